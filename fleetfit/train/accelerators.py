"""Where tensors are computed on, by name."""

import torch

from fleetfit.errors import ConfigError


def accelerator_named(device: str) -> torch.device:
    """Return the torch device of a name: "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: There is no such device on this machine.
    """
    try:
        found = torch.device(device or "nothing")
    except RuntimeError:
        raise ConfigError(f'engine.device must be "cpu", "cuda" or "cuda:N", got "{device}".') from None
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f'engine.device must be "cpu", "cuda" or "cuda:N", got "{device}".')
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ConfigError(f'engine.device is "{device}", but this machine has {count} CUDA devices.')
        found = torch.device("cuda", found.index or 0)
    return found
