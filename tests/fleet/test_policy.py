"""What a node's owner allows, and the node's log: each promise, and ways around it."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from own_terms import add_terms
from support import raises, run_verb
from tiny import plain, tiny_federation

from fleetfit.errors import ConfigError, RunError
from fleetfit.files import append_line

pytest.importorskip("flwr", reason="the extra flower is not installed")

from local_fleet import Lab, described

from fleetfit.config import load_experiment
from fleetfit.config.assemble.local import RECIPE
from fleetfit.core import Evaluation, Job, Local
from fleetfit.core.local import LocalSection
from fleetfit.fleet.certificates import replace_members_authority
from fleetfit.fleet.node import answer, get_node
from fleetfit.fleet.node_log import HEADS, NO_LINE, NodeLog, read_heads, read_log
from fleetfit.fleet.policy import Approvals, _is_within
from fleetfit.fleet.protocol import compute_digest, pack_message, read_answer
from fleetfit.fleet.secure_aggregation import read_member
from fleetfit.fleet.server_app import adapt_experiment
from fleetfit.fleet.settings import read_settings
from fleetfit.fleet.terms import compute_fingerprint, make_terms
from fleetfit.messages import dump_job, dump_state, pack
from fleetfit.privacy import compute_epsilon
from fleetfit.rounds import start

DATA = """
from pathlib import Path

from tiny import tiny_data


def load():
    Path(__file__).with_name("was_read").touch()
    return tiny_data()
"""
HELLO = add_terms({"what": "hello", "transform": ""})


def configure(folder: Path, **settings: Any) -> str:
    (folder / "own_data.py").write_text(DATA)
    table = {"name": "pi", "budget": 0.5, "data": {"name": "own_data.py:load"}, "allow": ["tiny:tiny"], **settings}
    (folder / "node.toml").write_text(tomli_w.dumps(table))
    get_node.cache_clear()
    return str(folder / "node.toml")


def was_read(folder: Path) -> bool:
    return (folder / "was_read").exists()


def make_job(**changes: Any) -> tuple[dict[str, Any], bytes]:
    """Return the header of a good training job, without terms, and its packed state."""
    federation, _ = tiny_federation({"name": "fedavg"})
    problem, sub = federation.problem, federation.levels[0].submodel
    state = federation.method.dispatch(federation, start(federation), 0, sub)
    job = Job("train", 1, 5, 0, 0, sub, state, {"name": "fedavg"}, 1, 0, local=plain(0.1, 1, 8))
    job = dataclasses.replace(job, **changes)
    header = {
        "what": "job", "run": "ab" * 8, "base": "", "cost": "parameters", "transform": "",
        "method": {"name": "fedavg"},
        "problem": {"model": {"name": "tiny:tiny"}, "given": {"classes": 4, "input_shape": [1, 4, 4]},
                    "task": "classification", "exits": list(problem.exits), "layout": problem.layout.to_payload()},
        "job": dump_job(dataclasses.replace(job, state={}), problem.layout),
    }  # fmt: skip
    return header, pack(dump_state(state, problem.layout, sub))


def send(path: str, header: Mapping[str, Any], state: bytes = b"") -> dict[str, Any]:
    return read_answer(answer(path, {"header": pack_message(header)} | ({"state": state} if state else {})))


# ---- terms: a run asks for nothing that an owner could not read ----------------------------------------------------


def test_a_message_that_keeps_to_its_terms_is_answered(tmp_path: Path) -> None:
    header, state = make_job()
    assert "reply" in send(configure(tmp_path), add_terms(header), state)


def without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


OTHER_TERMS: dict[str, dict[str, Any]] = {
    "model": {"model": {"name": "cnn"}}, "peft": {"peft": {"name": "lora"}}, "method": {"method": {"name": "scalefl"}},
    "cost": {"cost": "multiply_adds"}, "transform": {"transform": "ab" * 32}, "rounds": {"rounds": 1},
    "local": {"local": without_none(plain(0.1, 2, 8).dump())}, "secure": {"secure": {"bits": 20}},
    "local, its rate": {"local": without_none(plain(0.2, 1, 8).dump())},
    "local, its schedule": {"local": {**without_none(plain(0.1, 1, 8).dump()),
                                      "schedule": {"kind": "cosine", "minimum": 0.0}}},
}  # fmt: skip


@pytest.mark.parametrize("key", OTHER_TERMS)
def test_a_job_that_its_terms_do_not_have_is_refused(key: str, tmp_path: Path) -> None:
    """The server shows harmless terms to the owner, and asks for something else."""
    header, state = make_job()
    table = send(configure(tmp_path), add_terms(header, **OTHER_TERMS[key]), state)
    assert f'"{key.split(",")[0]}"' in table["refused"] and "reply" not in table and not was_read(tmp_path)


PRIVACY_TERMS = {"privacy": {"clipping_norm": 1.0}}


@pytest.mark.parametrize(
    ("changes", "terms", "key"),
    [
        ({"kind": "evaluate", "evaluation": Evaluation(metrics=("tiny:tiny",))}, {}, "metrics"),
        ({"kind": "evaluate", "evaluation": Evaluation(personal=True)}, {}, "personal"),
        ({"kind": "evaluate", "evaluation": Evaluation(split="train")}, {}, "split"),
        ({"kind": "evaluate", "evaluation": Evaluation(samples=1)}, {}, "samples"),
        ({"kind": "statistics", "evaluation": Evaluation(split="train", samples=2)}, {}, "samples"),
        ({"kind": "statistics"}, {"secure": {"bits": 20}}, "kind"),
        *[({"kind": kind}, PRIVACY_TERMS, "kind") for kind in ("statistics", "evaluate", "labels", "format")],
        ({"kind": "labels"}, {}, "kind"),
        ({"method": {"name": "scalefl"}}, {}, "method"),
        ({"rounds": 10**9}, {}, "rounds"),
        ({"round": True}, {}, "rounds"),
        ({"round": 7}, {}, "rounds"),
    ],
)
def test_a_job_asks_for_no_more_than_its_terms(
    changes: dict[str, Any], terms: dict[str, Any], key: str, tmp_path: Path
) -> None:
    header, state = make_job(**changes)
    bounds = {"metrics": [], "personal": False, "split": "test", "samples": 10, "asks_frequencies": False, "rounds": 6}
    table = send(configure(tmp_path, reports_labels=True), add_terms(header, **{**bounds, **terms}), state)
    assert f'"{key}"' in table["refused"] and not was_read(tmp_path)


def test_data_say_no_more_to_a_model_than_their_shape(tmp_path: Path) -> None:
    header, state = make_job()
    header["problem"]["given"]["dropout"] = 0.9  # a key of the model, past the terms
    table = send(configure(tmp_path), add_terms(header), state)
    assert '"model"' in table["refused"] and not was_read(tmp_path)


def test_a_header_has_no_more_entries_than_its_kind(tmp_path: Path) -> None:
    header, state = make_job()
    for message in ({**HELLO, "job": header["job"]}, {**add_terms(header), "phase": "keys"}):
        assert "entry" in send(configure(tmp_path), message, state)["refused"]


def test_defaults_for_a_task_are_no_other_method(tmp_path: Path) -> None:
    """Where the run file sets beta, the default for a regression is not taken; where it does not, it is."""
    header, state = make_job()
    spec = {"name": "fleetfit", "tau": 1.0, "beta": 0.5, "temperature": 3.0, "momentum": 0.5}
    other = {**spec, "beta": 0.0}
    header |= {"method": other, "job": {**header["job"], "method": other}}
    for task, open_keys, is_refused in (
        ("regression", [], True), ("classification", ["method.beta"], True), ("regression", ["method.beta"], False),
    ):  # fmt: skip
        header["problem"]["task"] = task
        table = send(configure(tmp_path), add_terms(header, method=spec, open=open_keys), state)
        assert ('"method"' in table.get("refused", "")) == is_refused, (task, open_keys, table)


def test_an_open_optimizer_is_one_that_fleetfit_chooses(tmp_path: Path) -> None:
    header, state = make_job(local=Local.load({"optimizer": "adamw", "lr": 0.005, "epochs": 1, "batch_size": 8}))
    terms = {"local": without_none(LocalSection(epochs=1, batch_size=8).model_dump())}
    open_keys = [f"local.{key}" for key in RECIPE]
    assert "reply" in send(configure(tmp_path), add_terms(header, **terms, open=open_keys), state)
    assert '"local"' in send(configure(tmp_path), add_terms(header, **terms), state)["refused"]
    header["job"]["local"]["lr"] = 0.5
    assert '"local"' in send(configure(tmp_path), add_terms(header, **terms, open=open_keys), state)["refused"]


@pytest.mark.parametrize("schedule", [{"kind": "exponential", "factor": 1.05}, {"kind": "cosine", "minimum": 0.01}])
def test_each_round_has_the_rate_of_its_schedule(schedule: dict[str, Any], tmp_path: Path) -> None:
    local = {**without_none(plain(0.1, 1, 8).dump()), "schedule": schedule}
    path = configure(tmp_path)
    for round in range(3):
        header, state = make_job(round=round, local=Local.load(local).at_round(5, round))
        assert "reply" in send(path, add_terms(header, local=local, rounds=5), state)
        header["job"]["round"] = round + 1
        assert '"local"' in send(path, add_terms(header, local=local, rounds=5), state)["refused"]


def test_a_hello_is_answered_by_its_terms(tmp_path: Path) -> None:
    path = configure(tmp_path, reports_labels=True)
    short = send(path, add_terms({"what": "hello", "transform": ""}, asks_budget=False, asks_labels=False))["hello"]
    assert not short.keys() & {"budget", "labels"}
    assert send(path, HELLO)["hello"].keys() >= {"budget", "labels"}


def test_each_entry_of_a_run_file_that_a_node_sees_is_in_its_fingerprint() -> None:
    def fingerprint(*overrides: str) -> str:
        return compute_fingerprint(make_terms(adapt_experiment(load_experiment(None, overrides)), ""))

    changes = (
        "rounds=7", "model.norm=group", "method.beta=0.1", "local.epochs=2", "local.lr=0.2", "fleet.cost=multiply_adds",
        "local.schedule.kind=constant", "cohort.deadline_s=9", "evaluate.split=validation", "evaluate.samples=5",
        "fleet.reports_labels=true", "evaluate.personal=true", "method.options.fedprox.mu=0.1",
        "secure.min_clients=4", "privacy.clipping_norm=0.3", "peft.name=lora", "name=diabetes",
    )  # fmt: skip
    fingerprints = {fingerprint(), *(fingerprint(change) for change in changes)}
    assert len(fingerprints) == len(changes) + 1
    of_the_server = ("engine.wait_s=5", "checkpoint.keep=5", "cohort.fraction=0.5", "seed=4", "fleet.tolerance=0.3")
    for change in of_the_server:
        assert fingerprint(change) == fingerprint()


# ---- policy --------------------------------------------------------------------------------------------------------

soon = datetime.now() + timedelta(hours=2)
LATER = f"{soon:%H:%M}-{soon + timedelta(hours=1):%H:%M}"
REFUSING: dict[str, dict[str, Any]] = {
    "methods": {"methods": ["scalefl", "heterofl"]},
    "models": {"models": ["cnn"]},
    "hours": {"hours": LATER},
    "bytes_a_day": {"bytes_a_day": "10 B"},
    "approval": {"approval": True},
    "privacy": {"privacy": {"epsilon": 5.0, "delta": 1e-3, "clipping_norm": 1.0}},
}


@pytest.mark.parametrize("key", REFUSING)
@pytest.mark.parametrize("what", ["hello", "setup", "job"])
def test_what_the_owner_does_not_allow_is_refused_before_data_are_read(what: str, key: str, tmp_path: Path) -> None:
    header, state = make_job()
    fields = {key: value for key, value in header.items() if what == "job" or key != "job"}
    fields = {"transform": ""} if what == "hello" else fields
    message = add_terms({**fields, "what": what}, model={"name": "tiny:tiny"})
    path = configure(tmp_path, policy=REFUSING[key])
    refusal = send(path, message, state)
    assert "owner" in refusal["refused"] and ("again" in refusal) == (key in ("hours", "bytes_a_day"))
    assert not was_read(tmp_path)
    assert "refused" not in send(configure(tmp_path), message, state) and was_read(tmp_path)


def test_names_that_the_owner_allows_are_answered(tmp_path: Path) -> None:
    header, state = make_job()
    path = configure(tmp_path, policy={"methods": ["fedavg"], "models": ["tiny:tiny"], "bytes_a_day": "1 GB",
                                       "jobs_a_day": 9})  # fmt: skip
    assert "reply" in send(path, add_terms(header), state)


OWN = "plugin_method:counting"


@pytest.mark.parametrize(
    "terms",
    [
        {"model": {"name": OWN}}, {"peft": {"name": OWN}}, {"metrics": [OWN]}, {"method": {"name": OWN}},
        {"method": {"name": "fedavg", "options": {OWN: {}}}}, {"method": {"name": "fedavg", "hooks": {"weigh": OWN}}},
    ],
)  # fmt: skip
def test_code_whose_hash_the_server_leaves_out_is_refused(terms: dict[str, Any], tmp_path: Path) -> None:
    path, hello = configure(tmp_path, allow=[OWN]), {"what": "hello", "transform": ""}
    for code in ({}, {OWN: ""}, {OWN: "ab" * 32}):
        assert OWN in send(path, add_terms(hello, **terms, code=code))["refused"]
    assert not was_read(tmp_path)
    assert "hello" in send(path, add_terms(hello, **terms))


def test_jobs_of_a_day_are_counted_over_restarts(tmp_path: Path) -> None:
    header, state = make_job()
    path = configure(tmp_path, policy={"jobs_a_day": 2})
    assert "reply" in send(path, add_terms(header), state)
    get_node.cache_clear()
    wrong = {**header, "job": {**header["job"], "submodel": {}}}
    assert "refused" in send(path, add_terms(wrong), state), "one that fails counts, too"
    get_node.cache_clear()
    assert "2 jobs a day" in send(path, add_terms(header), state)["refused"]
    assert "hello" in send(path, HELLO), "a question is no job"


def test_bytes_of_a_day_are_counted_both_ways(tmp_path: Path) -> None:
    path = configure(tmp_path, policy={"bytes_a_day": "100 kB"})
    tables = [send(path, HELLO) for _ in range(200)]
    answered = [table for table in tables if "hello" in table]
    assert 0 < len(answered) < len(tables) and "refused" in tables[-1]
    entries, _ = read_log(tmp_path / "fleetfit-node" / "pi" / "log.jsonl")
    assert sum(entry["bytes"] for entry in entries if entry["event"] != "refused") <= 100_000 + 1000


def test_hours_may_pass_midnight() -> None:
    assert _is_within(time(22), time(6), time(23)) and _is_within(time(22), time(6), time(5, 59))
    assert not _is_within(time(22), time(6), time(6)) and not _is_within(time(22), time(6), time(21, 59))
    assert _is_within(time(8), time(17), time(8)) and not _is_within(time(8), time(17), time(17))


@pytest.mark.parametrize("hours", ["8-17-20", "25:00-06:00", "10:00-10:00", "10:00", ""])
def test_wrong_hours_are_a_sentence(hours: str, tmp_path: Path) -> None:
    with raises(ConfigError, "22:00-06:00", key="policy.hours"):
        read_settings(configure(tmp_path, policy={"hours": hours}))


def test_a_wrong_amount_is_a_sentence(tmp_path: Path) -> None:
    with raises(ConfigError, "2 GB", key="policy.bytes_a_day"):
        read_settings(configure(tmp_path, policy={"bytes_a_day": "two"}))


def test_a_member_takes_part_in_secure_runs_only(tmp_path: Path) -> None:
    run_verb("flower", "certificates", tmp_path / "ca", "--host", "localhost", code=0)
    run_verb("flower", "member", tmp_path / "pi.member", "--authority", tmp_path / "ca", code=0)
    path = configure(tmp_path, secure={"member": "pi.member"})
    assert "[secure]" in send(path, HELLO)["refused"] and not was_read(tmp_path)
    assert "hello" in send(path, add_terms({"what": "hello", "transform": ""}, secure={"bits": 20}))


# ---- privacy -------------------------------------------------------------------------------------------------------

LIMITS = {"epsilon": 5.0, "delta": 1e-3, "clipping_norm": 1.0}
NOISE = {"noise_multiplier": 2.0, "rate": 0.5}
PRIVATE = {"clipping_norm": 0.5, "noise_multiplier": 2.0}


def private(round: int = 0, noise: Mapping[str, Any] = NOISE, **terms: Any) -> tuple[dict[str, Any], bytes]:
    header, state = make_job(round=round)
    return add_terms({**header, "privacy": dict(noise)}, privacy={**PRIVATE, **terms}), state


@pytest.fixture
def careful(tmp_path: Path) -> str:
    pytest.importorskip("opacus", reason="the accountant is an extra: fleetfit[privacy]")
    return configure(tmp_path, policy={"privacy": LIMITS})


def test_a_private_run_within_the_bounds_is_answered(careful: str, tmp_path: Path) -> None:
    assert "reply" in send(careful, *private())
    entries, _ = read_log(tmp_path / "fleetfit-node" / "pi" / "log.jsonl")
    assert entries[-1]["epsilon"] == pytest.approx(compute_epsilon(2.0, 0.5, 1, 1e-3), abs=1e-3)


@pytest.mark.parametrize(
    ("noise", "terms"),
    [
        (NOISE, {"clipping_norm": 1.5}), (NOISE, {"clipping_norm": None}), (NOISE, {"clipping_norm": "0.5"}),
        ({}, {}), ({"noise_multiplier": 2.0}, {}), ({**NOISE, "rate": 0.0}, {}), ({**NOISE, "rate": True}, {}),
        ({**NOISE, "noise_multiplier": 9.0}, {}),  # not that of the terms
        ({**NOISE, "noise_multiplier": 0.1}, {"noise_multiplier": 0.1}),  # epsilon is spent at once
    ],
)  # fmt: skip
def test_other_private_runs_are_refused(
    noise: dict[str, Any], terms: dict[str, Any], careful: str, tmp_path: Path
) -> None:
    assert "refused" in send(careful, *private(0, noise, **terms)) and not was_read(tmp_path)


@pytest.mark.parametrize("runs", [1, 100])
def test_the_budget_ends_also_if_the_server_counts_no_rounds(runs: int, careful: str) -> None:
    """It says round 0 each time, also of another run with the same terms; the node counts its own jobs."""
    bound = next(n for n in range(1, 100) if compute_epsilon(2.0, 0.5, n, 1e-3) > LIMITS["epsilon"])
    answered = 0
    header, state = private()
    while "reply" in send(careful, {**header, "run": f"{answered % runs:064x}"}, state):
        answered += 1
        get_node.cache_clear()
    assert answered == bound - 1


# ---- approval ------------------------------------------------------------------------------------------------------


def test_a_run_waits_until_its_owner_approves(tmp_path: Path) -> None:
    path = configure(tmp_path, policy={"approval": True})
    fingerprint = compute_fingerprint(HELLO["terms"])
    assert fingerprint in send(path, HELLO)["refused"]
    listed = run_verb("flower", "approve", path, code=0).out
    assert "waiting" in listed and fingerprint[:12] in listed
    shown = run_verb("flower", "approve", path, fingerprint[:10], code=0).out
    assert "fedavg" in shown and fingerprint in shown
    run_verb("flower", "approve", path, fingerprint[:10], "--yes", code=2)
    assert "refused" in send(path, HELLO), "shown is not approved"
    run_verb("flower", "approve", path, fingerprint, "--yes", code=0)
    assert "hello" in send(path, HELLO)
    assert "approved" in run_verb("flower", "approve", path, code=0).out
    run_verb("flower", "approve", path, fingerprint[:10], "--withdraw", code=0)
    assert "refused" in send(path, HELLO)


@pytest.mark.parametrize("key", HELLO["terms"])
def test_an_approved_run_with_other_terms_is_another_run(key: str, tmp_path: Path) -> None:
    path = configure(tmp_path, policy={"approval": True})
    send(path, HELLO)
    Approvals(tmp_path / "fleetfit-node" / "pi").approve(compute_fingerprint(HELLO["terms"]), HELLO["terms"])
    other: dict[type, Callable[[Any], Any]] = {
        str: lambda value: value + "x", int: lambda value: value + 1, bool: lambda value: not value,
        dict: lambda value: {**value, "more": 1}, list: lambda value: [*value, "x"],
    }  # fmt: skip
    value = HELLO["terms"][key]
    terms = {**HELLO["terms"], key: other[type(value)](value)}
    assert "refused" in send(path, {**HELLO, "terms": terms, "transform": terms["transform"]})


def test_waiting_terms_that_were_changed_are_not_approved(tmp_path: Path) -> None:
    """What the owner reads is what the fingerprint is of."""
    path = configure(tmp_path, policy={"approval": True})
    send(path, HELLO)
    waiting = tmp_path / "fleetfit-node" / "pi" / "waiting.json"
    waiting.write_text(waiting.read_text().replace("fedavg", "fedprox"))
    fingerprint = compute_fingerprint(HELLO["terms"])
    assert run_verb("flower", "approve", path, fingerprint, "--yes", code=2).err


@pytest.mark.parametrize("start", ["", "abc", "0123456789"])
def test_an_unknown_fingerprint_is_a_sentence(start: str, tmp_path: Path) -> None:
    configure(tmp_path, policy={"approval": True})
    with raises(ConfigError, key="fingerprint"):
        Approvals(tmp_path / "fleetfit-node" / "pi").find_waiting(start)


def test_a_flood_of_runs_does_not_fill_the_disk(tmp_path: Path) -> None:
    path = configure(tmp_path, policy={"approval": True})
    for number in range(30):
        send(path, add_terms({"what": "hello", "transform": ""}, rounds=number + 1))
    waiting = Approvals(tmp_path / "fleetfit-node" / "pi").read_waiting()
    assert len(waiting) == 20 and [terms["rounds"] for terms in waiting.values()][-1] == 30
    assert "characters" in send(path, add_terms({"what": "hello", "transform": ""}, name="x" * 70_000))["refused"]


# ---- the log -------------------------------------------------------------------------------------------------------


def log_of(folder: Path) -> Path:
    return folder / "fleetfit-node" / "pi" / "log.jsonl"


def fill_log(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the configuration of a node, and the heads that came with its answers."""
    header, state = make_job()
    path = configure(folder, policy={"methods": ["fedavg"]})
    heads = [send(path, HELLO)["log"], send(path, add_terms(header), state)["log"]]
    other = add_terms({"what": "hello", "transform": ""}, method={"name": "scalefl"})
    return path, [*heads, send(path, other)["log"], send(path, HELLO)["log"]]


def test_the_log_has_requests_decisions_and_what_left(tmp_path: Path) -> None:
    _, heads = fill_log(tmp_path)
    entries, hashes = read_log(log_of(tmp_path))
    events = [(entry["event"], entry["what"]) for entry in entries]
    answered = [("allowed", "hello"), ("left", "hello")]
    assert events == [*answered, ("allowed", "job"), ("left", "job"), ("refused", "hello"), *answered]
    assert [one["entries"] for one in heads] == [2, 4, 5, 7] and heads[-1]["hash"] == hashes[-1]
    assert entries[3]["round"] == 1 and len(entries[3]["sha256"]) == 64 and entries[3]["bytes"] > 1000
    lines = log_of(tmp_path).read_bytes().splitlines()  # by hand
    assert [json.loads(line)["before"] for line in lines] == [NO_LINE, *map(compute_digest, lines[:-1])]


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Change lines of a log, and make the chain anew."""
    entries, before = change([json.loads(line) for line in path.read_bytes().splitlines()]), NO_LINE
    lines = []
    for number, entry in enumerate(entries, 1):
        lines.append(json.dumps({**entry, "number": number, "before": before}).encode())
        before = compute_digest(lines[-1])
    path.write_bytes(b"\n".join(lines) + b"\n")


def shrink(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**entry, "bytes": 1} if number == 3 else entry for number, entry in enumerate(entries)]


CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a changed line": lambda lines: [lines[0], lines[1].replace(b'"bytes": ', b'"bytes": 1'), *lines[2:]],
    "a removed line": lambda lines: [*lines[:2], *lines[3:]],
    "lines in another order": lambda lines: [lines[1], lines[0], *lines[2:]],
    "a line twice": lambda lines: [lines[0], lines[0], *lines[1:]],
    "the first line is gone": lambda lines: lines[1:],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_log_is_found(change: str, tmp_path: Path) -> None:
    path, _ = fill_log(tmp_path)
    assert run_verb("flower", "log", path, code=0).out.count("\n") >= 8
    lines = log_of(tmp_path).read_bytes().splitlines(keepends=True)
    log_of(tmp_path).write_bytes(b"".join(CHANGES[change](lines)))
    with raises(RunError, "line"):
        read_log(log_of(tmp_path))
    assert "line" in run_verb("flower", "log", path, code=2).err


REWRITTEN: dict[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "what left was more": shrink, "the last lines are gone": lambda entries: entries[:-2],
    "a line is gone": lambda entries: [*entries[:2], *entries[3:]],
    "a line is new": lambda entries: [*entries[:4], {**entries[0], "event": "allowed"}, *entries[4:]],
}  # fmt: skip


@pytest.mark.parametrize("change", REWRITTEN)
def test_a_log_with_a_new_chain_is_found_by_the_servers_heads(change: str, tmp_path: Path) -> None:
    """The node's side rewrites its log alone: every hash is computed anew."""
    path, heads = fill_log(tmp_path)
    stored = tmp_path / HEADS
    other = {"name": "other", "entries": 1, "hash": ""}
    stored.write_text(
        "".join(json.dumps({"heads": {"1": {"name": "pi", **head}, "2": other}}) + "\n" for head in heads)
    )
    run_verb("flower", "log", path, "--heads", stored, code=0)
    rewrite(log_of(tmp_path), REWRITTEN[change])
    read_log(log_of(tmp_path))
    assert "server" in run_verb("flower", "log", path, "--heads", stored, code=2).err


def test_a_line_of_heads_that_a_loss_of_power_cut_off_costs_no_other(tmp_path: Path) -> None:
    heads = fill_log(tmp_path)[1]
    stored = tmp_path / HEADS
    stored.write_bytes(b'{"heads": {"1": {"name": "pi", "entr')
    append_line(stored, json.dumps({"heads": {"1": {"name": "pi", **heads[-1]}}}).encode() + b"\n")
    assert len(stored.read_text().splitlines()) == 2
    assert read_heads(stored, "pi") == [[{"name": "pi", **heads[-1]}]]


def test_heads_that_the_server_changes_do_not_agree(tmp_path: Path) -> None:
    path, heads = fill_log(tmp_path)
    stored = tmp_path / HEADS
    stored.write_text(json.dumps({"heads": {"1": {"name": "pi", **heads[1], "hash": "ab" * 32}}}) + "\n")
    assert "line 4" in run_verb("flower", "log", path, "--heads", stored, code=2).err
    stored.write_text(json.dumps({"heads": {"1": {"name": "other", **heads[1]}}}) + "\n")
    assert run_verb("flower", "log", path, "--heads", stored, code=2).err


def test_a_line_that_a_loss_of_power_cut_off_goes(tmp_path: Path) -> None:
    path, heads = fill_log(tmp_path)
    with log_of(tmp_path).open("ab") as file:
        file.write(b'{"number": 8, "time')
    get_node.cache_clear()
    assert send(path, HELLO)["log"]["entries"] == heads[-1]["entries"] + 2
    assert len(read_log(log_of(tmp_path))[0]) == 9


def test_a_line_that_a_full_disk_cut_off_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, heads = fill_log(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert "refused" in send(path, HELLO)
    assert send(path, HELLO)["log"]["entries"] == heads[-1]["entries"] + 3, "the line that was written stands"
    read_log(log_of(tmp_path))


def test_two_processes_of_a_node_write_one_chain(tmp_path: Path) -> None:
    first, second = NodeLog(tmp_path), NodeLog(tmp_path)
    for log in (first, second, second, first, second):
        log.add("allowed", what="job", kind="train", bytes=10)
    entries, hashes = read_log(tmp_path / "log.jsonl")
    assert len(entries) == 5 and second.head == {"entries": 5, "hash": hashes[-1]}
    assert second.count_today() == (5, 50)


def test_a_log_that_was_moved_away_begins_anew(tmp_path: Path) -> None:
    path, _ = fill_log(tmp_path)
    log_of(tmp_path).rename(tmp_path / "old.jsonl")
    assert send(path, HELLO)["log"]["entries"] == 2, "while the node runs"
    assert len(read_log(log_of(tmp_path))[0]) == 2 and len(read_log(tmp_path / "old.jsonl")[0]) == 7


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path, _ = fill_log(tmp_path)
    with log_of(tmp_path).open("ab") as file:
        file.write(b'{"number": 8, "time')
    run_verb("flower", "log", path, code=0)


def test_no_line_of_the_log_is_as_long_as_the_server_likes(tmp_path: Path) -> None:
    header, state = make_job(kind="x" * 100_000)
    assert "refused" in send(configure(tmp_path), add_terms(header), state)
    assert log_of(tmp_path).stat().st_size < 3000


def test_refused_messages_cost_nothing_of_the_day(tmp_path: Path) -> None:
    path = configure(tmp_path, policy={"bytes_a_day": "10 kB", "methods": ["fedavg"]})
    other = add_terms({"what": "hello", "transform": ""}, method={"name": "scalefl"}, name="x" * 5000)
    for _ in range(5):
        assert "refused" in send(path, other)
    assert "hello" in send(path, HELLO)


def test_nothing_leaves_a_node_that_cannot_write_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, state = make_job()
    path = configure(tmp_path)
    send(path, HELLO)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert send(path, add_terms(header), state).keys() == {"protocol", "refused"}


# ---- a run ---------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_without_the_node_whose_owner_refuses(tmp_path: Path) -> None:
    lab = Lab(tmp_path, described({"name": "scalefl"}), [0.5, 0.6, 1.0, 0.5, 1.0])
    lab.config(1, policy={"methods": ["fedavg"]})
    lab.config(3, policy={"methods": ["scalefl"]})
    run = lab.serve(nodes=4)
    assert run.finished
    for client, has_part in ((0, True), (1, False), (3, True)):
        folder = tmp_path / f"node-{client}" / "fleetfit-node" / f"node-{client}"
        entries, hashes = read_log(folder / "log.jsonl")
        assert any(entry["event"] == "left" and entry.get("kind") == "train" for entry in entries) == has_part
        if has_part:
            [heads] = read_heads(run.folder / HEADS, f"node-{client}")
            assert heads[-1] == {"name": f"node-{client}", "entries": len(entries), "hash": hashes[-1]}
    fingerprint = compute_fingerprint(json.loads((run.folder / "nodes.json").read_text())["terms"])
    assert fingerprint in lab.output and all(entry["fingerprint"] == fingerprint for entry in entries)


def test_a_run_takes_the_nodes_that_it_names(tmp_path: Path) -> None:
    lab = Lab(tmp_path, described({"name": "scalefl"}, cohort={"fraction": 1.0}), [0.5, 0.6, 1.0, 0.5, 1.0])
    lab.config(4, name="node-2")  # it claims another one's name
    run = lab.serve(nodes=["node-0", "node-2"])
    members = json.loads((run.folder / "nodes.json").read_text())["members"]
    assert [member["name"] for member in members] == ["node-0", "node-2"]
    assert run.finished


def test_a_revoked_authority_is_set_aside(tmp_path: Path) -> None:
    first, second = tmp_path / "a.member", tmp_path / "b.member"
    run_verb("flower", "member", first, "--authority", tmp_path, code=0)
    replace_members_authority(tmp_path)
    run_verb("flower", "member", second, "--authority", tmp_path, code=0)
    authorities = [read_member(path)[1] for path in (first, second)]
    assert authorities[0] != authorities[1] and (tmp_path / "members.key.old").exists()
    with raises(ConfigError, "members.key"):
        replace_members_authority(tmp_path / "nowhere")


def test_nothing_is_revoked_where_the_authority_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[object] = []
    monkeypatch.setattr("fleetfit.cli.fleet.subprocess.call", lambda command: commands.append(command) or 0)
    run_verb("flower", "revoke", 7, "--authority", tmp_path, code=2)
    assert commands == []
    run_verb("flower", "member", tmp_path / "a.member", "--authority", tmp_path, code=0)
    run_verb("flower", "revoke", 7, "--authority", tmp_path, code=0)
    assert len(commands) == 1 and (tmp_path / "members.key.old").exists()


def test_a_run_has_its_fingerprint_also_when_it_is_resumed(tmp_path: Path) -> None:
    lab = Lab(tmp_path, described({"name": "scalefl"}), [0.5, 0.6, 1.0, 0.5, 1.0], {"policy": {"approval": True}})
    terms = make_terms(adapt_experiment(load_experiment(lab_file(lab))), "")
    for config in lab.configs:
        folder = Path(read_settings(config).folder)
        with raises(RunError, key="policy.approval"):
            Approvals(folder).check(terms)
        Approvals(folder).approve(compute_fingerprint(terms), terms)
    run = lab.serve()
    assert run.finished
    (run.folder / "summary.json").unlink()
    checkpoints = sorted((run.folder / "checkpoints").iterdir())
    checkpoints[-1].unlink()
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert lab.serve(resume=True).finished


def test_a_run_that_goes_on_with_another_file_has_other_terms(tmp_path: Path) -> None:
    lab = Lab(tmp_path, described({"name": "scalefl"}, rounds=2), [0.5, 0.6, 1.0, 0.5, 1.0])
    run = lab.serve()
    config = run.folder / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3", 1).replace("epochs = 1", "epochs = 2", 1))
    again = lab.serve(resume=True)
    assert again.finished and len(again.metrics) == 3 and not again.metrics[-1]["failures"]
    log = tmp_path / "node-0" / "fleetfit-node" / "node-0" / "log.jsonl"
    assert len({entry["fingerprint"] for entry in read_log(log)[0]}) == 2


def lab_file(lab: Lab) -> Path:
    path = lab.folder / "run.toml"
    path.write_text(tomli_w.dumps({**lab.table, "engine": {"name": "flower", "nodes": 5}}))
    return path
