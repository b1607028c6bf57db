"""Where the time of a round goes, as a run's folder and its table say."""

import json
from pathlib import Path
from typing import Any

import pytest

import fleetfit as ff
from fleetfit.report.tables import make_total_table
from fleetfit.rounds.timekeeper import PARTS, Timekeeper

SMALL: dict[str, Any] = {
    "rounds": 4,
    "data": {"partition": {"clients": 8}},
    "local": {"epochs": 1},
    "cohort": {"count": 4},
    "evaluate": {"every": 2},
    "checkpoint": {"every": 2},
}


def test_inner_part_interrupts_outer() -> None:
    """Averaging from 0 to 10 s, in it training from 2 to 5 and, inside that, validation from 3 to 4."""
    times = iter([0.0, 2.0, 3.0, 4.0, 5.0, 10.0])
    watch = Timekeeper(lambda: next(times))
    with watch.on("averaging"), watch.on("training"), watch.on("validation"):
        pass
    seconds = watch.read()
    assert (seconds["averaging"], seconds["training"], seconds["validation"]) == (2.0 + 5.0, 1.0 + 1.0, 1.0)
    assert not any(watch.read().values())


def test_raising_part_is_counted() -> None:
    times = iter([0.0, 3.0, 4.0, 6.0])
    watch = Timekeeper(lambda: next(times))
    with pytest.raises(ValueError, match="on purpose"), watch.on("training"):
        raise ValueError("on purpose")
    with watch.on("validation"):
        pass
    assert (watch.read()["training"], watch.read()["validation"]) == (3.0, 0.0)


def test_rounds_and_summary_have_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is written after its round's line, so its seconds are in the next one, and the last in the summary.

    Evaluations and checkpoints are those of rounds 2 and 4.
    """
    run = ff.run(SMALL, out=tmp_path / "run")
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        of = line["seconds_of"]
        assert list(of) == list(PARTS)
        assert all(of[part] > 0 for part in ("training", "averaging", "validation"))
        assert sum(of.values()) <= line["seconds"]
    assert [line["seconds_of"]["evaluation"] > 0 for line in lines] == [False, True, False, True]
    assert [line["seconds_of"]["checkpoints"] > 0 for line in lines] == [False, False, True, False]
    summary = run.summary
    for part in PARTS:
        rounds = sum(line["seconds_of"][part] for line in lines)
        assert summary["seconds_of"][part] > rounds if part == "checkpoints" else summary["seconds_of"][part] == rounds
    assert sum(summary["seconds_of"].values()) <= summary["seconds"]
    rows = dict(make_total_table(run.files.read_summary()).rows)
    large = [part for part in PARTS if summary["seconds_of"][part] >= 0.05 * summary["seconds"]]
    assert "training" in large and [row.strip() for row in rows if "of it" in row] == [
        f"of it {part}" for part in large
    ]
