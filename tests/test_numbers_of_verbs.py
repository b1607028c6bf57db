"""One counting rule and one numbering: what `plan`, `check-model`, `run`, `predict` and `calibrate` say of a model."""

import csv
import json
import re
from pathlib import Path

import pytest

from fleetfit.cli import main

BUDGETS = (0.125, 0.25, 0.5, 1.0)


class Verbs:
    """The command line in a folder; what it printed last, and the rows of its tables."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        monkeypatch.setenv("COLUMNS", "220")
        monkeypatch.chdir(folder)
        self.capsys, self.said = capsys, ""

    def __call__(self, *arguments: str) -> list[list[str]]:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        printed = self.capsys.readouterr()
        assert not end.value.code, printed.err
        self.said = printed.out
        return [[cell.strip() for cell in line.strip("│").split("│")] for line in self.said.splitlines() if "│" in line]


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Verbs:
    return Verbs(monkeypatch, capsys, tmp_path)


def numbers(text: str) -> list[int]:
    return [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", text)]


def test_exits_and_costs_are_the_same_in_every_verb(verbs: Verbs) -> None:
    groups = ", ".join(f"{{budget = {budget}}}" for budget in BUDGETS)
    values = ["model.name=cnn", "data.name=digits", "data.partition.clients=4", f"fleet.groups=[{groups}]", "rounds=1"]
    run = verbs("run", "--out", "run", *(f"--set={value}" for value in values))
    levels = [row[:6] for row in run if len(row) == 8]
    planned = verbs("plan", "--model", "cnn", "--budgets", ",".join(map(str, BUDGETS)), "--input-shape", "1,8,8")
    note = next(line for line in verbs.said.splitlines() if "without its early classifiers" in line)
    assert [row[:6] for row in planned] == levels
    checked = verbs("check-model", "cnn", "--input-shape", "1,8,8")
    assert [row[:6] for row in checked] == levels
    assert note in verbs.said
    # each level's exits by number and block, as its predictions name them
    named = [row[3].split(", ") for row in levels]
    for level, exits in enumerate(named, 1):
        rows = verbs("predict", "run", "--adaptive", "--level", str(level), "--out", "said.csv")
        assert [row[0] for row in rows] == exits
        with Path("said.csv").open(encoding="utf-8") as file:
            header, first, *_ = csv.reader(file)
        assert header == ["sample", "label", *(f"exit{name.split()[0]}" for name in exits), "exit"]
        assert first[-1] == exits[-1].split()[0]
    plan = Path("run/plan.toml").read_text()
    counted = [int(n) for n in re.findall(r"^multiply_adds = (\d+)", plan, re.MULTILINE)][-len(levels) - 1 :]
    early = int(re.search(r"\[early_heads\]\n.*\nmultiply_adds = (\d+)", plan)[1])  # type: ignore[index]
    counted = [n for n in counted if n != early]
    for level in (2, 3, 4):
        rows = verbs("calibrate", "run", "--level", str(level), "--budget", "1")
        by_exit = [row for row in rows if re.fullmatch(r"\d+ \(\d+\)", row[0])]
        assert [row[0] for row in by_exit] == named[level - 1]
        # the last exit of a smaller level costs what the level does; of the full one, its early classifiers more
        last = numbers(by_exit[-1][1])[0]
        assert last == counted[level - 1] + (early if level == len(levels) else 0)
        assert any(f"{counted[level - 1]:,}" in line for line in verbs.said.splitlines() if "last exit" in line)
        assert (f": {early:,} " in verbs.said) == (level == len(levels))
    verbs("calibrate", "run", "--level", "4", "--budget", "1", "--json")
    assert json.loads(verbs.said)["costs"][-1] == counted[-1] + early


def test_levels_with_their_own_exit_only_keep_its_number(verbs: Verbs) -> None:
    """InclusiveFL's second level has the second of the model's exits, and no first one."""
    values = ["model.name=cnn", "data.name=digits", "data.partition.clients=4", "rounds=1", "method.name=inclusivefl",
              "fleet.groups=[{budget=0.5}, {budget=1.0}]", "fleet.tolerance=0.4"]  # fmt: skip
    run = verbs("run", "--out", "run", *(f"--set={value}" for value in values))
    levels = [row for row in run if len(row) == 8]
    assert [row[3].split()[0] for row in levels] == ["1", "2"]
    for level, row in enumerate(levels, 1):
        assert [one[0] for one in verbs("predict", "run", "--level", str(level))] == [row[3]]
