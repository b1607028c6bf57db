"""Shamir's secret sharing over the prime field of 2^521 - 1: `threshold` shares give the secret, fewer reveal nothing.

Shamir (Communications of the ACM, 1979). A share is 66 bytes. The dealer publishes a hash of each share with its holder
(`fleetfit.secure.client`), which shows whether a share was changed.
"""

import secrets
from collections.abc import Mapping
from functools import lru_cache

PRIME = 2**521 - 1
SIZE = 66
"""Bytes of a share."""


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Return a share for each holder, whose positions count from 1.

    Args:
        secret: At most 65 bytes.
        threshold: Number of shares that restore it.
        holders: Number of shares, below 2^521 - 1.
    """
    if not 1 <= threshold <= holders or len(secret) >= SIZE:
        raise ValueError(f"cannot share {len(secret)} bytes among {holders} holders with threshold {threshold}")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))  # of the highest power first
    shares = []
    for position in range(1, holders + 1):
        value = 0
        for coefficient in coefficients:
            value = (value * position + coefficient) % PRIME
        shares.append(value.to_bytes(SIZE, "big"))
    return shares


def join(shares: Mapping[int, bytes], length: int) -> bytes | None:
    """Return the secret of some shares.

    Args:
        shares: As many as the threshold, by their holders' positions.
        length: Bytes of the secret.

    Returns:
        None where the shares do not belong to a secret of that length.
    """
    factors = _compute_factors(tuple(shares))
    value = sum(f * int.from_bytes(share, "big") for f, share in zip(factors, shares.values(), strict=True)) % PRIME
    return value.to_bytes(length, "big") if value.bit_length() <= 8 * length else None


@lru_cache(maxsize=64)
def _compute_factors(positions: tuple[int, ...]) -> list[int]:
    """Return the factors of the shares whose sum is the polynomial's value at 0 (Lagrange)."""
    factors = []
    for own in positions:
        above = below = 1
        for other in positions:
            if other != own:
                above = above * other % PRIME
                below = below * (other - own) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return factors
