"""Test samples that `local` and `global` do not count are counted next to the accuracy, and a note says why."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fleetfit as ff
from fleetfit.report.tables import make_total_table

FAST = {"rounds": 1, "model": {"name": "mlp", "hidden": 16}, "local": {"max_steps": 2}, "fleet": {"tolerance": 0.3}}


def arrays(folder: Path, train: list[int], test: list[int], **more: Any) -> str:
    """Samples whose features are their class."""
    path = folder / "c.npz"
    x = [(np.eye(9)[y] * 3).astype("f4") for y in (train, test)]
    np.savez(path, x_train=x[0], x_test=x[1], y_train=np.array(train), y_test=np.array(test), **more)
    return str(path)


def total(run: ff.Run) -> dict[str, str]:
    return dict(make_total_table(run.files.read_summary()).rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("test", "left", "names"),
    [
        ([0, 1, 2, 3] * 10, 10, '("3")'),
        ([0, 1, 2, 4, 5] * 8, 16, '("4", "5")'),
        ([0, 1, 2, *range(3, 9)] * 4, 24, '("3", "4", "5", "6", "7", ...)'),
    ],
)
def test_classes_without_training_data(tmp_path: Path, test: list[int], left: int, names: str) -> None:
    place = arrays(tmp_path, [0, 1, 2] * 60, test)
    run = ff.run({**FAST, "data": {"path": place, "partition": {"clients": 4}}}, out=tmp_path / "run")
    columns, counted = run.columns["static"], len(test) - left
    assert columns["global_samples"] == columns["local_samples"] == counted
    for kind in ("global", "local"):
        assert total(run)[f"{kind} accuracy %"].endswith(f" ({counted} of {len(test)} samples)")
    (note,) = [note for note in run.notes if "belong to no client" in note]
    assert f"{left} of {len(test)} test samples" in note and names in note


def test_writers_that_were_not_drawn(tmp_path: Path) -> None:
    """Two of five groups are clients; the test samples of the other three are counted as left out."""
    groups = np.arange(200) % 5
    place = arrays(tmp_path, [0, 1] * 100, [0, 1] * 25, g_train=groups, g_test=np.arange(50) % 5)
    data = {"name": "arrays", "file": place, "groups": "g", "partition": {"kind": "natural", "clients": 2}}
    run = ff.run({**FAST, "data": data}, out=tmp_path / "run")
    assert run.columns["static"]["global_samples"] == 20
    assert "(20 of 50 samples)" in total(run)["local accuracy %"]
    assert any("30 of 50" in n and "partition" in n for n in run.notes)


def test_a_division_of_ones_own_that_drops_samples(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\ndef own(data, clients, rng):\n"
        "    owner = np.arange(len(data.split('train'))) % clients\n"
        "    owner[data.y[data.split('train')].numpy() == 2] = -1\n    return owner\n"
    )
    place = arrays(tmp_path, [0, 1, 2] * 60, [0, 1, 2] * 10)
    data = {"path": place, "partition": {"kind": f"{tmp_path}/own.py:own", "clients": 3}}
    run = ff.run({**FAST, "data": data}, out=tmp_path / "run")
    assert "(20 of 30 samples)" in total(run)["global accuracy %"]
    assert any("10 of 30" in n and "partition" in n for n in run.notes)


def test_some_clients_are_evaluated(tmp_path: Path) -> None:
    place = arrays(tmp_path, [0, 1] * 100, [0, 1] * 20)
    data = {"path": place, "partition": {"kind": "iid", "clients": 4}}
    run = ff.run({**FAST, "data": data, "evaluate": {"clients": 1}}, out=tmp_path / "run")
    assert "(10 of 40 samples)" in total(run)["global accuracy %"]
    assert any("1 of 4" in note and "[evaluate] clients" in note for note in run.notes)
    whole = ff.run({**FAST, "data": data}, out=tmp_path / "whole")
    assert "samples" not in total(whole)["global accuracy %"] and not any("no client" in n for n in whole.notes)


def test_a_comparison_notes_the_range_over_seeds(tmp_path: Path) -> None:
    place = arrays(tmp_path, [0, 1, 2] * 60, [0, 1, 2] * 10 + [0] * 3)
    path = tmp_path / "c.toml"
    path.write_text(
        f'rounds = 1\ndata = {{ path = "{place}", partition = {{ clients = 2 }} }}\n'
        'model = { name = "mlp", hidden = 16 }\nevaluate.clients = 1\n'
        "local = { max_steps = 2 }\nfleet = { tolerance = 0.3 }\n[compare]\ngrid.seed = [0, 1, "
        "2]\nsmallest_baseline = false\n"
        '[[compare.row]]\nmethod.name = "scalefl"\n'
    )
    comparison = ff.compare(path, out=tmp_path / "compared")
    summaries = [run.files.read_summary() for group in comparison.runs.values() for run in group]
    measured = [summary.headline.local_samples for summary in summaries]
    (note,) = [n for n in comparison.table.notes if n.startswith("Measured on a part") and ": local " in n]
    assert min(measured) < max(measured) and f"({min(measured)} to {max(measured)} of 33 samples)" in note


def test_a_comparison_has_the_note(tmp_path: Path) -> None:
    place = arrays(tmp_path, [0, 1, 2] * 60, [0, 1, 2, 3] * 10)
    path = tmp_path / "c.toml"
    path.write_text(
        f'rounds = 1\ndata = {{ path = "{place}", partition = {{ clients = 4 }} }}\n'
        'model = { name = "mlp", hidden = 16 }\n'
        "local = { max_steps = 2 }\nfleet = { tolerance = 0.3 }\n"
        '[[compare.row]]\nmethod.name = "scalefl"\n[[compare.row]]\nmethod.name = "heterofl"\n'
    )
    comparison = ff.compare(path, out=tmp_path / "compared")
    for kind in ("local", "global"):
        (note,) = [n for n in comparison.table.notes if n.startswith("Measured on a part") and f": {kind} " in n]
        assert "(30 of 40 samples)" in note and "scalefl" in note and "heterofl" in note
