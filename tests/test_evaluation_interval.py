"""`evaluate.every = "auto"`: at least ten evaluations, for about a tenth of a run's multiply-adds."""

import math
from pathlib import Path
from typing import Any

import pytest
from run_folders import stopped_run
from support import raises

import fleetfit as ff
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.config.records import restore_records
from fleetfit.config.schema import EvaluateSection, EvaluationPartSection
from fleetfit.errors import ConfigError
from fleetfit.report.columns import make_accuracy_curve
from fleetfit.report.curves import explain_partial
from fleetfit.runs.folder import RunFolder

TABLE: dict[str, Any] = {
    "rounds": 40,
    "data": {"name": "digits", "validation": 0.0, "partition": {"kind": "iid", "clients": 10}},
    "model": {"name": "mlp", "hidden": 8},
    "method": {"name": "fedavg"},
    "fleet": {"groups": [{"budget": 1.0}]},
    "local": {"epochs": 3, "batch_size": 16},
    "cohort": {"count": 4},
}
SHORT: dict[str, Any] = {"local": {"epochs": 1, "batch_size": 16}}
"""Ten complete evaluations cost more than a tenth of such a run."""


def choose(**sections: Any) -> EvaluateSection:
    return assemble(load_experiment({**TABLE, **sections})).experiment.evaluate


def count_tenths(rounds: int, cohort: int, epochs: int, test_passes: int) -> int:
    """Return how many complete evaluations are a tenth of the work.

    One level, no batch norm: 1,438 training samples of ten clients, 36 test samples of each, seen by each pass.
    """
    training = rounds * cohort * epochs * 3 * round(1438 / 10)
    return int(0.1 * training / (360 * test_passes))


@pytest.mark.parametrize(
    ("rounds", "cohort", "epochs", "every"),
    [(40, 4, 3, 2), (40, 10, 3, 1), (200, 4, 3, 4), (1000, 10, 3, 20), (12, 10, 5, 1)],
)
def test_complete_evaluations_are_a_tenth_of_the_work(rounds: int, cohort: int, epochs: int, every: int) -> None:
    chosen = choose(rounds=rounds, cohort={"count": cohort}, local={"epochs": epochs, "batch_size": 16})
    times = min(count_tenths(rounds, cohort, epochs, 2), 50, rounds)
    assert times >= 10
    assert (chosen.every, chosen.between) == (every, None) == (math.ceil(rounds / times), None)


@pytest.mark.parametrize("rounds", [1, 3, 9, 10, 11, 19, 20, 25, 99, 150])
def test_costly_evaluations_happen_ten_times(rounds: int) -> None:
    chosen = choose(rounds=rounds, cohort={"count": 1}, **SHORT)
    assert isinstance(chosen.every, int)
    evaluated = {*range(chosen.every, rounds + 1, chosen.every), rounds}
    assert min(rounds, 10) <= len(evaluated) < 20
    assert (chosen.between is None) == (rounds == 1), "the last one is complete"


@pytest.mark.parametrize(("cohort", "clients", "client_samples"), [(1, 10, 10), (2, 10, 16), (4, 10, 35)])
def test_a_part_is_a_tenth_of_the_work(cohort: int, clients: int, client_samples: int) -> None:
    """The last evaluation has 360 samples, the nine others the rest of a tenth, or 100; each passes a sample twice."""
    between = choose(cohort={"count": cohort}, **SHORT).between
    assert between == EvaluationPartSection(clients=clients, client_samples=client_samples)
    tenth = 0.1 * 40 * cohort * 3 * 144 / 2
    assert clients * client_samples == pytest.approx(max((tenth - 360) / 9, 100), abs=10)


def test_small_clients_reduce_the_evaluation() -> None:
    """359 test samples: of 60 clients each has 6 in the mean, of 6 each has 60; a part has 100 of them."""
    for clients, part in ((60, (17, None)), (6, (6, 17))):
        data = {**TABLE["data"], "partition": {"kind": "iid", "clients": clients}}
        between = choose(cohort={"count": 1}, local={"max_steps": 1}, data=data).between
        assert between == EvaluationPartSection(clients=part[0], client_samples=part[1])


def test_statistics_and_test_samples_are_reduced() -> None:
    cnn = {"model": {"name": "cnn", "norm": "batch"}, "cohort": {"count": 1}, **SHORT}
    between = choose(**cnn).between
    assert between is not None and between.statistics_samples == 100 and between.samples is None
    assert choose(**{**cnn, "model": {"name": "cnn", "norm": "group"}}).between.statistics_samples is None  # type: ignore[union-attr]
    whole = choose(**cnn, evaluate={"whole_test_set": True}).between
    assert whole is not None and whole.samples == 100


def test_few_evaluated_clients_are_evaluated_completely() -> None:
    assert choose(cohort={"count": 3}, **SHORT).between is not None
    assert choose(cohort={"count": 3}, **SHORT, evaluate={"clients": 5}).between is None


def test_a_set_interval_stays() -> None:
    assert [choose(evaluate={"every": every}).every for every in (0, 1, 7)] == [0, 1, 7]
    assert choose(cohort={"count": 1}, **SHORT, evaluate={"every": 1}).between is None
    part = {"clients": 3, "client_samples": 5}
    assert choose(evaluate={"between": part}).between == EvaluationPartSection(**part)
    for wrong in ("often", -3):
        with raises(ConfigError, '"auto"', repr(wrong), key="evaluate.every"):
            choose(evaluate={"every": wrong})


LEVELS: dict[str, Any] = {
    **TABLE, **SHORT, "rounds": 11, "method": {"name": "heterofl"}, "cohort": {"count": 1},
    "data": {"name": "digits", "validation": 0.0, "partition": {"kind": "iid", "clients": 20}},
    "model": {"name": "cnn", "norm": "batch"}, "fleet": {"groups": [{"budget": 0.25}, {"budget": 1.0}]},
}  # fmt: skip


@pytest.mark.parametrize("engine", ["local", "processes"])
def test_the_evaluated_part_stays_the_same(tmp_path: Path, engine: str) -> None:
    """With no training the model is the same in all rounds, and so is its accuracy on the same samples."""
    frozen = {**LEVELS, "model": {"name": "mlp", "hidden": 8}, "local": {**SHORT["local"], "lr": 1e-30}}
    frozen["local"] |= {"momentum": 0.0, "weight_decay": 0.0}
    if engine == "processes":
        frozen |= {"engine": {"name": "processes", "workers": 2}}
    run = ff.run(frozen, out=tmp_path / "run")
    between = run.experiment.evaluate.between
    assert between is not None
    *earlier, last = [report["evaluate"] for report in run.metrics if "evaluate" in report]
    assert len(earlier) == 10 and "partial" not in last
    assert last["static"]["local_clients"] == 20 and last["static"]["local_samples"] == 359
    for evaluation in earlier:
        assert evaluation["partial"]["clients"] == between.clients == evaluation["static"]["global_clients"]
        assert evaluation["partial"]["samples"] == evaluation["static"]["local_samples"] < 150
        assert [level["clients"] for level in evaluation["static"]["levels"].values()] == [5, 5], "half of each level"
        assert evaluation["static"]["per_client"] == earlier[0]["static"]["per_client"]


def test_final_numbers_are_complete(tmp_path: Path) -> None:
    stopped_run(LEVELS, tmp_path / "run", after=5)
    text = (tmp_path / "run" / "config.toml").read_text()
    assert "every = 1" in text and "[evaluate.between]" in text
    run = ff.resume(tmp_path / "run")
    complete = ff.run({**LEVELS, "evaluate": {"every": 0}}, out=tmp_path / "complete")
    assert run.summary["evaluate"] == complete.summary["evaluate"]
    assert run.summary["local"] == run.metrics[-1]["evaluate"]["static"]["local"]
    record = RunFolder.open(tmp_path / "run")
    assert len(record.evaluations) == 11
    assert make_accuracy_curve(record.rounds, "static", "local") == [(11, run.summary["local"])]
    part = run.metrics[0]["evaluate"]["partial"]
    [sentence] = explain_partial([record])
    assert f"{part['clients']} clients with {part['samples']} samples" in sentence
    assert sentence in (tmp_path / "run" / "report.html").read_text()
    assert explain_partial([RunFolder.open(tmp_path / "complete")]) == []


def test_an_older_run_keeps_its_interval() -> None:
    begun = load_experiment({**LEVELS, "evaluate": {"every": 2}})
    section = restore_records(load_experiment(LEVELS), begun).evaluate
    assert (section.every, section.between) == (2, None)


ROWS = {**LEVELS, "rounds": 10, "model": {"name": "mlp", "hidden": 8}}


@pytest.mark.parametrize("target", [None, 0.05])
def test_rows_of_a_comparison_share_evaluations(tmp_path: Path, target: float | None) -> None:
    compare: dict[str, Any] = {"row": [{"method": {"name": name}} for name in ("heterofl", "fedavg")]}
    compare |= {} if target is None else {"target": target}
    comparison = ff.compare({**ROWS, "compare": compare}, out=tmp_path / "out")
    chosen = [run.experiment.evaluate for runs in comparison.runs.values() for run in runs]
    assert len(chosen) == 2 and chosen[0] == chosen[1]
    assert (chosen[0].every, chosen[0].between is None) == (1, target is not None)
    if target is not None:
        assert comparison.table.rows[0][-1] == "1", "the first evaluation is above"
    again = ff.compare({**ROWS, "compare": compare}, out=tmp_path / "out")
    assert again.table == comparison.table
