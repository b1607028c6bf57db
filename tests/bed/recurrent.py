"""Recurrent modules, and convolutions and scans over time."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from bed.entry import Entry, sentences, series

# ---- LSTM and GRU ----------------------------------------------------------------------------------------------------


class LSTMClassifier(nn.Module):
    """As many a tutorial: embedding, LSTM, the last hidden state of each direction."""

    def __init__(self, vocab_size, embedding_dim, hidden_dim, output_dim, n_layers, bidirectional, dropout):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim)
        self.rnn = nn.LSTM(
            embedding_dim, hidden_dim, num_layers=n_layers, bidirectional=bidirectional, dropout=dropout,
            batch_first=True,
        )  # fmt: skip
        self.fc = nn.Linear(hidden_dim * 2 if bidirectional else hidden_dim, output_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, text):
        embedded = self.dropout(self.embedding(text))
        _output, (hidden, _cell) = self.rnn(embedded)
        if self.rnn.bidirectional:
            hidden = torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1)
        else:
            hidden = hidden[-1]
        return self.fc(self.dropout(hidden))


class RNNModel(nn.Module):
    """PyTorch's example word_language_model: tied, explicit initial state, the sequence first."""

    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers, dropout=0.5, tie_weights=False):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = getattr(nn, rnn_type)(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        self.rnn_type, self.nhid, self.nlayers = rnn_type, nhid, nlayers

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        hidden = weight.new_zeros(self.nlayers, bsz, self.nhid)
        return (hidden, weight.new_zeros(self.nlayers, bsz, self.nhid)) if self.rnn_type == "LSTM" else hidden

    def forward(self, input):
        emb = self.drop(self.encoder(input.t()))
        output, _ = self.rnn(emb, self.init_hidden(input.size(0)))
        return self.decoder(self.drop(output)).transpose(0, 1)


class GRUNet(nn.Module):
    """A series of sensors, the initial state made in forward."""

    def __init__(self, input_dim=6, hidden_dim=24, output_dim=5, n_layers=2, drop_prob=0.2):
        super().__init__()
        self.hidden_dim = hidden_dim
        self.n_layers = n_layers
        self.gru = nn.GRU(input_dim, hidden_dim, n_layers, batch_first=True, dropout=drop_prob)
        self.fc = nn.Linear(hidden_dim, output_dim)
        self.relu = nn.ReLU()

    def forward(self, x):
        h0 = torch.zeros(self.n_layers, x.size(0), self.hidden_dim, device=x.device).requires_grad_()
        out, _h = self.gru(x, h0.detach())
        return self.fc(self.relu(out[:, -1]))


class GRUCellLoop(nn.Module):
    """Two cells in a loop over time."""

    def __init__(self, n_in=6, n_hid=16, n_out=5):
        super().__init__()
        self.n_hid = n_hid
        self.inp = nn.Linear(n_in, n_hid)
        self.cell1 = nn.GRUCell(n_hid, n_hid)
        self.cell2 = nn.GRUCell(n_hid, n_hid)
        self.out = nn.Linear(n_hid * 2, n_out)

    def forward(self, x):
        h1 = x.new_zeros(len(x), self.n_hid)
        h2 = x.new_zeros(len(x), self.n_hid)
        states = []
        for t in range(x.shape[1]):
            h1 = self.cell1(torch.tanh(self.inp(x[:, t])), h1)
            h2 = self.cell2(h1, h2)
            states.append(torch.cat([h1, h2], dim=-1))
        return self.out(torch.stack(states, dim=1).mean(dim=1))


class HandLSTM(nn.Module):
    """Gates from one matrix, chunked; parameters by hand."""

    def __init__(self, input_sz=6, hidden_sz=16, n_out=5):
        super().__init__()
        self.input_sz, self.hidden_size = input_sz, hidden_sz
        self.W = nn.Parameter(torch.Tensor(input_sz, hidden_sz * 4))
        self.U = nn.Parameter(torch.Tensor(hidden_sz, hidden_sz * 4))
        self.bias = nn.Parameter(torch.Tensor(hidden_sz * 4))
        self.fc = nn.Linear(hidden_sz, n_out)
        self.init_weights()

    def init_weights(self):
        stdv = 1.0 / math.sqrt(self.hidden_size)
        for weight in self.parameters():
            weight.data.uniform_(-stdv, stdv)

    def forward(self, x):
        bs, seq_sz, _ = x.size()
        h_t, c_t = torch.zeros(bs, self.hidden_size).to(x), torch.zeros(bs, self.hidden_size).to(x)
        HS = self.hidden_size
        for t in range(seq_sz):
            gates = x[:, t, :] @ self.W + h_t @ self.U + self.bias
            i_t, f_t = torch.sigmoid(gates[:, :HS]), torch.sigmoid(gates[:, HS : HS * 2])
            g_t, o_t = torch.tanh(gates[:, HS * 2 : HS * 3]), torch.sigmoid(gates[:, HS * 3 :])
            c_t = f_t * c_t + i_t * g_t
            h_t = o_t * torch.tanh(c_t)
        return self.fc(h_t)


class AttentiveLSTM(nn.Module):
    """Self-attentive sentence embedding (Lin et al. 2017): several hops over a bidirectional LSTM."""

    def __init__(self, ntoken=40, ninp=12, nhid=10, attention_unit=14, hops=3, nclasses=4):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.bilstm = nn.LSTM(ninp, nhid, bidirectional=True)
        self.ws1 = nn.Linear(nhid * 2, attention_unit, bias=False)
        self.ws2 = nn.Linear(attention_unit, hops, bias=False)
        self.attention_hops = hops
        self.fc = nn.Linear(nhid * 2 * hops, 20)
        self.pred = nn.Linear(20, nclasses)

    def forward(self, inp):
        outp = self.bilstm(self.encoder(inp.t()))[0].transpose(0, 1).contiguous()
        size = outp.size()
        compressed = outp.view(-1, size[2])
        hbar = torch.tanh(self.ws1(compressed))
        alphas = self.ws2(hbar).view(size[0], size[1], -1)
        alphas = torch.transpose(alphas, 1, 2).contiguous()
        alphas = F.softmax(alphas.view(-1, size[1]), dim=1).view(size[0], self.attention_hops, size[1])
        outp = torch.bmm(alphas, outp).view(size[0], -1)
        return self.pred(torch.tanh(self.fc(outp)))


class ConvLSTMCell(nn.Module):
    def __init__(self, input_dim, hidden_dim, kernel_size, bias=True):
        super().__init__()
        self.hidden_dim = hidden_dim
        self.conv = nn.Conv2d(
            in_channels=input_dim + hidden_dim, out_channels=4 * hidden_dim, kernel_size=kernel_size,
            padding=kernel_size // 2, bias=bias,
        )  # fmt: skip

    def forward(self, input_tensor, cur_state):
        h_cur, c_cur = cur_state
        combined = torch.cat([input_tensor, h_cur], dim=1)
        cc_i, cc_f, cc_o, cc_g = torch.split(self.conv(combined), self.hidden_dim, dim=1)
        c_next = torch.sigmoid(cc_f) * c_cur + torch.sigmoid(cc_i) * torch.tanh(cc_g)
        return torch.sigmoid(cc_o) * torch.tanh(c_next), c_next

    def init_hidden(self, batch_size, image_size):
        height, width = image_size
        return (
            torch.zeros(batch_size, self.hidden_dim, height, width, device=self.conv.weight.device),
            torch.zeros(batch_size, self.hidden_dim, height, width, device=self.conv.weight.device),
        )


class ConvLSTM(nn.Module):
    """As ndrplz's ConvLSTM_pytorch, over four frames."""

    def __init__(self, channels=2, hidden_dim=8, kernel_size=3, n_class=6):
        super().__init__()
        self.cell = ConvLSTMCell(channels, hidden_dim, kernel_size)
        self.fc = nn.Linear(hidden_dim, n_class)

    def forward(self, video):
        b, frames, _, h, w = video.shape
        state = self.cell.init_hidden(b, (h, w))
        for t in range(frames):
            state = self.cell(video[:, t], state)
        return self.fc(state[0].amax((2, 3)))


# ---- scans -----------------------------------------------------------------------------------------------------------


class MambaBlock(nn.Module):
    def __init__(self, d_model, d_inner, d_state, d_conv, dt_rank):
        super().__init__()
        self.d_state, self.dt_rank = d_state, dt_rank
        self.in_proj = nn.Linear(d_model, d_inner * 2, bias=False)
        self.conv1d = nn.Conv1d(d_inner, d_inner, d_conv, groups=d_inner, padding=d_conv - 1)
        self.x_proj = nn.Linear(d_inner, dt_rank + d_state * 2, bias=False)
        self.dt_proj = nn.Linear(dt_rank, d_inner)
        A = torch.arange(1, d_state + 1).repeat(d_inner, 1).float()
        self.A_log = nn.Parameter(torch.log(A))
        self.D = nn.Parameter(torch.ones(d_inner))
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)

    def forward(self, x):
        _b, length, _d = x.shape
        x, res = self.in_proj(x).split([self.A_log.shape[0]] * 2, dim=-1)
        x = self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2)
        x = F.silu(x)
        return self.out_proj(self.ssm(x) * F.silu(res))

    def ssm(self, x):
        A = -torch.exp(self.A_log.float())
        delta, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        deltaA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        deltaB_u = torch.einsum("bld,bln,bld->bldn", delta, B, x)
        state = torch.zeros(x.shape[0], x.shape[2], self.d_state, device=x.device, dtype=x.dtype)
        ys = []
        for i in range(x.shape[1]):
            state = deltaA[:, i] * state + deltaB_u[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, C[:, i, :]))
        return torch.stack(ys, dim=1) + x * self.D


class Mamba(nn.Module):
    """As johnma2006's mamba-minimal, logits of each next token."""

    def __init__(self, vocab_size=40, d_model=16, n_layer=2, d_state=4, expand=2, d_conv=3):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(
            [MambaBlock(d_model, d_model * expand, d_state, d_conv, math.ceil(d_model / 8)) for _ in range(n_layer)]
        )
        self.norms = nn.ModuleList([nn.RMSNorm(d_model) for _ in range(n_layer)])
        self.norm_f = nn.RMSNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = layer(norm(x)) + x
        return self.lm_head(self.norm_f(x))


# ---- convolutions over time ------------------------------------------------------------------------------------------


class M5(nn.Module):
    """PyTorch's audio tutorial (Dai et al. 2016): raw waveforms."""

    def __init__(self, n_input=1, n_output=8, stride=4, n_channel=16):
        super().__init__()
        self.conv1 = nn.Conv1d(n_input, n_channel, kernel_size=20, stride=stride)
        self.bn1 = nn.BatchNorm1d(n_channel)
        self.pool1 = nn.MaxPool1d(4)
        self.conv2 = nn.Conv1d(n_channel, 2 * n_channel, kernel_size=3)
        self.bn2 = nn.BatchNorm1d(2 * n_channel)
        self.pool2 = nn.MaxPool1d(2)
        self.fc1 = nn.Linear(2 * n_channel, n_output)

    def forward(self, x):
        x = self.pool1(F.relu(self.bn1(self.conv1(x))))
        x = self.pool2(F.relu(self.bn2(self.conv2(x))))
        x = F.avg_pool1d(x, x.shape[-1])
        x = x.permute(0, 2, 1)
        x = self.fc1(x)
        return F.log_softmax(x, dim=2).squeeze(1)


class WaveNet(nn.Module):
    """Van den Oord et al. 2016: dilated, gated, with a skip from each layer."""

    def __init__(self, in_channels=1, res_channels=12, dil_channels=10, skip_channels=20, layers=3, classes=8):
        super().__init__()
        self.start = nn.Conv1d(in_channels, res_channels, 1)
        self.filter_convs, self.gate_convs = nn.ModuleList(), nn.ModuleList()
        self.residual_convs, self.skip_convs = nn.ModuleList(), nn.ModuleList()
        for i in range(layers):
            self.filter_convs.append(nn.Conv1d(res_channels, dil_channels, 2, dilation=2**i, bias=False))
            self.gate_convs.append(nn.Conv1d(res_channels, dil_channels, 2, dilation=2**i, bias=False))
            if i < layers - 1:
                self.residual_convs.append(nn.Conv1d(dil_channels, res_channels, 1))
            self.skip_convs.append(nn.Conv1d(dil_channels, skip_channels, 1))
        self.end = nn.Conv1d(skip_channels, classes, 1)

    def forward(self, x):
        x = self.start(x)
        skip = 0
        for i, (f, g) in enumerate(zip(self.filter_convs, self.gate_convs, strict=True)):
            residual = x
            x = torch.tanh(f(x)) * torch.sigmoid(g(x))
            s = self.skip_convs[i](x)
            skip = s if i == 0 else s + skip[:, :, -s.size(2) :]
            if i < len(self.residual_convs):
                x = self.residual_convs[i](x)
                x = x + residual[:, :, -x.size(2) :]
        return self.end(F.relu(skip)).mean(-1)


class Chomp1d(nn.Module):
    def __init__(self, chomp_size):
        super().__init__()
        self.chomp_size = chomp_size

    def forward(self, x):
        return x[:, :, : -self.chomp_size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, n_inputs, n_outputs, kernel_size, dilation, dropout=0.2):
        super().__init__()
        weight_norm = nn.utils.parametrizations.weight_norm
        padding = (kernel_size - 1) * dilation
        self.conv1 = weight_norm(nn.Conv1d(n_inputs, n_outputs, kernel_size, padding=padding, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(n_outputs, n_outputs, kernel_size, padding=padding, dilation=dilation))
        self.net = nn.Sequential(
            self.conv1, Chomp1d(padding), nn.ReLU(), nn.Dropout(dropout),
            self.conv2, Chomp1d(padding), nn.ReLU(), nn.Dropout(dropout),
        )  # fmt: skip
        self.downsample = nn.Conv1d(n_inputs, n_outputs, 1) if n_inputs != n_outputs else None

    def forward(self, x):
        out = self.net(x)
        res = x if self.downsample is None else self.downsample(x)
        return torch.relu(out + res)


class TCN(nn.Module):
    """As locuslab's TCN: weight norm, and each convolution under two names."""

    def __init__(self, input_size=6, output_size=5, num_channels=(12, 16), kernel_size=3):
        super().__init__()
        layers = []
        for i, channels in enumerate(num_channels):
            in_channels = input_size if i == 0 else num_channels[i - 1]
            layers += [TemporalBlock(in_channels, channels, kernel_size, dilation=2**i)]
        self.network = nn.Sequential(*layers)
        self.linear = nn.Linear(num_channels[-1], output_size)

    def forward(self, x):
        return self.linear(self.network(x.transpose(1, 2))[:, :, -1])


ENTRIES = [
    Entry(
        "lstm", lambda: LSTMClassifier(40, 12, 20, 4, 1, False, 0.0), sentences(40, 10), tokens=40,
        narrow=lambda f: LSTMClassifier(40, int(12 * f), int(20 * f), 4, 1, False, 0.0),
    ),
    Entry("lstm_bidirectional", lambda: LSTMClassifier(40, 12, 16, 4, 2, True, 0.2), sentences(40, 10), tokens=40),
    Entry(
        "lstm_tied", lambda: RNNModel("LSTM", 40, 20, 20, 2, tie_weights=True), sentences(40, 10), tokens=40,
        next_tokens=True, narrow=lambda f: RNNModel("LSTM", 40, int(20 * f), int(20 * f), 2, tie_weights=True),
    ),
    Entry("rnn", lambda: RNNModel("RNN", 40, 12, 20, 1, 0.0), sentences(40, 10), tokens=40, next_tokens=True),
    Entry("gru", GRUNet, series(9, 6), narrow=lambda f: GRUNet(6, int(24 * f))),
    Entry("gru_cells", GRUCellLoop, series(7, 6), narrow=lambda f: GRUCellLoop(n_hid=int(16 * f))),
    Entry("lstm_by_hand", HandLSTM, series(7, 6)),
    Entry("lstm_with_attention", AttentiveLSTM, sentences(40, 10), tokens=40),
    Entry("conv_lstm", ConvLSTM, series(4, 2, 8, 8)),
    Entry("selective_scan", Mamba, sentences(40, 10), tokens=40, next_tokens=True),
    Entry("audio", M5, series(1, 256), narrow=lambda f: M5(n_channel=int(16 * f))),
    Entry("wavenet", WaveNet, series(1, 32)),
    Entry("temporal_convolution", TCN, series(12, 6)),
]  # fmt: skip
