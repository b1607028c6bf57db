"""Transformers and mixers for images and for vectors, attention written in many ways."""

import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import einsum

from bed.entry import Entry, images, quiet, vectors

# ---- timm: fused qkv -------------------------------------------------------------------------------------------------


class DropPath(nn.Module):
    def __init__(self, drop_prob=None):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(keep_prob) / keep_prob


class Mlp(nn.Module):
    def __init__(self, in_features, hidden_features=None, out_features=None, act_layer=nn.GELU, drop=0.0):
        super().__init__()
        out_features = out_features or in_features
        hidden_features = hidden_features or in_features
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden_features, out_features)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Attention(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=False, qk_scale=None, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        head_dim = dim // num_heads
        self.scale = qk_scale or head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class Block(nn.Module):
    def __init__(self, dim, num_heads, mlp_ratio=4.0, qkv_bias=False, drop_path=0.0, norm_layer=nn.LayerNorm):
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.attn = Attention(dim, num_heads=num_heads, qkv_bias=qkv_bias)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = norm_layer(dim)
        self.mlp = Mlp(in_features=dim, hidden_features=int(dim * mlp_ratio))

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, img_size=16, patch_size=4, in_chans=3, embed_dim=32):
        super().__init__()
        self.img_size = img_size
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x):
        _B, _C, H, W = x.shape
        assert self.img_size == H == W, f"Input image size ({H}*{W}) doesn't match model ({self.img_size})."
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """As in timm and DeiT."""

    def __init__(self, embed_dim=32, depth=2, num_heads=4, mlp_ratio=2.0, num_classes=10, drop_path_rate=0.1):
        super().__init__()
        self.num_features = self.embed_dim = embed_dim
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        self.patch_embed = PatchEmbed(embed_dim=embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.patch_embed.num_patches + 1, embed_dim))
        self.pos_drop = nn.Dropout(p=0.1)
        dpr = [x.item() for x in torch.linspace(0, drop_path_rate, depth)]
        self.blocks = nn.ModuleList(
            [
                Block(embed_dim, num_heads, mlp_ratio, True, drop_path=dpr[i], norm_layer=norm_layer)
                for i in range(depth)
            ]
        )
        self.norm = norm_layer(embed_dim)
        self.head = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)
            if m.bias is not None:
                nn.init.constant_(m.bias, 0)

    def forward_features(self, x):
        B = x.shape[0]
        x = self.patch_embed(x)
        cls_tokens = self.cls_token.expand(B, -1, -1)
        x = torch.cat((cls_tokens, x), dim=1)
        x = self.pos_drop(x + self.pos_embed)
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x)[:, 0]

    def forward(self, x):
        return self.head(self.forward_features(x))


# ---- lucidrains: chunk, dim_head, a ModuleList of pairs --------------------------------------------------------------


def pair(t):
    return t if isinstance(t, tuple) else (t, t)


def exists(val):
    return val is not None


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, hidden_dim), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim), nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)


class ChunkAttention(nn.Module):
    def __init__(self, dim, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner_dim = dim_head * heads
        project_out = not (heads == 1 and dim_head == dim)
        self.heads = heads
        self.scale = dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(dim, inner_dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout)) if project_out else nn.Identity()

    def forward(self, x):
        x = self.norm(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        out = torch.matmul(self.attend(dots), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class SimpleViT(nn.Module):
    """As lucidrains' vit-pytorch, without einops: sines and cosines for positions, the mean for a class."""

    def __init__(self, *, image_size, patch_size, num_classes, dim, depth, heads, mlp_dim, channels=3, dim_head=8):
        super().__init__()
        image_height, image_width = pair(image_size)
        self.p = patch_size
        patch_dim = channels * patch_size * patch_size
        self.to_patch_embedding = nn.Sequential(nn.LayerNorm(patch_dim), nn.Linear(patch_dim, dim), nn.LayerNorm(dim))
        self.pos_embedding = self.posemb_sincos_2d(image_height // patch_size, image_width // patch_size, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(nn.ModuleList([ChunkAttention(dim, heads, dim_head), FeedForward(dim, mlp_dim)]))
        self.to_latent = nn.Identity()
        self.linear_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    @staticmethod
    def posemb_sincos_2d(h, w, dim, temperature=10000):
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        assert (dim % 4) == 0, "feature dimension must be multiple of 4 for sincos emb"
        omega = torch.arange(dim // 4) / (dim // 4 - 1)
        omega = 1.0 / (temperature**omega)
        y = y.flatten()[:, None] * omega[None, :]
        x = x.flatten()[:, None] * omega[None, :]
        return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), dim=1)

    def forward(self, img):
        b, c, h, w = img.shape
        p = self.p
        x = img.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1).reshape(b, (h // p) * (w // p), p * p * c)
        x = self.to_patch_embedding(x)
        x = x + self.pos_embedding.to(x.device, dtype=x.dtype)
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        x = x.mean(dim=1)
        return self.linear_head(self.to_latent(x))


# ---- a convolutional tokenizer, PyTorch's encoder, pooling over the sequence -----------------------------------------


class MultiheadBlock(nn.Module):
    def __init__(self, embed_dim, hidden_dim, num_heads, dropout=0.0):
        super().__init__()
        self.layer_norm_1 = nn.LayerNorm(embed_dim)
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, dropout=dropout)
        self.layer_norm_2 = nn.LayerNorm(embed_dim)
        self.linear = nn.Sequential(nn.Linear(embed_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, embed_dim))

    def forward(self, x):
        inp_x = self.layer_norm_1(x)
        x = x + self.attn(inp_x, inp_x, inp_x)[0]
        return x + self.linear(self.layer_norm_2(x))


class LightningViT(nn.Module):
    """As the UvA tutorials: nn.MultiheadAttention with the sequence first."""

    def __init__(self, embed_dim=24, hidden_dim=48, num_heads=4, num_layers=2, num_classes=10, patch_size=4):
        super().__init__()
        self.patch_size = patch_size
        self.input_layer = nn.Linear(3 * patch_size**2, embed_dim)
        self.transformer = nn.Sequential(*(MultiheadBlock(embed_dim, hidden_dim, num_heads) for _ in range(num_layers)))
        self.mlp_head = nn.Sequential(nn.LayerNorm(embed_dim), nn.Linear(embed_dim, num_classes))
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim))
        self.pos_embedding = nn.Parameter(torch.randn(1, 17, embed_dim))

    def forward(self, x):
        x = F.unfold(x, self.patch_size, stride=self.patch_size).transpose(1, 2)
        B, T, _ = x.shape
        x = self.input_layer(x)
        x = torch.cat([self.cls_token.repeat(B, 1, 1), x], dim=1)
        x = x + self.pos_embedding[:, : T + 1]
        x = self.transformer(x.transpose(0, 1))
        return self.mlp_head(x[0])


# ---- einsum, cross-covariance, linear attention ----------------------------------------------------------------------


class EinsumAttention(nn.Module):
    def __init__(self, dim, heads, d_k):
        super().__init__()
        self.wq = nn.Parameter(torch.randn(heads, dim, d_k) / math.sqrt(dim))
        self.wk = nn.Parameter(torch.randn(heads, dim, d_k) / math.sqrt(dim))
        self.wv = nn.Parameter(torch.randn(heads, dim, d_k) / math.sqrt(dim))
        self.wo = nn.Parameter(torch.randn(heads, d_k, dim) / math.sqrt(dim))
        self.d_k = d_k

    def forward(self, x):
        q = einsum("bnd,hdk->bhnk", x, self.wq)
        k = einsum("bnd,hdk->bhnk", x, self.wk)
        v = einsum("bnd,hdk->bhnk", x, self.wv)
        a = einsum("bhik,bhjk->bhij", q, k).div(self.d_k**0.5).softmax(-1)
        o = einsum("bhij,bhjk->bhik", a, v)
        return einsum("bhnk,hkd->bnd", o, self.wo)


class EinsumNet(nn.Module):
    """Weights as tensors of heads, as in JAX."""

    def __init__(self, dim=24, heads=4, d_k=8, depth=2, classes=10):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, 4)
        self.pos = nn.Parameter(torch.randn(16, dim) * 0.02)
        self.attn = nn.ModuleList(EinsumAttention(dim, heads, d_k) for _ in range(depth))
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.w_out = nn.Parameter(torch.randn(dim, classes) * 0.02)
        self.b_out = nn.Parameter(torch.zeros(classes))

    def forward(self, x):
        x = self.embed(x).flatten(2).mT + self.pos
        for norm, attn in zip(self.norm, self.attn, strict=True):
            x = x + attn(norm(x))
        return einsum("bnd,dc->bc", x, self.w_out) / x.shape[1] + self.b_out


class XCA(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        q, k, v = (t.transpose(-2, -1) for t in qkv.unbind(0))
        q = F.normalize(q, dim=-1)
        k = F.normalize(k, dim=-1)
        attn = (q @ k.transpose(-2, -1)) * self.temperature
        x = (attn.softmax(dim=-1) @ v).permute(0, 3, 1, 2).reshape(B, N, C)
        return self.proj(x)


class XCABlock(nn.Module):
    def __init__(self, dim, num_heads, eta=1.0):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), XCA(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 2 * dim)
        self.local_mp = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.gamma1 = nn.Parameter(eta * torch.ones(dim))
        self.gamma2 = nn.Parameter(eta * torch.ones(dim))
        self.gamma3 = nn.Parameter(eta * torch.ones(dim))

    def forward(self, x, H, W):
        x = x + self.gamma1 * self.attn(self.norm1(x))
        B, N, C = x.shape
        local = self.local_mp(x.permute(0, 2, 1).reshape(B, C, H, W)).reshape(B, C, N).permute(0, 2, 1)
        x = x + self.gamma3 * local
        return x + self.gamma2 * self.mlp(self.norm2(x))


class XCiT(nn.Module):
    """Cross-covariance attention (El-Nouby et al. 2021)."""

    def __init__(self, embed_dim=32, depth=2, num_heads=4, num_classes=10):
        super().__init__()
        self.proj = nn.Sequential(nn.Conv2d(3, embed_dim, 4, 4, bias=False), nn.BatchNorm2d(embed_dim))
        self.blocks = nn.ModuleList([XCABlock(embed_dim, num_heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, x):
        x = self.proj(x)
        Hp, Wp = x.shape[2], x.shape[3]
        x = x.flatten(2).transpose(1, 2)
        for blk in self.blocks:
            x = blk(x, Hp, Wp)
        return self.head(self.norm(x).mean(1))


class LinearAttentionNet(nn.Module):
    """Linear attention (Katharopoulos et al. 2020) with elu + 1, heads of a size of their own."""

    def __init__(self, dim=24, heads=3, head_dim=8, classes=10):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.stem = nn.Conv2d(3, dim, 4, 4)
        self.q, self.k, self.v = (nn.Linear(dim, heads * head_dim, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * head_dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.stem(x).flatten(-2).permute(0, 2, 1)
        n, s = x.shape[:2]
        q = F.elu(self.q(x)).add(1).view(n, s, self.heads, self.head_dim)
        k = F.elu(self.k(x)).add(1).view(n, s, self.heads, self.head_dim)
        v = self.v(x).view(n, s, self.heads, self.head_dim)
        kv = torch.einsum("nshd,nshm->nhmd", k, v)
        z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + 1e-6)
        y = torch.einsum("nlhd,nhmd,nlh->nlhm", q, kv, z)
        x = self.norm(x + self.o(y.reshape(n, s, -1)))
        return self.out(x.mean(1))


# ---- Swin ------------------------------------------------------------------------------------------------------------


def window_partition(x, window_size):
    B, H, W, C = x.shape
    x = x.view(B, H // window_size, window_size, W // window_size, window_size, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window_size, window_size, C)


def window_reverse(windows, window_size, H, W):
    B = int(windows.shape[0] / (H * W / window_size / window_size))
    x = windows.view(B, H // window_size, W // window_size, window_size, window_size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class WindowAttention(nn.Module):
    def __init__(self, dim, window_size, num_heads):
        super().__init__()
        self.dim = dim
        self.window_size = window_size
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * window_size[0] - 1) * (2 * window_size[1] - 1), num_heads)
        )
        coords = torch.stack(torch.meshgrid(torch.arange(window_size[0]), torch.arange(window_size[1]), indexing="ij"))
        coords_flatten = torch.flatten(coords, 1)
        relative_coords = coords_flatten[:, :, None] - coords_flatten[:, None, :]
        relative_coords = relative_coords.permute(1, 2, 0).contiguous()
        relative_coords[:, :, 0] += window_size[0] - 1
        relative_coords[:, :, 1] += window_size[1] - 1
        relative_coords[:, :, 0] *= 2 * window_size[1] - 1
        self.register_buffer("relative_position_index", relative_coords.sum(-1))
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        x = (self.softmax(attn) @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


class SwinBlock(nn.Module):
    def __init__(self, dim, input_resolution, num_heads, window_size=4, shift_size=0, mlp_ratio=2.0):
        super().__init__()
        self.input_resolution, self.window_size, self.shift_size = input_resolution, window_size, shift_size
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, pair(window_size), num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        attn_mask = None
        if self.shift_size > 0:
            H, W = input_resolution
            img_mask = torch.zeros((1, H, W, 1))
            slices = (slice(0, -window_size), slice(-window_size, -shift_size), slice(-shift_size, None))
            cnt = 0
            for h in slices:
                for w in slices:
                    img_mask[:, h, w, :] = cnt
                    cnt += 1
            mask_windows = window_partition(img_mask, window_size).view(-1, window_size * window_size)
            attn_mask = mask_windows.unsqueeze(1) - mask_windows.unsqueeze(2)
            attn_mask = attn_mask.masked_fill(attn_mask != 0, -100.0).masked_fill(attn_mask == 0, 0.0)
        self.register_buffer("attn_mask", attn_mask)

    def forward(self, x):
        H, W = self.input_resolution
        B, L, C = x.shape
        assert L == H * W, "input feature has wrong size"
        shortcut = x
        x = self.norm1(x).view(B, H, W, C)
        if self.shift_size > 0:
            x = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2))
        x_windows = window_partition(x, self.window_size).view(-1, self.window_size * self.window_size, C)
        attn_windows = self.attn(x_windows, mask=self.attn_mask)
        x = window_reverse(attn_windows.view(-1, self.window_size, self.window_size, C), self.window_size, H, W)
        if self.shift_size > 0:
            x = torch.roll(x, shifts=(self.shift_size, self.shift_size), dims=(1, 2))
        x = shortcut + x.view(B, H * W, C)
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, input_resolution, dim):
        super().__init__()
        self.input_resolution = input_resolution
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm = nn.LayerNorm(4 * dim)

    def forward(self, x):
        H, W = self.input_resolution
        B, _L, C = x.shape
        x = x.view(B, H, W, C)
        x0, x1 = x[:, 0::2, 0::2, :], x[:, 1::2, 0::2, :]
        x2, x3 = x[:, 0::2, 1::2, :], x[:, 1::2, 1::2, :]
        x = torch.cat([x0, x1, x2, x3], -1).view(B, -1, 4 * C)
        return self.reduction(self.norm(x))


class SwinTransformer(nn.Module):
    """As Microsoft's Swin: windows, shifts, a table of relative positions."""

    def __init__(self, embed_dim=16, num_heads=(2, 4), num_classes=10):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, embed_dim, 2, 2)
        self.layers = nn.ModuleList()
        res = (8, 8)
        for i, heads in enumerate(num_heads):
            dim = int(embed_dim * 2**i)
            blocks = [SwinBlock(dim, res, heads, 4, 0 if (j % 2 == 0 or res[0] <= 4) else 2) for j in range(2)]
            if i < len(num_heads) - 1:
                blocks.append(PatchMerging(res, dim))
            self.layers.append(nn.Sequential(*blocks))
            res = (res[0] // 2, res[1] // 2)
        self.num_features = dim
        self.norm = nn.LayerNorm(self.num_features)
        self.avgpool = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Linear(self.num_features, num_classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        x = self.avgpool(self.norm(x).transpose(1, 2))
        return self.head(torch.flatten(x, 1))


# ---- without attention: mixers ---------------------------------------------------------------------------------------


class PreNormResidual(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.fn(self.norm(x)) + x


def MLPMixer(*, image_size, patch_size, dim, depth, num_classes, expansion_factor=2):
    """As lucidrains' mlp-mixer-pytorch: one Sequential, the tokens mixed by Conv1d with kernel 1."""
    num_patches = (image_size // patch_size) ** 2

    def dense(layer, width, factor):
        inner = int(width * factor)
        return nn.Sequential(layer(width, inner), nn.GELU(), layer(inner, width))

    class Patches(nn.Module):
        def forward(self, x):
            return F.pixel_unshuffle(x, patch_size).flatten(2).transpose(1, 2)

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    return nn.Sequential(
        Patches(),
        nn.Linear(patch_size**2 * 3, dim),
        *[
            nn.Sequential(
                PreNormResidual(dim, dense(partial(nn.Conv1d, kernel_size=1), num_patches, expansion_factor)),
                PreNormResidual(dim, dense(nn.Linear, dim, expansion_factor)),
            )
            for _ in range(depth)
        ],
        nn.LayerNorm(dim),
        Mean(),
        nn.Linear(dim, num_classes),
    )


class SpatialGatingUnit(nn.Module):
    def __init__(self, d_ffn, seq_len):
        super().__init__()
        self.norm = nn.LayerNorm(d_ffn)
        self.spatial_proj = nn.Conv1d(seq_len, seq_len, kernel_size=1)
        nn.init.constant_(self.spatial_proj.bias, 1.0)

    def forward(self, x):
        u, v = x.chunk(2, dim=-1)
        v = self.norm(v)
        v = self.spatial_proj(v)
        return u * v


class gMLP(nn.Module):
    """Liu et al. 2021."""

    def __init__(self, d_model=16, d_ffn=24, seq_len=16, num_layers=2, n_classes=10):
        super().__init__()
        self.patcher = nn.Conv2d(3, d_model, kernel_size=4, stride=4)
        self.norms = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(num_layers)])
        self.up = nn.ModuleList([nn.Linear(d_model, d_ffn * 2) for _ in range(num_layers)])
        self.sgu = nn.ModuleList([SpatialGatingUnit(d_ffn, seq_len) for _ in range(num_layers)])
        self.down = nn.ModuleList([nn.Linear(d_ffn, d_model) for _ in range(num_layers)])
        self.classifier = nn.Linear(d_model, n_classes)

    def forward(self, x):
        patches = self.patcher(x)
        b, c, _, _ = patches.shape
        x = patches.permute(0, 2, 3, 1).view(b, -1, c)
        for norm, up, sgu, down in zip(self.norms, self.up, self.sgu, self.down, strict=True):
            x = down(sgu(F.gelu(up(norm(x))))) + x
        return self.classifier(x.mean(dim=1))


class PoolFormer(nn.Module):
    """MetaFormer (Yu et al. 2022): pooling mixes, GroupNorm of one group, layer scale unsqueezed in forward."""

    def __init__(self, dim=16, layers=2, num_classes=10):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 3, 2, 1)
        self.norms = nn.ModuleList([nn.GroupNorm(1, dim) for _ in range(2 * layers)])
        self.pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(dim, 3 * dim, 1), nn.GELU(), nn.Conv2d(3 * dim, dim, 1)) for _ in range(layers)]
        )
        self.scales = nn.ParameterList([nn.Parameter(torch.full((dim,), 0.5)) for _ in range(2 * layers)])
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.patch(x)
        for i, mlp in enumerate(self.mlps):
            h = self.norms[2 * i](x)
            x = x + self.scales[2 * i].unsqueeze(-1).unsqueeze(-1) * (self.pool(h) - h)
            x = x + self.scales[2 * i + 1].unsqueeze(-1).unsqueeze(-1) * mlp(self.norms[2 * i + 1](x))
        return self.head(x.mean([-2, -1]))


class GlobalFilterNet(nn.Module):
    """Rao et al. 2021: filters in the frequency domain, over space."""

    def __init__(self, dim=16, h=4, w=3, depth=2, num_classes=10):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, 4)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(h, w, dim, 2) * 0.02) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(depth)])
        self.mlps = nn.ModuleList([Mlp(dim, 2 * dim) for _ in range(depth)])
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1)
        for weight, norm, mlp in zip(self.weights, self.norms, self.mlps, strict=True):
            y = torch.fft.rfft2(norm(x), dim=(1, 2), norm="ortho")
            y = y * torch.view_as_complex(weight.contiguous())
            y = torch.fft.irfft2(y, s=x.shape[1:3], dim=(1, 2), norm="ortho")
            x = x + mlp(y)
        return self.head(x.mean((1, 2)))


# ---- queries that are learned ----------------------------------------------------------------------------------------


class Perceiver(nn.Module):
    """Jaegle et al. 2021: latents look at the pixels, then at themselves."""

    def __init__(self, num_latents=6, latent_dim=24, cross_heads=1, latent_heads=3, head_dim=8, num_classes=10):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(num_latents, latent_dim))
        self.norm_in = nn.LayerNorm(5)
        self.to_q = nn.Linear(latent_dim, cross_heads * head_dim, bias=False)
        self.to_kv = nn.Linear(5, cross_heads * head_dim * 2, bias=False)
        self.to_out = nn.Linear(cross_heads * head_dim, latent_dim)
        self.self_attn = ChunkAttention(latent_dim, latent_heads, head_dim)
        self.ff = FeedForward(latent_dim, 2 * latent_dim)
        self.logits = nn.Sequential(nn.LayerNorm(latent_dim), nn.Linear(latent_dim, num_classes))

    def forward(self, data):
        b, _, h, w = data.shape
        grid = torch.stack(
            torch.meshgrid(
                torch.linspace(-1, 1, h, device=data.device),
                torch.linspace(-1, 1, w, device=data.device),
                indexing="ij",
            )
        )
        data = torch.cat([data, grid.expand(b, -1, -1, -1)], 1).flatten(2).transpose(1, 2)
        x = self.latents[None].expand(b, -1, -1)
        q = self.to_q(x)
        k, v = self.to_kv(self.norm_in(data)).chunk(2, dim=-1)
        x = x + self.to_out(F.scaled_dot_product_attention(q, k, v))
        x = x + self.self_attn(x)
        x = x + self.ff(x)
        return self.logits(x.mean(dim=-2))


class AttentionPool2d(nn.Module):
    def __init__(self, spacial_dim, embed_dim, num_heads, output_dim=None):
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.randn(spacial_dim**2 + 1, embed_dim) / embed_dim**0.5)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.c_proj = nn.Linear(embed_dim, output_dim or embed_dim)
        self.num_heads = num_heads

    def forward(self, x):
        x = x.flatten(start_dim=2).permute(2, 0, 1)  # NCHW -> (HW)NC
        x = torch.cat([x.mean(dim=0, keepdim=True), x], dim=0)
        x = x + self.positional_embedding[:, None, :].to(x.dtype)
        x, _ = F.multi_head_attention_forward(
            query=x[:1], key=x, value=x,
            embed_dim_to_check=x.shape[-1],
            num_heads=self.num_heads,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
            in_proj_weight=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]),
            bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0,
            out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True,
            training=self.training,
            need_weights=False,
        )  # fmt: skip
        return x.squeeze(0)


class ClipStyleResNet(nn.Module):
    """As OpenAI's CLIP: pooling by attention, its projections handed to a function."""

    def __init__(self, width=24, heads=3, num_classes=10):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width // 2, 3, 2, 1, bias=False), nn.BatchNorm2d(width // 2)
        self.conv2, self.bn2 = nn.Conv2d(width // 2, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width)
        self.attnpool = AttentionPool2d(4, width, heads, num_classes)

    def forward(self, x):
        for conv, bn in [(self.conv1, self.bn1), (self.conv2, self.bn2)]:
            x = bn(conv(x)).relu_()
        return self.attnpool(x)


class QueryTransformer(nn.Module):
    """DETR's minimal demonstration (Carion et al. 2020): nn.Transformer and a table of queries."""

    def __init__(self, num_classes=10, hidden_dim=32, nheads=4, num_encoder_layers=1, num_decoder_layers=1):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU())
        self.conv = nn.Conv2d(24, hidden_dim, 1)
        self.transformer = nn.Transformer(hidden_dim, nheads, num_encoder_layers, num_decoder_layers, 64)
        self.linear_class = nn.Linear(hidden_dim, num_classes)
        self.query_pos = nn.Parameter(torch.rand(5, hidden_dim))
        self.row_embed = nn.Parameter(torch.rand(4, hidden_dim // 2))
        self.col_embed = nn.Parameter(torch.rand(4, hidden_dim // 2))

    def forward(self, inputs):
        h = self.conv(self.backbone(inputs))
        H, W = h.shape[-2:]
        pos = torch.cat(
            [
                self.col_embed[:W].unsqueeze(0).repeat(H, 1, 1),
                self.row_embed[:H].unsqueeze(1).repeat(1, W, 1),
            ],
            dim=-1,
        ).flatten(0, 1).unsqueeze(1)  # fmt: skip
        query = self.query_pos.unsqueeze(1).repeat(1, inputs.shape[0], 1)
        h = self.transformer(pos + 0.1 * h.flatten(2).permute(2, 0, 1), query).transpose(0, 1)
        return self.linear_class(h).mean(1)


# ---- vectors ---------------------------------------------------------------------------------------------------------


class TabTransformer(nn.Module):
    """Huang et al. 2020: the first columns hold categories as numbers, the others are continuous."""

    def __init__(self, categories=(5, 3, 7), num_continuous=4, dim=16, depth=2, heads=4, classes=3):
        super().__init__()
        self.num_categories = len(categories)
        offset = F.pad(torch.tensor(list(categories)), (1, 0), value=0).cumsum(dim=-1)[:-1]
        self.register_buffer("categories_offset", offset)
        self.register_buffer("upper", torch.tensor(list(categories)) - 1)
        self.category_embed = nn.Embedding(sum(categories), dim)
        self.layers = nn.ModuleList(
            [nn.ModuleList([ChunkAttention(dim, heads, dim // heads), FeedForward(dim, dim * 4)]) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(num_continuous)
        input_size = dim * self.num_categories + num_continuous
        self.mlp = nn.Sequential(nn.Linear(input_size, 2 * input_size), nn.SELU(), nn.Linear(2 * input_size, classes))

    def forward(self, x):
        x_categ, x_cont = x[:, : self.num_categories], x[:, self.num_categories :]
        x_categ = x_categ.abs().floor().long().minimum(self.upper) + self.categories_offset
        h = self.category_embed(x_categ)
        for attn, ff in self.layers:
            h = h + attn(h)
            h = h + ff(h)
        return self.mlp(torch.cat((h.flatten(1), self.norm(x_cont)), dim=-1))


class FTTransformer(nn.Module):
    """Gorishniy et al. 2021: each column times a vector of its own, a class token behind them."""

    def __init__(self, n_features=8, d_token=24, n_blocks=2, n_heads=4, n_out=3):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_features, d_token))
        self.bias = nn.Parameter(torch.empty(n_features, d_token))
        self.cls = nn.Parameter(torch.empty(d_token))
        self.blocks = nn.ModuleList(
            [
                nn.ModuleDict(
                    {
                        "attention": nn.MultiheadAttention(d_token, n_heads, batch_first=True, bias=False),
                        "norm0": nn.LayerNorm(d_token),
                        "ffn": nn.Sequential(
                            nn.Linear(d_token, 2 * d_token), nn.ReLU(), nn.Linear(2 * d_token, d_token)
                        ),
                        "norm1": nn.LayerNorm(d_token),
                    }
                )
                for _ in range(n_blocks)
            ]
        )
        self.head = nn.Sequential(nn.LayerNorm(d_token), nn.ReLU(), nn.Linear(d_token, n_out))
        self.reset_parameters()

    def reset_parameters(self):
        d_rsqrt = self.weight.shape[1] ** -0.5
        for p in (self.weight, self.bias, self.cls):
            nn.init.uniform_(p, -d_rsqrt, d_rsqrt)

    def forward(self, x):
        x = self.weight[None] * x[..., None] + self.bias[None]
        x = torch.cat([x, self.cls.expand(len(x), 1, -1)], dim=1)
        for block in self.blocks:
            h = block["norm0"](x)
            x = x + block["attention"](h, h, h, need_weights=False)[0]
            x = x + block["ffn"](block["norm1"](x))
        return self.head(x[:, -1])


def simple_vit(f=1.0):
    return SimpleViT(
        image_size=16, patch_size=4, num_classes=10, dim=int(32 * f), depth=2, heads=int(4 * f), mlp_dim=int(64 * f)
    )


ENTRIES = [
    Entry(
        "vit_fused_qkv", VisionTransformer, images(),
        narrow=lambda f: VisionTransformer(int(32 * f), num_heads=int(4 * f)),
    ),
    Entry("vit_chunked_qkv", simple_vit, images(), narrow=simple_vit),
    Entry(
        "multihead_attention", LightningViT, images(),
        narrow=lambda f: LightningViT(int(24 * f), int(48 * f), int(4 * f)),
    ),
    Entry("einsum_attention", EinsumNet, images(), narrow=lambda f: EinsumNet(int(24 * f), int(4 * f))),
    Entry("cross_covariance_attention", XCiT, images(), narrow=lambda f: XCiT(int(32 * f), num_heads=int(4 * f))),
    Entry("linear_attention", LinearAttentionNet, images()),
    Entry("swin", SwinTransformer, images(), narrow=lambda f: SwinTransformer(int(16 * f), [int(2 * f), int(4 * f)])),
    Entry(
        "mlp_mixer", lambda: MLPMixer(image_size=16, patch_size=4, dim=24, depth=2, num_classes=10), images(),
        narrow=lambda f: MLPMixer(image_size=16, patch_size=4, dim=int(24 * f), depth=2, num_classes=10),
    ),
    Entry("gmlp", gMLP, images(), narrow=lambda f: gMLP(int(16 * f), int(24 * f))),
    Entry("poolformer", PoolFormer, images()),
    Entry("global_filter", GlobalFilterNet, images()),
    Entry("perceiver", Perceiver, images()),
    Entry("attention_pooling", ClipStyleResNet, images()),
    Entry("query_transformer", quiet(QueryTransformer), images()),
    Entry("tab_transformer", TabTransformer, vectors(7)),
    Entry("feature_tokenizer", FTTransformer, vectors(8)),
]  # fmt: skip
