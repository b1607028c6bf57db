"""A data set outside the package: noisy 12x12 pictures of a bar, lying, standing or on either diagonal.

    fleetfit run examples/own_dataset.toml

A data set is a function that returns `fleetfit.Data`. Its parameters are the keys under [data] in a run file.
"""

import torch

from fleetfit import Data


def bars(samples: int = 2000, noise: float = 40.0, seed: int = 0) -> Data:
    """Return gray pictures [samples, 1, 12, 12] of four kinds of bars; a fifth of them is the test set.

    Args:
        samples: How many pictures.
        noise: Standard deviation of the gray values, of 255.
        seed: Of kinds, places and noise.
    """
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (samples,), generator=rng)
    at = torch.randint(-3, 4, (samples, 1, 1), generator=rng)
    row, column = torch.arange(12).view(1, 12, 1) - 6, torch.arange(12).view(1, 1, 12) - 6
    distance = torch.stack([row - at + 0 * column, column - at + 0 * row, row - column - at, row + column - at], dim=1)
    bright = distance[torch.arange(samples), y].abs() <= 1
    x = 120 * bright + 60 + noise * torch.randn(samples, 12, 12, generator=rng)
    train, test = torch.arange(samples).split([samples - samples // 5, samples // 5])
    return Data(
        name="bars",
        x=x.clamp(0, 255).to(torch.uint8).unsqueeze(1),
        y=y,
        splits={"train": train, "test": test},
        classes=4,
        class_names=("lying", "standing", "falling", "rising"),
        mean=(0.4,),
        std=(0.25,),
    )
