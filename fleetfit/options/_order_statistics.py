"""Order statistics of a few rows, element by element; shares of a count, rounded."""

import functools
import math

import torch
from torch import Tensor

_ROUNDING = 1e-9  # 0.07 * 100 is a little more than 7, and 0.29 * 100 a little less than 29


def ceil_share(share: float, count: int) -> int:
    """Return the smallest number that is a share of a count or more."""
    return math.ceil(share * count - _ROUNDING)


def floor_share(share: float, count: int) -> int:
    """Return the largest number that is a share of a count or less."""
    return math.floor(share * count + _ROUNDING)


def take_median(rows: Tensor) -> Tensor:
    """Return the median of each column of [K, n]: of an even number the mean of the two in the middle.

    The rows are written to.
    """
    count = len(rows)
    low, high = (count - 1) // 2, count // 2
    middle = select_ranks(rows, low, high + 1)
    return middle[0] if low == high else middle[0].add_(middle[1]).mul_(0.5)


def select_ranks(rows: Tensor, first: int, last: int) -> list[Tensor]:
    """Return the first-th to (last - 1)-th smallest of each column of [K, n]; the rows are written to.

    Whole rows are compared at once by a fixed network, which for some dozens of rows is far faster than sorting each
    column.
    """
    line, spare = list(rows.unbind(0)), torch.empty_like(rows[0])
    for a, b, needs_low, needs_high in make_network(len(line), first, last):
        if not needs_high:
            torch.minimum(line[a], line[b], out=line[a])
        elif not needs_low:
            torch.maximum(line[a], line[b], out=line[b])
        else:
            torch.minimum(line[a], line[b], out=spare)
            torch.maximum(line[a], line[b], out=line[b])
            line[a], spare = spare, line[a]
    return line[first:last]


@functools.lru_cache(maxsize=256)
def make_network(count: int, first: int, last: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Return the comparisons that sort the positions first to last - 1.

    Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2, Algorithm M), without the comparisons on
    which these positions do not depend.

    Returns:
        Two positions, and whether the smaller, and the larger, of the two is needed afterwards.
    """
    comparisons: list[tuple[int, int]] = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top if count > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            comparisons += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    needed, network = set(range(first, last)), []
    for a, b in reversed(comparisons):
        if a in needed or b in needed:
            network.append((a, b, a in needed, b in needed))
            needed |= {a, b}
    return tuple(reversed(network))
