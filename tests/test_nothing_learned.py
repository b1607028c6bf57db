"""A run in which nothing was learned ends with an error that says why; in a comparison only its row fails."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import raises, run_verb

import fleetfit as ff
from fleetfit.errors import NO_STATISTICS, ConfigError, NoUsableUpdates
from fleetfit.report.tables import explain_missing, make_total_table
from fleetfit.runs.schema import SummaryRecord
from fleetfit.training.job import DIVERGED

FAST: dict[str, Any] = {
    "rounds": 3, "data": {"name": "digits", "partition": {"clients": 8}}, "model": {"name": "mlp", "hidden": 16},
    "fleet": {"tolerance": 0.3}, "local": {"epochs": 1, "batch_size": 32}, "cohort": {"count": 4},
}  # fmt: skip
DIVERGES = {**FAST, "local": {**FAST["local"], "lr": 1e9}}
LOSSES = {
    "raises": "raise RuntimeError('shapes differ')",
    "memory": "raise torch.OutOfMemoryError('CUDA out of memory')",
    "detached": "return module(x)[-1].sum().detach()",
    "nan": "return module(x)[-1].sum() * float('nan')",
}


def with_loss(folder: Path, body: str) -> dict[str, Any]:
    (folder / "own.py").write_text(
        f"import torch\ndef loss(job, device):\n    def own(module, x, y):\n        {body}\n    return own\n"
    )
    return {**FAST, "method": {"name": "heterofl", "hooks": {"make_loss": f"{folder}/own.py:loss"}}}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_always_fails(tmp_path: Path, kind: str) -> None:
    with raises(NoUsableUpdates, 12):
        ff.run(with_loss(tmp_path, LOSSES[kind]), out=tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    reports = ff.load(tmp_path / "run").metrics  # all are there to be read, and the last one was not evaluated
    assert [len(one["failures"]) for one in reports] == [4] * 3 and "evaluate" not in reports[-1]


def test_reasons_are_counted_over_all_rounds(tmp_path: Path) -> None:
    """Clients fail for two reasons, by what they have: eight jobs of one, four of the other in three rounds of four."""
    body = "raise ValueError('odd' if job.index % 4 == 3 else 'even')"
    with pytest.raises(NoUsableUpdates) as caught:
        ff.run(with_loss(tmp_path, body), out=tmp_path / "run")
    message = str(caught.value)
    assert re.search(r"even.*\(9 times\).*odd.*\(3 times\)", message)


def test_the_command_line_ends_with_3(tmp_path: Path) -> None:
    changes = [f"--set={value}" for value in ("local.lr=1e9", "rounds=2", "data.partition.clients=4")]
    printed = run_verb("run", *changes, "--out", tmp_path / "r", code=3)
    assert "(8 times)" in printed.err and "global accuracy" not in printed.out


def test_a_run_that_goes_on_counts_the_rounds_of_before(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(report: Mapping[str, Any]) -> None:
        if report["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        ff.run(DIVERGES, out=tmp_path / "run", on_round=stop, checkpoint={"every": 1})
    for _ in range(2):  # however often
        with raises(NoUsableUpdates, 12):
            ff.resume(tmp_path / "run")


def test_one_usable_round_is_enough(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def loss(job, device):\n    def own(module, x, y):\n"
        "        if job.round != 1:\n            raise ValueError('no')\n"
        "        return module(x)[-1].logsumexp(1).mean()\n    return own\n"
    )
    table = {**FAST, "method": {"name": "heterofl", "hooks": {"make_loss": f"{tmp_path}/own.py:loss"}}}
    run = ff.run(table, out=tmp_path / "run")
    assert run.summary["empty_rounds"] == 2
    assert "2 of 3" in [value for _, value in make_total_table(run.files.read_summary()).rows]
    learned = ff.run(FAST, out=tmp_path / "learned")
    assert not any(" of 3" in value for _, value in make_total_table(learned.files.read_summary()).rows)


def test_clients_that_all_go_away_teach_nothing(tmp_path: Path) -> None:
    table = {**FAST, "fleet": {**FAST["fleet"], "availability": {"leave": 0.999999}}}
    with raises(NoUsableUpdates, 12):
        ff.run(table, out=tmp_path / "run")
    assert len(ff.load(tmp_path / "run").metrics) == 3


def test_private_runs_say_that_and_not_why(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    privacy = {"clipping_norm": 1.0, "noise_multiplier": 1.0, "key_file": str(tmp_path / "key")}
    with pytest.raises(NoUsableUpdates) as caught:
        ff.run({**DIVERGES, "privacy": privacy, "cohort": {"fraction": 1.0}}, out=tmp_path / "run")
    message = str(caught.value)
    assert "withheld" in message and not re.search(r"client \d|finite|times", message)


def test_secure_runs_say_why(tmp_path: Path) -> None:
    """Their rounds are undone, for nobody sent an update; the reasons of the clients are known."""
    with raises(NoUsableUpdates, 12, DIVERGED):
        ff.run({**DIVERGES, "secure": {"min_clients": 3}}, out=tmp_path / "run")


# ---- in a comparison -------------------------------------------------------------------------------------------------


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., Any]:
    def compare(rows: str, jobs: int = 1, **more: Any) -> Any:
        path = tmp_path / "c.toml"
        path.write_text(
            'rounds = 2\ndata = { name = "digits", partition = { clients = 6 } }\n'
            'model = { name = "mlp", hidden = 16 }\nfleet = { tolerance = 0.3 }\nlocal.epochs = 2\n'
            "compare.smallest_baseline = false\n" + rows
        )
        return ff.compare(path, out=tmp_path / "compared", jobs=jobs, **more)

    return compare


ROWS = """
[[compare.row]]
label = "good"
[[compare.row]]
label = "bad"
local.lr = 1e9
[[compare.row]]
label = "last"
method.name = "heterofl"
"""
METHODS = '[[compare.row]]\nmethod.name = "scalefl"\n[[compare.row]]\nmethod.name = "heterofl"\n'


@pytest.mark.parametrize("jobs", [1, 2])
def test_its_row_fails_and_the_others_finish(compared: Callable[..., Any], tmp_path: Path, jobs: int) -> None:
    comparison = compared(ROWS, jobs, record=tmp_path / "kept")
    assert {row for row, _ in comparison.runs} == {"good", "last"} and not comparison.finished
    (title,) = comparison.failures
    assert "bad" in title and any("bad" in note and "diverged" in note for note in comparison.table.notes)
    cells = {row[0]: row[1:] for row in comparison.table.rows}
    assert set(cells["bad"]) == {"-"} and "-" not in cells["good"] and "-" not in cells["last"]
    assert not (tmp_path / "kept").exists() or not list((tmp_path / "kept").iterdir())
    again = compared(ROWS, jobs)  # finished runs are not run again, and the failed one fails again
    assert again.failures == comparison.failures
    assert not ff.load_comparison(tmp_path / "compared").finished


def test_compare_prints_its_table_and_ends_with_3(tmp_path: Path, compared: Callable[..., Any]) -> None:
    compared(ROWS)
    printed = run_verb("compare", tmp_path / "c.toml", "--out", tmp_path / "compared", code=3)
    assert "bad" in printed.err and "good" in printed.out


def test_values_that_diverge_are_not_chosen(compared: Callable[..., Any]) -> None:
    comparison = compared(METHODS + "[compare.tune]\nlocal.lr = [1e9, 0.1]\n")
    assert (
        not comparison.failures
        and all("0.1" in values for values in comparison.tuned.values())
        and len(comparison.tuned) == 2
    )
    tried = {one.values["local.lr"]: one.score for result in comparison.tuning for one in result.candidates}
    assert tried[1e9] is None and tried[0.1] is not None


def test_nothing_at_all_was_learned(compared: Callable[..., Any]) -> None:
    with raises(NoUsableUpdates, 0, 8, DIVERGED):
        compared("local.lr = 1e9\n" + METHODS)


# ---- accuracies that cannot be computed ------------------------------------------------------------------------------


def test_missing_accuracies_are_explained(tmp_path: Path) -> None:
    run = ff.run({**FAST, "rounds": 1, "data": {**FAST["data"], "test": 0.0}}, out=tmp_path / "run")
    (reason,) = explain_missing(run.files.read_summary())
    assert "global accuracy" in reason and "local accuracy" in reason and "test samples" in reason
    assert reason in make_total_table(run.files.read_summary()).notes


def test_evaluations_that_fail_say_why(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def metric(outputs, labels):\n    raise ValueError('unlabeled')\n")
    table = {**FAST, "rounds": 1, "evaluate": {"metrics": [f"{tmp_path}/own.py:metric"]}}
    (reason,) = explain_missing(ff.run(table, out=tmp_path / "run").files.read_summary())
    assert "ValueError: unlabeled" in reason


def test_the_first_cause_is_named(tmp_path: Path) -> None:
    run = ff.run({**FAST, "rounds": 1}, out=tmp_path / "run")
    failures = [{"client": n, "reason": f"evaluation: {NO_STATISTICS}"} for n in range(9)] + [{"reason": "a cause"}] * 2
    evaluate = {**run.summary["evaluate"], "failures": failures}
    (reason,) = explain_missing(SummaryRecord.load({**run.summary, "evaluate": evaluate, "global": None}))
    assert "11 jobs" in reason and re.search(r"\b2 .*a cause", reason) and NO_STATISTICS not in reason


def test_failed_jobs_are_counted_by_reason(tmp_path: Path) -> None:
    loss = "torch.nn.functional.cross_entropy(module(x)[-1], y)"
    body = f"if job.index % 2 == 0:\n            raise ValueError('even')\n        return {loss}"
    run = ff.run(with_loss(tmp_path, body), out=tmp_path / "run")
    line = 1 + next(i for i, text in enumerate((tmp_path / "own.py").read_text().splitlines()) if "even" in text)
    reason = f"ValueError: even (own.py, line {line})"
    assert run.summary["failures"] == 6 and run.summary["failure_reasons"] == {reason: 6}
    assert "6 failed jobs" in repr(run)
    assert any("6 of " in note and "even" in note for note in make_total_table(run.files.read_summary()).notes)


def test_unmeasured_accuracies_are_known_names(tmp_path: Path) -> None:
    run = ff.run({**FAST, "rounds": 1, "data": {**FAST["data"], "test": 0.0}}, out=tmp_path / "run")
    with raises(ConfigError, key="kind"):
        run.accuracy("global")


def test_a_level_without_test_samples(tmp_path: Path) -> None:
    run = ff.run({**FAST, "rounds": 1}, out=tmp_path / "run")
    assert not explain_missing(run.files.read_summary())
    levels = [{**level, "local": None} if i == 0 else level for i, level in enumerate(run.summary["levels"])]
    (reason,) = explain_missing(SummaryRecord.load({**run.summary, "levels": levels}))
    assert "level 1" in reason
