"""The selective scan of Mamba (Gu and Dao, 2023) in plain PyTorch: exact, with gradients, without a compiled kernel.

Per channel d and state n, with a step size, an input weight B and an output weight C that depend on the token
(Algorithm 2, with the zero-order hold of Eq. 4 for A and its first-order form for B, as in the authors' code):
    h_t[d, n] = exp(step_t[d] A[d, n]) h_{t-1}[d, n] + step_t[d] B_t[n] x_t[d],    y_t[d] = sum_n C_t[n] h_t[d, n].

Time comes first in every tensor here, so a step of the loop works on contiguous memory. The backward pass computes
the states anew, because keeping them costs state-size times the memory of the tokens in every block.
Legend: B batch, L tokens, D channels, N states.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_SHORTEST_STEP, _LONGEST_STEP, _LEAST_STEP = 0.001, 0.1, 1e-4  # the authors' initial step sizes
_CPU_CHUNK, _ACCELERATOR_CHUNK = 2**18, 2**24  # numbers per chunk: a MiB stays in a core's cache


def _split_tokens(x: Tensor, states: int) -> list[slice]:
    """Split the tokens of [L, B, D] into chunks whose [B, D, N] tensors together fit the cache."""
    numbers = _ACCELERATOR_CHUNK if x.device.type not in ("cpu", "meta") else _CPU_CHUNK
    length = max(1, numbers // (math.prod(x.shape[1:]) * states))
    return [slice(start, min(start + length, len(x))) for start in range(0, len(x), length)]


def _compute_decays_and_inputs(x: Tensor, step: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(step A) and step B x, both [L, B, D, N]."""
    return torch.exp(step.unsqueeze(-1) * a), (step * x).unsqueeze(-1) * b.unsqueeze(-2)


def _accumulate(before: Tensor | None, decays: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add to each value its decay times the value before it, in place; `before` is the one before the first."""
    if values[0].is_meta:
        return
    for decay, value in zip(decays, values, strict=True):
        before = value if before is None else value.addcmul_(decay, before)


class _Scan(torch.autograd.Function):
    """y of x [L, B, D], step [L, B, D], A [D, N], B [L, B, N], C [L, B, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(x, step, a, b, c)
        y, last = torch.empty_like(x), None
        for s in _split_tokens(x, a.shape[-1]):
            decays, states = _compute_decays_and_inputs(x[s], step[s], a, b[s])
            _accumulate(last, decays.unbind(0), states.unbind(0))
            y[s] = torch.matmul(states, c[s].unsqueeze(-1)).squeeze(-1)
            last = states[-1]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients.

        The gradient of h_t is g_t = dy_t C_t + decay_{t+1} g_{t+1}; then that of step A is g_t decay_t h_{t-1} and that
        of step B x is g_t.
        """
        x, step, a, b, c = ctx.saved_tensors
        grad = grad.contiguous()  # otherwise g has its strides, and every product below copies
        states = _compute_states(x, step, a, b)
        grad_x, grad_step, grad_b, grad_c = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, x, b, b)
        )
        grad_a, after = torch.zeros_like(a), None
        for s in reversed(_split_tokens(x, a.shape[-1])):
            decays = torch.exp(step[s].unsqueeze(-1) * a)
            grad_c[s] = torch.matmul(grad[s].unsqueeze(-2), states[s]).squeeze(-2)
            g = grad[s].unsqueeze(-1) * c[s].unsqueeze(-2)
            if after is not None:
                g[-1] += after
            _accumulate(None, (decays[:1].unbind(0) + decays.unbind(0)[:0:-1]), g.unbind(0)[::-1])
            grad_b[s] = torch.matmul((step[s] * x[s]).unsqueeze(-2), g).squeeze(-2)
            grad_product = torch.matmul(g, b[s].unsqueeze(-1)).squeeze(-1)
            after = g.mul_(decays)[0].clone()
            g[1:] *= states[s][:-1]
            g[0] *= states[s.start - 1] if s.start else 0.0
            grad_x[s] = grad_product * step[s]
            grad_step[s] = grad_product * x[s] + torch.mul(g, a, out=decays).sum(-1)
            grad_a += g.mul_(step[s].unsqueeze(-1)).sum((0, 1))
        return grad_x, grad_step, grad_a, grad_b, grad_c


def _compute_states(x: Tensor, step: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return h [L, B, D, N]."""
    states, last = x.new_empty(*x.shape, a.shape[-1]), None
    for s in _split_tokens(x, a.shape[-1]):
        decays, states[s] = _compute_decays_and_inputs(x[s], step[s], a, b[s])
        _accumulate(last, decays.unbind(0), states[s].unbind(0))
        last = states[s][-1]
    return states


def _scan_by_doubling(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return y by log2(L) rounds over whole tensors: slow to train with, but a graph of few nodes, for export.

    After a round of stride k, each entry holds the last 2k inputs and the product of the last 2k decays.
    """
    decays, states = _compute_decays_and_inputs(x, step, a, b)
    stride = 1
    while stride < len(x):
        states = torch.cat([states[:stride], states[stride:] + decays[stride:] * states[:-stride]])
        decays = torch.cat([decays[:stride], decays[stride:] * decays[:-stride]])
        stride *= 2
    return torch.matmul(states, c.unsqueeze(-1)).squeeze(-1)


def scan(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return y [L, B, D] of the recurrence above.

    Args:
        x: Inputs [L, B, D].
        step: Step sizes [L, B, D], above 0.
        a: A [D, N], below 0.
        b: Input weights [L, B, N].
        c: Output weights [L, B, N].
    """
    if torch.compiler.is_exporting():
        return _scan_by_doubling(x, step, a, b, c)
    return _Scan.apply(x, step, a, b, c)  # type: ignore[no-untyped-call]


class SelectiveScan(nn.Module):
    """One direction of a Mamba block: causal depthwise convolution, SiLU, the projections of each token, the scan, D x.

    Names and shapes are those of the authors' code.
    """

    def __init__(self, inner: int, rank: int, state: int, kernel: int) -> None:
        super().__init__()
        self.rank, self.state = rank, state
        self.conv1d = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        if not self.D.is_meta:
            self._draw_steps(inner)

    @torch.no_grad()
    def _draw_steps(self, inner: int) -> None:
        """Draw the projection of steps so that softplus(bias) is log-uniform between the shortest and longest step."""
        self.dt_proj.weight.uniform_(-(self.rank**-0.5), self.rank**-0.5)
        low, high = math.log(_SHORTEST_STEP), math.log(_LONGEST_STEP)
        steps = torch.exp(low + torch.rand(inner) * (high - low)).clamp_min(_LEAST_STEP)
        self.dt_proj.bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        """Return [L, B, inner] of x [B, inner, L]; y_t depends on x_1 to x_t only."""
        mixed = F.silu(self.conv1d(x)[..., : x.shape[-1]]).permute(2, 0, 1).contiguous()
        steps, b, c = self.x_proj(mixed).split([self.rank, self.state, self.state], dim=-1)
        y = scan(mixed, F.softplus(self.dt_proj(steps)), -self.A_log.exp(), b, c)
        return torch.addcmul(y, mixed, self.D)

    def extra_flops(self, inputs: Sequence[Any]) -> int:
        """Return the floating-point operations of the scan that torch's counter does not see, two per multiply-add.

        Each token, channel and state takes four multiply-adds: step times A, step x times B, the new state, and its
        part of y. The last is a matrix product, which the counter sees.
        """
        batch, inner, tokens = inputs[0].shape
        return 2 * 3 * int(batch * tokens * inner) * self.state
