"""Numbers in modules that depend on sizes: found by their values, and settled by trials.

A number in a module, in an object that it has, or in a pair may be a size, a number of units, or neither. Each role of
axes is cut to half alone. If the module does not run, numbers get another meaning, alike in all modules of a class;
else axes are made one with axes that share a parameter; else the role stays whole, and the reason is the error with its
line.
"""

import itertools
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fleetfit.anatomy.copies import copy_level
from fleetfit.anatomy.kernels import plain_kernels
from fleetfit.anatomy.labels import FLATTENED, OF_SAMPLES, Reason, is_hidden, keep_along, list_tensors, vary
from fleetfit.anatomy.logits import get_logits
from fleetfit.anatomy.masks import call_instance
from fleetfit.anatomy.observe import Observation, has_axis
from fleetfit.anatomy.plan import DerivedPlan, Segments, SizeNumber
from fleetfit.anatomy.units import CLASSES
from fleetfit.errors import ModelError, release_frames
from fleetfit.layout import Dimension, Segment, get_length
from fleetfit.seeds import isolate_rng

_RARELY_A_SIZE = re.compile(
    r"head_dim|head_size|dim_head|d_head|per_head|d_k|size_per|window|patch|kernel|stride|class|label|vocab|max_|groups?$"
    r"|ratio|reduction|rank|shift|exits|idx|index|layer|depth|block|pad|token|resolution|image|img|^res$|^ws$"
)
"""Names of numbers that seldom depend on the width; they are tried last."""
_COUNTS_UNITS = re.compile(r"head")
_MAX_PAIRS, _MAX_PICKS = 40, 16
_MAX_TRIALS = 800  # then no other meanings are tried, and what does not run stays whole

Family = tuple[str, str, int | None]
"""A class, an attribute and an index: numbers of a family have the same meaning in all its modules."""


@dataclass
class Candidate:
    """A number that may depend on sizes.

    Attributes:
        module: The module's name.
        attribute: The attribute that has it.
        index: Its index in a sequence, or None.
        value: Its value.
        family: The numbers that have the same meaning.
        meanings: The segments whose length it may be, the likeliest first, with () for a number that stays.
        scope: The module whose sizes it may be: its own, or the nearest one around it with any.
        chosen: The index of its meaning.
    """

    module: str
    attribute: str
    index: int | None
    value: int
    family: Family
    meanings: list[Segments]
    scope: str
    chosen: int = 0

    @property
    def meaning(self) -> Segments:
        """The chosen segments."""
        return self.meanings[self.chosen]


class Trials:
    """Finds the meaning of each number, and the axes that run when they are cut.

    Args:
        observation: What was seen of the instance.
        now: Called with each step.
    """

    def __init__(self, observation: Observation, now: Callable[[str], None] = lambda step: None) -> None:
        self.observation, self.units, self._now = observation, observation.units, now
        self._settled: dict[tuple[str, str, int | None], Segments] = {}
        self.candidates: list[Candidate] = []
        self._trials = 0
        while (failure := self._find_failure()) is not None:
            self._settle_failure(*failure)

    @property
    def numbers(self) -> tuple[SizeNumber, ...]:
        """The numbers that depend on sizes, by the chosen meanings."""
        chosen = [SizeNumber(c.module, c.attribute, c.index, c.value, c.meaning) for c in self.candidates if c.meaning]
        return (*chosen, *_list_torch_numbers(self.observation))

    def make_plan(self) -> DerivedPlan:
        """Return a plan without exits."""
        units, first_use = self.units, self.observation.first_use
        tensors = dict(list_tensors(self.observation.net))
        segments = {dimension: segments for dimension, segments in units.segments.items() if has_axis(segments)}
        return DerivedPlan(
            {name: tuple(tensor.shape) for name, tensor in tensors.items()},
            units.sizes,
            segments,
            self.numbers,
            (),
            {name: 0 for name in tensors if name in first_use},
            self.observation.logits.shape[-1],
            self.observation.vocabulary,
            self.observation.logits.dim() == 3,
            units.ordered,
            {
                name: (size, str(reason))
                for name, (size, reason) in units.whole.items()
                if reason not in (OF_SAMPLES, FLATTENED)
            },
            mask=self.observation.mask,
            answers=self.observation.answers,
            unused=self.observation.unused,
        )

    def list_plans(self, most: int) -> Iterator[DerivedPlan]:
        """Yield plans in which numbers have other meanings, the likeliest first.

        First comes what the trials found, then the fewest numbers that must change, then other combinations.
        """
        first = self._read_choice()
        seen: list[Sequence[int]] = []
        for choice in itertools.chain([first], map(self._choose_fewest, [first]), self._list_combinations()):
            if len(seen) == most:
                break
            if choice not in seen:
                seen.append(choice)
                self._choose(choice)
                yield self.make_plan()
        self._choose(first)

    # ---- trials ---------------------------------------------------------------------------------------------------

    def _find_failure(self) -> tuple[list[str], Exception] | None:
        """Return the axes of a role that do not run when they are cut, and the error; None where all run."""
        self._collect()
        for axes in [*self.group_roles(), self.units.scaled]:
            self._now(f"a trial with {'all axes' if axes == self.units.scaled else axes[0]}")
            error = self._run(self._halve(axes))
            if error is not None:
                return axes, error
        return None

    def _settle_failure(self, role: list[str], error: Exception) -> None:
        """Find other meanings with which a role runs, or make one axis of several, or keep it whole.

        Raises:
            ModelError: No axis is left, and a copy of the model fails as it is.
        """
        if not role:
            raise ModelError(
                f"a copy of the model does not run, though none of its axes is cut: {explain_error(error)}"
            )
        alone: list[str] | None = None
        for families in (1, 2):
            if self._reinterpret(role, self._halve(role), families):
                self._unite_readers(role)
                return
            if alone is None:
                alone = [axis for axis in self.units.scaled if self._run(self._halve([axis])) is not None]
            if self._merge(alone or role, families):
                return
        for axis in [axis for axis in role if axis in (alone or ())] or role:
            self.units.fix(axis, explain_error(error))
        self.units.settle()

    def group_roles(self) -> list[list[str]]:
        """Return the axes that differ in the numbers of their blocks only, together."""
        roles: dict[str, list[str]] = defaultdict(list)
        for axis in self.units.scaled:
            roles[re.sub(r"\d+", "#", str(self.units.homes[axis]))].append(axis)
        return list(roles.values())

    def _halve(self, axes: Iterable[str]) -> dict[str, int]:
        return {axis: max(1, len(self.units.axes[axis]) // 2) for axis in axes}

    def _run(self, sizes: Mapping[str, int]) -> Exception | None:
        """Run a level on the example; return the error, if there is one."""
        observation = self.observation
        self._trials += 1
        try:
            with isolate_rng(torch.device("cpu")), plain_kernels():
                level = copy_level(observation.net, self.make_plan(), sizes).eval()
                out = get_logits(call_instance(level, observation.example, observation.mask))
        except Exception as error:  # other people's code may fail in any way
            release_frames(error)
            return error
        if out.shape != observation.logits.shape:
            return RuntimeError(f"the logits have shape {tuple(out.shape)}")
        return None

    def _merge(self, failed: Sequence[str], families: int) -> bool:
        """Make failed axes one with an axis that has a parameter in common; return whether the two run together."""
        units = self.units
        for stream in sorted(units.scaled, key=lambda axis: (-len(units.homes[axis]), axis)):
            tensors, size = {name for name, _ in units.homes[stream]}, len(units.axes[stream])
            others = [
                axis
                for axis in failed
                if axis != stream
                and tensors & {name for name, _ in units.homes[axis]}
                and size % len(units.axes[axis]) == 0
            ]
            fewest = min((len(units.axes[axis]) for axis in others), default=0)
            together = [*others, stream]
            if fewest < 2 or any(len(units.axes[axis]) % fewest for axis in together):
                continue
            sizes = {axis: len(units.axes[axis]) // fewest * (fewest // 2) for axis in together}
            before = self._read_choice()
            if self._run(sizes) is None or self._reinterpret(together, sizes, families):
                for axis in others:
                    units.merge(stream, axis)
                units.settle()
                return True
            self._choose(before)
        return False

    def _reinterpret(self, axes: Sequence[str], sizes: Mapping[str, int], count: int) -> bool:
        """Give `count` families of numbers near some axes other meanings; return whether these sizes run then."""
        owners = {name.rpartition(".")[0] for axis in axes for name, _ in self.units.homes[axis]}
        near = owners | {owner.rpartition(".")[0] for owner in owners}
        insides = ((candidate, f"{candidate.scope}." if candidate.scope else "") for candidate in self.candidates)
        families = _group_families(c for c, inside in insides if any(f"{name}.".startswith(inside) for name in near))
        before = self._read_choice()
        for some in itertools.islice(itertools.combinations(families, count), _MAX_PAIRS):
            counts = [min(len(c.meanings) for c in members) for members in some]
            options = [
                [pick for pick in range(n) if any(c.chosen != pick for c in members)]
                for n, members in zip(counts, some, strict=True)
            ]
            for picks in itertools.islice(itertools.product(*options), _MAX_PICKS):
                for members, pick in zip(some, picks, strict=True):
                    for candidate in members:
                        candidate.chosen = pick
                if self._trials >= _MAX_TRIALS:
                    break
                if self._run(sizes) is None:
                    self._settled |= {(c.module, c.attribute, c.index): c.meaning for members in some for c in members}
                    return True
            self._choose(before)
        return False

    def _unite_readers(self, role: Sequence[str]) -> None:
        """Make one axis of those whose modules read one number of an object that they have in common."""
        read = {s.axis for c in self.candidates if "." in c.attribute and c.index is None for s in c.meaning}
        if read & set(role) and len({len(self.units.axes[axis]) for axis in role}) == 1:
            for axis in role[1:]:
                self.units.merge(role[0], axis)
            self.units.settle()

    # ---- candidates -----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Find the numbers that may depend on sizes; those that were settled keep their meaning."""
        self.candidates = list(_list_candidates(self.observation))
        for candidate in self.candidates:
            settled = self._settled.get((candidate.module, candidate.attribute, candidate.index))
            if settled in candidate.meanings:
                candidate.chosen = candidate.meanings.index(settled)

    def _read_choice(self) -> list[int]:
        return [candidate.chosen for candidate in self.candidates]

    def _choose(self, choice: Sequence[int]) -> None:
        for candidate, chosen in zip(self.candidates, choice, strict=True):
            candidate.chosen = chosen

    def _choose_fewest(self, before: Sequence[int]) -> list[int]:
        """Return the choice in which only the numbers change without which some cut does not run."""
        self._choose(before)
        cuts = [*map(self._halve, self.group_roles()), self._halve(self.units.scaled)]
        for members in _group_families(self.candidates):
            last = self._read_choice()
            for candidate in members:
                candidate.chosen = candidate.meanings.index(())
            if self._read_choice() != last and any(self._run(cut) is not None for cut in cuts):
                self._choose(last)
        fewest = self._read_choice()
        self._choose(before)
        return fewest

    def _list_combinations(self) -> Iterator[list[int]]:
        """Yield other choices, those nearest to the likeliest meanings first."""
        families = _group_families(self.candidates)
        picks = itertools.product(*(range(min(len(c.meanings) for c in members)) for members in families))
        for pick in sorted(itertools.islice(picks, 4096), key=lambda pick: sum(chosen > 0 for chosen in pick)):
            for members, chosen in zip(families, pick, strict=True):
                for candidate in members:
                    candidate.chosen = chosen
            yield self._read_choice()


def _group_families(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    families: dict[Family, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        families[candidate.family].append(candidate)
    return list(families.values())


def explain_error(error: Exception) -> Reason:
    """Return an error as a reason, with the line of the person's code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_hidden(f.filename)]
    line = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    message = str(error).strip().partition("\n")[0]
    return Reason(f"a cut fails with {type(error).__name__}: {message}", "", line)


def _list_candidates(observation: Observation) -> Iterator[Candidate]:
    """Yield the numbers in other people's modules that equal a size which can be cut."""
    units = observation.units
    full = units.sizes
    seen: set[int] = set()  # objects that several modules have, such as a configuration
    for module, part in observation.net.named_modules():
        if type(part).__module__.startswith("torch.nn.modules") or hasattr(part, "parametrizations"):
            continue
        scope = module
        while not (dimensions := _list_dimensions(observation, scope)) and scope:
            scope = scope.rpartition(".")[0]
        dimensions.sort(key=lambda dimension: (dimension[0].count("."), dimension[1]))
        meanings = _list_meanings([units.segments[dimension] for dimension in dimensions], full)
        for attribute, index, value in _list_numbers(part, seen):
            some = meanings.get(value, [])
            if some and value > 1:
                family = (type(part).__qualname__, attribute, index)
                is_hidden_away = attribute.startswith("_") or "." in attribute
                ordered = [(), *some] if is_hidden_away else _order(attribute, some)
                yield Candidate(module, attribute, index, value, family, ordered, scope)


def _list_dimensions(observation: Observation, module: str) -> list[Dimension]:
    """Return the dimensions of a module's tensors that can be cut."""
    inside, segments = f"{module}." if module else "", observation.units.segments
    return [
        (name, d)
        for name, d in segments
        if name.startswith(inside) and any(s.axis not in (None, CLASSES) for s in segments[name, d])
    ]


def _list_meanings(dimensions: Sequence[Segments], full: Mapping[str, int]) -> dict[int, list[Segments]]:
    """Return what a number may mean, by its value: whole dimensions, segments, and multiples of units."""
    meanings: dict[int, dict[Segments, None]] = defaultdict(dict)
    largest: dict[str, int] = defaultdict(int)
    for segments in dimensions:
        for s in segments:
            if s.axis is not None:
                largest[s.axis] = max(largest[s.axis], s.per)
    for segments in dimensions:
        meanings[get_length(segments, full)].setdefault(segments)
        for s in segments:
            if s.axis not in (None, CLASSES):
                meanings[full[s.axis] * s.per].setdefault((s,))
                for per in range(1, largest[s.axis]):
                    if largest[s.axis] % per == 0:
                        meanings[full[s.axis] * per].setdefault((Segment(s.axis, per=per),))
    return {value: list(some) for value, some in meanings.items()}


def _list_numbers(part: nn.Module, seen: set[int]) -> Iterator[tuple[str, int | None, int]]:
    """Yield attribute, index and value of the whole numbers in a module, and of those in its objects and pairs.

    Args:
        part: The module.
        seen: The objects in which numbers were found already; those of this module are added.
    """
    for attribute, value in vars(part).items():
        if type(value) is int:
            yield attribute, None, value
        elif type(value) in (tuple, list):
            yield from ((attribute, i, one) for i, one in enumerate(value) if type(one) is int)
            pairs = [(f"{attribute}.{i}", one) for i, one in enumerate(value) if type(one) is tuple]  # einops' lengths
            yield from ((path, i, n) for path, one in pairs for i, n in enumerate(one) if type(n) is int)
        elif isinstance(getattr(value, "__dict__", None), dict) and id(value) not in seen | {id(part)}:
            seen.add(id(value))
            yield from ((f"{attribute}.{name}", None, n) for name, n in vars(value).items() if type(n) is int)


def _order(attribute: str, meanings: list[Segments]) -> list[Segments]:
    """Return the meanings of a number with the likeliest by its name first, and () for none."""
    if _RARELY_A_SIZE.search(attribute):
        return [(), *meanings]
    counts = bool(_COUNTS_UNITS.search(attribute))

    def is_count(segments: Segments) -> bool:
        return len(segments) == 1 and segments[0].per == 1

    return [*sorted(meanings, key=lambda segments: is_count(segments) != counts), ()]


def _list_torch_numbers(observation: Observation) -> Iterator[SizeNumber]:
    """Yield the sizes in PyTorch's own modules that have no parameter to tell them."""
    for name, part in observation.net.named_modules():
        if isinstance(part, nn.LayerNorm | nn.RMSNorm) and part.weight is None:
            for i, value in enumerate(part.normalized_shape):
                if segments := _get_input_segments(observation, name, i - len(part.normalized_shape)):
                    yield SizeNumber(name, "normalized_shape", i, value, segments)
        elif isinstance(part, nn.modules.batchnorm._NormBase) and part.weight is None:
            if segments := _get_input_segments(observation, name, 1):
                yield SizeNumber(name, "num_features", None, part.num_features, segments)
        elif isinstance(part, nn.GroupNorm) and part.weight is None:
            if segments := _get_input_segments(observation, name, 1):
                each = part.num_channels // part.num_groups
                yield SizeNumber(name, "num_channels", None, part.num_channels, segments)
                if part.num_groups > 1 and all(s.per % each == 0 for s in segments):
                    groups = tuple(Segment(s.axis, per=s.per // each) for s in segments)
                    yield SizeNumber(name, "num_groups", None, part.num_groups, groups)
        elif isinstance(part, nn.Unflatten) and isinstance(part.unflattened_size, tuple):
            d, segments = observation.find_channels(name)
            if segments and 0 <= (index := d - part.dim) < len(part.unflattened_size):
                yield SizeNumber(name, "unflattened_size", index, part.unflattened_size[index], segments)


def _get_input_segments(observation: Observation, module: str, d: int) -> Segments | None:
    """Return the segments along a dimension of a module's input."""
    for labels in observation.inputs.get(module, ()):
        if d % labels.dim() in vary(labels):
            return observation.units.parse(keep_along(labels, d % labels.dim()))
    return None
