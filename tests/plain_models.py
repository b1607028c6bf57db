"""Plain modules, as somebody writes them who has never heard of FleetFit: nothing here is imported from it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Residual(nn.Module):
    """Images of one channel; three blocks of one width."""

    def __init__(self, width: int = 16, depth: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layers = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


class GroupedStage(nn.Module):
    def __init__(self, channels: int, pools: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 24, 3, padding=1), nn.GroupNorm(4, 24)
        self.pools = pools

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return F.max_pool2d(x, 2) if self.pools else x


class Grouped(nn.Module):
    """Four stages of four groups of six channels, so that there are four widths."""

    def __init__(self, channels: int = 1, pools: bool = False, classes: int = 4) -> None:
        super().__init__()
        self.stages = nn.ModuleList([GroupedStage(24 if i else channels, pools and i < 2) for i in range(4)])
        self.fc = nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.fc(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, places, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, places, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, places, width)
        x = x + self.proj(mixed)
        return x + self.mlp(self.norm2(x))


class Patches(nn.Module):
    """A vision transformer on images of one channel."""

    def __init__(self, width: int = 32, heads: int = 8, depth: int = 2, classes: int = 4, side: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.randn(1, side * side // 4 + 1, width) * 0.02)
        self.blocks = nn.ModuleList([Attention(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Flat(nn.Module):
    """One hidden layer: no chain of blocks for early exits."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(16, hidden), nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(x.flatten(1))))


class Sequence(nn.Module):
    """Next tokens by a GRU."""

    def __init__(self, vocabulary: int = 12, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x))[0])
