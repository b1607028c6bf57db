"""One forward pass over the distinct samples of clients that share a level's model, instead of one for each client.

A client's few test samples make small batches, which cost several times as much a sample as large ones. In another
batch a sample's logits differ in their last bits, so that hits may not be taken from a shared pass as they are: where
the two largest scores of a sample are so near to each other that rounding may decide, its batch is run again as if its
client were alone. What clients score is therefore the same number either way; only their losses differ, by rounding.
Whether samples are computed independently of each other at all is looked at first: of some other model nothing is
shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fleetfit.layout import batch_norms, outputs
from fleetfit.tasks import classification
from fleetfit.training.features import Feed
from fleetfit.training.local_model import LocalModel
from fleetfit.training.steps import joined
from fleetfit.values import Device, Evaluation

_ROUNDING = 1e-5
"""By how much logits may differ from batch to batch, as a share of a sample's largest, for anything to be shared."""
_CLOSE = 1e-4
"""Two largest logits nearer than this, as a share of the largest, are not decided in a shared pass."""


@dataclass(frozen=True, eq=False)
class PassedScores:
    """What samples scored in a shared pass.

    Attributes:
        hits: Of the exits and of their ensemble, bool [N, E + 1].
        losses: Of the exits [N, E].
        close: Which samples are not decided by it, bool [N].
    """

    hits: Tensor
    losses: Tensor
    close: Tensor

    def of(self, rows: Tensor) -> "PassedScores":
        """Return those of some samples."""
        return PassedScores(self.hits[rows], self.losses[rows], self.close[rows])


def shared_scores(
    piece: LocalModel, device: Device, feed: Feed, chosen: Sequence[Tensor], wanted: Evaluation
) -> list[PassedScores] | None:
    """Return what the samples of each evaluation score in one pass, or None where it is not worth it, or not sound.

    Args:
        piece: The model, ready.
        device: One of those that are evaluated; all have parts of its data.
        feed: Gives the batches.
        chosen: The samples of each.
        wanted: Settings of the evaluation, the same for all.
    """
    if not _sharing(piece, device, wanted):
        return None
    distinct, rows = torch.cat(list(chosen)).unique(return_inverse=True)
    alone = sum(len(list(joined(indices, wanted.batch_size))) for indices in chosen)
    batches = list(joined(distinct, wanted.batch_size))
    if 2 * len(batches) > alone or not _independent(piece, feed, chosen, distinct, wanted.batch_size):
        return None
    found = [_looked_at(piece, device, feed, batch) for batch in batches]
    together = PassedScores(*(torch.cat(parts) for parts in zip(*found, strict=True)))
    return [together.of(mine) for mine in rows.split([len(indices) for indices in chosen])]


def _sharing(piece: LocalModel, device: Device, wanted: Evaluation) -> bool:
    """Tell whether what a sample scores can be its own alone."""
    data = device.data
    if piece.arithmetic.precision != "fp32":  # what rounding in bf16 may decide is no longer rare
        return False
    if data.padding >= 0 or data.classes < 2 or device.problem.task is not classification:  # a batch has a length
        return False
    return wanted.norm == "static" or not batch_norms(piece.module)


def _independent(piece: LocalModel, feed: Feed, chosen: Sequence[Tensor], distinct: Tensor, batch_size: int) -> bool:
    """Tell whether samples have the same logits alone and among others, but for rounding."""
    own = max(chosen, key=len)[: batch_size // 2]
    others = distinct[~torch.isin(distinct, own)][: batch_size - len(own)]
    if not len(own) or not len(others):
        return False
    alone, among = (outputs(piece.module, feed.batch(batch)[0]) for batch in (
        own, torch.cat([others, own])))  # fmt: skip
    for a, b in zip(alone, among, strict=True):
        if a.dim() != 2 or b.shape != (len(others) + len(own), a.shape[1]):
            return False
        largest = a.abs().amax(1, keepdim=True)
        if not bool(((a - b[len(others) :]).abs() <= _ROUNDING * largest).all()):
            return False
    return True


def _looked_at(piece: LocalModel, device: Device, feed: Feed, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hits of the exits and of their ensemble [B, E + 1], losses [B, E], and which are not decided [B]."""
    task = device.problem.task
    x, y = feed.batch(batch)
    logits = outputs(piece.module, x)
    scores = torch.stack([task.scores(z) for z in logits]).mean(0)
    hits = torch.stack([task.hits(z, y) for z in (*logits, scores)], dim=1)
    losses = torch.stack([F.cross_entropy(z, y, reduction="none") for z in logits], dim=1)
    bounds = [_CLOSE * z.abs().amax(1) for z in logits]
    bounds.append(torch.stack(bounds).amax(0) + _CLOSE**2)  # no probability moves by more than a logit does
    sure = torch.stack([_lead(z) > bound for z, bound in zip((*logits, scores), bounds, strict=True)])
    return hits.cpu(), losses.cpu(), ~sure.all(0).cpu()


def _lead(scores: Tensor) -> Tensor:
    """Return by how much the largest score of each sample exceeds the next [B]."""
    two = scores.topk(2, dim=1).values
    return two[:, 0] - two[:, 1]
