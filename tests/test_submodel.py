"""Extract, put back and move, against NumPy indexing written out per tensor; choices of channels; refusals."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from support import Expected, raises
from support.bits import assert_same_bits
from support.states import put_back
from zoo import RIGHT, Deep, Made, attention, concatenation, flattened

from fleetfit.anatomy import Axis, Layout, Segment, State, infer_layout
from fleetfit.errors import ModelError
from fleetfit.hooks import keep_prefix
from fleetfit.submodel import (
    SlicePlan,
    Submodel,
    check_shapes,
    concat_state,
    dump_prefixes,
    dump_submodel,
    extract,
    full_submodel,
    get_slice_plan,
    move_state,
    parse_prefixes,
    parse_submodel,
    random,
    rolling,
    window,
)  # fmt: skip

LAYOUT = infer_layout(Deep())
CUT = import_module("fleetfit.submodel.submodel")


def numbered(layout: Layout) -> State:
    """A full state in which every element is different."""
    start, state = 0, {}
    for name, shape in layout.shapes({}, layout.exits).items():
        n = int(np.prod(shape))
        state[name] = torch.arange(start, start + n, dtype=torch.float32).view(shape)
        start += n
    return state


def kept_places(layout: Layout, name: str, channels: dict[str, tuple[int, ...]]) -> list[list[int]]:
    """Indices kept in each dimension."""
    return [dim_places(layout, dim, channels) for dim in layout.tensors[name].dims]


def dim_places(layout: Layout, dim: Sequence[Segment], channels: dict[str, tuple[int, ...]]) -> list[int]:
    """Indices kept in one dimension, from the meaning of a segment, one element at a time."""
    start, places = 0, []
    for s in dim:
        if s.axis is None:
            places += range(start, start + s.per)
            start += s.per
            continue
        axis = layout.axes[s.axis]
        chosen = channels.get(s.axis, tuple(range(axis.size)))
        if s.within:
            owned = sum(inner.length(layout.axes, layout.full_sizes) for inner in s.within)
            places += [start + c * owned + i for c in chosen for i in dim_places(layout, s.within, channels)]
            start += axis.size * owned
        elif s.per_granule:
            places += [start + c // axis.granule for c in chosen if c % axis.granule == 0]
            start += axis.size // axis.granule
        else:
            places += [start + c * s.per + i for c in chosen for i in range(s.per)]
            start += axis.size * s.per
    return places


def extract_by_hand(layout: Layout, state: State, piece: Submodel) -> State:
    channels = {axis: tuple(places) for axis, places in piece.channels.items()}
    return {
        name: torch.from_numpy(tensor.numpy()[np.ix_(*kept_places(layout, name, channels))])
        for name, tensor in state.items()
        if layout.tensors[name].present(piece.exits)
    }


def some_channels(layout: Layout, how: str) -> dict[str, range | tuple[int, ...]]:
    """About half of each axis, chosen one way or the other."""
    rng = np.random.default_rng(7)
    channels: dict[str, range | tuple[int, ...]] = {}
    for name, axis in layout.axes.items():
        n = max(1, axis.size // axis.granule // 2) * axis.granule
        channels[name] = {"prefix": keep_prefix, "window": window, "rolling": rolling, "random": random}[how](
            axis, n, 3, 5, rng
        )
    return channels


@pytest.fixture(params=["by index", "by strips", "by slices"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways of moving elements, each made to be the one that is taken, whatever the sizes."""
    strips = import_module("fleetfit.submodel.strips")
    if request.param == "by slices":
        monkeypatch.setattr(CUT, "LARGE", 0)
        monkeypatch.setattr(strips, "_MAX_STRIPS", 0)
    else:
        monkeypatch.setattr(CUT, "FEW", 1 << 20 if request.param == "by index" else 0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("how", ["prefix", "window", "rolling", "random"])
@pytest.mark.parametrize("name", RIGHT)
def test_extract_is_numpy_indexing(name: str, how: str) -> None:
    layout = RIGHT[name]().infer()
    piece = Submodel(some_channels(layout, how), layout.exits)
    assert_same_bits(extract(layout, numbered(layout), piece), extract_by_hand(layout, numbered(layout), piece))


@pytest.mark.usefixtures("way")
def test_put_back_changes_exactly_the_kept_elements() -> None:
    layout = attention().infer()
    piece = Submodel({"hidden": (0, 1, 2, 3, 8, 9, 10, 11), "inner": (1, 4)}, (1,))
    before = numbered(layout)
    new = {n: -1 - t for n, t in extract(layout, before, piece).items()}
    after = put_back(layout, before, piece, new)
    for name, tensor in before.items():
        expected = tensor.clone().numpy()
        expected[np.ix_(*kept_places(layout, name, {a: tuple(c) for a, c in piece.channels.items()}))] = new[
            name
        ].numpy()
        assert np.array_equal(after[name].numpy(), expected)
    assert_same_bits(before, numbered(layout))  # the old state is untouched


def test_extract_is_a_copy() -> None:
    state = numbered(LAYOUT)
    for piece in (Submodel({"a": range(2)}, (1,)), full_submodel(LAYOUT)):
        for tensor in extract(LAYOUT, state, piece).values():
            tensor.zero_()
    assert_same_bits(state, numbered(LAYOUT))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("channels", [range(6), range(1, 4), (5, 0, 3)])
def test_scatter_adds_or_writes(channels: range | tuple[int, ...]) -> None:
    piece = Submodel({"a": channels, "classes": range(3)}, (1, 2, 3))
    compiled = SlicePlan(LAYOUT, piece)
    total = concat_state(numbered(LAYOUT)).clone()
    compiled.scatter(total, torch.ones(compiled.size), add=True)
    covered = (total - concat_state(numbered(LAYOUT))).to(torch.bool)
    assert int(covered.sum()) == compiled.size
    assert_same_bits(
        compiled.views(compiled.gather(total)),
        {n: t + 1 for n, t in extract_by_hand(LAYOUT, numbered(LAYOUT), piece).items()},
    )
    weights = torch.zeros_like(total)
    compiled.scatter_scalar(weights, 2.5)
    assert torch.equal(weights, covered * 2.5)


def test_move_state_keeps_common_elements() -> None:
    source, target = Submodel({"a": range(4)}, (1, 2)), Submodel({"a": (1, 5)}, (2, 3))
    state = {n: t + 1 for n, t in extract(LAYOUT, numbered(LAYOUT), source).items()}
    moved = move_state(LAYOUT, state, source, target)
    full = numbered(LAYOUT)
    assert moved["stem.bias"].tolist() == [full["stem.bias"][1] + 1, 0]
    assert moved["heads.3.bias"].tolist() == [0, 0, 0]  # the source has no such exit
    assert moved["heads.2.bias"].tolist() == (full["heads.2.bias"] + 1).tolist()
    assert_same_bits(move_state(LAYOUT, state, source, source), state)


def test_depth_removes_blocks_and_heads() -> None:
    names = set(extract(LAYOUT, numbered(LAYOUT), Submodel({}, (2,))))
    assert {"blocks.0.0.bias", "blocks.1.0.bias", "heads.2.bias"} <= names
    assert not names & {"blocks.2.0.bias", "heads.1.bias", "heads.3.bias"}


def test_stacked_parts_keep_the_same_channels() -> None:
    """Not the literal upper-left block: rows 0..3 of q, of k and of v, columns by branch."""
    layout = attention().infer()
    qkv = extract(layout, numbered(layout), Submodel({"hidden": range(4)}, (1,)))["qkv.bias"]
    first = numbered(layout)["qkv.bias"][0]
    assert (qkv - first).tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 24, 25, 26, 27]
    layout = concatenation().infer()
    row = extract(layout, numbered(layout), Submodel({"a": range(2), "b": range(1)}, (1,)))["fc.weight"][0]
    assert (row - numbered(layout)["fc.weight"][0, 0]).tolist() == [0, 1, 2, 3, 4, 5, 6, 11]
    layout = flattened().infer()
    row = extract(layout, numbered(layout), Submodel({"wide": (2,)}, (1,)))["fc.weight"][0]
    assert (row - numbered(layout)["fc.weight"][0, 0]).tolist() == [8, 9, 10, 11]


# ---- which channels --------------------------------------------------------------------------------------------------


def test_choices_of_channels_by_hand() -> None:
    axis, rng = Axis(8, granule=2), np.random.default_rng(0)
    assert keep_prefix(axis, 4, 9, 9, rng) == range(4)
    assert rolling(axis, 4, 0, 1, rng) == range(4)
    assert rolling(axis, 4, 1, 1, rng) == range(2, 6)
    assert rolling(axis, 4, 3, 1, rng) == (0, 1, 6, 7)
    assert rolling(axis, 4, 4, 1, rng) == range(4)
    starts = {window(axis, 4, 0, c, rng).start for c in range(60)}
    assert starts == {0, 2, 4}
    drawn = {tuple(random(axis, 4, 0, c, rng)) for c in range(200)}
    assert len(drawn) == 6  # four granules, two of them
    assert all(t[0] % 2 == 0 and t[1] == t[0] + 1 and t[3] == t[2] + 1 for t in drawn)
    for choose in (keep_prefix, window, rolling, random):
        assert choose(axis, 4, 3, None, rng) == range(4)  # evaluation
        assert tuple(choose(axis, 8, 3, 1, rng)) == tuple(range(8))


# ---- values ----------------------------------------------------------------------------------------------------------


def test_equal_by_value() -> None:
    one, other = Submodel({"a": (1, 2, 3)}, (1,)), Submodel({"a": range(1, 4)}, [1])  # type: ignore[arg-type]
    assert one == other
    assert hash(one) == hash(other)
    assert one.channels["a"] == range(1, 4)
    assert one != Submodel({"a": (1, 3, 2)}, (1,))
    assert one != Submodel({"a": range(1, 4)}, (2,))
    assert one.sizes == {"a": 3}
    assert Submodel({}, (1, 5)).depth == 5


def test_inside() -> None:
    small, big = Submodel({"a": range(1, 3)}, (1,)), Submodel({"a": range(4)}, (1, 2))
    assert small.is_part_of(big)
    assert not big.is_part_of(small)
    assert not Submodel({"a": (0, 5)}, (1,)).is_part_of(big)
    assert not Submodel({"a": range(2)}, (3,)).is_part_of(big)
    assert not Submodel({"a": range(2, 6)}, (1,)).is_part_of(big)
    assert not Submodel({"a": range(1, 3)}, (1,)).is_part_of(Submodel({"a": range(2, 3)}, (1,)))
    assert Submodel({"a": range(5, 5)}, (1,)).is_part_of(big)


@pytest.mark.parametrize("piece", [Submodel({"a": range(1, 3), "b": (0, 2)}, (1, 4)), Submodel({}, (2,))])
def test_a_sub_model_survives_plain_values(piece: Submodel) -> None:
    assert parse_submodel(dump_submodel(piece)) == piece


def test_levels_survive_plain_values() -> None:
    pieces = tuple(Submodel({"a": range(n), "b": range(2 * n)}, exits) for n, exits in ((1, (1,)), (3, (1, 4))))
    assert parse_prefixes(dump_prefixes(pieces)) == pieces


@pytest.mark.parametrize(
    "change",
    [{"sizes": [[1]]}, {"sizes": [[1, 1.5]]}, {"sizes": [[1, -1]]}, {"sizes": [[1, 1]] * 2}, {"sizes": [[1, 1 << 40]]},
     {"exits": None}, {"exits": [["1"]]}, {"axes": [1, 2]}, {"axes": None}],
)  # fmt: skip
def test_levels_that_are_none_are_refused(change: dict[str, Any]) -> None:
    good = {"axes": ["a", "b"], "sizes": [[1, 2]], "exits": [[1]]}
    assert parse_prefixes(good) == (Submodel({"a": range(1), "b": range(2)}, (1,)),)
    with raises(ModelError, key="levels"):
        parse_prefixes({**good, **change})


def test_index_work_is_done_once() -> None:
    layout = infer_layout(Deep())
    piece = Submodel({"a": range(3)}, (1,))
    assert get_slice_plan(layout, piece) is get_slice_plan(layout, Submodel({"a": (0, 1, 2)}, (1,)))
    for n in range(100):
        get_slice_plan(layout, Submodel({"a": (n % 6, (n + 1 + n // 6 % 5) % 6)}, (1 + n % 3,)))
    assert len(layout.slice_plans) <= 64


def test_concat_state_copies_only_non_adjacent_tensors() -> None:
    buffer = torch.arange(6.0)
    views = {"x": buffer[:4].view(2, 2), "y": buffer[4:]}
    assert concat_state(views).data_ptr() == buffer.data_ptr()
    assert concat_state({"y": views["y"], "x": views["x"]}).tolist() == [4, 5, 0, 1, 2, 3]
    assert concat_state({"x": views["x"].t(), "y": views["y"]}).tolist() == [0, 2, 1, 3, 4, 5]
    assert concat_state({"x": views["x"].double()}).dtype == torch.float32


def test_neighbors_in_other_buffers_are_copied() -> None:
    """An allocator may put two buffers side by side: that does not make them one."""
    block = np.arange(8, dtype=np.float32)
    left, right = torch.from_numpy(block[:4]), torch.from_numpy(block[4:])
    assert left.data_ptr() + 16 == right.data_ptr()
    assert concat_state({"l": left, "r": right}).tolist() == list(range(8))


# ---- refusals --------------------------------------------------------------------------------------------------------


IN_PAIRS = infer_layout(Made({"a": Axis(6, 2)}, lambda s: torch.nn.Linear(2, s["a"])))


@pytest.mark.parametrize(
    ("layout", "channels", "exits", "expected"),
    [
        (LAYOUT, {"b": range(2)}, (1,), Expected('"b"', key="channels")),
        (LAYOUT, {"a": ()}, (1,), Expected("0..5", key="channels")),
        (LAYOUT, {"a": (0, 0)}, (1,), Expected("0..5", key="channels")),
        (LAYOUT, {"a": (0, 6)}, (1,), Expected("0..5", key="channels")),
        (LAYOUT, {"a": (-1,)}, (1,), Expected("0..5", key="channels")),
        (LAYOUT, {"a": range(2)}, (4,), Expected("(4,)", "(1, 2, 3)", key="exits")),
        (LAYOUT, {"a": range(2)}, (1, 4), Expected(key="exits")),
        (LAYOUT, {}, (), Expected(key="exits")),
        (IN_PAIRS, {"a": range(1, 5)}, (1,), Expected(2, "[1, 2, 3, 4]", key="channels")),
        (IN_PAIRS, {"a": (0, 1, 2)}, (1,), Expected(2, "[0, 1, 2]", key="channels")),
        (IN_PAIRS, {"a": (1, 0, 2, 3)}, (1,), Expected(2, "[1, 0, 2, 3]", key="channels")),
        (IN_PAIRS, {"a": (2, 3, 0, 2)}, (1,), Expected("0..5", key="channels")),
    ],
)
def test_sub_models_that_do_not_fit_are_refused(
    layout: Layout, channels: dict[str, Any], exits: tuple[int, ...], expected: Expected
) -> None:
    with raises(ModelError, expected):
        extract(layout, numbered(layout), Submodel(channels, exits))


def test_shapes_are_compared_by_equality() -> None:
    """A size of one never stands for another: broadcasting would fill a whole row with one number."""
    piece = Submodel({"a": range(3)}, (1,))
    state = extract(LAYOUT, numbered(LAYOUT), piece)
    with raises(ModelError, '"stem.bias"', "(1,)", "(3,)", key="state"):
        put_back(LAYOUT, numbered(LAYOUT), piece, {**state, "stem.bias": torch.zeros(1)})
    with raises(ModelError, "stem.bias", key="state"):
        check_shapes({n: t for n, t in state.items() if n != "stem.bias"}, get_slice_plan(LAYOUT, piece).shapes)
    with raises(ModelError, key="state"):
        check_shapes({**state, "more": torch.zeros(1)}, get_slice_plan(LAYOUT, piece).shapes)
    with raises(ModelError, key="state"):
        extract(LAYOUT, state, piece)
    with raises(ModelError, "'more'", key="state"):
        extract(LAYOUT, {**numbered(LAYOUT), "more": torch.zeros(1)}, piece)
