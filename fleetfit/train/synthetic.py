"""Made-up samples of a problem: for whatever asks what a model costs, and not what it learns."""

import torch

from fleetfit.data import Data
from fleetfit.layout import some_input
from fleetfit.values import Problem


def random_data(problem: Problem, classes: int, samples: int, rng: torch.Generator) -> Data:
    """Return random training samples with labels of the problem's task.

    Args:
        problem: Says what a sample is, and which task its labels belong to.
        classes: Classes; of tokens to predict, of regression targets, of labels.
        samples: How many (N).
        rng: Draws them.

    Returns:
        x, float32 [N, ...] or int64 tokens [N, L], and y as `fleetfit.Data` says for the task; all of it is "train".
    """
    x = some_input(problem.architecture, problem.input_shape, samples, rng)
    labels = {
        "classification": lambda: torch.randint(classes, (samples,), generator=rng),
        "next_token": lambda: torch.randint(classes, tuple(x.shape), generator=rng),
        "regression": lambda: torch.randn(samples, classes, generator=rng),
        "multi_label": lambda: torch.randint(2, (samples, classes), generator=rng).float(),
    }
    y, splits = labels[problem.task.name](), {"train": torch.arange(samples)}
    tokens = getattr(problem.architecture, "tokens", 0)
    return Data("random", x, y, splits, classes, task=problem.task.name, vocabulary=tokens)
