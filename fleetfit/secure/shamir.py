"""Shamir's secret sharing over the prime field of 2^521 - 1: any `threshold` shares give the secret, fewer say nothing.

Shamir (Communications of the ACM, 1979). A share is 66 bytes; who deals says to everybody which share is whose by a
hash (`fleetfit.secure.client`), so that a share that was changed is known as such.
"""

import secrets
from collections.abc import Mapping
from functools import lru_cache

PRIME = 2**521 - 1
SIZE = 66
"""Bytes of a share."""


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Return a share for each holder, whose places count from 1.

    Args:
        secret: At most 65 bytes.
        threshold: How many shares give it back.
        holders: How many shares there are, below 2^521 - 1.
    """
    if not 1 <= threshold <= holders or len(secret) >= SIZE:
        raise ValueError(f"cannot share {len(secret)} bytes among {holders}, {threshold} of whom give them back")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))  # of the highest power first
    found = []
    for place in range(1, holders + 1):
        value = 0
        for coefficient in coefficients:
            value = (value * place + coefficient) % PRIME
        found.append(value.to_bytes(SIZE, "big"))
    return found


def join(shares: Mapping[int, bytes], length: int) -> bytes | None:
    """Return the secret of some shares.

    Args:
        shares: As many as the threshold, by their holders' places.
        length: Bytes of the secret.

    Returns:
        None where the shares belong to no secret of that length.
    """
    factors = _factors(tuple(shares))
    value = sum(f * int.from_bytes(share, "big") for f, share in zip(factors, shares.values(), strict=True)) % PRIME
    return value.to_bytes(length, "big") if value.bit_length() <= 8 * length else None


@lru_cache(maxsize=64)
def _factors(places: tuple[int, ...]) -> list[int]:
    """Return by what each share is multiplied so that the sum is the polynomial's value at 0 (Lagrange)."""
    found = []
    for mine in places:
        above = below = 1
        for other in places:
            if other != mine:
                above = above * other % PRIME
                below = below * (other - mine) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found
