"""From a table of one's own to the page, on every platform: what a first user does, without a tool that some lack.

On macOS and Windows the same file runs as it is (tests/everywhere.txt).
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import raises

import fleetfit as ff
from fleetfit.errors import DataError
from fleetfit.runs.listing import clear_checkpoints


class Stop(Exception):
    pass


def stop_after_one(report: Any) -> None:
    if report["round"] == 1:
        raise Stop


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, a run of it that was cut off after a round, and a space and an umlaut in its name."""
    place = tmp_path_factory.mktemp("my räume")
    draw = random.Random(0)
    rows = [(draw.random(), draw.choice(("rot", "grün"))) for _ in range(120)]
    lines = [f"{size:.3f},{color},{'big' if size > 0.5 else 'small'}" for size, color in rows]
    (place / "größen.csv").write_text("\n".join(["size,color,label", *lines]) + "\n", encoding="utf-8")
    data = {"path": str(place / "größen.csv"), "partition": {"clients": 4}}
    with pytest.raises(Stop):
        ff.run({"rounds": 3, "data": data, "local": {"epochs": 1}}, out=place / "runs" / "one", on_round=stop_after_one)
    return place


def test_a_run_of_a_table_goes_on_and_is_listed(stopped: Path) -> None:
    (before,) = ff.list_runs(stopped / "runs")
    assert (before.rounds, before.asked, before.finished, before.data) == (1, 3, False, "größen")
    run = ff.resume(stopped / "runs" / "one")
    assert run.finished and run.summary["data"] == "größen"
    again = ff.load(stopped / "runs" / "one")
    assert again.accuracy("local") == run.accuracy("local") is not None
    (after,) = ff.list_runs(stopped / "runs")
    assert (after.rounds, after.finished, after.damage, after.local) == (3, True, "", run.accuracy("local"))
    clear_checkpoints(stopped / "runs")
    assert ff.list_runs(stopped / "runs")[0].checkpoints == 1


def test_the_page_is_one_file_in_utf_8(stopped: Path) -> None:
    page = ff.write_report(stopped / "runs" / "one", out=stopped / "seite.html")
    text = Path(page).read_text(encoding="utf-8")
    assert "größen" in text and text.rstrip().endswith("</html>")
    assert b"\r\n" not in Path(page).read_bytes()


def test_one_sample_leads_to_a_batch_of_one_and_objects_print_on_a_line(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((300, 1, 8, 8), dtype=np.float32)
    run = ff.run(data=(x, np.arange(300) % 3), model="cnn", rounds=1, out=tmp_path / "run", progress=False)
    with raises(DataError, "x[None]", key="x"):
        run.predict(x[0])
    assert len(run.predict(x[0][None])) == 1
    rows = {"row": [{"method": "fedavg"}, {"method": "heterofl"}], "smallest_baseline": False}
    comparison = ff.compare(
        compare=rows, data=(x, np.arange(300) % 3), model="cnn", rounds=1, out=tmp_path / "both", progress=False
    )
    for value in (run, comparison, run.calibrate(budget=0.7)):
        assert "\n" not in repr(value) and len(repr(value)) < 250
