"""A generator of wrong plans of derived models, which drive builder and layout alike, so that shapes still fit.

Each is a right plan with a mistake: other segments of a dimension, of all dimensions like it, or of all with these
segments; numbers that mean something else; units that are too fine; an axis under two names; tensors in a wrong block;
exits that read other channels or sit elsewhere.
"""

import itertools
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fleetfit.anatomy.copies import copy_instance
from fleetfit.anatomy.derive import DerivedArchitecture, DerivedPlan
from fleetfit.layout import Segment
from fleetfit.machine import tensor_defaults

CLASSES = "classes"
TWIN = "_too"
"""The end of the name of an axis that is taken for two."""
Dimension = tuple[str, int]
Segments = tuple[Segment, ...]
Kept = Mapping[str, list[int]]


@dataclass(frozen=True)
class WrongPlan:
    """A wrong plan, the kind of mistake, and the mistake in words."""

    kind: str
    what: str
    plan: DerivedPlan


# ---- mistakes ------------------------------------------------------------------------------------------------------


def list_wrong_plans(right: DerivedPlan) -> Iterator[WrongPlan]:
    """Yield the wrong plans with one mistake, in a fixed order, each once."""
    seen, axes = {str(right.to_payload())}, _list_used_axes(right)
    for wrong in itertools.chain(
        _misread_dimensions(right), _turn(right), _misread_numbers(right), _refine(right), _untie(right),
        list_wrong_depths(right), _forget_order(right),
    ):  # fmt: skip
        content, used = str(wrong.plan.to_payload()), _list_used_axes(wrong.plan)
        is_tie = used < axes  # an axis that is taken for another one everywhere: nothing is wrong with that
        if content not in seen and not is_tie:
            seen.add(content)
            yield wrong


def _list_used_axes(plan: DerivedPlan) -> set[str | None]:
    return {s.axis for segments in plan.segments.values() for s in segments} - {None}


def draw_wrong_plans(right: DerivedPlan, count: int, seed: int) -> list[WrongPlan]:
    """Return so many, of each kind as many where there are enough; a fifth of them with two mistakes."""
    rng = random.Random(seed)
    kinds: dict[str, list[WrongPlan]] = {}
    for wrong in list_wrong_plans(right):
        kinds.setdefault(wrong.kind, []).append(wrong)
    for members in kinds.values():
        rng.shuffle(members)
    in_turn = [wrong for row in itertools.zip_longest(*kinds.values()) for wrong in row if wrong is not None]
    drawn = in_turn[: count - count // 5]
    same_axes = [wrong for wrong in in_turn if wrong.plan.axes == right.axes]
    while same_axes and len(drawn) < count:
        one, other = rng.choice(same_axes), rng.choice(same_axes)
        both = _add_mistake(right, one.plan, other.plan)
        drawn.append(WrongPlan("two mistakes", f"{one.what}; {other.what}", both))
    return drawn


def _add_mistake(right: DerivedPlan, one: DerivedPlan, other: DerivedPlan) -> DerivedPlan:
    """Return a plan with the segments that differ in either one, and the rest of the one that differs there."""
    dims = {**one.segments, **{d: s for d, s in other.segments.items() if right.segments.get(d) != s}}
    return replace(
        one,
        segments=dims,
        numbers=one.numbers if other.numbers == right.numbers else other.numbers,
        blocks=one.blocks if other.blocks == right.blocks else other.blocks,
        exits=one.exits if other.exits == right.exits else other.exits,
    )


def _get_length(segments: Segments, axes: Mapping[str, int]) -> int:
    return sum(s.per * (1 if s.axis is None else axes[s.axis]) for s in segments)


def _misread(segments: Segments, axes: Mapping[str, int]) -> Iterator[tuple[str, Segments]]:
    """Yield what segments may be taken for, of the same length in the full model."""
    for order in set(itertools.permutations(segments)) if len(segments) < 6 else ():
        yield "order of segments", order
    length, names = _get_length(segments, axes), {s.axis for s in segments}
    if len(names) == 1 and None not in names:
        per = length // axes[str(segments[0].axis)]
        for copies in range(1, per + 1):
            if per % copies == 0:
                yield "interleaved for blocked", (Segment(segments[0].axis, per=per // copies),) * copies
    for i, s in enumerate(segments):
        before, after, whole = segments[:i], segments[i + 1 :], _get_length((s,), axes)
        for axis, n in axes.items():
            if axis not in (s.axis, CLASSES) and whole % n == 0:
                kind = "an axis too many" if s.axis is None else "another axis"
                yield kind, (*before, Segment(axis, per=whole // n), *after)
        if s.axis is not None:
            yield "no axis", (*before, Segment(None, whole), *after)
        elif len(segments) > 1 and s.per > 1:
            rest = Segment(None, s.per - 1)
            yield "shifted places", (Segment(None, 1), *before, rest, *after)
            yield "shifted places", (*before, rest, *after, Segment(None, 1))
    pairs = [(a, b) for a, b in itertools.combinations(range(len(segments)), 2) if segments[a] != segments[b]]
    for a, b in pairs:
        first, second = segments[a], segments[b]
        if _get_length((first,), axes) == _get_length((second,), axes):
            swapped = list(segments)
            swapped[a], swapped[b] = second, first
            yield "axes exchanged", tuple(swapped)


def _misread_dimensions(right: DerivedPlan) -> Iterator[WrongPlan]:
    every: dict[Dimension, Segments] = {
        (name, d): right.segments.get((name, d), (Segment(None, size),))
        for name, shape in right.tensors.items()
        for d, size in enumerate(shape)
        if size > 1
    }
    for (name, d), segments in every.items():
        same = [dimension for dimension, others in every.items() if others == segments]
        alike = [(n, e) for n, e in same if e == d and re.sub(r"\d+", "#", n) == re.sub(r"\d+", "#", name)]
        for kind, others in _misread(segments, right.axes):
            for members in ([(name, d)], alike, same if segments[0].axis is not None or len(segments) > 1 else alike):
                what = f"{name}[{d}]{f' and {len(members) - 1} more' if len(members) > 1 else ''}: {others}"
                yield WrongPlan(kind, what, _replace_segments(right, dict.fromkeys(members, others)))


def _replace_segments(plan: DerivedPlan, changes: Mapping[Dimension, Segments]) -> DerivedPlan:
    dims = {d: s for d, s in {**plan.segments, **changes}.items() if any(one.axis is not None for one in s)}
    return replace(plan, segments=dims)


def _turn(right: DerivedPlan) -> Iterator[WrongPlan]:
    """Yield plans in which two dimensions of a tensor are exchanged."""
    for name, shape in right.tensors.items():
        for a, b in itertools.combinations(range(len(shape)), 2):
            if shape[a] == shape[b] > 1:
                whole = (Segment(None, shape[a]),)
                one, other = (right.segments.get((name, d), whole) for d in (a, b))
                yield WrongPlan("turned", name, _replace_segments(right, {(name, a): other, (name, b): one}))


def _misread_numbers(right: DerivedPlan) -> Iterator[WrongPlan]:
    families: dict[tuple[str, str, int | None], list[int]] = {}
    for i, number in enumerate(right.numbers):
        families.setdefault((re.sub(r"\d+", "#", number.module), number.attribute, number.index), []).append(i)
    for i, number in enumerate(right.numbers):
        meanings = [
            (Segment(axis, per=number.value // n),)
            for axis, n in right.axes.items()
            if axis != CLASSES and number.value % n == 0
        ]
        family = families[re.sub(r"\d+", "#", number.module), number.attribute, number.index]
        for members in ([i], family):
            left = tuple(other for j, other in enumerate(right.numbers) if j not in members)
            what = f"{number.module}.{number.attribute}"
            yield WrongPlan("a number that stays", what, replace(right, numbers=left))
            for meaning in meanings:
                changed = tuple(
                    replace(other, meaning=meaning) if j in members and other.value == number.value else other
                    for j, other in enumerate(right.numbers)
                )
                yield WrongPlan("another meaning", f"{what}: {meaning}", replace(right, numbers=changed))


def _refine(right: DerivedPlan) -> Iterator[WrongPlan]:
    """Yield plans with units that are a part of what can go, such as half a head; numbers of units stay."""
    for axis, n in right.axes.items():
        pers = [s.per for segments in right.segments.values() for s in segments if s.axis == axis]
        for parts in range(2, min(pers, default=0) + 1):
            if axis == CLASSES or any(per % parts for per in pers):
                continue

            def divide(segments: Segments, axis: str = axis, parts: int = parts) -> Segments | None:
                if any(s.axis == axis and s.per % parts for s in segments):
                    return None
                return tuple(replace(s, per=s.per // parts) if s.axis == axis else s for s in segments)

            meanings = [(number, divide(number.meaning)) for number in right.numbers]
            exits = [(point, divide(point.segments)) for point in right.exits]
            plan = replace(
                right,
                axes={**right.axes, axis: n * parts},
                segments={d: divide(segments) or segments for d, segments in right.segments.items()},
                numbers=tuple(replace(number, meaning=m) for number, m in meanings if m is not None),
                exits=tuple(replace(point, segments=s or point.segments) for point, s in exits),
            )
            yield WrongPlan("units too fine", f"{axis} in {n * parts}", plan)


def _untie(right: DerivedPlan) -> Iterator[WrongPlan]:
    """Yield plans in which some dimensions of an axis have another axis of its size."""
    for axis, n in right.axes.items():
        users = [d for d, segments in right.segments.items() if any(s.axis == axis for s in segments)]
        if axis == CLASSES or n < 2:
            continue
        twin = f"{axis}{TWIN}"
        for members in ([users[0]], users[::2], *([user] for user in users[1:4])):
            if len(members) < len(users):
                changes = {
                    d: tuple(Segment(twin, per=s.per) if s.axis == axis else s for s in right.segments[d])
                    for d in members
                }
                plan = replace(_replace_segments(right, changes), axes={**right.axes, twin: n})
                yield WrongPlan("untied", f"{axis} in {members[:3]}", plan)


def _misplace(right: DerivedPlan) -> Iterator[WrongPlan]:
    for name, block in right.blocks.items() if right.exits else ():
        for other in (block - 1, block + 1):
            if 0 <= other <= len(right.exits):
                yield WrongPlan("block", f"{name}: {other}", replace(right, blocks={**right.blocks, name: other}))


def _misread_exits(right: DerivedPlan) -> Iterator[WrongPlan]:
    for i, point in enumerate(right.exits):
        for kind, segments in () if point.is_own else _misread(point.segments, right.axes):
            exits = (*right.exits[:i], replace(point, segments=segments), *right.exits[i + 1 :])
            yield WrongPlan("channels of an exit", f"{point.module}, {kind}: {segments}", replace(right, exits=exits))


def list_wrong_depths(right: DerivedPlan) -> Iterator[WrongPlan]:
    """Yield the plans with a tensor in a wrong block, or with one wrong exit."""
    yield from _misplace(right)
    yield from _misread_exits(right)
    for one, other in itertools.pairwise(right.exits):
        for a, b, kind in ((one, other, "an exit one block early"), (other, one, "an exit one block late")):
            exits = tuple(replace(point, module=a.module) if point == b else point for point in right.exits)
            yield WrongPlan(kind, f"{b.module}: {a.module}", replace(right, exits=exits))


def _forget_order(right: DerivedPlan) -> Iterator[WrongPlan]:
    for axis in sorted(right.ordered):
        yield WrongPlan("order forgotten", axis, replace(right, ordered=right.ordered - {axis}))


# ---- what a wrong plan computes, by plain loops --------------------------------------------------------------------


def measure_harm(wrong: DerivedPlan, right: DerivedPlan, instance: nn.Module, x: Tensor, seed: int) -> float:
    """Return how far levels of a wrong plan are from what they must be: relative to the largest logit, at most.

    That is the right plan's level of the same channels. Where an axis has a twin, the level may take the channels of
    either: those of the other do not matter if it lives in tensors without effect alone, such as the bias before a
    batch norm. Where units are too fine, or counts differ, it is the full model whose other places are zero. Levels
    that cannot be built or run do no harm; every second one has one width for all axes, as levels have in a run. Batch
    norms have the running statistics of the samples, as calibration makes them anew for each level.
    """
    rng = random.Random(seed)
    with tensor_defaults("cpu", torch.float64), torch.no_grad():
        net = _redraw(instance, seed)
        x = x.double() if x.is_floating_point() else x
        most, compared = 0.0, 0
        for i in range(12):
            width = rng.random() if i % 2 else None
            chosen = {
                axis: _draw_kept(n, axis, wrong, rng, width, is_prefix=i % 4 < 2) for axis, n in wrong.axes.items()
            }
            last = rng.randint(1, len(right.exits) + 1)
            # early classifiers norm over channels: only the right plan's level has the same
            exits = tuple(range(1, len(right.exits) + 2))[: last if i and wrong.axes == right.axes else None]
            try:
                logits = _compute_level(net, wrong, chosen, exits, x)
            except Exception:  # noqa: S112 a wrong level may fail in any way
                continue
            choices = list(_list_same_channels(right, wrong, chosen))
            every = [_compute_level(net, right, same, exits, x) for same in choices]
            if not every:
                logits, every = logits[-1:], [_compute_masked(net, right, wrong, chosen, exits, x)]
            most = max(most, min(_measure_difference(logits, expected) for expected in every))
            compared += 1
    assert compared, "none of its levels runs"
    return most


def _list_same_channels(right: DerivedPlan, wrong: DerivedPlan, chosen: Kept) -> Iterator[Kept]:
    """Yield the channels of the right plan's levels that a level may be; none where none has its sizes."""
    own = {axis: units for axis, units in chosen.items() if axis in right.axes}
    twins = wrong.axes.keys() - right.axes.keys()
    if all(wrong.axes.get(axis) == n for axis, n in right.axes.items()) and all(
        len(chosen[twin]) == len(chosen[twin.removesuffix(TWIN)]) for twin in twins
    ):
        yield own
        for twin in twins:
            yield {**own, twin.removesuffix(TWIN): chosen[twin]}


def _measure_difference(logits: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(logits, expected, strict=True)
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def _redraw(instance: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = copy_instance(instance).double().eval()
    for parameter in net.parameters():
        wide = parameter.dim() > 1
        fan = parameter.numel() // len(parameter) if wide else 1
        parameter.copy_(torch.randn(parameter.shape) / fan**0.5 if wide else 0.5 + torch.rand(parameter.shape))
    return net


def _draw_kept(
    n: int, axis: str, plan: DerivedPlan, rng: random.Random, width: float | None, is_prefix: bool
) -> list[int]:
    count = n if axis == CLASSES else rng.randint(1, n) if width is None else max(1, int(n * width))
    return list(range(count)) if is_prefix or axis in plan.ordered else sorted(rng.sample(range(n), count))


def _list_kept_places(segments: Segments, axes: Mapping[str, int], chosen: Kept) -> list[int]:
    places, start = [], 0
    for s in segments:
        for unit in range(1 if s.axis is None else axes[s.axis]):
            if s.axis is None or unit in chosen[s.axis]:
                places += range(start, start + s.per)
            start += s.per
    return places


def _compute_level(net: nn.Module, plan: DerivedPlan, chosen: Kept, exits: tuple[int, ...], x: Tensor) -> list[Tensor]:
    architecture = DerivedArchitecture(net, plan)
    torch.manual_seed(0)
    full = architecture.build(plan.axes, architecture.positions).double().state_dict()
    level = architecture.build({axis: len(units) for axis, units in chosen.items()}, exits).double()
    for name, tensor in level.state_dict().items():
        cut = full[name]
        for d in range(cut.dim()):
            if segments := _find_segments(plan, name, d):
                cut = cut.index_select(d, torch.tensor(_list_kept_places(segments, plan.axes, chosen)))
        tensor.copy_(cut)
    logits: list[Tensor] = _estimate_statistics(level, x)(x)
    return logits


def _estimate_statistics(level: nn.Module, x: Tensor) -> nn.Module:
    """Return a module whose batch norms have the statistics of samples, and use them."""
    level.double().eval()
    for part in level.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            size = part.num_features if part.weight is None else len(part.weight)
            part.running_mean, part.running_var = torch.zeros(size), torch.ones(size)
            part.momentum, part.num_batches_tracked = 1.0, None
            part.train()
    level(x)
    return level.eval()


def _find_segments(plan: DerivedPlan, name: str, d: int) -> Segments | None:
    part, _, rest = name.partition(".")
    if part == "net":
        return plan.segments.get((rest, d))
    e, leaf = rest.split(".", 1)
    inner, classes = plan.exits[int(e) - 1].segments, (Segment(CLASSES),) if CLASSES in plan.axes else None
    return inner if leaf.startswith("norm") or (leaf, d) == ("fc.weight", 1) else classes


def _compute_masked(
    net: nn.Module, right: DerivedPlan, wrong: DerivedPlan, chosen: Kept, exits: tuple[int, ...], x: Tensor
) -> list[Tensor]:
    architecture = DerivedArchitecture(net, right)
    torch.manual_seed(0)
    full = architecture.build(right.axes, exits).double()
    for name, tensor in full.state_dict().items():
        for d in range(tensor.dim()):
            if name.startswith("net.") and (segments := _find_segments(wrong, name, d)):
                places = _list_kept_places(segments, wrong.axes, chosen)
                others = [i for i in range(tensor.shape[d]) if i not in places]
                tensor.index_fill_(d, torch.tensor(others, dtype=torch.int64), 0)
    logits: list[Tensor] = _estimate_statistics(full, x)(x)
    return logits[-1:]
