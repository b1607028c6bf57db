"""Budget files: one reader for the groups of a run file and for a node's configuration."""

from pathlib import Path
from typing import Any

import pytest
from support import raises

from fleetfit.config import load_experiment
from fleetfit.config.dump import to_toml
from fleetfit.config.load import read_budget_file
from fleetfit.errors import ConfigError

PI = 'budget = { parameters = 0.3, memory_bytes = "200 MB" }\ntolerance = 0.05\n'


def run_file(folder: Path, groups: str) -> Path:
    (folder / "runs").mkdir(exist_ok=True)
    path = folder / "runs" / "run.toml"
    path.write_text(f"[fleet]\ngroups = [{groups}]\n")
    return path


def test_a_group_may_name_a_file_seen_from_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "pi.toml").write_text(PI)
    path = run_file(tmp_path, '{ budget = "../pi.toml", fraction = 0.5 }, { budget = 1.0 }')
    first, second = load_experiment(path).fleet.groups
    assert first.budget == {"parameters": 0.3, "memory_bytes": "200 MB"} and first.tolerance == 0.05
    assert (first.name, first.fraction) == ("pi", 0.5) and second.tolerance is None


def test_a_budget_files_tolerance_counts(tmp_path: Path) -> None:
    (tmp_path / "pi.toml").write_text("budget = 0.3\n")
    path = run_file(tmp_path, '{ budget = "../pi.toml", tolerance = 0.2, name = "kitchen" }')
    assert [(g.name, g.tolerance) for g in load_experiment(path).fleet.groups] == [("kitchen", 0.2)]
    (tmp_path / "pi.toml").write_text(PI)
    assert load_experiment(path).fleet.groups[0].tolerance == 0.05


def test_a_run_keeps_a_budget_files_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`config.toml` holds the amounts, so that it gives the same run after the file has changed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pi.toml").write_text(PI)
    experiment = load_experiment(None, ['fleet.groups=[{budget = "pi.toml"}]'])
    (tmp_path / "pi.toml").unlink()
    assert "pi.toml" not in to_toml(experiment) and "memory_bytes" in to_toml(experiment)


@pytest.mark.parametrize(
    ("content", "key", "mention"),
    [
        (None, None, "pi.toml"),
        ("budget = 0.3\ntolerence = 0.1\n", "tolerence", '"tolerance"'),
        ("tolerance = 0.3\n", "budget", "budget"),
        ("budget = 0.3\ntolerance = -1\n", "tolerance", "-1"),
        ("budget = -0.3\n", "budget", "-0.3"),
        ("budget = [\n", None, "TOML"),
    ],
)
def test_wrong_budget_files_are_named(
    content: str | None, key: str | None, mention: str, tmp_path: Path
) -> None:  # fmt: skip
    if content is not None:
        (tmp_path / "pi.toml").write_text(content)
    for read in (
        lambda: load_experiment(run_file(tmp_path, '{ budget = "../pi.toml" }')),
        lambda: read_budget_file(tmp_path / "pi.toml"),
    ):
        with raises(ConfigError, "pi.toml", mention, key=key, path=tmp_path / "pi.toml"):
            read()


@pytest.mark.parametrize("groups", ["no list", [3], [{"budget": ["x.toml"]}], [{"fraction": 0.5}]])
def test_other_tables_are_left_to_the_schema(groups: Any) -> None:
    with raises(ConfigError, "groups") as error:
        load_experiment({"fleet": {"groups": groups}})
    assert error.value.key is not None and error.value.key.startswith("fleet.groups")
