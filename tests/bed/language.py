"""Modules of tokens: encoders, decoders, and bags of words."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from bed.entry import Entry, sentences

# ---- PyTorch's encoder -----------------------------------------------------------------------------------------------


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=64):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        x = x + self.pe[: x.size(0)]
        return self.dropout(x)


class TransformerModel(nn.Module):
    """As PyTorch's tutorial, the sequence first; the mean over it classifies."""

    def __init__(self, ntoken, d_model=32, nhead=4, d_hid=48, nlayers=2, dropout=0.1, n_class=4):
        super().__init__()
        self.model_type = "Transformer"
        self.pos_encoder = PositionalEncoding(d_model, dropout)
        encoder_layers = nn.TransformerEncoderLayer(d_model, nhead, d_hid, dropout)
        self.transformer_encoder = nn.TransformerEncoder(encoder_layers, nlayers, enable_nested_tensor=False)
        self.embedding = nn.Embedding(ntoken, d_model)
        self.d_model = d_model
        self.linear = nn.Linear(d_model, n_class)
        self.init_weights()

    def init_weights(self):
        initrange = 0.1
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.linear.bias.data.zero_()
        self.linear.weight.data.uniform_(-initrange, initrange)

    def forward(self, src):
        src = src.transpose(0, 1)
        src = self.embedding(src) * math.sqrt(self.d_model)
        src = self.pos_encoder(src)
        output = self.transformer_encoder(src)
        return self.linear(output.mean(0))


class PaddedEncoder(nn.Module):
    """Token 0 is padding: left out of attention and of the mean."""

    def __init__(self, vocab_size, dim=32, heads=4, layers=2, num_classes=4, pad_idx=0, max_len=32):
        super().__init__()
        self.pad_idx = pad_idx
        self.tok = nn.Embedding(vocab_size, dim, padding_idx=pad_idx)
        self.pos = nn.Embedding(max_len, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, dim * 2, norm_first=True, batch_first=True, activation=F.gelu)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.out = nn.Linear(dim, num_classes)

    def forward(self, ids):
        padding = ids == self.pad_idx
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))[None]
        x = self.encoder(x, src_key_padding_mask=padding)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        return self.out(x.sum(1) / (~padding).sum(1, keepdim=True).clamp(min=1))


# ---- BERT and ALBERT by hand -----------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config["num_attention_heads"]
        self.attention_head_size = int(config["hidden_size"] / config["num_attention_heads"])
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = nn.Linear(config["hidden_size"], self.all_head_size)
        self.key = nn.Linear(config["hidden_size"], self.all_head_size)
        self.value = nn.Linear(config["hidden_size"], self.all_head_size)
        self.dense = nn.Linear(self.all_head_size, config["hidden_size"])
        self.dropout = nn.Dropout(config["dropout"])

    def transpose_for_scores(self, x):
        new_x_shape = (*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        x = x.view(*new_x_shape)
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        scores = scores / math.sqrt(self.attention_head_size)
        scores = scores + attention_mask
        probs = self.dropout(nn.Softmax(dim=-1)(scores))
        context_layer = torch.matmul(probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(*context_layer.size()[:-2], self.all_head_size)
        return self.dense(context_layer)


class EncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = SelfAttention(config)
        self.norm1 = nn.LayerNorm(config["hidden_size"], eps=1e-12)
        self.intermediate = nn.Linear(config["hidden_size"], config["intermediate_size"])
        self.output = nn.Linear(config["intermediate_size"], config["hidden_size"])
        self.norm2 = nn.LayerNorm(config["hidden_size"], eps=1e-12)

    def forward(self, x, mask):
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.output(F.gelu(self.intermediate(x))))


class BertFromScratch(nn.Module):
    """Devlin et al. 2018 after a blog post: a dict of sizes, a pooler on the first token."""

    def __init__(self, config, num_labels=3):
        super().__init__()
        self.config = config
        embed = config.get("embedding_size", config["hidden_size"])
        self.word_embeddings = nn.Embedding(config["vocab_size"], embed, padding_idx=0)
        self.position_embeddings = nn.Embedding(config["max_position_embeddings"], embed)
        self.LayerNorm = nn.LayerNorm(embed, eps=1e-12)
        if embed != config["hidden_size"]:
            self.embedding_hidden_mapping_in = nn.Linear(embed, config["hidden_size"])
        self.register_buffer("position_ids", torch.arange(config["max_position_embeddings"]).expand((1, -1)))
        if config.get("shared"):
            self.layer = EncoderLayer(config)
        else:
            self.layer = nn.ModuleList([EncoderLayer(config) for _ in range(config["num_hidden_layers"])])
        self.pooler = nn.Sequential(nn.Linear(config["hidden_size"], config["hidden_size"]), nn.Tanh())
        self.classifier = nn.Linear(config["hidden_size"], num_labels)

    def forward(self, input_ids):
        mask = (1.0 - (input_ids > 0)[:, None, None, :].float()) * -10000.0
        x = self.word_embeddings(input_ids) + self.position_embeddings(self.position_ids[:, : input_ids.size(1)])
        x = self.LayerNorm(x)
        if hasattr(self, "embedding_hidden_mapping_in"):
            x = self.embedding_hidden_mapping_in(x)
        for i in range(self.config["num_hidden_layers"]):
            x = (self.layer if self.config.get("shared") else self.layer[i])(x, mask)
        return self.classifier(self.pooler(x[:, 0]))


def bert(f=1.0, **more):
    return BertFromScratch(
        dict(
            vocab_size=40, hidden_size=int(32 * f), num_attention_heads=int(4 * f), intermediate_size=int(64 * f),
            num_hidden_layers=2, max_position_embeddings=16, dropout=0.1, **more,
        )
    )  # fmt: skip


# ---- GPT -------------------------------------------------------------------------------------------------------------


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 40
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.0
    bias: bool = True


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.register_buffer(
            "bias",
            torch.tril(torch.ones(config.block_size, config.block_size)).view(
                1, 1, config.block_size, config.block_size
            ),
        )

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class GPTBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.ModuleDict(
            dict(
                c_fc=nn.Linear(config.n_embd, 4 * config.n_embd),
                c_proj=nn.Linear(4 * config.n_embd, config.n_embd),
                act=nn.GELU(approximate="tanh"),
            )
        )

    def forward(self, x):
        m = self.mlp
        x = x + self.attn(self.ln_1(x))
        return x + m.c_proj(m.act(m.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """As Karpathy's nanoGPT: a config object, tied embeddings."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx):
        device = idx.device
        _b, t = idx.size()
        assert t <= self.config.block_size, "Cannot forward, block size is exhausted"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class Head(nn.Module):
    """one head of self-attention"""

    def __init__(self, n_embd, head_size, block_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        _B, T, _C = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        return wei @ self.value(x)


class LectureGPT(nn.Module):
    """As Karpathy's lecture: a list of heads, each a module."""

    def __init__(self, vocab_size=40, n_embd=24, n_head=3, n_layer=2, block_size=16):
        super().__init__()
        self.token_embedding_table = nn.Embedding(vocab_size, n_embd)
        self.position_embedding_table = nn.Embedding(block_size, n_embd)
        hs = n_embd // n_head
        self.heads = nn.ModuleList(
            [nn.ModuleList([Head(n_embd, hs, block_size) for _ in range(n_head)]) for _ in range(n_layer)]
        )
        self.proj = nn.ModuleList([nn.Linear(hs * n_head, n_embd) for _ in range(n_layer)])
        self.ffwd = nn.ModuleList(
            [
                nn.Sequential(
                    nn.LayerNorm(n_embd), nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd)
                )
                for _ in range(n_layer)
            ]
        )
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx):
        _B, T = idx.shape
        x = self.token_embedding_table(idx) + self.position_embedding_table(torch.arange(T, device=idx.device))
        for heads, proj, ffwd in zip(self.heads, self.proj, self.ffwd, strict=True):
            x = x + proj(torch.cat([h(x) for h in heads], dim=-1))
            x = x + ffwd(x)
        return self.lm_head(self.ln_f(x))


# ---- Llama -----------------------------------------------------------------------------------------------------------


class RMSNorm(torch.nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    freqs = torch.outer(torch.arange(end), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[-1])
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_kv(x, n_rep):
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    return (
        x[:, :, :, None, :]
        .expand(bs, slen, n_kv_heads, n_rep, head_dim)
        .reshape(bs, slen, n_kv_heads * n_rep, head_dim)
    )


class LlamaAttention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.n_heads, self.n_kv_heads = args.n_heads, args.n_kv_heads
        self.n_rep = self.n_heads // self.n_kv_heads
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x, freqs_cis, mask):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = xk.view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = xv.view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        keys, values = repeat_kv(xk, self.n_rep), repeat_kv(xv, self.n_rep)
        xq, keys, values = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = F.softmax((scores + mask).float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values)
        output = output.transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(output)


class LlamaFeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, multiple_of):
        super().__init__()
        hidden_dim = int(2 * hidden_dim / 3)
        hidden_dim = multiple_of * ((hidden_dim + multiple_of - 1) // multiple_of)
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ModelArgs(NamedTuple):
    dim: int = 32
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    vocab_size: int = 40
    multiple_of: int = 8
    max_seq_len: int = 16


class LlamaLayer(nn.Module):
    def __init__(self, layer_id, args):
        super().__init__()
        self.layer_id = layer_id
        self.attention = LlamaAttention(args)
        self.feed_forward = LlamaFeedForward(args.dim, 4 * args.dim, args.multiple_of)
        self.attention_norm = RMSNorm(args.dim)
        self.ffn_norm = RMSNorm(args.dim)

    def forward(self, x, freqs_cis, mask):
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """As Meta's: complex rotations in a plain attribute, grouped heads, SwiGLU."""

    def __init__(self, params):
        super().__init__()
        self.params = params
        self.tok_embeddings = nn.Embedding(params.vocab_size, params.dim)
        self.layers = torch.nn.ModuleList()
        for layer_id in range(params.n_layers):
            self.layers.append(LlamaLayer(layer_id, params))
        self.norm = RMSNorm(params.dim)
        self.output = nn.Linear(params.dim, params.vocab_size, bias=False)
        self.freqs_cis = precompute_freqs_cis(params.dim // params.n_heads, params.max_seq_len * 2)

    def forward(self, tokens):
        _bsz, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        self.freqs_cis = self.freqs_cis.to(h.device)
        mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device).triu(diagonal=1)
        for layer in self.layers:
            h = layer(h, self.freqs_cis[:seqlen], mask)
        return self.output(self.norm(h)).float()


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, max_len=32, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        emb = torch.outer(torch.arange(max_len).float(), inv_freq).repeat(1, 2)
        self.register_buffer("cos_cached", emb.cos(), persistent=False)
        self.register_buffer("sin_cached", emb.sin(), persistent=False)

    def rotate_half(self, x):
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)

    def forward(self, x):
        n = x.shape[-2]
        return x * self.cos_cached[:n] + self.rotate_half(x) * self.sin_cached[:n]


class GroupedBlock(nn.Module):
    def __init__(self, hidden, n_q, n_kv, head_dim, inner):
        super().__init__()
        self.head_dim = head_dim
        self.input_norm, self.post_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q_proj = nn.Linear(hidden, n_q * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, n_kv * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, n_kv * head_dim, bias=False)
        self.o_proj = nn.Linear(n_q * head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x, rope):
        h = self.input_norm(x)
        hidden_shape = (*h.shape[:-1], -1, self.head_dim)
        q = rope(self.q_norm(self.q_proj(h).view(hidden_shape)).transpose(1, 2))
        k = rope(self.k_norm(self.k_proj(h).view(hidden_shape)).transpose(1, 2))
        v = self.v_proj(h).view(hidden_shape).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(o.transpose(1, 2).reshape(*h.shape[:-1], -1))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class GroupedDecoder(nn.Module):
    """Qwen's style: a norm per head, rotation by halves from a cached table, gate and up fused; tied."""

    def __init__(self, vocab=40, hidden=32, n_q=4, n_kv=2, head_dim=8, inner=48, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.rope = RotaryEmbedding(head_dim)
        self.blocks = nn.ModuleList([GroupedBlock(hidden, n_q, n_kv, head_dim, inner) for _ in range(depth)])
        self.norm = nn.RMSNorm(hidden)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.rope)
        return F.linear(self.norm(x), self.embed.weight)


class MultiQueryAlibi(nn.Module):
    """Falcon's and MPT's style: one key and value for all heads, split by sizes; slopes in place of positions."""

    def __init__(self, vocab=40, d=32, n_heads=4, depth=2, max_len=16):
        super().__init__()
        self.d, self.n_heads, self.head_dim = d, n_heads, d // n_heads
        self.wte = nn.Embedding(vocab, d)
        self.qkv = nn.ModuleList([nn.Linear(d, d + 2 * self.head_dim) for _ in range(depth)])
        self.out = nn.ModuleList([nn.Linear(d, d) for _ in range(depth)])
        self.fc = nn.ModuleList(
            [nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(depth)]
        )
        self.norm = nn.ModuleList([nn.LayerNorm(d, bias=False) for _ in range(depth)])
        slopes = torch.tensor([2 ** (-8 * (i + 1) / n_heads) for i in range(n_heads)])
        distance = torch.arange(max_len)[None, :] - torch.arange(max_len)[:, None]
        bias = slopes[:, None, None] * distance
        self.register_buffer("alibi", bias.masked_fill(distance > 0, float("-inf")))
        self.unembed = nn.Linear(d, vocab)

    def forward(self, ids):
        b, t = ids.shape
        x = self.wte(ids)
        for qkv, out, fc, norm in zip(self.qkv, self.out, self.fc, self.norm, strict=True):
            h = norm(x)
            q, k, v = qkv(h).split([self.d, self.head_dim, self.head_dim], dim=-1)
            q = q.view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
            a = F.scaled_dot_product_attention(q, k.unsqueeze(1), v.unsqueeze(1), attn_mask=self.alibi[:, :t, :t])
            x = x + out(a.transpose(1, 2).reshape(b, t, self.d)) + fc(h)
        return self.unembed(x)


# ---- FNet, experts, relative positions -------------------------------------------------------------------------------


class FNet(nn.Module):
    """Lee-Thorp et al. 2021: the Fourier transform runs over channels, too."""

    def __init__(self, vocab_size=40, dim=32, hidden=48, depth=2, num_classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(depth)])
        self.ff = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(depth)]
        )
        self.cls = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.embed(x)
        for norm, ff in zip(self.norms, self.ff, strict=True):
            x = norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
            x = x + ff(x)
        return self.cls(x.mean(1))


class DenseExperts(nn.Module):
    """Experts as one tensor each; all run, a gate weighs them."""

    def __init__(self, vocab=40, dim=24, hidden=32, num_experts=4, num_classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.gate = nn.Linear(dim, num_experts)
        self.w1 = nn.Parameter(torch.randn(num_experts, dim, hidden) * dim**-0.5)
        self.b1 = nn.Parameter(torch.zeros(num_experts, hidden))
        self.w2 = nn.Parameter(torch.randn(num_experts, hidden, dim) * hidden**-0.5)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, ids):
        x = self.emb(ids)
        probs = F.softmax(self.gate(x), dim=-1)
        h = torch.einsum("btd,edh->beth", x, self.w1) + self.b1[None, :, None]
        y = torch.einsum("beth,ehd->betd", F.relu(h), self.w2)
        y = torch.einsum("betd,bte->btd", y, probs)
        return self.head(self.norm(x + y).mean(1))


class T5Style(nn.Module):
    """Raffel et al. 2019: a learned bias of relative positions shared by the layers, no biases elsewhere."""

    def __init__(self, vocab=40, d_model=32, d_kv=8, num_heads=3, d_ff=48, num_layers=2, num_buckets=8, n_out=4):
        super().__init__()
        self.shared = nn.Embedding(vocab, d_model)
        self.n_heads, self.d_kv, self.num_buckets = num_heads, d_kv, num_buckets
        self.inner_dim = num_heads * d_kv
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)
        for name, i, o in [("q", d_model, self.inner_dim), ("k", d_model, self.inner_dim),
                           ("v", d_model, self.inner_dim), ("o", self.inner_dim, d_model),
                           ("wi", d_model, d_ff), ("wo", d_ff, d_model)]:  # fmt: skip
            setattr(self, name, nn.ModuleList([nn.Linear(i, o, bias=False) for _ in range(num_layers)]))
        self.final = RMSNorm(d_model)
        self.lm = nn.Linear(d_model, n_out, bias=False)

    def compute_bias(self, length, device):
        pos = torch.arange(length, device=device)
        bucket = (pos[None, :] - pos[:, None] + self.num_buckets // 2).clamp(0, self.num_buckets - 1)
        return self.relative_attention_bias(bucket).permute([2, 0, 1]).unsqueeze(0)

    def forward(self, ids):
        x = self.shared(ids)
        batch, length = ids.shape
        bias = self.compute_bias(length, ids.device)
        shape = lambda s: s.view(batch, -1, self.n_heads, self.d_kv).transpose(1, 2)
        for q, k, v, o, wi, wo in zip(self.q, self.k, self.v, self.o, self.wi, self.wo, strict=True):
            scores = torch.matmul(shape(q(x)), shape(k(x)).transpose(3, 2)) + bias
            y = torch.matmul(F.softmax(scores, dim=-1), shape(v(x)))
            x = x + o(y.transpose(1, 2).contiguous().view(batch, -1, self.inner_dim))
            x = x + wo(wi(x).relu())
        return self.lm(self.final(x)[:, -1])


# ---- bags and convolutions of words ----------------------------------------------------------------------------------


class TextCNN(nn.Module):
    """Kim 2014."""

    def __init__(self, embed_num=50, embed_dim=16, class_num=4, kernel_num=12, kernel_sizes=(2, 3, 4)):
        super().__init__()
        self.embed = nn.Embedding(embed_num, embed_dim)
        self.convs = nn.ModuleList([nn.Conv2d(1, kernel_num, (K, embed_dim)) for K in kernel_sizes])
        self.dropout = nn.Dropout(0.5)
        self.fc1 = nn.Linear(len(kernel_sizes) * kernel_num, class_num)

    def forward(self, x):
        x = self.embed(x)  # (N, W, D)
        x = x.unsqueeze(1)  # (N, Ci, W, D)
        x = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        x = [F.max_pool1d(i, i.size(2)).squeeze(2) for i in x]
        x = self.dropout(torch.cat(x, 1))
        return self.fc1(x)


class FastText(nn.Module):
    """PyTorch's tutorial on text: nn.EmbeddingBag."""

    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim)
        self.fc = nn.Linear(embed_dim, embed_dim)
        self.out = nn.Linear(embed_dim, num_class)
        self.init_weights()

    def init_weights(self):
        initrange = 0.5
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.fc.weight.data.uniform_(-initrange, initrange)
        self.fc.bias.data.zero_()

    def forward(self, text):
        return self.out(torch.relu(self.fc(self.embedding(text))))


class GatedConvLM(nn.Module):
    """Dauphin et al. 2017: causal convolutions with gates, logits of each next token."""

    def __init__(self, vocab=40, embd=16, n=24, layers=2, k=3):
        super().__init__()
        self.k = k
        self.embedding = nn.Embedding(vocab, embd)
        self.conv = nn.ModuleList([nn.Conv1d(embd if i == 0 else n, n, k) for i in range(layers)])
        self.conv_gate = nn.ModuleList([nn.Conv1d(embd if i == 0 else n, n, k) for i in range(layers)])
        self.fc = nn.Linear(n, vocab)

    def forward(self, x):
        h = self.embedding(x).transpose(1, 2)
        for conv, gate in zip(self.conv, self.conv_gate, strict=True):
            padded = F.pad(h, (self.k - 1, 0))
            new = conv(padded) * torch.sigmoid(gate(padded))
            h = new + h if new.shape == h.shape else new
        return self.fc(h.transpose(1, 2))


words = sentences(40, 12)

ENTRIES = [
    Entry(
        "torch_encoder", lambda: TransformerModel(40), words, tokens=40,
        narrow=lambda f: TransformerModel(40, int(32 * f), int(4 * f), int(48 * f)),
    ),
    Entry("torch_encoder_with_padding", lambda: PaddedEncoder(40), words, tokens=40),
    Entry("bert_from_scratch", bert, words, tokens=40, narrow=bert),
    Entry("shared_blocks", lambda: bert(shared=True, embedding_size=16), words, tokens=40),
    Entry(
        "gpt_tied", lambda: GPT(GPTConfig()), words, tokens=40, next_tokens=True,
        narrow=lambda f: GPT(GPTConfig(n_embd=int(32 * f), n_head=int(4 * f))),
    ),
    Entry("gpt_list_of_heads", LectureGPT, words, tokens=40, next_tokens=True),
    Entry(
        "llama", lambda: Llama(ModelArgs()), words, tokens=40, next_tokens=True,
        narrow=lambda f: Llama(ModelArgs(dim=int(32 * f), n_heads=int(4 * f), n_kv_heads=int(2 * f))),
    ),
    Entry(
        "grouped_heads_tied", GroupedDecoder, words, tokens=40, next_tokens=True,
        narrow=lambda f: GroupedDecoder(40, int(32 * f), int(4 * f), int(2 * f), 8, int(48 * f)),
    ),
    Entry("multi_query", MultiQueryAlibi, words, tokens=40, next_tokens=True),
    Entry("fourier_over_channels", FNet, words, tokens=40),
    Entry("dense_experts", DenseExperts, words, tokens=40),
    Entry("relative_positions", T5Style, words, tokens=40),
    Entry("text_cnn", TextCNN, sentences(50, 12), tokens=50),
    Entry("embedding_bag", lambda: FastText(60, 16, 4), sentences(60, 12), tokens=60),
    Entry("gated_conv_lm", GatedConvLM, words, tokens=40, next_tokens=True),
]  # fmt: skip
