"""`runs.json`: which comparison a run belongs to."""

import json
from pathlib import Path

from fleetfit.runs.comparison import find_comparison


def test_a_run_finds_its_comparison(tmp_path: Path) -> None:
    folder, other = tmp_path / "both/tune/a/lr-0.1/seed-3", tmp_path / "both/a/seed-9"
    for path in (folder, other):
        path.mkdir(parents=True)
    runs = {"runs": [{"place": "tune/a/lr-0.1/seed-3", "title": "tuning, a"}]}
    (tmp_path / "both/runs.json").write_text(json.dumps(runs))
    assert find_comparison(folder) == ("tuning, a", "both")
    assert find_comparison(other) == ("", "")
    (tmp_path / "both/runs.json").write_text("{")
    assert find_comparison(folder) == ("", "")
