"""The order of a few rows, element by element: their median, or their smallest and largest; shares of so many."""

import functools
import math

import torch
from torch import Tensor

_ROUNDING = 1e-9  # 0.07 * 100 is a little more than 7, and 0.29 * 100 a little less than 29


def at_least(share: float, count: int) -> int:
    """Return the smallest number that is a share of a count or more."""
    return math.ceil(share * count - _ROUNDING)


def at_most(share: float, count: int) -> int:
    """Return the largest number that is a share of a count or less."""
    return math.floor(share * count + _ROUNDING)


def middle(rows: Tensor) -> Tensor:
    """Return the median of each column of [K, n]: of an even number the mean of the two in the middle.

    The rows are written to.
    """
    count = len(rows)
    low, high = (count - 1) // 2, count // 2
    found = ordered(rows, low, high + 1)
    return found[0] if low == high else found[0].add_(found[1]).mul_(0.5)


def ordered(rows: Tensor, first: int, last: int) -> list[Tensor]:
    """Return the first-th to (last - 1)-th smallest of each column of [K, n]; the rows are written to.

    Whole rows are compared at once by a fixed network, which for some dozens of rows is far faster than sorting each
    column.
    """
    line, spare = list(rows.unbind(0)), torch.empty_like(rows[0])
    for a, b, wants_low, wants_high in network(len(line), first, last):
        if not wants_high:
            torch.minimum(line[a], line[b], out=line[a])
        elif not wants_low:
            torch.maximum(line[a], line[b], out=line[b])
        else:
            torch.minimum(line[a], line[b], out=spare)
            torch.maximum(line[a], line[b], out=line[b])
            line[a], spare = spare, line[a]
    return line[first:last]


@functools.lru_cache(maxsize=256)
def network(count: int, first: int, last: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Return the comparisons after which places first to last - 1 hold what sorting would put there.

    Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2, Algorithm M), without what these places
    do not depend on.

    Returns:
        Two places, and whether the smaller, and the larger, of the two is needed afterwards.
    """
    found: list[tuple[int, int]] = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top if count > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            found += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    needed, kept = set(range(first, last)), []
    for a, b in reversed(found):
        if a in needed or b in needed:
            kept.append((a, b, a in needed, b in needed))
            needed |= {a, b}
    return tuple(reversed(kept))
