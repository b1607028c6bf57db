"""Vectors, points and graphs, and modules that are unusual: parametrizations, wrappers, outputs, branches."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import Tensor

from bed.entry import Entry, images, quiet, series, vectors

# ---- tables ----------------------------------------------------------------------------------------------------------


class DeepMLP(nn.Module):
    """A list of hidden sizes, dropout and norms."""

    def __init__(self, in_dim: int, hidden: list[int], out_dim: int, p: float = 0.1):
        super().__init__()
        dims = [in_dim, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(dims[:-1], dims[1:], strict=True))
        self.norms = nn.ModuleList(nn.BatchNorm1d(d) for d in hidden)
        self.drop = nn.Dropout(p)
        self.out = nn.Linear(dims[-1], out_dim)

    def forward(self, x: Tensor) -> Tensor:
        for lin, bn in zip(self.layers, self.norms, strict=True):
            x = self.drop(torch.relu_(bn(lin(x))))
        return self.out(x)


class ColumnEmbeddings(nn.Module):
    """As fastai's tabular model: columns of categories come as floats, each with a table of its own."""

    def __init__(self, emb_szs=((6, 3), (9, 5), (4, 2)), n_cont=5, out_sz=3, layers=(24, 16)):
        super().__init__()
        self.embeds = nn.ModuleList([nn.Embedding(ni, nf) for ni, nf in emb_szs])
        self.sizes = [ni for ni, _ in emb_szs]
        self.emb_drop = nn.Dropout(0.0)
        self.bn_cont = nn.BatchNorm1d(n_cont)
        self.n_emb, self.n_cont = sum(nf for _, nf in emb_szs), n_cont
        sizes = [self.n_emb + self.n_cont, *layers]
        blocks = []
        for i in range(len(sizes) - 1):
            blocks += [
                nn.Linear(sizes[i], sizes[i + 1], bias=False),
                nn.ReLU(inplace=True),
                nn.BatchNorm1d(sizes[i + 1]),
            ]
        self.layers = nn.Sequential(*blocks, nn.Linear(sizes[-1], out_sz))

    def forward(self, x):
        n = len(self.embeds)
        codes = x[:, :n].abs().long()
        e = [
            emb(codes[:, i].clamp(max=size - 1))
            for i, (emb, size) in enumerate(zip(self.embeds, self.sizes, strict=True))
        ]
        e = self.emb_drop(torch.cat(e, 1))
        return self.layers(torch.cat([e, self.bn_cont(x[:, n:])], 1))


class DeepFM(nn.Module):
    """Factorization machine beside a deep part, and a cross network (Guo et al. 2017, Wang et al. 2017)."""

    def __init__(self, n_fields=8, k=6, deep=(24, 16), n_cross=2, n_out=2):
        super().__init__()
        self.linear = nn.Linear(n_fields, n_out)
        self.v = nn.Parameter(torch.randn(n_fields, k) * 0.1)
        self.fm_out = nn.Linear(k, n_out)
        self.cross_w = nn.ParameterList([nn.Parameter(torch.randn(n_fields) * 0.1) for _ in range(n_cross)])
        self.cross_b = nn.ParameterList([nn.Parameter(torch.zeros(n_fields)) for _ in range(n_cross)])
        self.dnn = nn.Sequential(nn.Linear(n_fields * k, deep[0]), nn.ReLU(), nn.Linear(deep[0], deep[1]), nn.ReLU())
        self.out = nn.Linear(n_fields + deep[1], n_out)

    def forward(self, x):
        e = x.unsqueeze(-1) * self.v
        square_of_sum = torch.pow(torch.sum(e, dim=1), 2)
        sum_of_square = torch.sum(e * e, dim=1)
        fm = self.fm_out(0.5 * (square_of_sum - sum_of_square))
        x0, xl = x, x
        for w, b in zip(self.cross_w, self.cross_b, strict=True):
            xl = x0 * torch.matmul(xl, w).unsqueeze(1) + b + xl
        deep = self.dnn(e.flatten(1))
        return self.linear(x) + fm + self.out(torch.cat((xl, deep), 1))


class GatedResidual(nn.Module):
    """Temporal fusion's gated residual network (Lim et al. 2021) on vectors, GEGLU after it."""

    def __init__(self, n_in=10, d=16, n_out=4):
        super().__init__()
        self.skip = nn.Linear(n_in, d)
        self.lin1, self.lin2 = nn.Linear(n_in, d), nn.Linear(d, d)
        self.glu = nn.Sequential(nn.Linear(d, 2 * d), nn.GLU())
        self.norm = nn.LayerNorm(d)
        self.geglu = nn.Linear(d, 6 * d)
        self.out = nn.Linear(3 * d, n_out)

    def forward(self, x):
        h = self.norm(self.skip(x) + self.glu(self.lin2(F.elu(self.lin1(x)))))
        h, gates = self.geglu(h).chunk(2, dim=-1)
        return self.out(h * F.gelu(gates))


class Siren(nn.Module):
    """Sitzmann et al. 2020: sines, with an initialization of its own; a layer class by hand."""

    class Layer(nn.Module):
        def __init__(self, in_features, out_features, is_first=False, omega_0=30):
            super().__init__()
            self.omega_0, self.in_features = omega_0, in_features
            self.linear = nn.Linear(in_features, out_features)
            with torch.no_grad():
                bound = 1 / in_features if is_first else math.sqrt(6 / in_features) / omega_0
                self.linear.weight.uniform_(-bound, bound)

        def forward(self, input):
            return torch.sin(self.omega_0 * self.linear(input))

    def __init__(self, in_features=10, hidden_features=24, hidden_layers=2, out_features=4):
        super().__init__()
        self.net = [Siren.Layer(in_features, hidden_features, is_first=True)]
        for _ in range(hidden_layers):
            self.net.append(Siren.Layer(hidden_features, hidden_features))
        self.net.append(nn.Linear(hidden_features, out_features))
        self.net = nn.Sequential(*self.net)

    def forward(self, coords):
        return self.net(coords)


class LinearByHand(nn.Module):
    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        stdv = 1.0 / math.sqrt(self.weight.size(1))
        self.weight.data.uniform_(-stdv, stdv)
        if self.bias is not None:
            self.bias.data.uniform_(-stdv, stdv)

    def forward(self, x):
        y = x.mm(self.weight.t())
        return y if self.bias is None else y + self.bias

    def extra_repr(self):
        return f"{self.in_features}, {self.out_features}"


class MaskedLinear(LinearByHand):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.register_buffer("mask", torch.ones(out_features, in_features))

    def set_mask(self, degrees_in, degrees_out):
        self.mask.data.copy_(degrees_out[:, None] >= degrees_in[None, :])
        return degrees_out

    def forward(self, x):
        return F.linear(x, self.mask * self.weight, self.bias)


class MADE(nn.Module):
    """Germain et al. 2015: masks over the weights, in buffers."""

    def __init__(self, nin=8, hidden=24, nout=4):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (
            MaskedLinear(nin, hidden),
            MaskedLinear(hidden, hidden),
            LinearByHand(hidden, nout),
        )
        m = self.fc1.set_mask(torch.arange(nin), torch.arange(hidden) % (nin - 1))
        self.fc2.set_mask(m, torch.arange(hidden) % (nin - 1))

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class HyperNet(nn.Module):
    """Ha et al. 2016: one network gives the weights of another for each sample."""

    def __init__(self, n_in=8, hidden=10, z=6, n_out=4):
        super().__init__()
        self.n_in, self.hidden = n_in, hidden
        self.embed = nn.Linear(n_in, z)
        self.to_weight = nn.Linear(z, n_in * hidden)
        self.to_bias = nn.Linear(z, hidden)
        self.out = nn.Linear(hidden, n_out)

    def forward(self, x):
        z = torch.tanh(self.embed(x))
        w = self.to_weight(z).view(-1, self.hidden, self.n_in)
        h = torch.bmm(w, x.unsqueeze(2)).squeeze(2) + self.to_bias(z)
        return self.out(F.relu(h))


class MultiTask(nn.Module):
    """Multi-gate mixture of experts (Ma et al. 2018), read out by a bilinear layer."""

    def __init__(self, n_in=10, expert_dim=12, n_experts=3, n_out=4):
        super().__init__()
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(n_in, 20), nn.ReLU(), nn.Linear(20, expert_dim), nn.ReLU())
                for _ in range(n_experts)
            ]
        )
        self.gates = nn.ModuleList([nn.Sequential(nn.Linear(n_in, n_experts), nn.Softmax(dim=1)) for _ in range(2)])
        self.out = nn.Bilinear(expert_dim, expert_dim, n_out)

    def forward(self, x):
        experts = torch.stack([e(x) for e in self.experts], dim=2)
        a, b = (torch.sum(experts * gate(x).unsqueeze(1), dim=2) for gate in self.gates)
        return self.out(a, b)


# ---- points and graphs -----------------------------------------------------------------------------------------------


class TNet(nn.Module):
    def __init__(self, k, width):
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = nn.Conv1d(k, width, 1), nn.Conv1d(width, 2 * width, 1)
        self.fc1, self.fc2 = nn.Linear(2 * width, width), nn.Linear(width, k * k)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(width), nn.BatchNorm1d(2 * width), nn.BatchNorm1d(width)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = torch.max(x, 2, keepdim=True)[0].view(x.size(0), -1)
        x = self.fc2(F.relu(self.bn3(self.fc1(x))))
        iden = torch.eye(self.k, device=x.device, dtype=x.dtype).flatten().unsqueeze(0)
        return (x + iden).view(-1, self.k, self.k)


class PointNet(nn.Module):
    """As fxia22's pointnet.pytorch: 1x1 convolutions, a learned rotation, the maximum."""

    def __init__(self, k=5, width=12):
        super().__init__()
        self.stn = TNet(3, width)
        self.conv1, self.conv2 = nn.Conv1d(3, width, 1), nn.Conv1d(width, 3 * width, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(width), nn.BatchNorm1d(3 * width)
        self.fc = nn.Sequential(nn.Linear(3 * width, 2 * width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(2 * width, k))

    def forward(self, x):
        trans = self.stn(x)
        x = torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x = torch.max(x, 2)[0]
        return self.fc(x)


class DeepSets(nn.Module):
    """Zaheer et al. 2017: equivariant layers that subtract the set's maximum."""

    def __init__(self, x_dim=3, d_dim=20, n_out=5):
        super().__init__()
        self.gamma1, self.lambda1 = nn.Linear(x_dim, d_dim), nn.Linear(x_dim, d_dim, bias=False)
        self.gamma2, self.lambda2 = nn.Linear(d_dim, d_dim), nn.Linear(d_dim, d_dim, bias=False)
        self.ro = nn.Sequential(nn.Dropout(p=0.5), nn.Linear(d_dim, d_dim), nn.Tanh(), nn.Linear(d_dim, n_out))

    def forward(self, x):
        x = x.transpose(1, 2)
        for gamma, lam in ((self.gamma1, self.lambda1), (self.gamma2, self.lambda2)):
            xm, _ = x.max(1, keepdim=True)
            x = torch.tanh(gamma(x) - lam(xm))
        return self.ro(x.mean(1))


class SkeletonGCN(nn.Module):
    """ST-GCN (Yan et al. 2018): three fixed adjacency matrices, their parts of a convolution's channels."""

    def __init__(self, in_channels=3, hidden=12, num_class=6, joints=7, partitions=3):
        super().__init__()
        hop = (torch.arange(joints)[:, None] - torch.arange(joints)[None]).abs()
        A = torch.stack([(hop == d).float() for d in range(partitions)])
        self.register_buffer("A", A / A.sum(1, keepdim=True).clamp(min=1))
        self.edge_importance = nn.Parameter(torch.ones(A.size()))
        self.data_bn = nn.BatchNorm1d(in_channels * joints)
        self.gcn1 = nn.Conv2d(in_channels, hidden * partitions, 1)
        self.tcn1 = nn.Sequential(nn.BatchNorm2d(hidden), nn.ReLU(), nn.Conv2d(hidden, hidden, (3, 1), padding=(1, 0)))
        self.gcn2 = nn.Conv2d(hidden, hidden * partitions, 1)
        self.fcn = nn.Conv2d(hidden, num_class, kernel_size=1)

    def gcn(self, conv, x):
        A = self.A * self.edge_importance
        x = conv(x)
        n, kc, t, v = x.size()
        x = x.view(n, A.size(0), kc // A.size(0), t, v)
        return torch.einsum("nkctv,kvw->nctw", x, A).contiguous()

    def forward(self, x):
        N, C, T, V = x.size()
        x = x.permute(0, 3, 1, 2).contiguous().view(N, V * C, T)
        x = self.data_bn(x).view(N, V, C, T).permute(0, 2, 3, 1).contiguous()
        x = self.tcn1(self.gcn(self.gcn1, x))
        x = F.relu(self.gcn(self.gcn2, x))
        x = F.avg_pool2d(x, x.size()[2:])
        return self.fcn(x).view(N, -1)


class GraphAttention(nn.Module):
    """GAT (Velickovic et al. 2018) on the points of a set, all of them neighbors; several heads concatenated."""

    def __init__(self, nfeat=3, nhid=6, nheads=3, nclass=5, alpha=0.2):
        super().__init__()
        self.W = nn.ParameterList(
            [nn.Parameter(nn.init.xavier_uniform_(torch.empty(nfeat, nhid))) for _ in range(nheads)]
        )
        self.a_src = nn.ParameterList([nn.Parameter(torch.randn(nhid, 1)) for _ in range(nheads)])
        self.a_dst = nn.ParameterList([nn.Parameter(torch.randn(nhid, 1)) for _ in range(nheads)])
        self.leakyrelu = nn.LeakyReLU(alpha)
        self.out = nn.Linear(nhid * nheads, nclass)

    def forward(self, points):
        x = points.transpose(1, 2)
        heads = []
        for W, src, dst in zip(self.W, self.a_src, self.a_dst, strict=True):
            h = x @ W
            e = self.leakyrelu(h @ src + (h @ dst).mT)
            heads.append(F.elu(e.softmax(-1) @ h))
        return self.out(torch.cat(heads, dim=-1).mean(1))


class CapsuleNet(nn.Module):
    """Sabour et al. 2017: capsules in a dimension of their own, two steps of routing."""

    def __init__(self, caps=4, dim=6, classes=5, out_dim=8):
        super().__init__()
        self.caps, self.dim = caps, dim
        self.conv = nn.Conv2d(1, 16, 5, 2)
        self.primary = nn.Conv2d(16, caps * dim, 3, 2)
        self.W = nn.Parameter(0.1 * torch.randn(1, caps * 4, classes, out_dim, dim))

    @staticmethod
    def squash(s, dim=-1):
        norm2 = torch.sum(s**2, dim=dim, keepdim=True)
        return norm2 / (1 + norm2) * s / (torch.sqrt(norm2) + 1e-8)

    def forward(self, x):
        x = self.primary(F.relu(self.conv(x)))
        b = x.size(0)
        u = x.view(b, self.caps, self.dim, -1).permute(0, 1, 3, 2).reshape(b, -1, self.dim)
        u = self.squash(u)[:, :, None, :, None]
        u_hat = torch.matmul(self.W, u).squeeze(-1)
        logits = u_hat.new_zeros(b, u_hat.size(1), u_hat.size(2), 1)
        for _ in range(2):
            v = self.squash((logits.softmax(dim=2) * u_hat).sum(dim=1))
            logits = logits + (u_hat * v.unsqueeze(1)).sum(-1, keepdim=True)
        return v.norm(dim=-1)


# ---- weights that are computed ---------------------------------------------------------------------------------------


class SpectralDiscriminator(nn.Module):
    """SNGAN's discriminator (Miyato et al. 2018) with several outputs."""

    def __init__(self, ch=12, n_classes=5, spectral_norm=nn.utils.parametrizations.spectral_norm):
        super().__init__()
        self.conv1 = spectral_norm(nn.Conv2d(3, ch, 3, padding=1))
        self.conv2 = spectral_norm(nn.Conv2d(ch, ch * 2, 4, 2, 1))
        self.fc = spectral_norm(nn.Linear(ch * 2, n_classes))

    def forward(self, x):
        h = F.leaky_relu(self.conv1(x), 0.1)
        h = F.leaky_relu(self.conv2(h), 0.1)
        return self.fc(h.sum(dim=(2, 3)))


class WeightNormed(nn.Module):
    """Either of PyTorch's two weight norms, the old one by hooks."""

    def __init__(self, wn, width=16, classes=5):
        super().__init__()
        self.body = nn.Sequential(
            wn(nn.Conv2d(3, width, 3, padding=1)), nn.ReLU(), wn(nn.Conv2d(width, 2 * width, 3, 2, 1)), nn.ReLU()
        )
        self.skip = wn(nn.Conv2d(3, 2 * width, 5, 2, 2))
        self.tail = wn(nn.Linear(2 * width, classes))

    def forward(self, x):
        x = self.body(x) + self.skip(x)
        return self.tail(x.mean((2, 3)))


class Symmetric(nn.Module):
    def forward(self, X):
        return X.triu() + X.triu(1).transpose(-1, -2)


class ParametrizedNet(nn.Module):
    """PyTorch's tutorial on parametrizations: a symmetric matrix between two layers."""

    def __init__(self, n_in=8, width=16, n_out=4):
        super().__init__()
        self.up = nn.Linear(n_in, width)
        self.mid = nn.Linear(width, width)
        self.down = nn.Linear(width, n_out)
        parametrize.register_parametrization(self.mid, "weight", Symmetric())

    def forward(self, x):
        return self.down(torch.tanh(self.mid(torch.tanh(self.up(x)))))


class Exponential(nn.Module):
    def forward(self, X):
        return X.exp()

    def right_inverse(self, X):
        return X.abs().clamp_min(1e-3).log()


class MonotoneNet(nn.Module):
    """Weights kept positive by a parametrization."""

    def __init__(self, n_in=8, hidden=20, n_out=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_in, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                parametrize.register_parametrization(layer, "weight", Exponential())
        self.out = nn.Linear(hidden, n_out)

    def forward(self, x):
        return self.out(self.layers(x) / 2)


class CosineHead(nn.Module):
    """CosFace's and few-shot repositories' head: normalized features and classes, a learned scale."""

    def __init__(self, feat_dim=24, num_classes=10):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, feat_dim, 3, 2, 1), nn.ReLU()
        )
        self.proto = nn.Parameter(torch.empty(num_classes, feat_dim))
        self.scale = nn.Parameter(torch.tensor(10.0))
        nn.init.kaiming_uniform_(self.proto, a=math.sqrt(5))

    def forward(self, x):
        feat = F.normalize(self.encoder(x).flatten(2).mean(2), p=2, dim=1)
        return self.scale * feat.matmul(F.normalize(self.proto, dim=1).t())


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, lora_alpha=8):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad = False
        self.lora_A = nn.Parameter(torch.zeros(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = lora_alpha / r
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def lora(r=4):
    """A multi-layer perceptron whose hidden layers somebody has wrapped after they were made."""
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    for i in (0, 2):
        net[i] = LoRALinear(net[i], r)
    return net


class SharedStep(nn.Module):
    """One step repeated with a gain per repetition, as unrolled optimizers do (LISTA, Gregor and LeCun 2010)."""

    def __init__(self, n=10, m=24, steps=4, n_out=4):
        super().__init__()
        self.W = nn.Linear(n, m, bias=False)
        self.S = nn.Linear(m, m, bias=False)
        self.theta = nn.Parameter(torch.full((steps, m), 0.1))
        self.cls = nn.Linear(m, n_out)

    def forward(self, y):
        b = self.W(y)
        x = F.softshrink(b, 0.1)
        for theta in self.theta:
            c = b + self.S(x)
            x = torch.sign(c) * F.relu(c.abs() - theta.abs())
        return self.cls(x)


# ---- sizes in objects, unusual outputs, branches ---------------------------------------------------------------------


@dataclass
class NetConfig:
    in_channels: int = 3
    hidden: int = 16
    spatial: int = 4
    n_classes: int = 10
    act: Callable[[], nn.Module] = nn.ReLU
    extra: dict[str, Any] = field(default_factory=lambda: {"fc_dim": 32})


class ConfiguredNet(nn.Module):
    """forward reads its sizes from a config object."""

    def __init__(self, cfg: NetConfig | None = None):
        super().__init__()
        self.cfg = cfg = cfg or NetConfig()
        self.conv1 = nn.Conv2d(cfg.in_channels, cfg.hidden, 3, 2, 1)
        self.conv2 = nn.Conv2d(cfg.hidden, cfg.hidden, 3, 2, 1)
        self.act = cfg.act()
        self.fc1 = nn.Linear(cfg.hidden * cfg.spatial**2, cfg.extra["fc_dim"])
        self.fc2 = nn.Linear(cfg.extra["fc_dim"], cfg.n_classes)

    @property
    def flat_dim(self) -> int:
        return self.cfg.hidden * self.cfg.spatial * self.cfg.spatial

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv2(self.act(self.conv1(x))))
        x = x.view(-1, self.flat_dim)
        return self.fc2(self.act(self.fc1(x)))


@dataclass
class Output:
    logits: Tensor
    features: Tensor | None = None


class StructuredOutput(nn.Module):
    """Returns a dataclass, or a dict."""

    def __init__(self, as_dict: bool, width: int = 24):
        super().__init__()
        self.as_dict = as_dict
        self.trunk = nn.Sequential(nn.Linear(10, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.cls = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Any:
        features = self.trunk(x)
        logits = self.cls(features)
        return {"logits": logits, "features": features} if self.as_dict else Output(logits, features)


class VAEClassifier(nn.Module):
    """A variational code, sampled in training mode, its mean in evaluation mode."""

    def __init__(self, n_in=12, h_dim=24, z_dim=8, n_out=4):
        super().__init__()
        self.fc1 = nn.Linear(n_in, h_dim)
        self.fc_mu = nn.Linear(h_dim, z_dim)
        self.fc_logvar = nn.Linear(h_dim, z_dim)
        self.cls = nn.Linear(z_dim, n_out)

    def forward(self, x):
        h = F.silu(self.fc1(x))
        mu, log_var = self.fc_mu(h), self.fc_logvar(h)
        std = torch.exp(log_var / 2)
        noise = torch.randn_like(std) if self.training else torch.zeros_like(std)
        return self.cls(mu + std * noise)


class DataBranch(nn.Module):
    """Which path runs depends on the batch."""

    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Linear(10, width)
        self.bright = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.dark = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        h = torch.relu(self.stem(x))
        h = self.bright(h) if x.mean() > 0 else self.dark(h)
        return self.head(h)


class ScriptedPart(nn.Module):
    """Its encoder was scripted."""

    def __init__(self, width=16):
        super().__init__()
        encoder = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.encoder = torch.jit.script(encoder)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


def mlp(f=1.0):
    return DeepMLP(10, [int(32 * f), int(24 * f), int(16 * f)], 4)


ENTRIES = [
    Entry("mlp_batch_norm", mlp, vectors(10), narrow=mlp),
    Entry("column_embeddings", ColumnEmbeddings, vectors(8)),
    Entry("factorization_machine", DeepFM, vectors(8)),
    Entry("gated_residual", GatedResidual, vectors(10), narrow=lambda f: GatedResidual(d=int(16 * f))),
    Entry("siren", Siren, vectors(10)),
    Entry("masked_weights", MADE, vectors(8)),
    Entry("hypernetwork", HyperNet, vectors(8)),
    Entry("gated_experts", MultiTask, vectors(10)),
    Entry("pointnet", PointNet, series(3, 20), narrow=lambda f: PointNet(width=int(12 * f))),
    Entry("deep_sets", DeepSets, series(3, 20)),
    Entry("skeleton_graph", SkeletonGCN, series(3, 9, 7)),
    Entry("graph_attention", GraphAttention, series(3, 12)),
    Entry("capsules", CapsuleNet, images(1)),
    Entry("spectral_norm", SpectralDiscriminator, images()),
    Entry("spectral_norm_by_hooks", lambda: SpectralDiscriminator(spectral_norm=nn.utils.spectral_norm), images()),
    Entry("weight_norm", lambda: WeightNormed(nn.utils.parametrizations.weight_norm), images()),
    Entry("weight_norm_by_hooks", quiet(lambda: WeightNormed(nn.utils.weight_norm)), images()),
    Entry("parametrized_symmetric", ParametrizedNet, vectors(8)),
    Entry("parametrized_positive", MonotoneNet, vectors(8)),
    Entry("cosine_head", CosineHead, images()),
    Entry("lora", lora, vectors(10)),
    Entry("unrolled_steps", SharedStep, vectors(10)),
    Entry("config_object", ConfiguredNet, images()),
    Entry("dict_output", lambda: StructuredOutput(True), vectors(10)),
    Entry("dataclass_output", lambda: StructuredOutput(False), vectors(10)),
    Entry("variational", VAEClassifier, vectors(12)),
    Entry("data_branch", DataBranch, vectors(10), limit="a branch that depends on data"),
    Entry("scripted_part", quiet(ScriptedPart), vectors(10), limit="a scripted submodule"),
]
