"""One evaluation pass over the distinct samples of several clients that share a level's model.

A client's few test samples make small batches, which cost several times as much per sample as large ones. In another
batch the last bits of a sample's logits differ, so its hits may differ, too. If the two largest scores of a sample are
so close that rounding may decide, its batch is run again for its client alone. So the hits of a client are the same
either way. A model whose samples depend on each other is found by trying, and nothing is shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fleetfit.anatomy import batch_norms, outputs
from fleetfit.core import Device, Evaluation
from fleetfit.core.tasks import classification
from fleetfit.training.batches import iter_batches
from fleetfit.training.features import BatchLoader
from fleetfit.training.local_model import LocalModel

_ROUNDING = 1e-5
"""Largest difference of logits between batches, as a share of a sample's largest, for a pass to be shared."""
_CLOSE = 1e-4
"""Two largest logits that differ by less, as a share of the largest, are not decided in a shared pass."""


@dataclass(frozen=True, eq=False)
class SampleScores:
    """The scores of samples in a shared pass.

    Attributes:
        hits: Of the exits and of their ensemble, bool [N, E + 1].
        undecided: Samples whose batch must be run again, bool [N].
        personal: Hits of the last exit with the client's class frequencies, bool [N]; None if these are not scored.
    """

    hits: Tensor
    undecided: Tensor
    personal: Tensor | None = None

    def select(self, rows: Tensor | slice) -> "SampleScores":
        """Return the scores of some samples."""
        personal = None if self.personal is None else self.personal[rows]
        return SampleScores(self.hits[rows], self.undecided[rows], personal)


def score_in_shared_pass(
    model: LocalModel, device: Device, loader: BatchLoader, samples: Sequence[Tensor], evaluation: Evaluation,
    offsets: Sequence[Tensor] = (),
) -> list[SampleScores] | None:  # fmt: skip
    """Return the scores of each evaluation's samples, or None if a shared pass saves little or is not sound.

    Args:
        model: The model, loaded.
        device: One of those that are evaluated; all have parts of its data.
        loader: Loads the batches.
        samples: The samples of each evaluation.
        evaluation: Settings of all evaluations.
        offsets: What each evaluation's personal predictions add to logits [C]; empty if these are not scored.
    """
    data = device.data
    if model.arithmetic.precision != "fp32":  # rounding in bf16 decides often
        return None
    if data.padding >= 0 or data.classes < 2 or device.problem.task is not classification:  # a batch has a length
        return None
    if evaluation.norm != "static" and batch_norms(model.module):
        return None
    distinct, rows = torch.cat(list(samples)).unique(return_inverse=True)
    alone = sum(len(list(iter_batches(indices, evaluation.batch_size))) for indices in samples)
    batches = list(iter_batches(distinct, evaluation.batch_size))
    if 2 * len(batches) > alone or not _is_independent(model, loader, samples, distinct, evaluation.batch_size):
        return None
    parts = [_score_batch(model, device, loader, batch, keeps_logits=bool(offsets)) for batch in batches]
    hits, undecided, *answers = (torch.cat(columns) for columns in zip(*parts, strict=True))
    scores, own_rows = SampleScores(hits, undecided), rows.split([len(indices) for indices in samples])
    if not offsets:
        return [scores.select(own) for own in own_rows]
    logits, labels = answers
    return [
        _score_personal(scores.select(own), logits[own], labels[own], offset.cpu())
        for own, offset in zip(own_rows, offsets, strict=True)
    ]


def _score_personal(scores: SampleScores, logits: Tensor, labels: Tensor, offset: Tensor) -> SampleScores:
    """Return the scores of an evaluation's samples with its personal predictions; `logits`: of the last exit [N, C]."""
    adjusted = logits + offset
    margin = _CLOSE * (logits.abs().amax(1) + offset.abs().amax())
    two = adjusted.topk(2, dim=1).values
    undecided = scores.undecided | (two[:, 0] - two[:, 1] <= margin)
    return SampleScores(scores.hits, undecided, classification.hits(adjusted, labels))


def _is_independent(
    model: LocalModel, loader: BatchLoader, samples: Sequence[Tensor], distinct: Tensor, batch_size: int
) -> bool:
    """Tell whether samples have the same logits alone and among others, except for rounding."""
    own = max(samples, key=len)[: batch_size // 2]
    others = distinct[~torch.isin(distinct, own)][: batch_size - len(own)]
    if not len(own) or not len(others):
        return False
    alone = outputs(model.module, loader.load(own)[0])
    among = outputs(model.module, loader.load(torch.cat([others, own]))[0])
    for a, b in zip(alone, among, strict=True):
        if a.dim() != 2 or b.shape != (len(others) + len(own), a.shape[1]):
            return False
        largest = a.abs().amax(1, keepdim=True)
        if not bool(((a - b[len(others) :]).abs() <= _ROUNDING * largest).all()):
            return False
    return True


def _score_batch(
    model: LocalModel, device: Device, loader: BatchLoader, batch: Tensor, keeps_logits: bool
) -> tuple[Tensor, ...]:
    """Return hits and undecided of `SampleScores` for a batch, and perhaps the last logits and the labels."""
    task = device.problem.task
    x, y = loader.load(batch)
    logits = outputs(model.module, x)
    ensemble = torch.stack([task.scores(z) for z in logits]).mean(0)
    hits = torch.stack([task.hits(z, y) for z in (*logits, ensemble)], dim=1)
    margins = [_CLOSE * z.abs().amax(1) for z in logits]
    margins.append(torch.stack(margins).amax(0) + _CLOSE**2)  # no probability moves by more than a logit does
    largest = [z.topk(2, dim=1).values for z in (*logits, ensemble)]
    decided = [two[:, 0] - two[:, 1] > margin for two, margin in zip(largest, margins, strict=True)]
    answers = (logits[-1].cpu(), y.cpu()) if keeps_logits else ()
    return hits.cpu(), ~torch.stack(decided).all(0).cpu(), *answers
