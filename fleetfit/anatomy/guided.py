"""A labeled pass whose labels follow what grows.

A second run, of the same module with some axes one granule larger, shows along which dimensions each result grows.
Labels are put only on dimensions of parameters that grow, and are kept only along dimensions of results that grow:
along others all places go together. So heads or groups of a fixed number keep what is inside of them apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fleetfit.anatomy.kernels import track_modules
from fleetfit.anatomy.known_values import iter_tensors
from fleetfit.anatomy.labels import CalledOperations, LabeledPass, Labels, Reason, list_tensors, vary
from fleetfit.errors import format_cause

Shape = tuple[int, ...]


class NotRead(Exception):
    """Why a pass does not show how places are arranged.

    Args:
        reason: Why, as the end of a sentence.
        advice: What to do.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice or (
            "Let forward treat all channels alike, by operations on whole tensors: write a loop over heads or channels "
            "as a reshape. Or let one axis alone move this dimension."
        )


_Record = tuple[str, list[Shape]]
"""An operation of the larger run: its name, and the shapes of its results."""


def run_guided(small: nn.Module, larger: nn.Module, x: Tensor) -> LabeledPass:
    """Return the labeled pass of a module, guided by one with larger axes.

    Args:
        small: The module.
        larger: The same with larger axes.
        x: Samples [batch, ...].

    Raises:
        NotRead: The larger one does not run, or runs other operations.
    """
    try:
        with _ShapeRecording() as recording:
            larger.eval()(x)
    except Exception as error:  # of a forward, in any way
        raise NotRead(
            f"with one more granule of its axes, forward fails with {format_cause(error, typed=True).rstrip('.')}",
            "Make the granule of an axis what comes and goes together, such as the channels of a head or of a group, "
            "and take sizes in forward from tensors.",
        ) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in list_tensors(larger)}
    labeled = GuidedPass(small, x, shapes, recording.records)
    run_labeled(small, x, labeled)
    if labeled.at < len(recording.records):
        raise NotRead("one more granule takes more operations")
    return labeled


def run_labeled(module: nn.Module, x: Tensor, labeled: LabeledPass, **more: Tensor) -> Any:
    """Run a module in evaluation mode under a labeled pass; return what it gives."""
    with track_modules(module) as stack:
        labeled.stack = stack
        with labeled:
            return module.eval()(x, **more)


class _ShapeRecording(CalledOperations):
    """Records the operations of a run; `detach` is PyTorch's own, of what a factory made, and not in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[_Record] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name != "detach":
            self.records.append((name, [tuple(x.shape) for x in iter_tensors([out])]))
        return out


class GuidedPass(LabeledPass):
    """A labeled pass that follows the dimensions that grow.

    Args:
        module: The module that will run.
        x: The samples.
        larger: The shapes of its tensors with larger axes.
        records: The operations with larger axes.

    Attributes:
        at: The number of operations so far.
    """

    _keeps_tables = False

    def __init__(self, module: nn.Module, x: Tensor, larger: Mapping[str, Shape], records: Sequence[_Record]) -> None:
        self._larger, self._records, self.at = larger, records, 0
        self._grown: WeakIdKeyDictionary = WeakIdKeyDictionary()
        super().__init__(module, x)
        for name, tensor in list_tensors(module):
            self._note(tensor, larger[name])

    def _has_labels(self, name: str, d: int, tensor: Tensor) -> bool:
        return self._larger[name][d] != tensor.shape[d]

    def _note(self, x: Tensor, larger: Shape) -> None:
        """Note along which dimensions a tensor grows."""
        if len(larger) == x.dim():
            self._grown[x] = [a != b for a, b in zip(x.shape, larger, strict=True)]
            self._alive.append(x)

    def _note_results(self, results: Sequence[Tensor]) -> None:
        if self._operation == "detach":
            return
        name, shapes = self._records[self.at] if self.at < len(self._records) else ("", [])
        if name != self._operation or len(shapes) != len(results):
            raise NotRead(f"one more granule takes other operations than {self.make_reason()}")
        self.at += 1
        for x, shape in zip(results, shapes, strict=True):
            self._note(x, shape)

    def _set(self, x: Any, labels: Iterable[Labels]) -> None:
        grown = self._grown.get(x) if isinstance(x, Tensor) else None
        super()._set(x, labels if grown is None else [self._follow(one, grown) for one in labels])

    def _follow(self, labels: Labels, grown: Sequence[bool]) -> Labels:
        """Return labels along dimensions that grow; what grows along none is fixed."""
        along = vary(labels)
        if not any(grown[d] for d in along) and (along or (labels.numel() == 1 and not any(grown))):
            self.fix(labels, Reason("it does not grow"))
        return self._collapse(labels, {d for d in along if not grown[d]})

    def _tie_groups(self, table: Labels) -> None:
        groups_grow = self._records[self.at - 1][1][1][1] != len(table)
        self.tie(table, 1 if groups_grow else 0)

    def _connect_groups(
        self, channels: Sequence[Labels], inner: Sequence[Labels], outer: Sequence[Labels], groups: int
    ) -> None:
        if not channels and not inner:  # the input is fixed: members come and go
            for w in outer:
                self.tie(w.reshape(groups, -1), 0)
            return
        if not any(len(w) > 1 for w in inner):  # groups come and go
            super()._connect_groups(channels, inner, outer, groups)
            return
        for one in (*channels, *outer):  # members come and go, alike in all groups
            self.tie(one.reshape(groups, -1), 0)
        for one in channels:
            for w in inner:
                self.unite(one.reshape(groups, -1)[0], w)
