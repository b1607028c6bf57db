"""Private runs: what a round costs by definition, and what reports withhold."""

import math
from pathlib import Path

import numpy as np
import torch
from scipy import stats

import fleetfit as ff
from fleetfit.submodel import concat_state

KEY = bytes(range(32))


def exact_delta(epsilon: float, noise: float, rate: float) -> float:
    """Return the hockey-stick divergence of one round, by integrating its definition in both directions."""

    x = np.linspace(-12 * noise, 12 * noise + 1, 200_001)
    plain = stats.norm.pdf(x, 0, noise)
    mixed = (1 - rate) * plain + rate * stats.norm.pdf(x, 1, noise)
    one, other = (
        np.trapezoid(np.maximum(0, p - math.exp(epsilon) * q), x) for p, q in ((mixed, plain), (plain, mixed))
    )
    return float(max(one, other))


WITHHELD = {"train": {"loss": None, "clients": None, "samples": None, "by_level": {}}, "failures": [],
            "bytes_down": None, "bytes_up": None}  # fmt: skip


def read_state(folder: Path) -> torch.Tensor:
    return concat_state(ff.load(folder).checkpoint["server"].state)
