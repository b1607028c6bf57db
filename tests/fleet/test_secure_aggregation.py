"""Secure rounds of a fleet in one process: the simulation's bits, losses in each phase, and what the server gets."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import raises
from support.secure import Stopped
from tiny import tiny_data

import fleetfit as ff
from fleetfit import secure
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Failure
from fleetfit.engines.secure import BlockLayout
from fleetfit.errors import ConfigError, NoUsableUpdates, RunError
from fleetfit.privacy import Privacy, count_registered
from fleetfit.secure import Quantizer, keys
from fleetfit.submodel import concat_state

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Message
from local_fleet import CLIENTS, Lab, described
from open_updates import needles

from fleetfit.fleet import node as nodes_side, transport
from fleetfit.fleet.certificates import make_member
from fleetfit.fleet.node_log import read_log
from fleetfit.fleet.secure_aggregation import read_member

SECURE: dict[str, Any] = {"min_clients": 2, "reconstruction_threshold": 0.6}
TABLE = described(
    {"name": "scalefl"}, secure=SECURE, model={"name": "tiny:tiny", "norm": False}, cohort={"fraction": 1.0}, rounds=2
)


@pytest.fixture(autouse=True)
def fresh_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_side.get_node.cache_clear()


def lab_of(folder: Path, table: Mapping[str, Any] = TABLE, **of_member: Any) -> Lab:
    """Return a fleet whose nodes have keys of one authority."""
    budgets = assemble(load_experiment(dict(table))).fleet.budgets
    lab = Lab(folder, dict(table), [float(b) for b in budgets])
    for client in range(CLIENTS):
        place = folder / f"node-{client}"
        make_member(place / "own.member", folder / "authority")
        lab.config(client, secure={"member": "own.member", "min_clients": 2, **of_member})
    return lab


def phase_of(message: Message) -> str:
    """Return which phase a message asks for, or ""."""
    from fleetfit.messages import unpack

    header = unpack(transport.read_parts(message)["header"], bounded=True)
    return str(header["secure"]["phase"]) if header["what"] == "secure" else ""


def test_a_fleet_ends_with_the_bits_of_the_simulation(tmp_path: Path) -> None:
    base = ff.run(TABLE, out=tmp_path / "local")
    run = lab_of(tmp_path).serve()
    assert torch.equal(concat_state(run.server.state), concat_state(base.server.state))
    for ours, theirs in zip(run.metrics, base.metrics, strict=True):
        assert ours["train"] == theirs["train"] and ours["failures"] == [] and ours["train"]["clients"] == CLIENTS
        assert ours["secure"] == theirs["secure"] and ours["train"]["loss"] is None
        assert ours["bytes_up"] == pytest.approx(theirs["bytes_up"], abs=200), "names of runs and clients differ"


WITH_PRIOR = {**TABLE, "method": {"name": "scalefl", "options": {"class_prior": {}}}}


def reporting_lab(folder: Path, clients: Iterable[int] = range(CLIENTS)) -> Lab:
    lab = lab_of(folder, WITH_PRIOR)
    for client in clients:
        lab.config(client, secure={"member": "own.member", "min_clients": 2}, reports_labels=True)
    return lab


def test_class_frequencies_equal_the_simulations(tmp_path: Path) -> None:
    base = ff.run(WITH_PRIOR, out=tmp_path / "local")
    run = reporting_lab(tmp_path).serve()
    assert run.server.prior == base.server.prior != ()
    assert torch.equal(concat_state(run.server.state), concat_state(base.server.state))
    assert run.metrics[0]["prior"] == base.metrics[0]["prior"] == {"clients": CLIENTS, "failures": []}


@pytest.mark.parametrize("reporting", [[0, 1, 2, 4], [0, 2, 3], []])
def test_class_frequencies_sum_over_consenting_nodes(reporting: list[int], tmp_path: Path) -> None:
    run = reporting_lab(tmp_path, reporting).serve()
    data = tiny_data()
    parts = assemble(load_experiment(WITH_PRIOR)).simulation.parts  # type: ignore[union-attr]
    labels = [data.y[parts[client]["train"]].tolist() for client in reporting]
    rows = [[(one.count(c) + 1) / (len(one) + 4) for c in range(4)] for one in labels]
    mean = [sum(row[c] for row in rows) / len(rows) for c in range(4)] if rows else [0.25] * 4
    assert run.server.prior == pytest.approx(mean, abs=1e-6)
    prior = run.metrics[0]["prior"]
    assert prior["clients"] == len(reporting)
    assert [failure["client"] for failure in prior["failures"]] == sorted({*range(CLIENTS)} - {*reporting})
    assert run.metrics[0]["train"]["clients"] == CLIENTS, "they train all the same"


def test_class_frequencies_are_added_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is stopped before it keeps the sum; the run goes on with a uniform one."""
    lab = reporting_lab(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("fleetfit.rounds.loop.run_round", stop)
        with pytest.raises(Stopped):
            lab.serve()
    run = lab.serve(resume=True)
    assert run.metrics[0]["prior"]["clients"] == 0 and run.server.prior == (0.25,) * 4
    assert run.finished and run.metrics[0]["train"]["clients"] == CLIENTS


def stop(*arguments: Any) -> None:
    raise Stopped


@pytest.mark.parametrize("masks", [True, False])
def test_the_server_gets_and_keeps_no_single_update(
    masks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in any reply, nor in what it says and writes; without masks the same search finds every client's."""
    lab, came = lab_of(tmp_path), []
    updates = needles(TABLE)
    if not masks:
        monkeypatch.setattr(keys, "add_mask", lambda words, key, sign: None)

    def record(message: Message, reply: Message) -> Message:
        came.append(b"".join(bytes(part) for part in transport.read_parts(reply).values()))
        return reply

    lab.grid.twist = record
    run = lab.serve()
    assert all(report["failures"] == [] for report in run.metrics), "sums are right either way"
    files = [path.read_bytes() for path in run.folder.rglob("*") if path.is_file()]
    everything = [*came, *files, lab.output.encode()]
    leaked = {
        client for client, pieces in updates.items() for piece in pieces if any(piece in text for text in everything)
    }
    assert len(updates) == CLIENTS and leaked == (set() if masks else set(range(CLIENTS)))


@pytest.mark.parametrize("phase", ["keys", "shares", "train", "sign", "unmask"])
def test_a_dead_worker_leaves_the_round(phase: str, tmp_path: Path) -> None:
    lab, ended = lab_of(tmp_path), []

    def ends(message: Message, reply: Message) -> Message | None:
        if phase_of(message) == phase and message.metadata.dst_node_id == 103 and not ended:
            ended.append(message)
            nodes_side.get_node(str(lab.configs[2]))._member._client = None  # its secrets were in memory only
            return _failed(message)
        return reply

    lab.grid.twist = ends
    run = lab.serve()
    first, second = run.metrics
    counts = phase in ("sign", "unmask")
    assert [f["client"] for f in first["failures"]] == ([] if counts else [2])
    assert first["train"]["clients"] == CLIENTS - (not counts) and "undone" not in first
    assert second["failures"] == [] and second["train"]["clients"] == CLIENTS


def in_vain(lab: Lab) -> ff.Run:
    """Serve a run of which no round has a usable update; return it with its reports."""
    with pytest.raises(NoUsableUpdates):
        lab.serve()
    return ff.load(lab.folder / "run")


def _failed(message: Message) -> Message:
    from flwr.app import Error

    return Message(Error(8, "killed"), reply_to=message)


def test_a_member_refuses_to_train_in_the_open(tmp_path: Path) -> None:
    lab = lab_of(tmp_path)
    del lab.table["secure"]
    with raises(RunError, key="engine.nodes"):
        lab.serve(wait_s=0.5)
    logs = [read_log(path)[0] for path in tmp_path.rglob("log.jsonl")]
    assert len(logs) == CLIENTS and all("[secure]" in entry["reason"] for log in logs for entry in log)


def test_nodes_without_a_key_stay_out(tmp_path: Path) -> None:
    lab = lab_of(tmp_path)
    lab.config(1)
    run = lab.serve()
    assert [f["client"] for f in run.metrics[0]["failures"]] == [1]


def test_members_refuse_other_authorities(tmp_path: Path) -> None:
    """The server cannot invent members: nobody goes on with one that the authority has not signed."""
    lab = lab_of(tmp_path)
    (tmp_path / "node-1/own.member").unlink()
    make_member(tmp_path / "node-1/own.member", tmp_path / "stranger")
    run = in_vain(lab)
    assert "0 clients" in run.metrics[0]["undone"]["reason"]
    reasons = {f["client"]: f["reason"] for f in run.metrics[0]["failures"]}
    assert all("client 1 " in reasons[c] for c in range(CLIENTS) if c != 1)


def test_a_node_goes_by_a_minimum_of_its_own(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, min_clients=6)
    run = in_vain(lab)
    assert "0 clients" in run.metrics[0]["undone"]["reason"]
    assert re.findall(r"\d+", run.metrics[0]["failures"][0]["reason"]) == ["5", "6"]


def test_a_node_with_a_new_worker_does_no_round_twice(tmp_path: Path) -> None:
    """The server forgets that rounds were begun, and asks once more, by the same name."""
    lab = lab_of(tmp_path)
    name = json.loads((lab.serve().folder / "secure.json").read_text())["run"]
    nodes_side.get_node.cache_clear()
    lab.table["rounds"] = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure, "token_hex", lambda size: name)
        again = lab.serve("again")
    for report in again.metrics[:2]:
        assert len(report["failures"]) == CLIENTS and report["train"]["clients"] == 0
    assert again.metrics[2]["train"]["clients"] == CLIENTS, "a round that was not begun"


@pytest.mark.parametrize("twist", ["range", "bits", "lr"])
def test_different_settings_give_noise(twist: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetfit.fleet import secure_aggregation

    lab, answer, lies = lab_of(tmp_path), secure_aggregation.Member.make_finish, []
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "range": lambda h: h["secure"].update(range=h["secure"]["range"] * 1e6),
        "bits": lambda h: h["secure"].update(bits=19),
        "lr": lambda h: h["job"]["local"].update(lr=0.0),
    }

    def lied(self: Any, header: Any, message: bytes) -> Any:
        if not lies:
            lies.append(changes[twist](header))
        return answer(self, header, message)

    monkeypatch.setattr(secure_aggregation.Member, "make_finish", lied)
    lab.table["rounds"] = 1
    assert in_vain(lab).metrics[0]["undone"]["reason"] and len(lies) == 1


# ---- with differential privacy -------------------------------------------------------------------------------------


def private_table(folder: Path, **changes: Any) -> dict[str, Any]:
    pytest.importorskip("opacus", reason="the accountant is an extra: fleetfit[privacy]")
    privacy = {
        "clipping_norm": 0.05,
        "noise_multiplier": 1.0,
        "delta": 0.01,
        "key_file": str(folder / "keys" / "run.key"),
    }
    return {**TABLE, "privacy": privacy, "evaluate": {"every": 0}, **changes}


def test_a_private_secure_fleet_equals_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one salt for both. Nodes clip themselves, as the simulated clients do."""
    monkeypatch.setattr("secrets.token_hex", lambda size: "5a" * size)
    table = private_table(tmp_path)
    base = ff.run(table, out=tmp_path / "local")
    run = lab_of(tmp_path, table).serve()
    assert torch.equal(concat_state(run.server.state), concat_state(base.server.state))
    assert [r["privacy"] for r in run.metrics] == [r["privacy"] for r in base.metrics]
    assert all(r["train"]["clients"] is None and "secure" not in r and "undone" not in r for r in run.metrics)
    monkeypatch.setattr(Quantizer, "quantize_clipped", lambda self, moved: self.quantize(moved)[0])
    nodes_side.get_node.cache_clear()
    loose = lab_of(tmp_path / "loose", table).serve()
    assert not torch.equal(concat_state(loose.server.state), concat_state(base.server.state)), (
        "and clipping shortens something"
    )


@pytest.mark.parametrize("masks", [True, False])
def test_a_private_server_sees_noisy_sums_only(masks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in any reply, nor in what it says and writes; without masks and noise the same search finds both."""
    traces: dict[str, list[bytes]] = {"updates": [], "means": []}
    words, released, came = BlockLayout.quantize_update, Privacy.release, []

    def sent(*arguments: Any) -> Any:
        messages = words(*arguments)
        traces["updates"] += [part.tobytes()[:64] for part in messages[0].values()]
        return messages

    def record_mean(self: Privacy, federation: Any, server: Any, total: torch.Tensor) -> Any:
        members = count_registered(federation, server.round) * self.rate
        traces["means"].append((total / members + concat_state(server.state)).numpy().tobytes()[:64])
        return released(self, federation, server, total)

    def record_message(message: Message, reply: Message) -> Message:
        came.append(b"".join(bytes(part) for part in transport.read_parts(reply).values()))
        return reply

    monkeypatch.setattr(BlockLayout, "quantize_update", sent)
    monkeypatch.setattr(Privacy, "release", record_mean)
    if not masks:
        monkeypatch.setattr(keys, "add_mask", lambda words, key, sign: None)
        monkeypatch.setattr(Privacy, "_add_noise", lambda self, total, round: None)
    lab = lab_of(tmp_path, private_table(tmp_path))
    lab.grid.twist = record_message
    run = lab.serve()
    secret = (tmp_path / "keys" / "run.key").read_text().strip()
    files = [path.read_bytes() for path in run.folder.rglob("*") if path.is_file()]
    everything = [*came, *files, lab.output.encode()]
    assert not any(secret.encode() in text or bytes.fromhex(secret) in text for text in everything)
    messages = {kind for kind, parts in traces.items() for part in parts if any(part in text for text in everything)}
    assert len(traces["updates"]) >= 2 * CLIENTS and len(traces["means"]) == 2
    assert messages == (set() if masks else {"updates", "means"})
    assert not re.search(r"\d updates", lab.output) and lab.output.count("epsilon") >= 2


@pytest.mark.parametrize("twist", ["clip", "none", "beyond"])
def test_a_server_that_changes_a_nodes_clip_gets_noise(
    twist: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a longer movement, or to none, or to one that does not lie within the range, which the node refuses."""
    from fleetfit.fleet import secure_aggregation

    lab, answer, lies = lab_of(tmp_path, private_table(tmp_path, rounds=1)), secure_aggregation.Member.make_finish, []
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "clip": lambda h: h["secure"].update(clip=0.9),
        "none": lambda h: h["secure"].pop("clip"),
        "beyond": lambda h: h["secure"].update(clip=9.0),
    }

    def lied(self: Any, header: Any, message: bytes) -> Any:
        if not lies:
            lies.append(changes[twist](header))
        return answer(self, header, message)

    monkeypatch.setattr(secure_aggregation.Member, "make_finish", lied)
    run = lab.serve() if twist == "beyond" else in_vain(lab)
    undone = run.metrics[0].get("undone", {}).get("reason", "")
    assert len(lies) == 1 and (twist == "beyond") == (undone == "")
    assert undone in lab.output


def test_a_node_that_could_not_train_sends_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, real = [], nodes_side.run_job

    def broken(job: Any, device: Any) -> Any:
        trained.append(job.client)
        result = real(job, device)
        return (Failure.of(job, "it diverged"), None) if job.client == 1 and job.kind == "train" else result

    monkeypatch.setattr(nodes_side, "run_job", broken)
    reported: list[Any] = []
    real_released = Privacy.release_sums

    def record_sums(self: Privacy, federation: Any, server: Any, summed: Any) -> Any:
        reported.append(summed)
        return real_released(self, federation, server, summed)

    monkeypatch.setattr(Privacy, "release_sums", record_sums)
    lab_of(tmp_path, private_table(tmp_path, rounds=1)).serve()
    assert trained.count(1) == 1 and max(block.clients for block in reported[0].blocks) == CLIENTS
    assert not any(isinstance(report, Failure) for report in reported[0].reports)


def test_a_quorum_is_refused(tmp_path: Path) -> None:
    lab = lab_of(tmp_path)
    lab.table["cohort"] = {"fraction": 1.0, "quorum": 0.5}
    with raises(ConfigError, "[cohort] quorum"):
        lab.serve()


def test_member_keys_are_readable_by_their_owner(tmp_path: Path) -> None:
    make_member(tmp_path / "a", tmp_path / "authority")
    make_member(tmp_path / "b", tmp_path / "authority")
    (one, authority), (other, same) = read_member(tmp_path / "a"), read_member(tmp_path / "b")
    assert authority == same and one.signer.public != other.signer.public
    for identity in (one, other):
        assert keys.verify_signature(authority, identity.certificate, keys.encode_membership(identity.signer.public))
    for path in (tmp_path / "a", tmp_path / "authority/members.key"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert bytes.fromhex((tmp_path / "authority/members.key").read_text()).hex() not in (tmp_path / "a").read_text()
    with raises(ConfigError, path="a"):
        make_member(tmp_path / "a", tmp_path / "authority")
    (tmp_path / "c").write_text("{}")
    with raises(ConfigError, key="secure.member", path="c"):
        read_member(tmp_path / "c")
    with raises(ConfigError, key="secure.member", path="d"):
        read_member(tmp_path / "d")
