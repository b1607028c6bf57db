"""Seeds derived from keys, so that no random choice depends on what ran before it."""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

_HOST = torch.device("cpu")


def derive_seed(*key: int | str) -> int:
    """Return a 63-bit seed for a key such as `(run seed, round, "train", client)`; different keys, unrelated seeds."""
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def make_numpy_rng(*key: int | str) -> np.random.Generator:
    """Return a NumPy generator seeded from a key."""
    return np.random.default_rng(derive_seed(*key))


def make_torch_rng(*key: int | str) -> torch.Generator:
    """Return a torch generator on the host seeded from a key."""
    return torch.Generator().manual_seed(derive_seed(*key))


@contextlib.contextmanager
def isolate_rng(accelerator: torch.device, seed: int | None = None) -> Iterator[None]:
    """Leave torch's global generators as they were; inside they begin with a seed, if there is one."""
    with torch.random.fork_rng(devices=[accelerator] if accelerator.type == "cuda" else []):
        if seed is not None:  # `torch.manual_seed` would seed every CUDA device, too
            (torch if accelerator.type == "cuda" else torch.default_generator).manual_seed(seed)
        yield


@contextlib.contextmanager
def isolate_global_rngs(accelerator: torch.device = _HOST) -> Iterator[None]:
    """Leave the global generators of Python, NumPy and torch as they were, for code of others."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with isolate_rng(accelerator):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def seed_global_rngs(accelerator: torch.device, seed: int) -> None:
    """Seed the global generators of Python, NumPy and one device.

    Those of other devices would keep a stack trace until used, which costs more than a small client's step.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    (torch if accelerator.type == "cuda" else torch.default_generator).manual_seed(seed)
