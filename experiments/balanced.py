"""AG News with as many training texts of each class, as its test set has them.

The copy at hand has 4,541 to 9,701 texts of a class. A method that corrects for class frequencies would gain from tests
that are balanced where training is not.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from fleetfit import Data
from fleetfit.data.sets.short_texts import ag_news as read_ag_news
from fleetfit.errors import DataError


def ag_news(
    folder: str | None = None,
    tokenizer: str | None = None,
    length: int = 64,
    samples: int = 12000,
    validation: float = 0.1,
    seed: int = 0,
) -> Data:
    """Return AG News as tokens, with equally many training texts of each class, and held-out ones likewise.

    Args:
        folder: The folder with its files or the one above; None: in the folder FLEETFIT_DATA.
        tokenizer: Folder of a Hugging Face checkpoint, or a tokenizer.json.
        length: Tokens of a text.
        samples: Training texts of all classes, those held out included.
        validation: Share of them to hold out.
        seed: Seed of the texts that are drawn.

    Raises:
        DataError: A class has too few texts, or the files or the tokenizer are missing or wrong.
    """
    if tokenizer and not Path(tokenizer).exists():
        raise DataError(
            f"tokenizer: {tokenizer} does not exist. The pretrained MiniLM comes with `python experiments/minilm.py`.",
            key="tokenizer",
        )
    data = read_ag_news(folder=folder, tokenizer=tokenizer, length=length, validation=validation, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    held_out = round(samples * validation / data.classes)
    each = {"train": samples // data.classes - held_out, "validation": held_out}
    chosen = {split: _draw_each_class(data, split, count, generator) for split, count in each.items()}
    return dataclasses.replace(data, name=f"{data.name}-balanced-{samples}", splits={**data.splits, **chosen})


def _draw_each_class(data: Data, split: str, count: int, generator: torch.Generator) -> Tensor:
    """Return the indices of `count` samples of each class, [classes * count], ascending."""
    indices = data.splits[split]
    labels = data.y[indices]
    fewest = int(torch.bincount(labels, minlength=data.classes).min())
    if fewest < count:
        raise DataError(
            f"samples: {split} needs {count} texts of each class, and a class has {fewest}. Ask for fewer.",
            key="samples",
        )
    order = torch.randperm(len(indices), generator=generator)
    each = [order[labels[order] == one][:count] for one in range(data.classes)]
    return indices[torch.cat(each).sort().values]
