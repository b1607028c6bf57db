"""Messages round-trip, damage is refused with a sentence, and a bad update never reaches the state."""

import contextlib
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support import raises
from support.bits import assert_same_bits, has_same_bits
from support.nests import nests
from tiny import plain, tiny_federation

import fleetfit
from fleetfit import names
from fleetfit.anatomy import Layout, infer_layout
from fleetfit.core import Evaluation, Failure, Job, Update
from fleetfit.errors import RunError, one_line
from fleetfit.fleet import PROTOCOL
from fleetfit.fleet.protocol import read_answer
from fleetfit.messages import (
    compress,
    dump_job,
    dump_reply,
    job_size,
    load_job,
    load_reply,
    pack,
    packed_size,
    unpack,
)
from fleetfit.rounds import start
from fleetfit.submodel import Submodel, concat_state, extract, get_slice_plan


@given(nests)
@settings(max_examples=150, deadline=None)
def test_round_trip(payload: object) -> None:
    message = pack(payload)
    assert has_same_bits(unpack(message), payload)
    assert packed_size(payload) == len(message)


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


LAYOUT = tiny_federation({"name": "fedavg"})[0].problem.layout


def job_and_update() -> tuple[Job, Update]:
    federation, _ = tiny_federation({"name": "fedavg"})
    server = start(federation)
    piece = federation.levels[1].submodel
    state = extract(federation.problem.layout, server.state, piece)
    job = Job("train", 3, 9, 2, 4, piece, state, {"name": "fedavg"}, 11, 1, plain(lr=0.5, clip_norm=1.0))
    return job, Update(3, 2, 4, 1, piece, piece, state, 10, {"loss": 0.5})


def test_jobs_and_replies_round_trip() -> None:
    job, update = job_and_update()
    back = load_job(unpack(pack(dump_job(job, LAYOUT))), LAYOUT)
    assert {k: v for k, v in vars(back).items() if k != "state"} == {k: v for k, v in vars(job).items() if k != "state"}
    assert_same_bits(back.state, job.state)
    reply = load_reply(unpack(pack(dump_reply(update, LAYOUT))), LAYOUT)
    assert isinstance(reply, Update) and reply.submodel == update.submodel and has_same_bits(reply.state, update.state)
    assert concat_state(reply.state).data_ptr() == next(iter(reply.state.values())).data_ptr()  # read as one, no copy
    assert reply.untrained == () and "untrained" not in dump_reply(update, LAYOUT)
    some = replace(update, untrained=("heads.1.weight", "heads.1.bias"))
    assert load_reply(unpack(pack(dump_reply(some, LAYOUT))), LAYOUT).untrained == some.untrained  # type: ignore[union-attr]
    failure = Failure(3, 2, None, 1, job.submodel, "no data")
    assert vars(load_reply(unpack(pack(dump_reply(failure, LAYOUT))), LAYOUT)) == vars(failure)


def test_a_job_s_bytes_do_not_grow_with_its_levels() -> None:
    job, _ = job_and_update()
    many = Submodel({f"axis{i}": range(64) for i in range(100)}, (1, 2, 3))
    assert pack(dump_job(replace(job, levels=(many,) * 5), LAYOUT)) == pack(dump_job(job, LAYOUT))
    assert job_size(replace(job, levels=(many,) * 5), LAYOUT) == job_size(job, LAYOUT)


def test_an_evaluation_keeps_its_scope() -> None:
    job, _ = job_and_update()
    for scope in ("local", "global"):
        evaluation_job = replace(job, kind="evaluate", evaluation=Evaluation(scope=scope))  # type: ignore[arg-type]
        assert load_job(unpack(pack(dump_job(evaluation_job, LAYOUT))), LAYOUT).evaluation == evaluation_job.evaluation


@given(st.dictionaries(st.text(max_size=9), nests, max_size=4), st.sets(st.integers(0, 20), max_size=3))
@settings(max_examples=100, deadline=None)
def test_a_reply_that_is_none_is_a_sentence(odd: dict[str, object], gone: set[int]) -> None:
    """Fields that are missing or unknown, or a sub-model that is none."""
    _, update = job_and_update()
    payload = dump_reply(update, LAYOUT)
    fields = {name: value for i, (name, value) in enumerate(payload.items()) if i not in gone}
    for damaged in (fields | odd, fields, odd, {**payload, "submodel": odd}, {**payload, "dispatched": odd}):
        with contextlib.suppress(RunError):
            assert isinstance(load_reply(damaged, LAYOUT), Update | Failure)


# ---- what strangers may announce -------------------------------------------------


def raw(header: str, data: bytes = b"") -> bytes:
    """A message whose nest is any text, with numbers in float32 behind it."""
    return headed(f'[{{"float32":{len(data) // 4}}},{header}]' if data else f"[{{}},{header}]", data)


def headed(header: str, data: bytes = b"", version: int = 2) -> bytes:
    """A message with any header."""
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return b"FFIT" + bytes([version, 0, 0, 0]) + len(text).to_bytes(8, "little") + text + data


def sized(*sizes: str) -> str:
    return '{"$t":["float32",[' + ",".join(sizes) + "]]}"


@pytest.mark.parametrize(
    "header",
    [
        sized(*["1e308"] * 20_000),  # a product of six million digits
        sized(*["99999999999999999999"] * 500),  # 10 kB: a number that has no text
        sized(*["1"] * 64), sized("4294967296", "4294967296"), sized("-1"), sized("1.0"), sized("true"), sized('"1"'),
        '{"$t":["float32",{"0":1}]}', '{"$t":["float32"]}',
        '{"$t":["object",[1]]}', '{"$t":[["float32"],[1]]}', '{"$t":"float32"}', '{"$t":["float32",[0]],"more":1}',
        '{"$s":["float32",[4]]}', '{"$s":["float32",{"a":4}]}', '{"$s":["float32",{"$a":[0]}]}', '{"$s":{"a":[1]}}',
        '{"$s":["float32",{"a":[1],"b":[1099511627775,1099511627775]}]}', '{"$a":["float32",[1]]}',
        '{"$u":{"0":1}}', '{"$u":5}', '{"$d":[[1]]}', '{"$d":[[[1],2]]}', '{"$d":{"a":1}}',
        "[" * 70 + "]" * 70, "[" * 100_000, '{"a":' * 70 + "1" + "}" * 70, "9" * 5000, "[1e999999,", "\x00", "",
    ],
    ids=lambda header: f"{header[:40]} ({len(header)})",
)  # fmt: skip
@pytest.mark.parametrize("data", [b"", bytes(64)])
def test_headers_match_their_content(header: str, data: bytes) -> None:
    with raises(RunError) as refused:
        unpack(raw(header, data), bounded=True)
    assert len(str(refused.value)) < 400 and str(refused.value).isprintable()


@pytest.mark.parametrize(
    "counts",
    ["{}", '{"float32":15}', '{"float32":17}', '{"float32":1e308}', '{"float32":16.0}', '{"float32":-16}', "[16]", "16",
     '{"float32":99999999999999999999}', '{"float32":true}', '{"object":64}', '{"":64}', '{"float32":"16"}',
     '{"int8":8,"int64":7}', '{"float32":8,"float64":4}', '{"int64":2305843009213693951,"float32":18}'],
)  # fmt: skip
def test_bytes_behind_a_header_are_counted(counts: str) -> None:
    for header in (f"[{counts},1]", f"[{counts}]", f'{{"a":{counts}}}', counts):
        with raises(RunError):
            unpack(headed(header, bytes(64)), bounded=True)
    with raises(RunError, 16, "float32", 0):
        unpack(headed('[{"float32":16},1]', bytes(64)))


@pytest.mark.parametrize(
    "element", ['{"":0}', "[]", "{}", '"ab"', '"\\u20ac\\u20ac"', "1.5", "99999", "[[0]]", '{"$u":[]}',
                '{"$d":[[1,2]]}', '{"$t":["bool",[0]]}', '{"$s":["bool",{"a":[0]}]}', "[300,400]", "[1.5,-2.5]",
                "[[],900]", "[-9999,70000,500]"]
)  # fmt: skip
@pytest.mark.parametrize("length", [20_000, 2_000_000])
def test_messages_need_bounded_memory(element: str, length: int) -> None:
    """Also where it is refused: 16 times, and a MiB. Unbounded, it is up to 91 times."""
    elements = ",".join([element] * (length // len(element)))
    refused_small(raw(f'{{"protocol":{PROTOCOL},"x":[' + elements + "]}"))


@pytest.mark.parametrize("count", [200, 3_000, 100_000])
def test_memory_of_a_message_is_bounded(count: int) -> None:
    """Of ten bytes, a name and a shape without a number, one can make a tensor of 900."""
    shapes = ",".join(f'"{i:x}":[0]' for i in range(count))
    refused_small(raw(f'{{"protocol":{PROTOCOL},"x":{{"$s":["bool",{{{shapes}}}]}}}}'))


def refused_small(content: bytes) -> None:
    message = ""
    tracemalloc.start()
    try:
        try:
            read_answer(content)
        except RunError as error:
            message = str(error)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(content) + 2**20 and (not message or "memory" in message)


def test_honest_messages_are_within_bounds() -> None:
    """Hundreds of tensors of a few numbers with short names, random channels, a table of counts."""
    state = {f"b{i}.w": torch.ones(2) for i in range(600)}
    channels = {f"axis{i}": list(range(i % 2, 512, 2)) for i in range(40)}
    payload = {"protocol": PROTOCOL, "reply": {"state": state, "submodel": {"channels": channels, "exits": [1, 2]},
            "metrics": {"loss": 0.5, "teachers": {str(e): 7 for e in range(50)}}}}  # fmt: skip
    assert read_answer(pack(payload))["reply"]["state"].keys() == state.keys()
    assert read_answer(pack({"protocol": PROTOCOL, "submodel": channels}))["submodel"] == channels


def test_keys_that_share_one_hash_are_refused() -> None:
    """Multiples of 2^61 - 1 all have the hash 0: a table of them takes the square of their number."""
    same_hash = ",".join(f"[{i * (2**61 - 1)},0]" for i in range(1, 40))
    with raises(RunError, 60):
        unpack(raw('{"$d":[' + same_hash + "]}"), bounded=True)


@pytest.mark.parametrize(
    ("change", "quoted"),
    [
        ({"kind": "cat\x1b[31m\nx"}, "cat [31m x"),
        ({"kind": [1]}, "(list)"),
        ({"dispatched": {"channels": {"a": {"from": 0, "to": 1e308}}, "exits": [1]}}, "range"),
        ({"dispatched": {"channels": {"a": {"from": 0}}, "exits": [1]}}, "range"),
        ({"dispatched": {"channels": {"a": "0123"}, "exits": [1]}}, "range"),
        ({"dispatched": {"channels": {"a": [True, 2]}, "exits": [1]}}, "range"),
        ({"dispatched": {"channels": {"a": [2**70]}, "exits": [1]}}, "range"),
        ({"dispatched": {"channels": [1], "exits": [1]}}, "channels"),
        ({"dispatched": {"channels": {}, "exits": ["1"]}}, "exits"),
        ({"submodel": {"channels": {}, "exits": [1.5]}}, "exits"),
        ({"dispatched": torch.ones(2)}, "channels"),
        ({"unknown\x1b]0;x\x07field": 1}, "unexpected keyword"),
    ],
)
def test_every_field_of_a_reply_has_its_type(change: dict[str, object], quoted: str) -> None:
    _, update = job_and_update()
    with pytest.raises(RunError) as refused:
        load_reply({**dump_reply(update, LAYOUT), **change}, LAYOUT)
    assert quoted in str(refused.value) and str(refused.value).isprintable()


@pytest.mark.parametrize(
    "change", [lambda n: {}, lambda n: {**n, "local": [1]}, lambda n: {**n, "local": {**n["local"], "x": 1}},
               lambda n: {**n, "submodel": 5}, lambda n: {k: v for k, v in n.items() if k != "seed"}]
)  # fmt: skip
def test_a_job_that_is_none_is_a_sentence(change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    job, _ = job_and_update()
    with raises(RunError):
        load_job(change(dump_job(job, LAYOUT)), LAYOUT)


@given(st.text(max_size=300) | st.integers() | st.none(), st.integers(4, 100))
def test_a_strangers_text_is_one_line(text: object, most: int) -> None:
    line = one_line(text, most)
    assert len(line) <= most and line.isprintable() and line.encode() is not None


def test_escapes_and_marks_do_not_reach_a_terminal() -> None:
    assert one_line("a\x1b[2Jb\r\nc\u202ed\ud800e\u2028f\x9bg") == "a [2Jb c d e f g"
    assert one_line("x" * 500, 10) == "xxxxxxx..." and one_line(["a"]) == "(list)"


# ---- a state that follows from its sub-model ---------------------------------------------------------------------


def trained(layout: Layout, piece: Submodel, compress_to: str | None) -> Update:
    """An update of a sub-model as a client sends it."""
    state = get_slice_plan(layout, piece).views(torch.randn(get_slice_plan(layout, piece).size))
    update = Update(3, 2, 4, 1, piece, piece, state, 500, {"loss": 0.5, "steps": 32}, multiply_adds=10**12)
    job = Job("train", 3, 9, 2, 4, piece, state, {"name": "fedavg"}, 11, 1, plain())
    return update if compress_to is None else compress(update, job, layout, compress_to, None)[0]


@pytest.mark.parametrize("kind", [None, "float16", "int8"])
@pytest.mark.parametrize(("family", "width"), [("resnet20", 0.6), ("resnet110", 0.25)])
def test_a_header_is_less_than_a_hundredth_of_an_update(family: str, width: float, kind: str | None) -> None:
    """Of about 100,000 parameters, in up to 335 tensors: what a client sends beside its numbers."""
    architecture = names.resolve("models", family)(classes=10)
    layout = infer_layout(architecture, (architecture.blocks,))
    piece = Submodel({axis: range(size) for axis, size in architecture.sizes(width).items()}, layout.exits)
    update = trained(layout, piece, kind)
    numbers = sum(t.numel() * t.element_size() for t in (*update.state.values(), *update.scales.values()))
    assert 60_000 < sum(t.numel() for t in update.state.values()) < 140_000
    message = pack(dump_reply(update, layout))
    assert len(message) == packed_size(dump_reply(update, layout))
    assert 0 < len(message) - numbers < 0.01 * len(message)
    reply = load_reply(unpack(message, bounded=True), layout)
    assert (
        isinstance(reply, Update)
        and has_same_bits(reply.state, update.state)
        and has_same_bits(dict(reply.scales), update.scales)
    )


def test_unusual_states_travel_by_name() -> None:
    """Other tensors, other types, another order of the names, and what a reply leaves out."""
    _, update = job_and_update()
    some = dict(list(update.state.items())[:3])
    turned = {name: update.state[name] for name in sorted(update.state, reverse=True)}
    wider = {**update.state, **{name: tensor.double() for name, tensor in some.items()}}
    for state in (some, {**update.state, "more": torch.ones(2)}, wider):
        payload = dump_reply(replace(update, state=state), LAYOUT)
        reply = load_reply(unpack(pack(payload)), LAYOUT)
        assert (
            payload["state"].keys() == state.keys()
            and isinstance(reply, Update)
            and has_same_bits(dict(reply.state), state)
        )
    reply = load_reply(unpack(pack(dump_reply(replace(update, state=turned), LAYOUT))), LAYOUT)
    assert (
        isinstance(reply, Update)
        and has_same_bits(reply.state, update.state)
        and list(reply.state) == list(update.state)
    )
    rows = Submodel({**update.submodel.channels, "classes": (0, 2)}, update.submodel.exits)
    full = start(tiny_federation({"name": "fedavg"})[0]).state
    left_out = replace(update, submodel=rows, state=extract(LAYOUT, full, rows))
    payload = dump_reply(left_out, LAYOUT)
    assert payload["submodel"]["channels"]["classes"] == [0, 2] and isinstance(payload["state"], torch.Tensor)
    reply = load_reply(unpack(pack(payload)), LAYOUT)
    assert isinstance(reply, Update) and reply.submodel == rows and has_same_bits(reply.state, left_out.state)


@pytest.mark.parametrize("numbers", [torch.zeros(3), torch.zeros(0), torch.zeros(2, 2), torch.zeros(())])
def test_other_numbers_than_the_sub_models_are_refused(numbers: torch.Tensor) -> None:
    job, update = job_and_update()
    with raises(RunError, tuple(numbers.shape)):
        load_reply({**dump_reply(update, LAYOUT), "state": numbers}, LAYOUT)
    with raises(RunError, tuple(numbers.shape)):
        load_job({**dump_job(job, LAYOUT), "state": numbers}, LAYOUT)
    for odd in ({"a": {"from": 0, "to": 2**31 - 1}}, {"a": {"from": 3, "to": 1}}, {"what": [0]}, {"b": [0, 3]}):
        payload = {**dump_reply(update, LAYOUT), "submodel": {"channels": odd, "exits": [1]}}
        with raises(RunError):
            load_reply(payload, LAYOUT)


# ---- other formats ---------------------------------------------------------------------------------------------------


def test_other_formats_name_the_version_to_install() -> None:
    later = bytearray(pack({"a": 1}))
    later[4:8] = bytes([3, 4, 5, 6])
    with raises(RunError, "format 3", "FleetFit 4.5.6"):
        unpack(later)


def test_messages_name_their_writer() -> None:
    assert pack({})[:8] == b"FFIT\x02" + bytes(int(part) for part in re.findall(r"\d+", fleetfit.__version__)[:3])
