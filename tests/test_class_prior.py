"""The class prior: its formula by hand, training by a plain loop, who is asked for p, and where it is off."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from run_folders import stop_before_round
from support import raises
from support.attacks import TINY
from support.bits import have_same_state
from support.engines import MeddlingEngine, RecordingEngine
from support.secure import TINY as SECURE_TINY, merge_tables
from support.training import assert_close, make_job, plain_outputs, plain_sgd, train_job
from tiny import plain, tiny_data, tiny_federation
from torch import Tensor

import fleetfit as ff
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import (
    FREQUENCIES,
    Clients,
    Evaluation,
    Failure,
    Federation,
    Job,
    RoundSums,
    Simulation,
    Update,
)
from fleetfit.core.tasks import get_task
from fleetfit.data import Data
from fleetfit.engines import secure as secure_engine
from fleetfit.engines.secure import SecureEngine
from fleetfit.errors import ConfigError
from fleetfit.hooks import Method, build
from fleetfit.layout import State
from fleetfit.messages import dump_job, job_size, load_job, pack, reply_size, unpack
from fleetfit.methods.heterofl import width_loss
from fleetfit.options.class_prior import adjust_task, compute_offset
from fleetfit.rounds import Settings, run, start
from fleetfit.rounds.class_frequencies import (
    MAX_CLIENTS,
    ask_class_frequencies,
    iter_label_jobs,
    sum_class_frequencies,
)
from fleetfit.rounds.restore import check_checkpoint
from fleetfit.runs.checkpoints import CheckpointError
from fleetfit.secure import keys, pack_message
from fleetfit.training import compute_class_frequencies, job as jobs, run_job
from fleetfit.validation import find_job_error

PRIOR = {"class_prior": {}}


def skewed(name: str = "fedavg", tau: float = 1.0, **more: Any) -> tuple[Federation, Simulation]:
    """Six clients; client k has no training sample of class k mod 4, so that their classes differ."""
    federation, simulation = tiny_federation(
        {"name": name, "options": {"class_prior": {"tau": tau}}}, norm=False, **more
    )
    y = simulation.data.y
    parts = [{**part, "train": part["train"][y[part["train"]] != k % 4]} for k, part in enumerate(simulation.parts)]
    samples = np.array([len(part["train"]) for part in parts])
    clients = replace(federation.clients, num_examples=samples)
    return replace(federation, clients=clients), replace(simulation, parts=parts)


def frequencies_by_hand(simulation: Simulation, client: int) -> list[float]:
    labels = simulation.data.y[simulation.parts[client]["train"]].tolist()
    return [(labels.count(c) + 1) / (len(labels) + 4) for c in range(4)]


def offset_by_hand(simulation: Simulation, client: int, prior: Sequence[float], tau: float = 1.0) -> Tensor:
    own = frequencies_by_hand(simulation, client)
    return torch.tensor([tau * (math.log(a) - math.log(b)) for a, b in zip(own, prior, strict=True)])


PRIOR_BY_HAND = (0.1, 0.2, 0.3, 0.4)

# ---- formulas --------------------------------------------------------------------------------------------------------


def test_frequencies_count_scored_positions() -> None:
    """n = 5 of C = 4 classes: (2 + 1) / 9, (0 + 1) / 9, (3 + 1) / 9, 1 / 9; of tokens -100 does not count."""
    x, splits = torch.zeros(6, 1, 2, 2), {"train": torch.arange(5), "test": torch.tensor([5])}
    data = Data("five", x, torch.tensor([0, 2, 2, 0, 2, 3]), splits, 4)
    assert compute_class_frequencies(data).tolist() == pytest.approx([3 / 9, 1 / 9, 4 / 9, 1 / 9], rel=1e-15)
    y = torch.tensor([[0, 1, -100], [1, 1, -100]])
    tokens = Data("two", torch.zeros(2, 3, dtype=torch.int64), y, {"train": torch.arange(2)}, 3, task="next_token",
                  vocabulary=3)  # fmt: skip
    assert compute_class_frequencies(tokens).tolist() == pytest.approx([2 / 7, 4 / 7, 1 / 7], rel=1e-15)


def test_the_offset_is_tau_times_log_ratios() -> None:
    """tau 0.5, p_k = (3/4, 1/4): 0.5 ln((3/4) / (1/2)) = 0.5 ln 1.5 = 0.20273; relative to (3/4, 1/4) it is zero."""
    own = torch.tensor([0.75, 0.25], dtype=torch.float64)
    expected = [0.2027325541, 0.5 * math.log(0.5)]
    assert compute_offset(own, (), 0.5).tolist() == pytest.approx(expected, rel=1e-6)
    assert compute_offset(own, (0.5, 0.5), 0.5).tolist() == pytest.approx(expected, rel=1e-6)
    assert compute_offset(own, (0.75, 0.25), 0.5).tolist() == [0.0, 0.0]


def test_the_loss_is_adjusted_and_the_divergence_is_not() -> None:
    """With equal logits the adjusted prediction is p_k / p, normalized."""
    federation, simulation = skewed()
    device, job = simulation.device(1), replace(make_job(federation, 1, 2), prior=PRIOR_BY_HAND)
    task, changed = device.problem.task, adjust_task(job, device, 1.0)
    ratios = [a / b for a, b in zip(frequencies_by_hand(simulation, 1), PRIOR_BY_HAND, strict=True)]
    loss = changed.loss(torch.zeros(1, 4), torch.tensor([2]))
    assert float(loss) == pytest.approx(-math.log(ratios[2] / sum(ratios)), rel=1e-6)
    assert replace(changed, loss=task.loss) == task
    assert adjust_task(job, device, 0.0) is task


def test_tokens_get_the_offset_at_each_position() -> None:
    task, (_, simulation) = get_task("next_token"), skewed()
    y = torch.tensor([[0, 1, -100], [1, 1, -100]])
    data = Data("two", torch.zeros(2, 3, dtype=torch.int64), y, {"train": torch.arange(2)}, 3, task="next_token",
                vocabulary=3)  # fmt: skip
    device = simulation.device(0)
    device = replace(device, data=data, problem=device.problem.replace_task(task))
    job = Job("train", 0, 1, 0, 0, simulation.problem.submodel(1.0, (3,)), {}, {}, 1, prior=(0.5, 0.25, 0.25))
    ratios = [(2 / 7) / 0.5, (4 / 7) / 0.25, (1 / 7) / 0.25]
    losses = [-math.log(ratios[c] / sum(ratios)) for c in (0, 1, 1, 1)]
    loss = adjust_task(job, device, 1.0).loss(torch.zeros(2, 3, 3), y)
    assert float(loss) == pytest.approx(sum(losses) / 4, rel=1e-6)


def test_heterofl_masks_first_and_adds_the_offset_then() -> None:
    """Client 1 lacks class 1: its logit counts as 0, before the offset."""
    federation, simulation = skewed("heterofl")
    device, job = simulation.device(1), replace(make_job(federation, 1, 2), prior=PRIOR_BY_HAND)
    own = replace(device, problem=device.problem.replace_task(adjust_task(job, device, 1.0)))
    loss = width_loss(job, own, scaler=False, masked=True)
    logits, y = torch.tensor([[0.5, 9.0, -0.2, 0.1]]), torch.tensor([0])

    class Constant(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return logits

    shifted = torch.tensor([[0.5, 0.0, -0.2, 0.1]]) + offset_by_hand(simulation, 1, PRIOR_BY_HAND)
    assert float(loss(Constant(), torch.zeros(1), y)) == pytest.approx(float(F.cross_entropy(shifted, y)), rel=1e-6)


# ---- training, by a plain loop ---------------------------------------------------------------------------------------

LOCAL = plain(lr=0.2, epochs=3, batch_size="all")


def train_plainly(job: Job, simulation: Simulation, offset: Tensor, beta: float | None) -> State:
    """FedAvg's loss (beta None), or ScaleFL's Eq. 5 with cross-entropies of z + offset and divergences of z."""

    def loss(logits: list[Tensor], y: Tensor) -> Tensor:
        if beta is None:
            return F.cross_entropy(logits[-1] + offset, y)
        exits, total = len(logits), torch.zeros((), dtype=torch.float64)
        teacher = (logits[-1].detach() / 3).softmax(-1)
        for i, z in enumerate(logits, 1):
            term = F.cross_entropy(z + offset, y)
            if i < exits:
                term = term + beta * 9 * (teacher * (teacher.log() - (z / 3).log_softmax(-1))).sum(-1).mean()
            total = total + 2 * i / (exits * (exits + 1)) * term
        return total

    assert job.client is not None
    data = simulation.device(job.client).data
    batches = [data.batch(data.split("train"))] * LOCAL.epochs
    return plain_sgd(job.state, job.submodel.exits, batches, loss, LOCAL)


@pytest.mark.parametrize(("name", "beta"), [("fedavg", None), ("scalefl", 0.1)])
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_training_equals_a_plain_loop(name: str, beta: float | None, tau: float) -> None:
    federation, simulation = skewed(name, tau)
    job = replace(make_job(federation, 2, 2, local=LOCAL), prior=PRIOR_BY_HAND)
    offset = offset_by_hand(simulation, 2, PRIOR_BY_HAND, tau)
    assert float(offset.abs().max()) > 0.1
    assert_close(train_job(job, simulation.device(2)).state, train_plainly(job, simulation, offset, beta))


def test_the_default_prior_is_uniform() -> None:
    federation, simulation = skewed()
    job = make_job(federation, 2, 2, local=LOCAL)
    offset = offset_by_hand(simulation, 2, [0.25] * 4)
    assert_close(train_job(job, simulation.device(2)).state, train_plainly(job, simulation, offset, None))


@pytest.mark.parametrize("name", ["fedavg", "scalefl", "heterofl", "depthfl", "reefl"])
def test_tau_0_changes_no_bit(name: str) -> None:
    federation, simulation = skewed(name, 0.0)
    job = replace(make_job(federation, 2, 2, local=LOCAL), prior=PRIOR_BY_HAND)
    without = replace(job, method={"name": name})
    with_prior = replace(job, method={"name": name, "options": PRIOR})
    state, expected, other = (train_job(j, simulation.device(2)).state for j in (job, without, with_prior))
    assert all(torch.equal(state[n], expected[n]) for n in expected)
    assert not all(torch.equal(other[n], expected[n]) for n in expected)


def test_early_stopping_checks_the_adjusted_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before the first step is the cross-entropy of z + offset on the validation data."""
    federation, simulation = skewed()
    checked: list[float] = []
    compute = jobs.EarlyStopping._compute_loss

    def record(self: Any) -> float:
        checked.append(compute(self))
        return checked[-1]

    monkeypatch.setattr(jobs.EarlyStopping, "_compute_loss", record)
    job = replace(make_job(federation, 2, 2, local=LOCAL.replace(patience=5, check_every=1)), prior=PRIOR_BY_HAND)
    device = simulation.device(2)
    train_job(job, device)
    x, y = device.data.batch(device.data.split("validation"))
    logits = plain_outputs(job.state, x, job.submodel.exits)[-1]
    shifted = F.cross_entropy(logits + offset_by_hand(simulation, 2, PRIOR_BY_HAND), y)
    assert checked[0] == pytest.approx(float(shifted), rel=1e-5)
    assert checked[0] != pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-3)


def test_evaluation_has_the_plain_logits() -> None:
    federation, simulation = skewed()
    job = make_job(federation, 2, 2, kind="evaluate", prior=PRIOR_BY_HAND)
    without = replace(job, method={"name": "fedavg"}, prior=())
    reply, expected = (run_job(j, simulation.device(2))[0] for j in (job, without))
    assert isinstance(reply, Update) and isinstance(expected, Update) and reply.metrics == expected.metrics


# ---- who is asked ----------------------------------------------------------------------------------------------------


def rounds_of(federation: Federation, engine: Any, rounds: int = 2) -> list[Any]:
    return list(run(federation, engine, Settings(rounds, plain(lr=0.1, batch_size=8)), start(federation)))


def test_every_training_job_has_the_mean_prior() -> None:
    federation, simulation = skewed("scalefl")
    engine = RecordingEngine(simulation)
    first, second = rounds_of(federation, engine)
    rows = [frequencies_by_hand(simulation, client) for client in range(6)]
    expected = [sum(row[c] for row in rows) / 6 for c in range(4)]
    assert first.server.prior == pytest.approx(expected, rel=1e-12) and second.server.prior == first.server.prior
    kinds = [job.kind for job in engine.jobs]
    assert kinds[:6] == ["labels"] * 6 and kinds.count("labels") == 6 and engine.jobs[6].kind == "train"
    assert all(job.prior == first.server.prior for job in engine.jobs if job.kind == "train")
    assert all(not job.prior and not job.state for job in engine.jobs if job.kind == "labels")
    assert first.report["prior"] == {"clients": 6, "failures": []} and "prior" not in second.report
    layout, pairs = federation.problem.layout, list(zip(engine.jobs, engine.replies, strict=True))[: 6 + 4]
    assert first.report["bytes_down"] == sum(job_size(job, layout) for job, _ in pairs)
    assert first.report["bytes_up"] == sum(reply_size(reply, layout) for _, reply in pairs)


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "fedavg"}, {"name": "fleetfit", "tau": 0.0},
        *({"name": name, "options": {"class_prior": {"tau": 0.0}}} for name in ("fedavg", "fleetfit")),
    ],
)  # fmt: skip
def test_no_client_is_asked_in_vain(spec: Mapping[str, Any]) -> None:
    federation, simulation = tiny_federation(spec)
    engine = RecordingEngine(simulation)
    outcome = rounds_of(federation, engine, 1)[0]
    assert "labels" not in {job.kind for job in engine.jobs} and not outcome.server.prior
    assert "prior" not in outcome.report


def test_a_method_that_reads_frequencies_keeps_them() -> None:
    def reads_prior() -> Method:
        return Method(needs_prior=True)

    for tau in (0.0, 1.0):
        assert build({"name": reads_prior, "options": {"class_prior": {"tau": tau}}}).needs_prior


def test_at_most_a_thousand_clients_are_asked() -> None:
    federation, _ = skewed()
    many = replace(federation, clients=Clients(np.full(1500, 10), np.ones(1500)))
    jobs, again = (list(iter_label_jobs(many, start(many))) for _ in range(2))
    clients = [job.client for job in jobs]
    assert len(set(clients)) == len(clients) == MAX_CLIENTS == 1000
    assert clients == [job.client for job in again] == sorted(clients)
    other = replace(many, seed=1)
    assert clients != [job.client for job in iter_label_jobs(other, start(other))]


def test_only_connected_clients_are_asked() -> None:
    federation, simulation = skewed()
    connected = np.array([True, False, True, True, False, True])

    def trace(round: int) -> np.ndarray:
        return connected if round else np.zeros(6, dtype=bool)

    engine = RecordingEngine(simulation)
    first, second = rounds_of(replace(federation, connected=trace), engine)
    assert not first.server.prior and second.report["prior"]["clients"] == 4
    assert [job.client for job in engine.jobs if job.kind == "labels"] == [0, 2, 3, 5]


FULL = torch.full((4,), 0.25, dtype=torch.float64)
NONSENSE: dict[str, Mapping[str, Tensor]] = {
    "another length": {FREQUENCIES: torch.full((5,), 0.2, dtype=torch.float64)},
    "another dtype": {FREQUENCIES: FULL.float()},
    "another sum": {FREQUENCIES: FULL * 1.00001},
    "not a number": {FREQUENCIES: FULL * math.nan},
    "infinite": {FREQUENCIES: FULL * math.inf},
    "negative": {FREQUENCIES: torch.tensor([0.6, 0.6, 0.2, -0.4], dtype=torch.float64)},
    "zero": {FREQUENCIES: torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)},
    "nothing": {},
    "something beside it": {FREQUENCIES: FULL, "more": FULL},
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE.keys())
def test_a_malformed_answer_is_left_out(answer: Mapping[str, Tensor]) -> None:
    federation, simulation = skewed()

    def meddle(index: int, reply: Update | Failure) -> Update | Failure:
        return replace(reply, state=answer) if index == 3 and isinstance(reply, Update) else reply

    frequencies = ask_class_frequencies(federation, MeddlingEngine(simulation, meddle), start(federation))
    rows = [frequencies_by_hand(simulation, client) for client in (0, 1, 2, 4, 5)]
    assert frequencies.prior == pytest.approx([sum(row[c] for row in rows) / 5 for c in range(4)], rel=1e-12)
    assert frequencies.clients == 5 and [failure["client"] for failure in frequencies.failures] == [3]


def test_failed_clients_are_left_out_of_the_prior(
    caplog: pytest.LogCaptureFixture,
) -> None:
    federation, simulation = skewed()

    def fails(lost: set[int]) -> MeddlingEngine:
        return MeddlingEngine(
            simulation, lambda i, reply: Failure.of(_job_of(reply), "gone") if reply.client in lost else reply
        )

    frequencies = ask_class_frequencies(federation, fails({0}), start(federation))
    assert frequencies.clients == 5 and not caplog.records
    frequencies = ask_class_frequencies(federation, fails(set(range(6))), start(federation))
    assert frequencies.prior == (0.25,) * 4 and frequencies.clients == 0 and len(frequencies.failures) == 6
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def _job_of(reply: Update | Failure) -> Job:
    return Job("labels", reply.round, 0, reply.index, reply.client, reply.dispatched, {}, {}, 0, reply.level)


# ---- classes that are tokens -----------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {"rounds": 1, "local": {"max_steps": 1, "epochs": 1}, "evaluate": {"clients": 2}}


def token_data(classes: int, task: str = "classification") -> Data:
    """Windows of 6 of 30 tokens, whose labels are one of some classes, or the next token at each place."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randint(30, (120, 7), generator=rng)
    y = x[:, 1:] if task == "next_token" else x[:, -1] % classes
    splits = {"train": torch.arange(90), "test": torch.arange(90, 120)}
    return Data("tokens", x[:, :6], y, splits, classes, task=task, vocabulary=30)


TEXT = "the tide took the ladder and the wheel to the other side of the quiet harbour "


@pytest.mark.parametrize(
    "data",
    [token_data(30, "next_token"), token_data(30), token_data(27), "play.txt"],
    ids=["next tokens", "the token after a window", "some tokens are no label", "a text file"],
)
def test_no_histogram_of_words_is_asked_for(data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("play.txt").write_text(TEXT * 40)
    section = {"path": data} if isinstance(data, str) else {"name": data, "partition": {"kind": "iid", "clients": 6}}
    first = ff.run(data=section, **SHORT, out="first")
    assert "prior" not in first.metrics[0] and not first.server.prior
    assert 'name = "fleetfit"' in first.files.text("config.toml") and "tau = 0.0" in first.files.text("config.toml")
    for index, method in enumerate(({"name": "fleetfit", "tau": 1.0}, {"name": "fleetfit", "options": PRIOR})):
        run = ff.run(data=section, method=method, **SHORT, out=f"asked-{index}")
        assert run.metrics[0]["prior"]["clients"] > 0 and len(run.server.prior) == run.assembly.data.classes


def test_classes_that_are_no_tokens_have_the_prior(tmp_path: Path) -> None:
    run = ff.run(data=token_data(4), **SHORT, out=tmp_path / "run")
    assert run.metrics[0]["prior"]["clients"] > 0 and "tau = 1.0" in run.files.text("config.toml")


def test_a_resumed_run_keeps_its_prior_on_tokens(tmp_path: Path) -> None:
    data = {"name": token_data(30, "next_token"), "partition": {"kind": "iid", "clients": 6}}
    table = {**SHORT, "data": data, "method": {"name": "fleetfit", "tau": 1.0}, "rounds": 2}
    whole = ff.run(table, out=tmp_path / "whole")
    stop_before_round(table, tmp_path / "half", 1)
    again = ff.resume(tmp_path / "half", data=data["name"])
    assert have_same_state(again, whole) and len(whole.server.prior) == 30


# ---- secure sums -----------------------------------------------------------------------------------------------------

SECURE: dict[str, Any] = merge_tables(
    SECURE_TINY,
    {
        "secure": {"min_clients": 3},
        "method": {"options": PRIOR},
        "data": {"partition": {"kind": "dirichlet", "alpha": 0.5}},
    },
)


def secured(drop: secure_engine.Dropout | None = None) -> tuple[Federation, SecureEngine]:
    assembly = assemble(load_experiment(SECURE))
    engine, secure, layout = assembly.engine(), assembly.settings.secure, assembly.federation.problem.layout
    assert isinstance(engine, SecureEngine) and secure is not None
    make_parties = partial(secure_engine.SimulatedParties, engine.engine, dropout=drop)
    return assembly.federation, SecureEngine(engine.engine, layout, secure, make_parties)


def test_a_secure_sum_is_nearly_the_mean() -> None:
    """Of 22 bits: 1 / (2^21 - 1) / 2 = 2.4e-7."""
    federation, engine = secured()
    server = start(federation)
    plain_mean, frequencies = (
        ask(federation, runner, server).prior
        for ask, runner in ((ask_class_frequencies, engine.engine), (sum_class_frequencies, engine))
    )
    apart = [abs(a - b) for a, b in zip(plain_mean, frequencies, strict=True)]
    assert max(plain_mean) - min(plain_mean) > 0.02 and 0 < max(apart) <= 2.4e-7
    assert sum(frequencies) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("phase", ["keys", "shares", "update"])
def test_dropouts_are_left_out_of_a_secure_sum(phase: str) -> None:
    federation, engine = secured(lambda p, r, c: p == phase and c in (1, 6))
    frequencies = sum_class_frequencies(federation, engine, start(federation))
    rows = [r.state[FREQUENCIES] for r in engine.engine.run(iter_label_jobs(federation, start(federation)))]
    expected = sum(row for client, row in enumerate(rows) if client not in (1, 6)) / 10
    assert frequencies.prior == pytest.approx(expected.tolist(), abs=secure_engine.LABEL_GRID.step)
    assert frequencies.clients == 10 and [failure["client"] for failure in frequencies.failures] == [1, 6]


@pytest.mark.parametrize("fault", ["too few clients", "masks left in the sum"])
def test_without_a_valid_sum_the_prior_is_uniform(
    fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, engine = secured(lambda p, r, c: p == "unmask" and fault == "too few clients")
    sum_labels = engine.sum_labels

    def leave_masks(jobs: Iterator[Job], classes: int) -> RoundSums:
        summed = sum_labels(jobs, classes)
        return replace(summed, blocks=tuple(replace(block, sums=block.sums + 2**30) for block in summed.blocks))

    monkeypatch.setattr(engine, "sum_labels", leave_masks)
    frequencies = sum_class_frequencies(federation, engine, start(federation))
    assert frequencies.prior == (0.25,) * 4 and frequencies.clients == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_different_priors_give_noise() -> None:
    """Masks of pairs depend on what both were sent, and the prior is a part of it."""
    federation, engine = secured()
    job, state, grid = make_job(federation, 2, 2), start(federation).state, engine.secure.grid
    submodels = [secure_engine.format_submodel(job.submodel)]
    one, other = (
        engine.blocks.digest_sent(submodels, replace(job, prior=prior), state, grid).terms
        for prior in ((0.5, 0.5), (0.4, 0.6))
    )
    assert one != other


@pytest.mark.parametrize("masks", [True, False])
def test_secure_runs_hide_each_clients_frequencies(
    masks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as numbers nor as words of a sum; without masks the same search finds every client's."""
    came: list[bytes] = []
    ask = secure_engine.SimulatedParties.ask

    def record(self: Any, phase: str, requests: Any) -> Iterator[Any]:
        for index, answer in ask(self, phase, requests):
            came.append(pack_message(answer.message))
            assert answer.report is None or not (answer.report.state or answer.report.metrics)
            yield index, answer

    monkeypatch.setattr(secure_engine.SimulatedParties, "ask", record)
    if not masks:
        monkeypatch.setattr(keys, "add_mask", lambda words, key, sign: None)
    run = ff.run({**SECURE, "rounds": 1}, out=tmp_path / "run")
    assert run.server.prior and run.metrics[0]["prior"] == {"clients": 12, "failures": []}
    simulation = run.assembly.simulation
    assert simulation is not None
    files = [path.read_bytes() for path in run.folder.rglob("*") if path.is_file() and path.name != "fleet.json"]
    everything, seen = b"".join([*came, *files]), set()
    for client in range(12):
        own = torch.tensor(frequencies_by_hand(simulation, client), dtype=torch.float64)
        words = torch.round(own.float().double() / secure_engine.LABEL_GRID.step).to(torch.int32)
        texts = [", ".join(map(repr, numbers.tolist())).encode() for numbers in (own, words)]
        needles = [*texts, *(numbers.numpy().tobytes() for numbers in (words, own, own.float()))]
        if any(needle in everything for needle in needles):
            seen.add(client)
    assert seen == (set() if masks else set(range(12)))


# ---- messages --------------------------------------------------------------------------------------------------------


def test_a_jobs_prior_survives_a_message() -> None:
    federation, _ = skewed()
    layout, job = federation.problem.layout, make_job(federation, 2, 2)
    prior = tuple(compute_class_frequencies(tiny_data()).tolist())
    assert load_job(unpack(pack(dump_job(replace(job, prior=prior), layout))), layout).prior == prior
    assert "prior" not in dump_job(job, layout) and load_job(dump_job(job, layout), layout).prior == ()
    assert job_size(replace(job, prior=prior), layout) > job_size(job, layout)


@pytest.mark.parametrize(
    "changes",
    [{"prior": ("a", "b")}, {"prior": (0.5, 0.6)}, {"prior": (1.5, -0.5)}, {"prior": (1.0, 0.0)},
     {"prior": (math.nan, 0.5)}, {"prior": (10**400, 0.5)}, {"prior": "ab"}, {"prior": 1}],
    ids=str,
)  # fmt: skip
def test_a_node_looks_at_the_prior_that_a_server_sends(changes: dict[str, Any]) -> None:
    federation, _ = skewed()
    job = replace(make_job(federation, 2, 2), prior=PRIOR_BY_HAND)
    assert find_job_error(job, federation.problem) is None
    assert find_job_error(replace(job, **changes), federation.problem) is not None


def test_a_prior_of_other_classes_is_the_job_s_failure() -> None:
    federation, simulation = skewed()
    reply, _ = run_job(replace(make_job(federation, 2, 2), prior=(0.5, 0.5)), simulation.device(2))
    assert isinstance(reply, Failure)


def test_a_job_for_labels_takes_no_tensors() -> None:
    federation, _ = skewed()
    job = make_job(federation, 2, 0, kind="labels", evaluation=Evaluation(split="train"))
    assert find_job_error(replace(job, state={}), federation.problem) is None
    assert find_job_error(job, federation.problem) is not None


# ---- runs ------------------------------------------------------------------------------------------------------------

TABLE: dict[str, Any] = {**TINY, "method": {"name": "scalefl", "options": PRIOR}}


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_resumed_run_has_equal_bits(after: int, tmp_path: Any, monkeypatch: Any) -> None:
    """Stopped after the answers and before the first round, and after a round, of which one has a checkpoint."""
    table = {**TABLE, "rounds": 3, "checkpoint": {"every": 2}}
    base = ff.run(table, out=tmp_path / "unbroken")
    stop_before_round(table, tmp_path / "broken", after)
    calls: list[int] = []
    monkeypatch.setattr(
        "fleetfit.rounds.class_frequencies.ask_class_frequencies",
        lambda *a: calls.append(1) or ask_class_frequencies(*a),
    )
    resumed = ff.resume(tmp_path / "broken")
    assert have_same_state(base, resumed)
    assert resumed.server.prior == base.server.prior != () and len(calls) == (after < 2)


def test_a_damaged_prior_in_a_checkpoint_is_found() -> None:
    federation, _ = skewed()
    server = start(federation)
    payload = {"server": {"state": dict(server.state), "round": 1, "memory": None, "prior": list(PRIOR_BY_HAND)},
               "clients": {}, "statistics": None}  # fmt: skip
    check_checkpoint(federation, payload, 1)
    for prior in ([0.5, 0.5], [0.7, 0.7, -0.2, -0.2], "0123", [None] * 4):
        with raises(CheckpointError):
            check_checkpoint(federation, {**payload, "server": {**payload["server"], "prior": prior}}, 1)


def test_with_privacy_no_client_is_asked(tmp_path: Any) -> None:
    pytest.importorskip("opacus", reason="the accountant is an extra: fleetfit[privacy]")
    privacy = {"clipping_norm": 0.3, "noise_multiplier": 1.0, "key_file": str(tmp_path / "key")}
    table = {**TABLE, "model": {"name": "tiny:tiny", "norm": False}, "privacy": privacy, "rounds": 2}
    without = {**table, "method": {"name": "scalefl"}}
    assembly = assemble(load_experiment(table))
    assert len(set(assembly.notes) - set(assemble(load_experiment(without)).notes)) == 1
    run = ff.run(table, out=tmp_path / "run")
    assert run.server.prior == () and "prior" not in run.metrics[0]


@pytest.mark.parametrize("task", ["regression", "multi_label"])
def test_without_classes_the_prior_is_off(task: str, tmp_path: Any) -> None:
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    y = (x[:, :2] > 0).float() if task == "multi_label" else x[:, :2]
    splits = {"train": torch.arange(48), "test": torch.arange(48, 60)}
    data = Data("lines", x, y, splits, 2, task=task)
    table: dict[str, Any] = {
        "rounds": 2, "model": {"name": "mlp"}, "local": {"epochs": 1},
        "data": {"name": data, "partition": {"kind": "iid", "clients": 4}},
    }  # fmt: skip
    off = ff.run(table, method={"name": "scalefl"}, out=tmp_path / "off")
    run = ff.run(table, method={"name": "scalefl", "options": PRIOR}, out=tmp_path / "on")
    assert have_same_state(off, run) and run.server.prior == ()
    assert len(set(run.notes) - set(off.notes)) == 1


def test_two_class_priors_are_refused() -> None:
    double = replace(build({"name": "fedavg"}), adapt_task=lambda job, device: device.problem.task)
    with raises(ConfigError, "class_prior", '"adapt_task"', key="method.hooks.adapt_task"):
        build({"name": double, "options": PRIOR})


def test_a_negative_tau_is_refused() -> None:
    with raises(ConfigError, -1.0, key="method.options.class_prior.tau"):
        build({"name": "fedavg", "options": {"class_prior": {"tau": -1}}})
