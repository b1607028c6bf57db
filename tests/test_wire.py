"""Messages round-trip, damage is refused with a sentence, and a bad update never reaches the state."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_federation

from fleetfit.errors import RunError
from fleetfit.rounds import start
from fleetfit.submodel import FlatState, extract, flat_of
from fleetfit.values import Failure, Job, Local, Update
from fleetfit.wire import job_nest, job_of, pack, packed_size, reply_nest, reply_of, unpack

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 99))
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9
    return numbers.to(draw(st.sampled_from(DTYPES)))


scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
nests = st.recursive(
    scalars | tensors(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, FlatState) or isinstance(b, FlatState):
        return same(dict(a), dict(b))  # type: ignore[call-overload]
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)  # type: ignore[attr-defined, index]
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    return a == b


@given(nests)
@settings(max_examples=150, deadline=None)
def test_round_trip(nest: object) -> None:
    message = pack(nest)
    assert same(unpack(message), nest)
    assert packed_size(nest) == len(message)


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_damage_is_a_sentence(extra: bytes, place: int, byte: int) -> None:
    """Truncated, prolonged or altered messages either still parse or raise RunError; nothing else escapes."""
    message = bytearray(pack({"a": torch.arange(5.0), "b": [1, "x", (None,)]}))
    message[place % len(message)] = byte
    for damaged in (bytes(message), bytes(message[: place % len(message)]), bytes(message) + extra, extra):
        refused = ""
        try:
            unpack(damaged)
        except RunError as error:
            refused = str(error)
        assert not refused or "message" in refused


def job_and_update() -> tuple[Job, Update]:
    federation, _ = tiny_federation({"name": "fedavg"})
    server = start(federation)
    piece = federation.levels[1].submodel
    state = extract(federation.problem.layout, server.state, piece)
    job = Job("train", 3, 9, 2, 4, piece, state, {"name": "fedavg"}, 11, 1, Local(lr=0.5, clip_norm=1.0))
    return job, Update(3, 2, 4, 1, piece, piece, state, 10, {"loss": 0.5})


def test_jobs_and_replies_round_trip() -> None:
    job, update = job_and_update()
    back = job_of(unpack(pack(job_nest(job))))
    assert {k: v for k, v in vars(back).items() if k != "state"} == {k: v for k, v in vars(job).items() if k != "state"}
    assert same(back.state, job.state)
    found = reply_of(unpack(pack(reply_nest(update))))
    assert isinstance(found, Update) and found.submodel == update.submodel and same(found.state, update.state)
    assert flat_of(found.state).data_ptr() == next(iter(found.state.values())).data_ptr()  # read as one, no copy
    failure = Failure(3, 2, None, 1, job.submodel, "no data")
    assert vars(reply_of(unpack(pack(reply_nest(failure))))) == vars(failure)


@given(st.dictionaries(st.text(max_size=9), nests, max_size=4), st.sets(st.integers(0, 20), max_size=3))
@settings(max_examples=100, deadline=None)
def test_a_reply_that_is_none_is_a_sentence(odd: dict[str, object], gone: set[int]) -> None:
    """Fields that are missing or unknown, or a sub-model that is none."""
    _, update = job_and_update()
    nest = reply_nest(update)
    kept = {name: value for i, (name, value) in enumerate(nest.items()) if i not in gone}
    for damaged in (kept | odd, kept, odd, {**nest, "submodel": odd}, {**nest, "dispatched": odd}):
        refused = ""
        try:
            assert isinstance(reply_of(damaged), Update | Failure)
        except RunError as error:
            refused = str(error)
        assert not refused or "no update and no failure" in refused
