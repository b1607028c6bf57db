"""Engine flower, its own code in one process: same bits as `local`; late, lost, false and missing replies."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import some_quick
from support import Expected, raises, run_verb
from support.bits import have_same_state
from tiny import spec_of, tiny_data

import fleetfit as ff
from experiments.figures import early_exits
from fleetfit import names
from fleetfit.config import load_experiment
from fleetfit.data.partition import partition
from fleetfit.errors import ConfigError, FleetFitError, RunError
from fleetfit.messages import LIGHTER

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from local_fleet import ALLOW, CLIENTS, Lab, described
from local_grid import LocalGrid

from fleetfit.engines.flower import flower
from fleetfit.fleet import PROTOCOL, node as nodes_side, transport
from fleetfit.fleet.server_app import ServerAppConfig, _FleetRun, adapt_experiment, list_changes, make_rules, serve
from fleetfit.fleet.transport import Transport
from fleetfit.hooks import build
from fleetfit.messages import pack, unpack
from fleetfit.privacy import Privacy
from fleetfit.secure import Quantizer


@pytest.fixture(autouse=True)
def fresh_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_side.get_node.cache_clear()


def simulated(folder: Path, table: dict[str, Any]) -> ff.Run:
    return ff.run(table, out=folder / "local")


def lab_of(folder: Path, table: dict[str, Any], **node: Any) -> tuple[Lab, ff.Run]:
    base = simulated(folder, table)
    return Lab(folder, table, [float(b) for b in base.assembly.fleet.budgets], node), base


# ---- the same bits -----------------------------------------------------------------------------------------------

SPECS: list[dict[str, Any]] = [
    *(spec_of(name) for name in names.list_names("methods")),
    {"name": "plugin_method:counting", "pull": 0.1},
    {"name": "scalefl", "options": {"feddyn": {}}},
    {"name": "heterofl", "hooks": {"choose_channels": "random"}},
    {"name": "scalefl", "options": {"scaffold": {}}},
    {"name": "fedrolex", "options": {"fednova": {}}},
    {"name": "heterofl", "options": {"feddistill": {}}},
]


QUICK = [*map(spec_of, ("scalefl", "feddf")), *SPECS[-6:]]


@pytest.mark.parametrize(
    "spec", some_quick(SPECS, QUICK), ids=lambda spec: f"{spec['name']}{'+' if len(spec) > 1 else ''}"
)
def test_every_method_ends_with_the_bits_of_local(spec: dict[str, Any], tmp_path: Path) -> None:
    lab, base = lab_of(tmp_path, described(spec), reports_labels=build(spec).needs_prior)
    run = lab.serve()
    assert have_same_state(base, run)
    assert pack(base.server.memory) == pack(run.server.memory)
    for ours, theirs in zip(run.metrics, base.metrics, strict=True):
        assert ours["train"] == theirs["train"] and ours["failures"] == []
        assert ours["bytes_up"] == theirs["bytes_up"] and ours["waste"] == theirs["waste"]


def test_best_checkpoint_equals_local(tmp_path: Path) -> None:
    table = described({"name": "scalefl"}, rounds=6, evaluate={"every": 1, "split": "validation"})
    table["local"]["lr"], table["checkpoint"] = 1.0, {"keep": 1}
    lab, base = lab_of(tmp_path, table)
    run = lab.serve()
    local = [report["evaluate"]["static"]["local"] for report in run.metrics]
    best = 1 + local.index(max(local))
    assert best < 6, "not the newest"
    for folder in (run.folder, base.folder):
        assert ff.load(folder, "best").server.round == best
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
            f"round-{number:06d}.safetensors" for number in (best, 6)
        ]
    assert have_same_state(ff.load(run.folder, "best"), ff.load(base.folder, "best"))


@pytest.mark.parametrize("kind", LIGHTER)
def test_lighter_updates_too(kind: str, tmp_path: Path) -> None:
    table = described({"name": "scalefl"})
    table["local"]["compress"] = kind
    lab, base = lab_of(tmp_path, table)
    assert have_same_state(base, lab.serve())


def test_class_prior_equals_local(tmp_path: Path) -> None:
    lab, base = lab_of(tmp_path, described({"name": "scalefl", "options": {"class_prior": {}}}), reports_labels=True)
    run = lab.serve()
    assert have_same_state(base, run) and run.server.prior == base.server.prior != ()
    assert run.metrics[0]["prior"] == base.metrics[0]["prior"] == {"clients": CLIENTS, "failures": []}
    assert [report["bytes_up"] for report in run.metrics] == [report["bytes_up"] for report in base.metrics]


def test_class_frequencies_need_the_owners_consent(tmp_path: Path) -> None:
    lab = Lab(tmp_path, described({"name": "fedavg", "options": {"class_prior": {}}}, rounds=1), [1.0] * CLIENTS)
    lab.config(3, reports_labels=True)
    run = lab.serve()
    data = tiny_data()
    own = partition(data, "dirichlet", CLIENTS, 3, alpha=1.0)[3]["train"]
    counts = [data.y[own].tolist().count(c) for c in range(4)]
    assert run.server.prior == pytest.approx([(n + 1) / (len(own) + 4) for n in counts])
    assert run.metrics[0]["prior"]["clients"] == 1
    assert [failure["client"] for failure in run.metrics[0]["prior"]["failures"]] == [0, 1, 2, 4]
    assert run.metrics[0]["failures"] == [], "they train all the same"


@pytest.mark.parametrize("how", [{}, {"precision": "bf16"}], ids=["chosen", "bf16"])
def test_a_fast_run_has_the_bits_of_local(how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 too where that is emulated: nodes go back to fp32 where they lack it, which one machine must not."""
    monkeypatch.setattr(nodes_side, "replace_emulated_bf16", lambda problem, accelerator: problem)
    fast = {"speed": "fast", **how}
    lab, base = lab_of(tmp_path, described({"name": "scalefl"}, model={"name": "cnn"}, engine=fast))
    run = lab.serve(**fast)
    assert have_same_state(base, run)
    assert run.experiment.recorded.computing == base.experiment.recorded.computing
    assert set(run.experiment.recorded.computing.values()) == {f"{'bf16' if how else 'fp32'} channels_last"}
    plain = described({"name": "scalefl"}, model={"name": "cnn"}, engine={"memory_format": "contiguous"})
    assert not have_same_state(ff.run(plain, out=tmp_path / "plain"), run)


def test_a_client_is_measured_on_its_own_level_only(tmp_path: Path) -> None:
    """What devices cannot run they do not evaluate; the accuracy at a client's own level is the simulation's."""
    lab, base = lab_of(tmp_path, described({"name": "scalefl"}))
    run = lab.serve()
    ours, theirs = run.columns["static"], base.columns["static"]
    top = [c for c, level in enumerate(base.assembly.federation.level_of) if level == 1]
    assert ours["global_clients"] == len(top) < theirs["global_clients"] == CLIENTS
    assert ours["per_client"]["global"] == {str(c): ours["per_client"]["local"][str(c)] for c in top}
    headers = [unpack(transport.read_parts(m)["header"]) for m in lab.grid.sent]
    jobs = [(h["job"]["client"], h["job"]["level"]) for h in headers if h["what"] == "job"]
    assert all(level <= base.assembly.federation.level_of[client] for client, level in jobs)


def test_callbacks_are_called_on_the_server_only(tmp_path: Path) -> None:
    (tmp_path / "heard.py").write_text(
        "from pathlib import Path\n\n\ndef heard(report):\n"
        "    with (Path(__file__).parent / 'heard.txt').open('a') as file:\n"
        "        file.write(f'{report[\"round\"]}\\n')\n"
    )
    lab, _ = lab_of(tmp_path, described({"name": "scalefl"}, callbacks=[f"{tmp_path}/heard.py:heard"]))
    (tmp_path / "heard.txt").unlink()
    lab.serve()
    assert (tmp_path / "heard.txt").read_text().splitlines() == ["1", "2", "3"]
    headers = [transport.read_parts(message)["header"] for message in lab.grid.sent]
    assert headers and not [header for header in headers if b"heard" in header]


def test_nodes_compute_allowed_metrics_only(tmp_path: Path) -> None:
    metric = "own_metric:share"
    model = {"name": "tiny:tiny", "norm": False}  # whose statistics a fleet measures on fewer clients
    table = described({"name": "scalefl"}, rounds=1, model=model, evaluate={"metrics": [metric]})
    lab, base = lab_of(tmp_path, table, allow=[*ALLOW, metric])
    ours, theirs = lab.serve().columns["static"], base.columns["static"]
    assert ours["metrics"]["share"]["levels"] == theirs["metrics"]["share"]["levels"]
    refusing, _ = lab_of(tmp_path / "refusing", table)
    reasons = [failure["reason"] for failure in refusing.serve().columns["failures"]]
    assert reasons and all(f'names "{metric}"' in reason for reason in reasons)


def test_a_level_is_one_flower_object(tmp_path: Path) -> None:
    lab, _ = lab_of(tmp_path, described({"name": "scalefl"}, rounds=1, cohort={"fraction": 1.0}))
    lab.serve()
    states: dict[int, set[str]] = {}
    for message in lab.grid.sent:
        header = unpack(transport.read_parts(message)["header"])
        if message.metadata.message_type == "train":
            states.setdefault(header["job"]["level"], set()).add(message.content["state.0"].object_id)
    assert sorted(states) == [0, 1] and all(len(ids) == 1 for ids in states.values())
    sent = {message.object_id for message in lab.grid.sent}
    assert sent < set(lab.grid.confirmed), "the SuperLink keeps what is not confirmed"
    assert len(lab.grid.confirmed) == 2 * len(sent)
    assert states[0] != states[1]


def test_models_and_pictures_need_no_data(tmp_path: Path, runs_draw: None) -> None:
    lab, base = lab_of(tmp_path, described({"name": "scalefl"}))
    lab.serve()
    loaded = ff.load(tmp_path / "run")
    x = torch.rand(6, 1, 4, 4)
    for level in (1, 2):
        ours, theirs = loaded.model(level)(x), base.model(level)(x)
        assert [tuple(z.shape) for z in ours] == [tuple(z.shape) for z in theirs]
    assert loaded.finished and (tmp_path / "run" / "plots" / "levels.png").is_file()
    with raises(ConfigError, "evaluate(data=...)"):
        loaded.evaluate()


# ---- going on ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The server's process ends."""


@pytest.mark.parametrize("name", ["scalefl", "plugin_method:counting"])
@pytest.mark.parametrize("when", [1, 2])
def test_resume_after_a_killed_server_has_the_same_bits(name: str, when: int, tmp_path: Path) -> None:
    """Memories lie on the nodes: also what a node remembered of a round that never counted must not be used."""
    lab, base = lab_of(tmp_path, described({"name": name}, rounds=4))
    answered = 0

    def twist(message: Message, reply: Message) -> Message:
        nonlocal answered
        answered += message.metadata.group_id.split()[0] == str(when + 1) and message.metadata.message_type == "train"
        if answered == 2:  # they have trained, and remember it
            raise Killed
        return reply

    lab.grid.twist = twist
    with pytest.raises(Killed):
        lab.serve()
    assert len(ff.load(tmp_path / "run").metrics) == when
    lab.grid.twist = lambda message, reply: reply
    nodes_side.get_node.cache_clear()  # the nodes were restarted as well
    assert have_same_state(base, lab.serve(resume=True))
    lab.lines.clear()
    assert lab.serve(resume=True).finished and "finished already" in lab.output


def test_an_undone_round_is_undone_on_the_nodes_too(tmp_path: Path) -> None:
    """After it nodes begin with what they remembered before it, and the bits are those of local."""
    step = "test_standing:in_the_second"
    method = {"name": "plugin_method:counting", "pull": 0.1, "hooks": {"step": step}}
    lab, base = lab_of(tmp_path, described(method, rounds=4, cohort={"fraction": 1.0}), allow=[*ALLOW, step])
    run = lab.serve()
    for metrics in (run.metrics, base.metrics):
        assert ["undone" in report for report in metrics] == [False, True, False, False]
        assert len(metrics[1]["undone"]["reported"]) == 2 and metrics[1]["train"]["clients"] == 0  # two are able
    assert have_same_state(base, run) and pack(base.server.memory) == pack(run.server.memory)
    jobs = [
        unpack(transport.read_parts(m)["header"])["job"] for m in lab.grid.sent if m.metadata.message_type == "train"
    ]
    assert {(job["round"], job["memory_version"]) for job in jobs} == {(0, -1), (1, 0), (2, 0), (3, 2)}
    assert all(quoted in lab.output for quoted in ("Round 2 ", '"stem.bias"', "norm: node-"))


def test_resume_needs_a_run_of_a_fleet(tmp_path: Path) -> None:
    lab, _ = lab_of(tmp_path, described({"name": "fedavg"}, rounds=1))
    with raises(RunError, "fleetfit resume"):
        lab.serve("local", resume=True)
    lab.serve("run")
    with raises(RunError, "flower resume"):
        lab.serve("run")


# ---- who does not answer as it should ----------------------------------------------------------------------------


def reply_twisted(lab: Lab, client: int, *changes: Callable[[dict[str, Any]], Any]) -> None:
    """Have one client's replies of the first rounds of training changed on their way, in each round by another."""

    def twist(message: Message, reply: Message) -> Message | None:
        mine = message.metadata.message_type == "train" and message.metadata.dst_node_id == 101 + client
        if not mine or int(message.metadata.group_id.split()[0]) > len(changes):
            return reply
        changed = changes[int(message.metadata.group_id.split()[0]) - 1](unpack(transport.read_parts(reply)["answer"]))
        if changed is None or isinstance(changed, RecordDict):
            return None if changed is None else Message(changed, reply_to=message)
        return transport.make_reply(message, {"answer": changed if isinstance(changed, bytes) else pack(changed)})

    lab.grid.twist = twist


def in_reply(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda payload: {**payload, "reply": {**payload["reply"], **fields}}


def in_state(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The tensors of a state are one flat vector."""
    return lambda payload: {**payload, "reply": {**payload["reply"], "state": change(payload["reply"]["state"])}}


def raw(header: bytes) -> bytes:
    """A message with any header."""
    return b"FFIT" + bytes([1, 0, 0, 0]) + len(header).to_bytes(8, "little") + header


WHOLE = {"channels": {"a": {"from": 0, "to": 8}, "b": {"from": 0, "to": 12}, "classes": {"from": 0, "to": 4}},
         "exits": [1, 2, 3]}  # fmt: skip
LIES = {
    "a size-1 dimension": in_state(lambda s: s[:1]),
    "a dimension more": in_state(lambda s: s[None]),
    "a number less": in_state(lambda s: s[:-1]),
    "a number more": in_state(lambda s: torch.cat([s, s[:1]])),
    "names": in_state(lambda s: {"x": s}),
    "NaN": in_state(lambda s: s * float("nan")),
    "infinity": in_state(lambda s: s / 0),
    "other numbers": in_state(lambda s: s.double()),
    "a larger sub-model": in_reply(submodel=WHOLE),
    "too many samples": in_reply(num_examples=10**6),
    "a negative number of samples": in_reply(num_examples=-1),
    "another client": in_reply(client=4),
    "another round": in_reply(round=7),
    "no table": lambda payload: {**payload, "reply": [1, 2]},
    "no reply": lambda payload: {"protocol": PROTOCOL},
    "another protocol": lambda payload: {**payload, "protocol": PROTOCOL + 1},
    "no message of ours": lambda payload: b"GARBAGE" * 9,
    "a message cut off": lambda payload: pack(payload)[:-5],
    "another format version": lambda payload: pack(payload)[:4] + bytes([9]) + pack(payload)[5:],
    "no part": lambda payload: RecordDict({}),
    "another record": lambda payload: RecordDict({"answer": ConfigRecord({"bytes": b"123"})}),
    "no bytes": lambda payload: RecordDict({"answer": ConfigRecord({"answer.0": "123"})}),
    "two pieces in one": lambda payload: RecordDict({"answer": ConfigRecord({"answer.0": b"1", "answer.1": b"2"})}),
    "a piece without a number": lambda payload: RecordDict({"answer": ConfigRecord({"answer.x": b"123"})}),
    "version 1": lambda payload: RecordDict({"answer": ArrayRecord({"bytes": Array(torch.ones(3).numpy())})}),
    "numbers that are tensors": lambda payload: {**payload, "protocol": torch.ones(2)},
    "flags that are tensors": in_reply(compressed=torch.ones(2)),
    "a huge number": in_reply(metrics={"loss": 10**400, "steps": 1}),
    "a nest that cannot be": lambda payload: raw(b'{"$u":5}'),
    "a nest without end": lambda payload: raw(b"[" * 600 + b"]" * 600),
    "a shape without end": lambda payload: raw(b'{"$t":["uint8",[Infinity]]}'),
    "a refusal": lambda payload: {"protocol": PROTOCOL, "refused": "not today"},
}


@pytest.fixture(scope="module")
def without_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[float], ff.Run]:
    """The run in which client 0 fails honestly in the first round."""
    folder = tmp_path_factory.mktemp("honest")
    table = described({"name": "scalefl"}, rounds=2, cohort={"fraction": 1.0}, seed=0)
    lab, _ = lab_of(folder, table)
    nodes_side.get_node.cache_clear()
    reply_twisted(lab, 0, lambda payload: {"protocol": PROTOCOL, "refused": "the reference"})
    return table, lab.budgets, lab.serve()


def test_a_node_whose_owner_allows_no_work_now_is_away_for_a_minute(tmp_path: Path) -> None:
    lab = Lab(
        tmp_path,
        described({"name": "scalefl"}, rounds=3, cohort={"fraction": 1.0}, evaluate={"every": 0}),
        [1.0] * CLIENTS,
    )
    reply_twisted(lab, 0, lambda payload: {"protocol": PROTOCOL, "refused": "it is night", "again": True})
    first, *later = lab.serve().metrics
    assert [(one["client"], one["absent"]) for one in first["failures"]] == [(0, True)]
    assert [(report["train"]["clients"], report["failures"]) for report in later] == [(CLIENTS - 1, [])] * 2


def test_keys_of_a_fleet_hold_where_a_file_names_another_engine() -> None:
    table = {"engine": {"name": "processes", "workers": 2, "nodes": 4, "deadline_s": 1200.0}}
    rules = make_rules(adapt_experiment(load_experiment(table)))
    assert (rules.nodes, rules.deadline_s) == (4, 1200.0)
    (note,) = list_changes(load_experiment(table))
    assert "workers" in note and "nodes" not in note
    assert not list_changes(load_experiment({"engine": {"nodes": 4}}))


def test_a_late_node_that_names_another_cost_gets_what_fits_it(tmp_path: Path) -> None:
    """The run was planned for budgets of parameters; its levels have no cost of memory until a node names one."""
    table = described({"name": "scalefl"}, rounds=3, cohort={"fraction": 1.0}, evaluate={"every": 0})
    lab = Lab(tmp_path, table, [0.25, 0.5, 1.0, 1.0, 1.0])
    budget = {"parameters": 1.0, "memory_bytes": 0.6}
    lab.grid = LocalGrid([*lab.configs[:-1], lab.config(CLIENTS - 1, budget=budget)])
    late = 100 + CLIENTS
    lab.grid.offline = {late}

    def twist(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            lab.grid.offline = set()
        return reply

    lab.grid.twist = twist
    lab.serve(nodes=CLIENTS - 1)
    first, *later = [line for line in lab.lines if line.startswith(f"Node node-{CLIENTS - 1} trains")]
    assert first.endswith("level 1.") and not later, lab.output


def test_a_secure_fleet_that_grows_keeps_to_what_its_sums_hold() -> None:
    lines: list[str] = []
    run: Any = _FleetRun(*[None] * 6, lines.append)
    grid = Quantizer(1.0, 24, None)
    pairs = ((3, 200), (200, 300), (256, 400))
    assert [run._limit_cohort(grid, before, cohort, 0) for before, cohort in pairs] == [200, 256, 256]
    assert len(lines) == 1
    with raises(RunError, key="secure.bits"):
        run._limit_cohort(grid, 30, 30, 300)


def test_set_beside_resume_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, key="set"):
        serve(LocalGrid([]), ServerAppConfig(resume=str(tmp_path), overrides=["rounds=9"]))


def test_false_sums_leave_the_state(without_one: Any, tmp_path: Path) -> None:
    """Client 0 tells another lie in each round but the last; in the run beside it, it refuses honestly."""
    table, budgets, _ = without_one
    table = {**table, "rounds": len(LIES) + 1, "evaluate": {"every": 0}}
    honest, lab = Lab(tmp_path / "honest", table, budgets), Lab(tmp_path / "lies", table, budgets)
    reply_twisted(honest, 0, *[lambda payload: {"protocol": PROTOCOL, "refused": "the reference"}] * len(LIES))
    reply_twisted(lab, 0, *LIES.values())
    expected = honest.serve()
    nodes_side.get_node.cache_clear()
    run = lab.serve()
    assert have_same_state(run, expected)
    for lie, report in zip(LIES, run.metrics, strict=False):
        assert [f["client"] for f in report["failures"]] == [0] and len(report["failures"][0]["reason"]) < 600, lie
    assert sum(line.startswith("  Node node-0: ") for line in lab.lines) == len(LIES), lab.output
    assert run.metrics[-1]["train"]["clients"] == CLIENTS and not run.metrics[-1]["failures"]


def test_a_round_ends_at_its_deadline(without_one: Any, tmp_path: Path) -> None:
    table, budgets, _ = without_one
    lab = Lab(tmp_path, table, budgets)
    reply_twisted(lab, 0, lambda payload: None)
    began = time.monotonic()
    run = lab.serve(deadline_s=1.0)
    assert time.monotonic() - began > 1.0
    assert " 1 s" in lab.output
    assert run.metrics[0]["train"]["clients"] == CLIENTS - 1
    # its job of round 1 is still out: nobody sends it another one until Flower has dropped that
    assert run.metrics[1]["train"]["clients"] == CLIENTS - 1 and run.metrics[1]["online"] == CLIENTS - 1


def test_a_late_answer_frees_its_node(tmp_path: Path) -> None:
    lab, _ = lab_of(tmp_path, described({"name": "scalefl"}, rounds=4, cohort={"fraction": 1.0}))
    late: list[tuple[str, Message]] = []

    def twist(message: Message, reply: Message) -> Message | None:
        metadata = message.metadata
        if metadata.message_type == "train" and metadata.dst_node_id == 101 and metadata.group_id.split()[0] == "1":
            late.append((metadata.message_id, reply))
            return None
        if metadata.message_type == "train" and metadata.group_id.split()[0] == "2" and late:
            time.sleep(0.3)
            lab.grid.replies.update(late)
            late.clear()
        return reply

    lab.grid.twist = twist
    run = lab.serve(deadline_s=0.6)
    assert "Node node-0 " in lab.output
    assert [report["online"] for report in run.metrics] == [5, 4, 5, 5]


def test_an_answer_that_comes_again_counts_once(tmp_path: Path) -> None:
    """Twice at once, and once more for every message of the server's that is asked for later."""
    lab, base = lab_of(tmp_path, described({"name": "scalefl", "options": {"feddyn": {}}}))
    pull, before = lab.grid.pull_messages, list[Message]()

    def again(ids: Any) -> list[Message]:
        replies = list(pull(ids))
        repeated = [*replies, *replies, *before] if replies else []
        before[:] = [*before, *replies][-20:]
        return repeated

    lab.grid.pull_messages = again  # type: ignore[method-assign]
    run = lab.serve()
    assert len(before) == 20 and have_same_state(base, run)
    assert [m["train"] for m in run.metrics] == [m["train"] for m in base.metrics]
    assert not any(m["failures"] for m in run.metrics)


def test_enough_answers_end_a_round(without_one: Any, tmp_path: Path) -> None:
    table, budgets, _ = without_one
    lab = Lab(tmp_path, {**table, "cohort": {"fraction": 1.0, "quorum": 0.8}}, budgets)
    reply_twisted(lab, 0, lambda payload: None)
    began = time.monotonic()
    run = lab.serve(deadline_s=300.0)
    assert time.monotonic() - began < 100
    assert run.metrics[0]["train"]["clients"] == 4 and "enough others" in run.metrics[0]["failures"][0]["reason"]


@pytest.mark.parametrize("quorum", [0.6, 1.0])
def test_a_level_that_misses_every_round_is_named(quorum: float, tmp_path: Path) -> None:
    """As one of slow devices, whose answers come when the quorum has ended the round."""
    table = described({"name": "heterofl"}, rounds=2, cohort={"fraction": 1.0, "quorum": quorum})
    lab = Lab(tmp_path, table, [0.5, 0.5, 1.0, 1.0, 1.0])

    def twist(message: Message, reply: Message) -> Message | None:
        is_slow = message.metadata.dst_node_id <= 102 and message.metadata.message_type == "train"
        return None if is_slow and quorum < 1 else reply

    lab.grid.twist = twist
    run = lab.serve()
    assert [report["train"]["by_level"].get("1", 0) for report in run.metrics] == [2 * (quorum == 1)] * 2
    assert any("level 1" in line and "cohort.quorum" in line for line in lab.lines) == (quorum < 1)


def test_over_selection_fills_the_cohort(tmp_path: Path) -> None:
    lab, _ = lab_of(tmp_path, described({"name": "fedavg"}, rounds=1, cohort={"count": 3, "over_selection": 0.5}))
    reply_twisted(lab, 0, lambda payload: None)
    reply_twisted_too = lab.grid.twist
    lab.grid.twist = lambda m, r: None if m.metadata.dst_node_id == 102 and m.metadata.message_type == "train" else (
        reply_twisted_too(m, r))  # fmt: skip
    run = lab.serve(deadline_s=60.0)
    assert sum(m.metadata.message_type == "train" for m in lab.grid.sent) == 5
    assert run.metrics[0]["train"]["clients"] == 3 and len(run.metrics[0]["failures"]) == 2


def test_nodes_that_come_back_or_come_late_take_part(tmp_path: Path) -> None:
    """AdaptiveFL keeps a table of the clients, which grows with them."""
    table = described({"name": "adaptivefl", "p": 1}, rounds=6, cohort={"fraction": 1.0})
    lab, _ = lab_of(tmp_path, table)
    lab.grid.offline = {105}  # it has not come yet

    def twist(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            lab.grid.offline = {"1": {105}, "2": {101}, "3": {101}}.get(message.metadata.group_id.split()[0], set())
        return reply

    lab.grid.twist = twist
    run = lab.serve(nodes=4)
    online = [report["online"] for report in run.metrics]
    assert online == [4, 4, 4, 4, 5, 5], online  # 105 comes in the second round, 101 is away in the third and fourth
    assert run.server.memory["adaptivefl"]["curiosity"].shape[1] == 5
    again = serve(lab.grid, ServerAppConfig(resume=str(tmp_path / "run")), lab.lines.append)
    assert again.finished and len(again.assembly.federation.levels) == 3


def test_a_reply_that_hangs_does_not_delay_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a node dies while it uploads: the reply is announced, and its content does not come."""
    monkeypatch.setattr(transport, "_LABEL_BYTES", -1)  # small answers have no content
    lab, _ = lab_of(tmp_path, described({"name": "scalefl"}, rounds=1, cohort={"fraction": 1.0}))

    def twist(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and not lab.grid.late:
            lab.grid.late.add(message.metadata.message_id)
        return reply

    lab.grid.twist = twist
    run = lab.serve(deadline_s=4.0)
    assert run.metrics[0]["train"]["clients"] == CLIENTS - 1
    assert len(run.metrics[0]["failures"]) == 1


def test_the_replies_of_a_round_are_asked_for_together(tmp_path: Path) -> None:
    lab, _ = lab_of(tmp_path, described({"name": "scalefl"}, rounds=1, cohort={"fraction": 1.0}))
    push, pull = lab.grid.PushMessages, lab.grid.pull_messages
    pushed, pulled = list[int](), list[int]()
    lab.grid.PushMessages = lambda request: pushed.append(len(request.messages_list)) or push(request)  # type: ignore
    lab.grid.pull_messages = lambda ids: pulled.append(len(ids)) or pull(ids)  # type: ignore[method-assign]
    lab.serve()
    assert max(pushed) == CLIENTS and max(pulled) == CLIENTS


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_a_large_part_travels_in_pieces(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_RECORD_BYTES", size)
    content = bytes(range(23))
    records = [*transport.make_part("one", content), *transport.make_part("none", b"")]
    assert len(records) == -(-23 // size) + 1
    mixed = sorted(records, key=lambda record: next(iter(record))[::-1])
    assert transport.join_records(records) == transport.join_records(mixed) == {"one": content, "none": b""}


def test_a_run_waits_while_no_node_is_connected(tmp_path: Path) -> None:
    lab, _ = lab_of(tmp_path, described({"name": "fedavg"}, rounds=2))
    disconnected = threading.Event()

    def twist(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and not disconnected.is_set():
            disconnected.set()
            lab.grid.offline = set(lab.grid.contexts)
            threading.Timer(1.0, lab.grid.offline.clear).start()
        return reply

    lab.grid.twist = twist
    run = lab.serve()
    assert run.metrics[1]["train"]["clients"] == 4


# ---- who may take part -------------------------------------------------------------------------------------------


def test_unfit_nodes_are_left_out_by_name(tmp_path: Path) -> None:
    lab, _ = lab_of(tmp_path, described({"name": "scalefl"}, rounds=1, cohort={"fraction": 1.0}))
    lab.config(1, reports_budget=False)
    lab.config(2, data={"name": "digits"})
    lab.config(3, allow=[])
    run = lab.serve(nodes=3)
    for node, cause in (("Node 102 ", "budget"), ("Node node-2 ", "[1, 8, 8]"), ("Node node-3 ", '"tiny:tiny"')):
        assert any(node in line and cause in line for line in lab.lines), lab.output
    assert set(run.metrics[0]["train"]["by_level"]) <= {"1", "2"} and run.metrics[0]["online"] == 2


def test_a_node_with_an_unusable_budget_is_left_out(tmp_path: Path) -> None:
    lab, _ = lab_of(tmp_path, described({"name": "scalefl"}, rounds=3, cohort={"fraction": 1.0}))
    lab.config(1, budget={"memory_bytes": "200 MB"})
    lab.grid.offline = {102}

    def twist(message: Message, reply: Message) -> Message:
        lab.grid.offline.clear()
        return reply

    lab.grid.twist = twist
    run = lab.serve(nodes=4)
    assert any("Node 102 " in line and "budget" in line for line in lab.lines), lab.output
    assert [report["online"] for report in run.metrics] == [4, 4, 4]


def test_changed_nodes_are_asked_until_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetfit.fleet.client_manager._AGAIN_S", 0.05)
    lab, _ = lab_of(tmp_path, described({"name": "scalefl"}, rounds=6, cohort={"fraction": 1.0}))

    def twist(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            lab.grid.offline = {101} if message.metadata.group_id.split()[0] == "1" else set()
            if message.metadata.group_id.split()[0] == "1":
                lab.config(0, data={"name": "digits"})
                nodes_side.get_node.cache_clear()
        return reply

    lab.grid.twist = twist
    run = lab.serve()
    assert any("Node node-0 " in line and "[1, 8, 8]" in line for line in lab.lines), lab.output
    assert [report["online"] for report in run.metrics] == [5, 4, 4, 4, 4, 4]


def test_a_node_that_comes_back_is_asked_once(tmp_path: Path) -> None:
    """The first nodes are asked twice: the model depends on their data."""
    lab, _ = lab_of(tmp_path, described({"name": "fedavg"}, rounds=4, cohort={"fraction": 1.0}))

    def twist(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            lab.grid.offline = {101} if message.metadata.group_id.split()[0] == "1" else set()
        return reply

    lab.grid.twist = twist
    run = lab.serve()
    assert run.metrics[-1]["online"] == CLIENTS
    headers = [unpack(transport.read_parts(m)["header"]) for m in lab.grid.sent if m.metadata.dst_node_id == 101]
    assert [header["what"] for header in headers if header["what"] != "job"] == ["hello", "setup", "setup"]


@pytest.mark.parametrize("lost", ["once", "late"])
def test_a_question_without_an_answer_is_asked_again(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node loses its first answer; or sends each with the next message, as Flower's own does after a stopped run."""
    monkeypatch.setattr("fleetfit.fleet.client_manager._REPEAT_S", 0.3)
    lab, base = lab_of(tmp_path, described({"name": "scalefl"}, rounds=2))
    waiting: list[tuple[Message, Message]] = []
    healed = []

    def twist(message: Message, reply: Message) -> Message | None:
        if message.metadata.dst_node_id != 101 or healed:
            return reply
        before = waiting.pop() if waiting else None
        if before is not None:
            lab.grid.replies[before[0].metadata.message_id] = before[1]
        if lost == "once" or (before is not None and transport.HOLD in transport.read_parts(before[0])):
            healed.append(message)
            return None if lost == "once" else reply
        waiting.append((message, reply))
        return None

    lab.grid.twist = twist
    run = lab.serve(wait_s=60.0)
    assert healed and run.metrics[0]["online"] == CLIENTS
    assert have_same_state(base, run) and not any(report["failures"] for report in run.metrics)


def test_too_few_nodes_and_a_broken_one(tmp_path: Path) -> None:
    lab, _ = lab_of(tmp_path, described({"name": "scalefl"}, rounds=1))
    lab.configs[0].write_text("name = 3")
    with raises(RunError, 4, 5, 1):
        lab.serve(wait_s=1.0)
    assert "name: " in lab.output
    assert not (tmp_path / "run").exists()


def test_a_budget_that_is_not_reported_does_not_travel(tmp_path: Path) -> None:
    lab, _ = lab_of(tmp_path, described({"name": "adaptivefl", "p": 1}, rounds=1), reports_budget=False)
    run = lab.serve()
    assert '"budget": 0.' not in (tmp_path / "run" / "nodes.json").read_text()
    assert run.metrics[0]["waste"] >= 0


def test_untrained_tensors_are_sent_again_after_a_loss(tmp_path: Path) -> None:
    table = described({"name": "scalefl"}, peft={"name": "frozen"}, rounds=2)
    lab, base = lab_of(tmp_path, table)
    run = lab.serve()
    assert have_same_state(base, run)
    sent = [(unpack(transport.read_parts(m)["header"])["what"], m.metadata) for m in lab.grid.sent]
    assert sorted(one.dst_node_id for what, one in sent if what == "base") == [101, 102, 103, 104, 105]
    assert max(one.ttl for what, one in sent if what == "setup") < min(one.ttl for what, one in sent if what == "base")
    for path in (tmp_path / "node-0").rglob("base/*.ffit"):
        path.write_bytes(b"damaged")
    nodes_side.get_node.cache_clear()
    lab.grid.sent.clear()
    assert have_same_state(base, lab.serve("again"))
    again = [
        m.metadata.dst_node_id for m in lab.grid.sent if unpack(transport.read_parts(m)["header"])["what"] == "base"
    ]
    assert again == [101]


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"nodes": 0}, Expected(1, key="engine.nodes")),
        ({"nodes": []}, Expected(1, key="engine.nodes")),
        ({"nodes": ["pi", "pi"]}, Expected("pi", key="engine.nodes")),
        ({"wait_s": 0.0}, Expected(0, key="engine.wait_s")),
        ({"deadline_s": -1.0}, Expected(0, key="engine.deadline_s")),
    ],
)
def test_rules_out_of_range(settings: dict[str, Any], expected: Expected) -> None:
    with raises(ConfigError, expected):
        flower(**settings)


def test_a_fleet_is_not_started_as_a_simulation(tmp_path: Path) -> None:
    with raises(ConfigError, key="engine.name"):
        ff.run(described({"name": "fedavg"}, engine={"name": "flower"}), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"outt": "x"}, Expected("outt = 'x'")),
        ({"out": 3}, Expected("out = 3")),
        ({"run-file": True}, Expected("run-file = True")),
    ],
)
def test_a_wrong_run_config_is_one_sentence(config: dict[str, Any], expected: Expected, tmp_path: Path) -> None:
    with raises(ConfigError, expected):
        ServerAppConfig.from_run_config(config, tmp_path)


def test_the_run_file_is_that_of_the_app(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("rounds = 2")
    assert ServerAppConfig.from_run_config({"run-file": "run.toml", "set": "a=1 b=2"}, tmp_path) == ServerAppConfig(
        str(tmp_path / "run.toml"), overrides=["a=1", "b=2"]
    )
    with raises(ConfigError, "nowhere.toml"):
        serve(LocalGrid([]), ServerAppConfig("nowhere.toml"))


# ---- the transport -----------------------------------------------------------------------------------------------


def test_replies_beyond_the_bound_wait_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transport, "_MAX_BYTES", 3000)
    lab, base = lab_of(tmp_path, described({"name": "scalefl"}, cohort={"fraction": 1.0}))
    kinds: list[type] = []
    store = Transport._store
    monkeypatch.setattr(Transport, "_store", lambda self, content: kinds.append(type(k := store(self, content))) or k)
    assert have_same_state(base, lab.serve())
    assert any(issubclass(kind, Path) for kind in kinds) and bytearray in kinds


def test_absent_superlinks_are_tried_again(tmp_path: Path) -> None:
    import httpx

    lab, base = lab_of(tmp_path, described({"name": "scalefl"}, rounds=2))
    pull, calls = lab.grid.pull_messages, []

    def away(ids: Any) -> Any:
        calls.append(1)
        if len(calls) % 2:
            raise httpx.ConnectError("away")
        return pull(ids)

    lab.grid.pull_messages = away  # type: ignore[method-assign]
    assert have_same_state(base, lab.serve())


# ---- the folder of a finished run --------------------------------------------------------------------------------


def fleet_folder(folder: Path) -> Path:
    """A finished run of a fleet, whose nodes have data of the same shape as `tiny:tiny_data`."""
    lab, _ = lab_of(folder, described({"name": "scalefl"}))
    lab.serve()
    return folder / "run"


def test_a_fleets_run_is_evaluated_on_local_data(tmp_path: Path) -> None:
    run = fleet_folder(tmp_path)
    here = ("--data", "tiny:tiny_data")
    x, y = tiny_data().batch(tiny_data().split("test"))
    right = {level: (ff.load(run).model(level)(x)[-1].argmax(-1) == y).double().mean().item() for level in (1, 2)}
    columns = ff.load(run).evaluate(data="tiny:tiny_data")["static"]
    assert {name: entry["accuracy"] for name, entry in columns["levels"].items()} == {
        str(level): pytest.approx(share) for level, share in right.items()
    }
    assert columns["full"] == pytest.approx(right[2]) and columns["samples"] == len(y)
    printed = run_verb("eval", run, *here, code=0).out
    assert f"{100 * right[1]:.2f}" in printed and f"{100 * right[2]:.2f}" in printed
    for verb in (("calibrate", run, "--level", 2), ("predict", run, "--level", 2, "--stop")):
        run_verb(*verb, *here, code=0)
    assert early_exits.main([str(run), *here]) == 0
    assert (run / "plots" / "stopping.png").is_file()
    assert json.loads((run / "inference" / "level-2.json").read_text())["data"] == "tiny"


@pytest.mark.parametrize("verb", ["eval", "predict", "calibrate"])
def test_verbs_without_data_name_the_nodes(verb: str, tmp_path: Path) -> None:
    run = fleet_folder(tmp_path)
    assert "data" not in json.loads((run / "environment.json").read_text()), "nothing to compare them by is written"
    err = run_verb(verb, run, code=2).err
    assert "nodes" in err and "--data" in err
    err = run_verb(verb, run, "--data", "digits", code=2).err
    assert "[1, 8, 8], 10 classes" in err and "[1, 4, 4], 4 classes" in err


def test_the_run_folder_describes_the_nodes(tmp_path: Path) -> None:
    run = fleet_folder(tmp_path)
    data = json.loads((run / "nodes.json").read_text())["data"]
    assert (data["sample_shape"], data["classes"], data["task"]) == ([1, 4, 4], 4, "classification")
    groups = ff.load(run).experiment.fleet.groups
    budgets = ff.load(run).assembly.fleet
    assert [group.name for group in groups] == [f"node-{i}" for i in range(CLIENTS)]
    assert [group.budget for group in groups] == list(budgets.budgets)


# ---- differential privacy of clients -------------------------------------------------------------------------------


def private_table(folder: Path, **changes: Any) -> dict[str, Any]:
    privacy = {
        "clipping_norm": 0.5,
        "noise_multiplier": 1.0,
        "delta": 0.01,
        "key_file": str(folder / "keys" / "run.key"),
    }
    model = {"name": "tiny:tiny", "norm": False}
    table = {"rounds": 6, "model": model, "cohort": {"fraction": 0.5}, "privacy": privacy, "evaluate": {"every": 0}}
    return described({"name": "scalefl"}, **{**table, **changes})


def test_a_private_fleet_has_the_bits_of_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one salt for both; cohorts are larger than is to be expected at times, and nobody is cut off then."""
    pytest.importorskip("opacus", reason="the accountant is an extra: fleetfit[privacy]")
    monkeypatch.setattr("secrets.token_hex", lambda size: "5a" * size)
    lab, base = lab_of(tmp_path, private_table(tmp_path))
    run = lab.serve()
    headers = [unpack(transport.read_parts(m)["header"]) for m in lab.grid.sent]
    rounds = [h["job"]["round"] for h in headers if h["what"] == "job" and h["job"]["kind"] == "train"]
    assert max(map(rounds.count, rounds)) > round(0.5 * CLIENTS)
    assert have_same_state(base, run)
    assert [r["privacy"] for r in run.metrics] == [r["privacy"] for r in base.metrics]


def test_a_resumed_private_fleet_pays_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accountant = pytest.importorskip("fleetfit.privacy.accountant")
    pytest.importorskip("opacus", reason="the accountant is an extra: fleetfit[privacy]")
    lab, _ = lab_of(tmp_path, private_table(tmp_path, rounds=3))
    real, calls = Privacy.aggregate, []

    def cut_off(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(Privacy, "aggregate", cut_off)
    with pytest.raises((KeyboardInterrupt, FleetFitError)):
        lab.serve()
    run = lab.serve(resume=True)
    assert len(calls) == 4  # the first round was begun twice
    assert [r["privacy"]["epsilon"] for r in run.metrics] == [
        accountant.compute_epsilon(1.0, 0.5, n, 0.01) for n in (2, 3, 4)
    ]
    assert json.loads((run.folder / "privacy.json").read_text())["begun"] == 4
    assert json.loads((run.folder / "fleet.json").read_text())["first"]["samples"] is None
    rounds = [line for line in lab.lines if line.startswith("Round")]
    assert len(rounds) == 3 and all("epsilon" in line and "level" not in line and "loss" not in line for line in rounds)
    secret = (tmp_path / "keys" / "run.key").read_text().strip()
    assert secret not in lab.output
    assert not any(secret.encode() in file.read_bytes() for file in run.folder.rglob("*") if file.is_file())
    assert not any(secret.encode() in part for m in lab.grid.sent for part in transport.read_parts(m).values())
