"""Units and axes: what can be cut from an instance, and where it lives.

A unit is the smallest thing that can go: a channel, a head with its rows of q, k and v, a group. Units that live in the
same dimensions are an axis. The places of an axis in a dimension are a segment, in the same order everywhere, so that
a prefix of the units is a prefix of each segment.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fleetfit.anatomy.growth import OddOrder, read_runs
from fleetfit.anatomy.labels import LabeledPass, Labels, Reason
from fleetfit.layout import Dimension, Segment, Segments

CLASSES = "classes"
"""The axis of the logits, which is never cut."""
_PARAMETER = (".weight", ".bias")
_TOGETHER = "its channels come and go together, as where a shuffle or a product mixes them"


@dataclass
class Units:
    """The units of an instance, by axis.

    Attributes:
        labeled: The labeled pass.
        trained: The names of parameters.
        logits: The labels along the logits' last dimension; None where it has none.
        axes: By axis its units, in order.
        ordered: The axes of which only the first units can be kept.
        whole: By would-be axis its size and why it is not cut.
        homes: By axis the dimensions in which it lives.
        segments: By dimension its segments.
    """

    labeled: LabeledPass
    trained: frozenset[str]
    logits: Labels | None
    axes: dict[str, list[int]] = field(default_factory=dict)
    ordered: frozenset[str] = frozenset()
    whole: dict[str, tuple[int, Reason]] = field(default_factory=dict)
    homes: dict[str, list[Dimension]] = field(default_factory=dict)
    segments: dict[Dimension, Segments] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settle()

    @property
    def sizes(self) -> dict[str, int]:
        """The number of units of each axis."""
        return {axis: len(units) for axis, units in self.axes.items()}

    @property
    def scaled(self) -> list[str]:
        """The axes that width cuts."""
        return [axis for axis in self.axes if axis != CLASSES]

    def settle(self) -> None:
        """Find axes and segments; merge or fix the axes of a dimension that no segments describe."""
        while True:
            self._unit_of, self._fixed = self.labeled.find_units()
            self._find_axes()
            try:
                ranges = self.labeled.ranges.items()
                self.segments = {dim: self._parse(np.arange(labels.start, labels.stop)) for dim, labels in ranges}
                return
            except OddOrder as odd:
                axes = odd.args
            if len(axes) == 2 and len({len(self.axes[axis]) for axis in axes}) == 1:  # they alternate, as in a shuffle
                self.merge(*axes)
            else:
                for axis in axes:
                    self.fix(axis, Reason("its places are in another order elsewhere"))

    def merge(self, one: str, other: str) -> None:
        """Make one axis of two, unit by unit, when units are settled; those of the finer one go several together."""
        fine, coarse = sorted((self.axes[one], self.axes[other]), key=len, reverse=True)
        ratio = len(fine) // len(coarse)
        label = self._labels_of_units()
        self.labeled.unite(
            torch.tensor([label[unit] for unit in fine]),
            torch.tensor([label[coarse[i // ratio]] for i in range(len(fine))]),
        )

    def fix(self, axis: str, reason: Reason) -> None:
        """Keep an axis whole when units are settled, for a reason."""
        label = self._labels_of_units()
        self.labeled.fix(torch.tensor([label[unit] for unit in self.axes[axis]]), reason)

    def parse(self, labels: Labels) -> Segments | None:
        """Return the segments of labels along one dimension; None where there are none that describe it."""
        try:
            return self._parse(labels.reshape(-1).numpy())
        except OddOrder:
            return None

    def _labels_of_units(self) -> dict[int, int]:
        """Return one label of each unit."""
        count = len(self._unit_of)
        return dict(zip(self._unit_of[::-1].tolist(), range(count - 1, -1, -1), strict=True))

    def _find_axes(self) -> None:
        logits = set() if self.logits is None else set(self._unit_of[self.logits.numpy()].tolist())
        ordered = {unit for labels in self.labeled.ordered for unit in self._unit_of[labels].tolist()}
        self.axes, self.homes, self.whole = {}, {}, {}
        self._tags: dict[int, tuple[str, int]] = {}
        for homes, units in self._group_alike():
            lead = _choose_lead(homes)
            is_classes = set(units) <= logits
            reason = next((self._fixed[unit] for unit in units if unit in self._fixed), None)
            if len(units) == 1:
                if reason is None and not is_classes:
                    self.whole[self._name(lead)] = (len(self.labeled.ranges[lead]), Reason(_TOGETHER))
            elif reason is not None:
                self.whole[self._name(lead)] = (len(units), reason)
            elif not set(units) & logits or (is_classes and self.logits is not None and len(units) == len(self.logits)):
                axis = CLASSES if is_classes else self._name(lead)
                self.axes[axis], self.homes[axis] = units, homes
                self._tags |= {unit: (axis, i) for i, unit in enumerate(units)}
        self.ordered = frozenset(axis for axis, units in self.axes.items() if ordered.intersection(units))

    def _group_alike(self) -> list[tuple[list[Dimension], list[int]]]:
        """Return the units that live in the same dimensions, in the order of their places, with these dimensions."""
        counts: dict[int, Counter[Dimension]] = defaultdict(Counter)
        first: dict[tuple[int, Dimension], int] = {}
        for dimension, labels in self.labeled.ranges.items():
            for i, unit in enumerate(self._unit_of[labels.start : labels.stop].tolist()):
                counts[unit][dimension] += 1
                first.setdefault((unit, dimension), i)
        alike: dict[tuple[tuple[Dimension, int], ...], list[int]] = defaultdict(list)
        for unit, count in counts.items():
            alike[tuple(count.items())].append(unit)
        groups = []
        for key, units in alike.items():
            homes = [dimension for dimension, _ in key]
            is_loose = len(key) == 1 and key[0][1] == 1  # nothing else depends on these places
            lead = _choose_lead(homes)
            is_tied = len(units) == 1 and lead[1] == 0 and len(key) > 1 and dict(key)[lead] > 1
            is_axis = len(units) > 1 and not is_loose
            if (is_axis or is_tied) and any(name in self.trained for name, _ in homes):
                groups.append((homes, sorted(units, key=lambda unit: first[unit, lead])))
        return groups

    def _name(self, lead: Dimension) -> str:
        """Return an axis's name, after the module of its first dimension."""
        name = lead[0]
        module, _, leaf = name.partition(".parametrizations.")
        short = module if leaf else next((name.removesuffix(end) for end in _PARAMETER if name.endswith(end)), name)
        others = sum(axis == short or axis.startswith(f"{short}~") for axis in {**self.axes, **self.whole})
        return f"{short}~{others + 1}" if others else short

    def _parse(self, labels: np.ndarray) -> Segments:
        """Return the segments of labels; raise `OddOrder` where there are none that describe them."""
        runs = read_runs([self._tags.get(unit) for unit in self._unit_of[labels].tolist()], self.sizes)
        return tuple(Segment(axis, per=per) for axis, per in runs)


def _choose_lead(homes: Sequence[Dimension]) -> Dimension:
    """Return the dimension after which an axis is named: the rows of a weight, if there are any."""
    return next((home for home in homes if home[1] == 0 and home[0].endswith(".weight")), homes[0])
