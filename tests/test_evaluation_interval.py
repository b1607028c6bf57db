"""`evaluate.every = "auto"`: evaluations take about a tenth of a run's multiply-adds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run_folders import stopped_run
from support import raises

import fleetfit as ff
from fleetfit.config import assemble, load_experiment
from fleetfit.config.records import restore_records
from fleetfit.errors import ConfigError

TABLE: dict[str, Any] = {
    "rounds": 40,
    "data": {"name": "digits", "validation": 0.0, "partition": {"kind": "iid", "clients": 10}},
    "model": {"name": "mlp", "hidden": 8},
    "method": {"name": "fedavg"},
    "fleet": {"groups": [{"budget": 1.0}]},
    "local": {"epochs": 3, "batch_size": 16},
    "cohort": {"count": 4},
}


def choose(**sections: Mapping[str, Any]) -> int:
    every = assemble(load_experiment({**TABLE, **sections})).experiment.evaluate.every
    assert isinstance(every, int)
    return every


def count_by_hand(rounds: int, cohort: int, epochs: int, test_passes: int) -> int:
    """One level, no batch norm: 1,438 training samples of ten clients, 359 test samples, which each pass sees whole."""
    training = rounds * cohort * epochs * 3 * round(1438 / 10)
    times = max(1, int(0.1 * training / (359 * test_passes)))
    return -(-rounds // min(times, rounds))


def test_the_interval_is_a_tenth_of_the_work() -> None:
    assert choose() == count_by_hand(40, 4, 3, 2) == 2
    assert choose(local={"epochs": 1, "batch_size": 16}) == count_by_hand(40, 4, 1, 2) == 5
    assert choose(cohort={"count": 1}) == count_by_hand(40, 1, 3, 2) == 6
    assert choose(cohort={"count": 10}) == count_by_hand(40, 10, 3, 2) == 1
    assert choose(cohort={"count": 1}, local={"epochs": 1, "batch_size": 16, "max_steps": 1}) == 40


def test_fewer_evaluated_clients_are_evaluated_more_often() -> None:
    small = {"cohort": {"count": 1}, "local": {"epochs": 1, "batch_size": 16}}
    assert choose(**small, evaluate={"clients": 5}) < choose(**small)


def test_the_whole_test_set_counts_where_each_evaluation_passes_it() -> None:
    small = {"cohort": {"count": 1}}
    assert choose(**small, evaluate={"whole": True}) == count_by_hand(40, 1, 3, 3) == 10
    assert choose(**small, evaluate={"whole": True, "samples": 20}) == choose(**small) == 6


def test_statistics_of_batch_norm_count() -> None:
    """With a batch norm, levels are measured on training samples, and test samples are passed under both norms."""
    cnn = {"model": {"name": "cnn", "norm": "batch"}}
    assert choose(**cnn) > choose(model={"name": "cnn", "norm": "group"})
    assert choose(**cnn, evaluate={"statistics_samples": 100}) < choose(**cnn)


def test_a_set_interval_stays() -> None:
    assert [choose(evaluate={"every": every}) for every in (0, 1, 7)] == [0, 1, 7]
    for wrong in ("often", -3):
        with raises(ConfigError, '"auto"', repr(wrong), key="evaluate.every"):
            choose(evaluate={"every": wrong})


def test_a_run_records_its_interval_and_is_evaluated_by_it(tmp_path: Path) -> None:
    table = {**TABLE, "rounds": 6, "local": {"epochs": 1, "batch_size": 16}}
    stopped_run(table, tmp_path / "run", after=3)
    assert "every = 6" in (tmp_path / "run" / "config.toml").read_text()
    run = ff.resume(tmp_path / "run")
    assert [report["round"] for report in run.metrics if "evaluate" in report] == [6]
    begun = run.experiment.model_copy(update={"evaluate": run.experiment.evaluate.model_copy(update={"every": 2})})
    assert restore_records(load_experiment(table), begun).evaluate.every == 2
