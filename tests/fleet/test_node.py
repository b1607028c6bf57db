"""The device's side of engine flower: configuration, what it tells, keeps and refuses; keys, certificates, the app."""

import dataclasses
import mmap
import os
import signal
import stat
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tomli_w
import torch
import waiting
from hypothesis import given, settings, strategies as st
from own_terms import add_terms
from support import Expected, check_error, raises, run_verb
from tiny import plain, tiny_federation

from fleetfit.errors import ConfigError, RunError

pytest.importorskip("flwr", reason="the extra flower is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fleetfit.anatomy.infer import _infer_once
from fleetfit.core import Device, Job
from fleetfit.core.nodes import parse_node_description
from fleetfit.fleet import PROTOCOL, worker
from fleetfit.fleet.app_folder import write_app
from fleetfit.fleet.certificates import make_certificates, make_node_key
from fleetfit.fleet.node import MemoryLimit, NodeFiles, answer, get_node
from fleetfit.fleet.protocol import check_header, compute_digest, pack_message, read_answer
from fleetfit.fleet.settings import load_data, read_settings
from fleetfit.fleet.worker import NodeWorker, WorkerDeath
from fleetfit.messages import dump_job, dump_state, pack, unpack
from fleetfit.rounds import start
from fleetfit.submodel import dump_prefixes
from fleetfit.training import run_job

GOOD: dict[str, Any] = {"name": "pi", "budget": 0.5, "data": {"name": "tiny:tiny_data"}}
HELLO = add_terms({"what": "hello", "transform": ""})


def config(folder: Path, **changes: Any) -> Path:
    table = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    (folder / "node.toml").write_text(tomli_w.dumps(table))
    get_node.cache_clear()
    return folder / "node.toml"


def say_hello(folder: Path, **changes: Any) -> dict[str, Any]:
    payload = read_answer(answer(str(config(folder, **changes)), {"header": pack_message(HELLO)}))
    hello: dict[str, Any] = payload.get("hello", payload)
    return hello


# ---- configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "mention"),
    [
        ({"name": None}, "name: "),
        ({"name": "a b"}, "60"),
        ({"data": None}, "data: "),
        ({"data": {"name": "tiny:tiny_data", "client": 1}}, "go together"),
        ({"data": {"name": "digitss"}}, 'Did you mean "digits"'),
        ({"data": {"name": "tiny:tiny"}}, "fleetfit.Data"),
        (
            {"data": {"name": "tiny:tiny_data", "client": 9, "partition": {"kind": "iid", "clients": 3}}},
            "clients 0 to 2",
        ),
        ({"budgett": 0.1}, 'Did you mean "budget"'),
        ({"budget": -0.1}, "budget"),
        ({"memory_limit": "300"}, "memory_limit"),
        ({"memory_limit": "300 XB"}, "300 XB"),
        ({"threads": 0}, "threads"),
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"budget": "missing.toml"}, "missing.toml"),
        ({"budget": "200 cheese"}, "budget"),
        ({"budget": {"memory": 0.5}}, '"memory"'),
    ],
)
def test_a_wrong_configuration_is_a_sentence(changes: dict[str, Any], mention: str, tmp_path: Path) -> None:
    answered = read_answer(answer(str(config(tmp_path, **changes)), {"header": pack_message(HELLO)}))
    assert mention in answered["refused"] and "Traceback" not in answered["refused"], answered


def test_paths_are_seen_from_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from tiny import tiny_data as load\n")
    (tmp_path / "budget.toml").write_text("budget = { parameters = 0.3 }\ntolerance = 0.2\n")
    settings = read_settings(config(tmp_path, data={"name": "mine.py:load"}, budget="budget.toml", allow=["m.py:f"]))
    assert settings.data.name == f"{tmp_path / 'mine.py'}:load" and settings.allow == [f"{tmp_path / 'm.py'}:f"]
    assert settings.budget == {"parameters": 0.3} and settings.tolerance == 0.2
    assert settings.folder == str(tmp_path / "fleetfit-node" / "pi")


def test_a_node_describes_itself(tmp_path: Path) -> None:
    hello = say_hello(tmp_path)
    assert hello["examples"] == {"train": 168, "validation": 24, "test": 48} and hello["budget"] == 0.5
    assert hello["facts"]["sample_shape"] == [1, 4, 4] and "labels" not in hello
    assert say_hello(tmp_path, budget=None)["budget"] == 1.0, "it has no limit"
    shy = say_hello(tmp_path, reports_budget=False, reports_labels=True)
    assert "budget" not in shy and sum(shy["labels"]) == 168
    part = {"kind": "iid", "clients": 4}
    assert (
        say_hello(tmp_path, data={"name": "tiny:tiny_data", "client": 1, "partition": part})["examples"]["train"] == 42
    )
    np.savez(tmp_path / "own.npz", x=np.eye(60)[:, :5], y=np.arange(60) % 2, user=np.arange(60) % 6)
    data = {"name": "own.npz", "groups": "user", "client": 1, "partition": {"clients": 6}}
    own = load_data(read_settings(config(tmp_path, data=data)))
    users = {int(i) % 6 for name in ("train", "validation", "test") for i in own.split(name)}
    assert len(users) == 1, "one user's samples, as in a simulation"
    assert parse_node_description(hello).num_examples == 168 and parse_node_description(
        parse_node_description(shy).payload
    ) == parse_node_description(shy)


def test_check_shows_it_and_starts_nothing(tmp_path: Path) -> None:
    assert "Node pi: tiny, 168" in run_verb("flower", "node", config(tmp_path), "--check", code=0).out
    check_error(ConfigError(run_verb("flower", "node", config(tmp_path, name="a b"), "--check", code=2).err), "a b", 60)


# ---- what a server may not do ------------------------------------------------------------------------------------

SETUP: dict[str, Any] = {
    "what": "setup", "run": "ab" * 8, "base": "", "cost": "parameters", "transform": "", "method": {"name": "fedavg"},
    "problem": {"model": {"name": "tiny:tiny"}, "given": {"classes": 4, "input_shape": [1, 4, 4]},
                "task": "classification", "exits": [3]},
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"method": {"name": "plugin_method:counting"}},
        {"method": {"name": "fedavg", "hooks": {"make_loss": "os:system"}}},
        {"method": {"name": "fedavg", "options": {"/tmp/x.py:f": {}}}},
        {"method": {"name": "fedavg", "cohort": {"name": "os:system"}}},
        {"problem": {**SETUP["problem"], "model": {"name": "os:system"}}},
        {"problem": {**SETUP["problem"], "task": "os:system"}},
        {"problem": {**SETUP["problem"], "peft": {"name": "shutil:rmtree"}}},
    ],
)
def test_a_node_imports_allowed_names_only(change: dict[str, Any], tmp_path: Path) -> None:
    path = str(config(tmp_path, allow=["tiny:tiny"]))
    assert read_answer(answer(path, {"header": pack_message(add_terms(SETUP))}))["ready"] is True
    for what in ("setup", "base", "job"):
        base = pack({"w": torch.ones(1)}) if what == "base" else b""
        header = {**SETUP, **change, "what": what, "base": compute_digest(base) if base else ""}
        header |= {"job": {}} if what == "job" else {}
        refused = read_answer(answer(path, {"header": pack_message(add_terms(header)), "base": base}))["refused"]
        assert "allow" in refused, refused


def test_allowed_names_run(tmp_path: Path) -> None:
    path = str(config(tmp_path, allow=["tiny:tiny", "plugin_method:counting"]))
    header = {**SETUP, "method": {"name": "plugin_method:counting"}}
    assert read_answer(answer(path, {"header": pack_message(add_terms(header))}))["ready"] is True


@pytest.mark.parametrize(
    "parts",
    [
        {}, {"header": b""}, {"header": b"FFIT"}, {"header": pack([1])}, {"header": pack({"protocol": PROTOCOL + 1})},
        {"header": pack_message({"what": "format the disk"})}, {"header": pack_message({"what": "job"})},
        {"header": pack_message(add_terms({**SETUP, "what": "job", "job": {}}))},
        {"header": pack_message(add_terms({**SETUP, "run": "../../etc/passwd", "what": "job", "job": {}}))},
        {"header": pack_message(add_terms({**SETUP, "base": "../x", "what": "setup"}))},
        {"header": pack_message(add_terms({**SETUP, "base": "ab" * 32, "what": "base"})), "base": b"other tensors"},
    ],
)  # fmt: skip
def test_every_message_has_an_answer(parts: dict[str, bytes], tmp_path: Path) -> None:
    assert "refused" in read_answer(answer(str(config(tmp_path, allow=["tiny:tiny"])), parts))
    assert not list(tmp_path.rglob("*.ffit"))


ODD: tuple[Any, ...] = (None, True, -1, 1 << 70, 1.5, float("nan"), "x", "", [], [1], [[]], {}, {"x": 1}, {None: 1},
                        {2: 3}, {True: {}}, {"a": [{None: 1}]})  # fmt: skip


def places(payload: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values of a nest, and of a key that it does not have."""
    paths: list[tuple[Any, ...]] = [path] if path else []
    if isinstance(payload, dict):
        paths += [(*path, None)]
    inner = payload.items() if isinstance(payload, dict) else enumerate(payload) if isinstance(payload, list) else ()
    return paths + [place for key, value in inner for place in places(value, (*path, key))]


def replaced(payload: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    if isinstance(payload, list):
        return [replaced(inner, path[1:], value) if i == path[0] else inner for i, inner in enumerate(payload)]
    return {**payload, path[0]: replaced(payload.get(path[0], {}), path[1:], value)}


def make_parts() -> tuple[dict[str, Any], bytes]:
    """Return the header of a good job, and its packed state."""
    federation, _ = tiny_federation({"name": "fedavg"})
    problem, sub = federation.problem, federation.levels[0].submodel
    state = federation.method.dispatch(federation, start(federation), 0, sub)
    job = Job("train", 1, 2, 0, 0, sub, state, {"name": "fedavg"}, 1, 0, local=plain(0.1, 1, 8))
    parts = {
        "exits": list(problem.exits),
        "levels": dump_prefixes(problem.levels),
        "layout": problem.layout.to_payload(),
    }
    header = {**SETUP, "what": "job", "problem": {**SETUP["problem"], **parts},
              "job": dump_job(dataclasses.replace(job, state={}), problem.layout)}  # fmt: skip
    return header, pack(dump_state(state, problem.layout, sub))


@pytest.mark.parametrize("part", ["layout", "problem", "method", "job", "terms", ""])
def test_no_value_in_a_job_s_header_is_unexpected(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each value of a good job is replaced by odd ones, and each table gets a key that is not text."""
    good, sent = make_parts()
    path = str(config(tmp_path, allow=["tiny:tiny"]))
    assert "reply" in read_answer(answer(path, {"header": pack_message(add_terms(good)), "state": sent}))

    def find_part(place: tuple[Any, ...]) -> str:
        return next((name for name in (place[1:2] == ("layout",) and "layout", place[0])
                     if name in ("layout", "problem", "method", "job", "terms")), "")  # fmt: skip

    every = [place for place in places(add_terms(good)) if find_part(place) == part]
    assert len(every) > 2
    steps = {"layout": 5, "job": 3}.get(part, 1)
    for number, place in enumerate(every):
        for odd in ODD[number % steps :: steps]:
            wrong = replaced(add_terms(good), place, odd) if part == "terms" else add_terms(replaced(good, place, odd))
            answered = read_answer(answer(path, {"header": pack_message(wrong), "state": sent}))
            assert "unexpectedly" not in answered.get("refused", ""), (place, odd, answered)
    assert not [record for record in caplog.records if record.exc_info]


def swap_names(layout: Any) -> None:
    layout["tensors"][0][0], layout["tensors"][1][0] = layout["tensors"][1][0], layout["tensors"][0][0]


WRONG_LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "a tensor is absent": lambda p: p["tensors"].pop(0),
    "a tensor that the model does not have": lambda p: p["tensors"].append(["more", [0], None, None, True]),
    "a tensor of another shape": lambda p: p["dims"].__setitem__(0, [[None, 2**39]]),
    "a size of an axis": lambda p: p["dims"].__setitem__(0, [[None, 12]]),
    "names of two tensors": swap_names,
    "a parameter that is none": lambda p: p["tensors"][0].__setitem__(4, False),
    "a tensor behind the level": lambda p: p["tensors"][0].__setitem__(2, 2),
    "a tensor of another exit": lambda p: p["tensors"][0].__setitem__(3, 3),
    "a second name that is none": lambda p: p["aliases"].update({p["tensors"].pop(0)[0]: p["tensors"][0][0]}),
    "a tensor that is never trained": lambda p: p["base"].append(p["tensors"].pop(0)),
    "all tensors are never trained": lambda p: p.update(base=p["tensors"], tensors=[]),
}


@pytest.mark.parametrize("wrong", WRONG_LAYOUTS)
def test_a_node_trains_by_no_other_model_s_layout(wrong: str, tmp_path: Path) -> None:
    """It refuses the message, or its job fails, with a reason."""
    header, sent = make_parts()
    WRONG_LAYOUTS[wrong](header["problem"]["layout"])
    path = str(config(tmp_path, allow=["tiny:tiny"]))
    table = read_answer(answer(path, {"header": pack_message(add_terms(header)), "state": sent}))
    reason = table["refused"] if "refused" in table else table["reply"]["reason"]
    assert reason and "unexpectedly" not in reason, table


def test_a_node_infers_no_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, sent = make_parts()
    path = str(config(tmp_path, allow=["tiny:tiny"]))
    monkeypatch.setattr("fleetfit.anatomy.infer._infer", None)
    _infer_once.cache_clear()
    table = read_answer(answer(path, {"header": pack_message(add_terms(header)), "state": sent}))
    assert table["reply"]["kind"] == "update"
    del header["problem"]["layout"]
    assert "refused" in read_answer(answer(path, {"header": pack_message(add_terms(header)), "state": sent}))


def test_a_loss_on_a_node_sees_all_levels(tmp_path: Path) -> None:
    federation, _ = tiny_federation({"name": "plugin_method:reporting_levels"})
    problem, piece = federation.problem, federation.levels[1].submodel
    state = federation.method.dispatch(federation, start(federation), 0, piece)
    job = Job("train", 1, 2, 0, 0, piece, state, federation.method_spec, 1, 1, local=plain(0.1, 1, 8))
    header = {**SETUP, "what": "job", "method": federation.method_spec, "problem": problem.spec,
              "job": dump_job(dataclasses.replace(job, state={}), problem.layout)}  # fmt: skip
    path = str(config(tmp_path, allow=["tiny:tiny", "plugin_method:reporting_levels"]))
    parts = {"header": pack_message(add_terms(header)), "state": pack(dump_state(state, problem.layout, piece))}
    everything = [[level.submodel.sizes, list(level.submodel.exits)] for level in federation.levels]
    assert read_answer(answer(path, parts))["reply"]["metrics"]["levels"] == [1, everything]


@pytest.mark.parametrize(
    "change", [{"sizes": [[9, 12, 4]]}, {"sizes": [[0, 12, 4]]}, {"exits": [[4]]}, {"exits": [[]]}, {"axes": ["a"]}]
)
def test_nodes_refuse_levels_of_other_models(change: dict[str, Any], tmp_path: Path) -> None:
    levels = {"axes": ["a", "b", "classes"], "sizes": [[8, 12, 4]], "exits": [[3]]}
    path = str(config(tmp_path, allow=["tiny:tiny"]))
    for table, key in ((levels, "ready"), ({**levels, **change}, "refused")):
        header = {**SETUP, "problem": {**SETUP["problem"], "levels": table}}
        assert read_answer(answer(path, {"header": pack_message(add_terms(header))}))[key]


NESTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["name", "facts", "examples", "train", "budget", "tolerance", "labels", "sample_shape", "classes", "task",
         "vocabulary", "padding", "what", "protocol", "run", "problem", "method", "base", "cost", "job"]), inner),
    max_leaves=12,
)  # fmt: skip
HELLO_REPLY: dict[str, Any] = {
    "name": "pi", "examples": {"train": 5}, "budget": 0.5, "tolerance": 0.1, "labels": [2, 3],
    "facts": {"name": "d", "task": "classification", "sample_shape": [1, 4], "classes": 2, "vocabulary": 0,
              "padding": -1},
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(NESTS, st.sampled_from([*HELLO_REPLY, None]))
def test_no_hello_breaks_the_server(payload: Any, where: str | None) -> None:
    for tried in (payload, {**HELLO_REPLY, **({} if where is None else {where: payload})}):
        try:
            description = parse_node_description(tried)
        except RunError:
            continue
        assert isinstance(description.name, str) and description.num_examples >= 0 and description.facts.classes >= 1
        assert 0 <= description.tolerance < 100 and parse_node_description(description.payload) == description


@settings(max_examples=200, deadline=None)
@given(NESTS)
def test_no_header_breaks_a_node(payload: Any) -> None:
    try:
        check_header(payload)
    except RunError:
        return
    assert payload["what"] in ("hello", "setup", "base", "job")


def test_false_numbers_of_a_hello() -> None:
    assert parse_node_description(HELLO_REPLY).labels == (2, 3)
    for change, expected in [
        ({"labels": [2, 2]}, Expected(key="labels")), ({"labels": [5]}, Expected(key="labels")),
        ({"examples": {"train": True}}, Expected(key="examples")),
        ({"tolerance": float("nan")}, "tolerance"), ({"name": "x" * 61}, "name"), ({"budget": {}}, "budget"),
        ({"budget": float("inf")}, "budget"),
    ]:  # fmt: skip
        with raises(RunError, expected):
            parse_node_description({**HELLO_REPLY, **change})


# ---- what it keeps -----------------------------------------------------------------------------------------------


def test_the_last_two_versions_are_kept(tmp_path: Path) -> None:
    files, run = NodeFiles(tmp_path / "node"), "0123456789abcdef"
    assert files.load(run, -1) == (None, False) and files.load(run, 3) == (None, True)
    files.keep(run, -1, 0, {"mean": torch.ones(2)})
    files.keep(run, 0, 4, {"mean": torch.zeros(2)})
    assert torch.equal(files.load(run, 0)[0]["mean"], torch.ones(2))  # round 4 may never have counted
    files.keep(run, 0, 5, "five")
    assert files.load(run, 4) == (None, True) and files.load(run, 5) == ("five", False)
    files.keep(run, 5, 6, ("a", 1, None))
    assert NodeFiles(tmp_path / "node").load(run, 6) == (("a", 1, None), False)
    assert files.load(run, 0) == (None, True)
    [path] = (tmp_path / "node").rglob("*.ffit")
    path.write_bytes(path.read_bytes()[:-3])
    assert files.load(run, 6) == (None, True)
    assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o700


def test_runs_long_ago_are_forgotten(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    for number in range(12):
        files.keep(f"{number:016x}", -1, 0, number)
    assert len(list(tmp_path.rglob("*.ffit"))) == 8 and files.load(f"{11:016x}", 0) == (11, False)


def test_untrained_tensors_match_their_digest(tmp_path: Path) -> None:
    files, content = NodeFiles(tmp_path), pack({"w": torch.ones(3)})
    assert files.load_base(compute_digest(content)) is None
    files.keep_base(compute_digest(content), content)
    assert torch.equal(unpack(files.load_base(compute_digest(content)) or b"")["w"], torch.ones(3))
    next(iter(tmp_path.rglob("*.ffit"))).write_bytes(b"x")
    assert files.load_base(compute_digest(content)) is None
    with raises(RunError, key="base"):
        files.keep_base(compute_digest(content), b"other")
    with raises(RunError, key="digest"):
        files.load_base(compute_digest(content)[:32])


# ---- the worker --------------------------------------------------------------------------------------------------


@pytest.fixture
def node_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeWorker]:
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{Path.cwd() / 'tests'}")
    monkeypatch.setattr(worker, "_ASK_S", 0.1)
    node_worker = NodeWorker(str(tmp_path / "node.toml"))
    yield node_worker
    node_worker.end()


def hello() -> dict[str, bytearray]:
    return {"header": bytearray(pack_message(HELLO))}


def is_wanted() -> bool:
    return True


def test_a_worker_answers_twice_in_one_process(node_worker: NodeWorker, tmp_path: Path) -> None:
    config(tmp_path)
    parts = hello()
    first = read_answer(node_worker.ask(parts, is_wanted) or b"")
    assert not parts, "a device may lack the memory for two"
    process = node_worker._process
    second = read_answer(node_worker.ask(hello(), is_wanted) or b"")
    assert node_worker._process is process and second["hello"] == first["hello"]
    assert (first["log"]["entries"], second["log"]["entries"]) == (2, 4), "the log goes on"
    assert first["hello"]["name"] == "pi"


USED = """
from pathlib import Path

from fleetfit.method import Method


def mine():
    Path(__file__).with_name("used").write_text("{}")
    return Method()
"""


def test_code_that_both_sides_update_is_what_runs(node_worker: NodeWorker, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    config(tmp_path, allow=["tiny:tiny", f"{file}:mine"])
    for count, version in enumerate(("old", "newer"), 1):
        file.write_text(USED.format(version))
        message = add_terms({**SETUP, "method": {"name": f"{file}:mine"}})  # with the hash of now
        answer = read_answer(node_worker.ask({"header": bytearray(pack_message(message))}, is_wanted) or b"")
        assert answer["ready"] and (tmp_path / "used").read_text() == version
        assert answer["log"]["entries"] == 2 * count, "a message is answered once"


def test_a_file_of_code_stands_elsewhere_on_the_server(tmp_path: Path) -> None:
    """Its own name and its content decide, not the server's folder."""
    (tmp_path / "server").mkdir()
    files = [tmp_path / "own.py", tmp_path / "server" / "own.py"]
    for file in files:
        file.write_text(USED.format("here"))
    path, name = str(config(tmp_path, allow=["tiny:tiny", "own.py:mine"])), f"{files[1]}:mine"
    setup = {"header": pack_message(add_terms({**SETUP, "method": {"name": name}}))}
    assert read_answer(answer(path, setup))["ready"] and not (tmp_path / "server" / "used").exists()
    assert (tmp_path / "used").exists(), "the node's own file ran"
    job, sent = make_parts()
    own = {**job, "method": {"name": name}, "job": {**job["job"], "method": {"name": name}}}
    assert "reply" in read_answer(answer(path, {"header": pack_message(add_terms(own)), "state": sent}))
    files[1].write_text(USED.format("there"))
    other = {"header": pack_message(add_terms({**SETUP, "method": {"name": name}}))}
    assert "SHA-256" in read_answer(answer(path, other))["refused"]
    files[1].rename(tmp_path / "server" / "mine.py")
    foreign = add_terms({**SETUP, "method": {"name": f"{tmp_path / 'server' / 'mine.py'}:mine"}})
    assert '"mine.py:mine"' in read_answer(answer(path, {"header": pack_message(foreign)}))["refused"]


def test_a_process_that_finds_other_data_is_described_again(tmp_path: Path) -> None:
    """As after a worker was killed: the server knows the samples of the first one."""
    header, sent = make_parts()
    job, hello = {"header": pack_message(add_terms(header)), "state": sent}, {"header": pack_message(HELLO)}
    rng = np.random.default_rng(0)

    def write(samples: int) -> str:
        x, y = rng.random((samples, 1, 4, 4)).astype(np.float32), np.arange(samples) % 4
        np.savez(tmp_path / "own.npz", x=x, y=y)
        return str(config(tmp_path, data={"path": "own.npz", "standardize": False}, allow=["tiny:tiny"]))

    path = write(80)
    assert read_answer(answer(path, hello))["hello"]["examples"]["train"] == 58
    assert "reply" in read_answer(answer(path, job))
    path = write(80)  # of which the server knows all that it was told
    assert "reply" in read_answer(answer(path, job))
    path = write(120)
    assert read_answer(answer(path, job))["lost"] is True
    assert read_answer(answer(path, hello))["hello"]["examples"]["train"] == 86
    assert "reply" in read_answer(answer(path, job))


NEVER_THE_FIRST_TIME = """
import time
from pathlib import Path

from tiny import tiny_data


def load():
    begun = Path(__file__).with_name("begun")
    if not begun.exists():
        begun.touch()
        time.sleep(600)
    return tiny_data()
"""


def test_a_worker_ends_where_its_answer_is_not_wanted(node_worker: NodeWorker, tmp_path: Path) -> None:
    """As when a run is stopped in the middle of a long job: the next message does not wait for that job."""
    (tmp_path / "slow.py").write_text(NEVER_THE_FIRST_TIME)
    config(tmp_path, data={"name": "slow.py:load"})
    assert node_worker.ask(hello(), lambda: not (tmp_path / "begun").exists()) is None
    answer = node_worker.ask(hello(), is_wanted)
    assert answer is not None and read_answer(answer)["hello"]["name"] == "pi"


def test_a_worker_that_is_killed_is_replaced(node_worker: NodeWorker, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(NEVER_THE_FIRST_TIME)
    config(tmp_path, data={"name": "slow.py:load"})

    def kill() -> bool:
        if (tmp_path / "begun").exists() and node_worker._process is not None:
            node_worker._process.kill()
        return True

    with pytest.raises(WorkerDeath) as death:
        node_worker.ask(hello(), kill)
    assert death.value.code == -signal.SIGKILL
    assert node_worker.ask(hello(), is_wanted) is not None


def test_a_worker_that_is_not_heard_answers_no_later_message(node_worker: NodeWorker, tmp_path: Path) -> None:
    """As when the SuperLink refuses the node in the middle of a job."""
    (tmp_path / "slow.py").write_text(NEVER_THE_FIRST_TIME.replace("600", "2"))
    config(tmp_path, data={"name": "slow.py:load"})

    def refuse() -> bool:
        raise KeyError

    with pytest.raises(KeyError):
        node_worker.ask(hello(), refuse)
    answer = node_worker.ask({"header": bytearray(b"not a header")}, is_wanted)
    assert answer is not None and "refused" in read_answer(answer)


def test_a_killed_worker_whose_process_keeps_the_pipe_is_noticed(node_worker: NodeWorker, tmp_path: Path) -> None:
    child = tmp_path / "child"
    (tmp_path / "slow.py").write_text(
        NEVER_THE_FIRST_TIME.replace("import time", "import os, time").replace(
            "        time",
            "        os.fork() or Path(__file__).with_name('child').write_text(str(os.getpid()))\n        time",
        )
    )
    config(tmp_path, data={"name": "slow.py:load"})

    def kill() -> bool:
        if child.exists() and child.read_text() and node_worker._process is not None:
            os.kill(node_worker._process.pid, signal.SIGKILL)
        return True

    try:
        with pytest.raises(WorkerDeath) as death:
            node_worker.ask(hello(), kill)
        assert death.value.code == -signal.SIGKILL
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)


def test_a_worker_that_the_node_ends_has_no_answer(node_worker: NodeWorker, tmp_path: Path) -> None:
    """As at SIGTERM, in another thread."""
    (tmp_path / "slow.py").write_text(NEVER_THE_FIRST_TIME)
    config(tmp_path, data={"name": "slow.py:load"})
    end = threading.Thread(target=lambda: (waiting.wait_until((tmp_path / "begun").exists), node_worker.end()))
    end.start()
    assert node_worker.ask(hello(), is_wanted) is None
    end.join()


def test_the_last_line_of_a_worker_that_cannot_start_is_the_reason(
    node_worker: NodeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no such wheel')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    with pytest.raises(WorkerDeath) as death:
        node_worker.ask(hello(), is_wanted)
    assert death.value.code == 1 and "no such wheel" in str(death.value)
    assert "no such wheel" in capfd.readouterr().err, "the node's own log has it, too"


NODE = """
import sys
from own_terms import add_terms

from fleetfit.fleet.protocol import pack_message
from fleetfit.fleet.worker import NodeWorker

header = pack_message(add_terms({"what": "hello", "transform": ""}))
NodeWorker(sys.argv[1]).ask({"header": bytearray(header)}, lambda: True)
"""


def test_a_worker_ends_with_its_node_in_the_middle_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{Path.cwd() / 'tests'}")
    (tmp_path / "slow.py").write_text(NEVER_THE_FIRST_TIME)
    path = config(tmp_path, data={"name": "slow.py:load"})
    with waiting.running([sys.executable, "-c", NODE, path]) as node:
        waiting.wait_until((tmp_path / "begun").exists, node)
        [process] = psutil.Process(node.pid).children()
        node.kill()
        process.wait(waiting.LIMIT_S)


# ---- the app, keys and certificates ------------------------------------------------------------------------------


def test_the_apps_folder_is_thin_and_names_this_package(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("rounds = 3\n")
    write_app(tmp_path / "My App", tmp_path / "mine.toml", {"out": "x"})
    table = tomllib.loads((tmp_path / "My App" / "pyproject.toml").read_text())
    app = table["tool"]["flwr"]["app"]
    assert table["project"]["name"] == "my-app" and app["config"]["out"] == "x"
    assert app["components"]["clientapp"] == "fleetfit.fleet.client_app:app"
    assert (tmp_path / "My App" / "run.toml").read_text() == "rounds = 3\n"
    assert not list((tmp_path / "My App").glob("*.py"))
    read_settings(tmp_path / "My App" / "node.example.toml")
    for args, expected in [
        ((tmp_path / "My App",), Expected(path="My App")),
        ((tmp_path / "b", tmp_path / "no.toml"), Expected("no.toml")),
    ]:
        with raises(ConfigError, expected):
            write_app(*args)
    (tmp_path / "bad.toml").write_text("a = ")
    with raises(ConfigError, "bad.toml"):
        write_app(tmp_path / "b", tmp_path / "bad.toml")


def test_an_app_has_the_files_that_its_run_file_names(tmp_path: Path) -> None:
    run = {
        "model": {"name": "net.py:Net"},
        "method": {"hooks": {"weigh": "own.py:weigh"}},
        "fleet": {"levels": "p.toml"},
    }
    for name in ("net.py", "own.py", "p.toml", "other.py"):
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(run))
    write_app(tmp_path / "app", tmp_path / "mine.toml")
    own = {path.name for path in (tmp_path / "app").iterdir()} & {"net.py", "own.py", "p.toml", "other.py"}
    assert own == {"net.py", "own.py", "p.toml"} and (tmp_path / "app" / "net.py").read_text() == "# net.py"
    (tmp_path / "mine.toml").write_text(tomli_w.dumps({"data": {"transform": "public"}}))
    with raises(ConfigError, '"public"', key="data.transform", path="mine.toml"):
        write_app(tmp_path / "second", tmp_path / "mine.toml")


def test_the_example_of_a_run_file_is_valid(tmp_path: Path) -> None:
    from fleetfit.config import load_experiment
    from fleetfit.fleet.server_app import make_rules

    write_app(tmp_path / "app")
    assert make_rules(load_experiment(tmp_path / "app" / "run.toml")).nodes == 2


def test_certificates_name_their_hosts(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["10.0.0.1", "fleet.example.org"], days=10)
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fleet.example.org"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    with raises(ConfigError, path="server.pem"):
        make_certificates(tmp_path, ["10.0.0.1"])
    for name in ("server.pem", "server.key"):
        (tmp_path / name).unlink()
    with raises(ConfigError, key="days", path="ca.crt"):
        make_certificates(tmp_path, ["10.0.0.2"], days=200)
    make_certificates(tmp_path, ["10.0.0.2"], days=90)  # the authority stays: nodes need not be told
    assert x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes()) == authority
    x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes()).verify_directly_issued_by(authority)
    with raises(ConfigError, key="hosts"):
        make_certificates(tmp_path / "other", [])
    for name in ("server.pem", "ca.key"):
        (tmp_path / name).unlink()
    with raises(ConfigError, path="ca.key"):  # it is kept elsewhere
        make_certificates(tmp_path, ["10.0.0.1"])


def test_a_nodes_key_is_an_openssh_pair(tmp_path: Path) -> None:
    make_node_key(tmp_path / "keys" / "pi")
    private = serialization.load_ssh_private_key((tmp_path / "keys" / "pi").read_bytes(), None)
    public = serialization.load_ssh_public_key((tmp_path / "keys" / "pi.pub").read_bytes())
    assert private.public_key() == public
    assert stat.S_IMODE((tmp_path / "keys" / "pi").stat().st_mode) == 0o600
    with raises(ConfigError, path="pi.pub"):
        make_node_key(tmp_path / "keys" / "pi")


# ---- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_job_without_memory_is_tried_again_once(fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier runs left in the process must not count against this one, so it is let go of first."""
    federation, _ = tiny_federation({"name": "fedavg"})
    problem, calls = federation.problem, []

    def scarce(job: Job, device: Device) -> Any:
        calls.append(job)
        if len(calls) <= fails:
            raise MemoryError
        return run_job(job, device)

    monkeypatch.setattr("fleetfit.fleet.node.run_job", scarce)
    sub = federation.levels[0].submodel
    state = federation.method.dispatch(federation, start(federation), 0, sub)
    job = Job("train", 1, 2, 0, 0, sub, state, {"name": "fedavg"}, 1, 0, local=plain(0.1, 1, 8))
    path = str(config(tmp_path, allow=["tiny:tiny"], memory_limit="2 GB"))
    header = {**SETUP, "what": "job", "problem": {**SETUP["problem"], "exits": list(problem.exits)}}
    bare = dump_job(dataclasses.replace(job, state={}), problem.layout)
    payload = read_answer(
        answer(
            path,
            {
                "header": pack_message(add_terms({**header, "job": bare})),
                "state": pack(dump_state(state, problem.layout, sub)),
            },
        )
    )
    assert len(calls) == min(fails, 1) + 1, payload
    assert ("memory" in str(payload["reply"].get("reason"))) == (fails == 2), payload


def test_the_memory_limit_counts_written_memory() -> None:
    """Kernels that earlier jobs compiled take much address space and little memory; what is in memory counts."""

    def fits(size_mb: int) -> bool:
        try:
            with limit.hold(), mmap.mmap(-1, size_mb << 20, mmap.MAP_PRIVATE):
                return True
        except OSError:
            return False

    limit = MemoryLimit(100 << 20)
    assert fits(80) and not fits(120)
    with mmap.mmap(-1, 200 << 20, mmap.MAP_PRIVATE) as block:
        assert fits(80) and not fits(120)
        block[: 60 << 20] = bytes(60 << 20)
        assert fits(20) and not fits(80)
    assert fits(80)
