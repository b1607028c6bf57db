"""The checkpoint of the best round on validation data: it is kept, found again, and opened by `load(folder, "best")`.

The run of these tests is best early, so that its best checkpoint is neither due nor among the newest.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import raises, run_verb
from support.bits import assert_same_bits

import fleetfit as ff
from fleetfit.report.tables import make_level_table
from fleetfit.rounds import PlateauDetector
from fleetfit.runs.listing import clear_checkpoints
from fleetfit.runs.schema import RoundRecord
from fleetfit.runs.summary import Best, find_best

TINY = Path(__file__).parents[1] / "tiny.py"
ROUNDS = 9
SECTIONS: dict[str, Any] = {
    "data": {"name": f"{TINY}:tiny_data", "partition": {"kind": "iid", "clients": 4}},
    "model": {"name": f"{TINY}:tiny"},
    "fleet": {"groups": [{"budget": 0.3}, {"budget": 1.0}]},
    "method": {"name": "scalefl"},
    "local": {"epochs": 1, "lr": 1.0},
    "cohort": {"count": 2},
    "checkpoint": {"every": 4, "keep": 1},
}


def train(
    out: Path, rounds: int = ROUNDS, split: str = "validation", patience: int | None = None, **others: Any
) -> ff.Run:
    evaluate = {"every": 2, "split": split, "patience": patience}
    return ff.run(rounds=rounds, evaluate=evaluate, out=out, progress=False, **SECTIONS, **others)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    """The run of the first seed that is best in round 2; which one that is depends on how a processor rounds."""
    for seed in range(30):
        SECTIONS["seed"] = seed
        run = train(tmp_path_factory.mktemp("best") / "run")
        if find_highest(run.folder) == 2:
            return run
    pytest.fail("no run is best early")


@pytest.fixture(scope="module")
def best(trained: ff.Run) -> int:
    return find_highest(trained.folder)


def find_highest(folder: Path) -> int:
    """Return the first round with the highest recorded accuracy, found by hand."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = {line["round"]: line["evaluate"]["static"]["local"] for line in lines if "evaluate" in line}
    highest = max(accuracies.values())
    assert list(accuracies) == [2, 4, 6, 8, 9], "2 is neither due (every = 4) nor the newest"
    return int(min(number for number, accuracy in accuracies.items() if accuracy == highest))


@pytest.fixture
def own(trained: ff.Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained.folder, tmp_path / "own"))


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def name_checkpoints(*rounds: int) -> list[str]:
    return [f"round-{number:06d}.safetensors" for number in rounds]


def test_early_stopping_ends_the_run_as_its_last_round_does(trained: ff.Run, best: int, tmp_path: Path) -> None:
    """Best is round 2, and rounds 4 and 6 are no better."""
    run = train(tmp_path / "run", patience=2)
    assert [report["round"] for report in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert run.finished and run.summary["best"] == trained.summary["best"] and run.summary["rounds"] == 6
    assert checkpoints(run.folder) == name_checkpoints(best, 6)
    evaluations = [report["evaluate"]["static"] for report in run.metrics if "evaluate" in report]
    assert ["full" in columns for columns in evaluations] == [False, False, True], "the last one is complete"
    assert run.summary["evaluate"]["static"]["full"] == evaluations[-1]["full"]
    written = (run.folder / "summary.json").stat().st_mtime_ns
    assert len(ff.resume(run.folder, progress=False).metrics) == 6
    assert (run.folder / "summary.json").stat().st_mtime_ns == written, "no round is left"
    (run.folder / "summary.json").unlink()  # as if it had ended while it drew its plots
    assert len(ff.resume(run.folder, progress=False).metrics) == 6 and run.finished
    config = run.folder / "config.toml"
    config.write_text(config.read_text().replace("patience = 2", "patience = 9"))
    further = ff.resume(run.folder, progress=False)
    assert_same_bits(further.server.state, trained.server.state)
    assert [one["round"] for one in further.metrics] == list(range(1, ROUNDS + 1))


def test_a_run_that_stopped_early_is_evaluated_on_test_data(trained: ff.Run, best: int, tmp_path: Path) -> None:
    run = train(tmp_path / "run", patience=2)
    opened = ff.load(run.folder, "best")
    expected = ff.load(trained.folder, "best").evaluate(split="test")
    assert opened.evaluate(split="test") == expected and expected["split"] == "test"
    assert "on validation data" in make_level_table(run.files.read_summary()).title


def test_a_comparison_says_where_runs_stopped_early(tmp_path: Path) -> None:
    rows = [{"method": {"name": "scalefl"}}, {"method": {"name": "fedavg"}, "evaluate": {"patience": 8}}]
    sections = {key: SECTIONS[key] for key in ("data", "model", "cohort", "checkpoint")}
    sections["fleet"] = {**SECTIONS["fleet"], "tolerance": 0.2}
    comparison = ff.compare(
        rounds=4, compare={"row": rows}, evaluate={"every": 1, "split": "validation", "patience": 1},
        out=tmp_path / "c", progress=False, local={"lr": 1e-9}, **sections,
    )  # fmt: skip
    (note,) = (note for note in comparison.table.notes if "Early stopping" in note)
    assert "scalefl (2)" in note and "fedavg" not in note


def test_early_stopping_needs_validation_data(tmp_path: Path) -> None:
    with raises(ff.ConfigError, "validation", key="evaluate.split"):
        train(tmp_path / "run", split="test", patience=2)


def test_a_part_does_not_end_a_run_whose_complete_evaluation_is_better() -> None:
    def report(accuracy: float | None) -> dict[str, Any]:
        return {"evaluate": {"static": {"local": accuracy}}}

    stopping = PlateauDetector(2, "static", [report(0.5), {}, report(0.5)])
    assert not stopping.would_stop({}) and not stopping.would_stop(report(None)) and stopping.would_stop(report(0.4))
    stopping.note(report(0.6))
    assert not stopping.is_due and not stopping.would_stop(report(0.6))
    assert PlateauDetector(2, "static", [report(0.0)] * 3).is_due, "0 is an accuracy"
    assert not PlateauDetector(None, "static", [report(0.5)] * 9).is_due


def test_best_is_kept_beside_the_newest(trained: ff.Run, best: int) -> None:
    assert checkpoints(trained.folder) == name_checkpoints(best, ROUNDS)
    assert ff.load(trained.folder).server.round == ff.load(trained.folder, "last").server.round == ROUNDS


def test_state_is_that_of_a_run_up_to_the_best_round(trained: ff.Run, best: int, tmp_path: Path) -> None:
    opened = ff.load(trained.folder, "best")
    assert opened.server.round == best
    assert_same_bits(opened.server.state, train(tmp_path / "short", rounds=best).server.state)


def test_numbers_are_those_of_the_best_round(trained: ff.Run, best: int) -> None:
    opened, recorded = ff.load(trained.folder, "best"), trained.metrics[best - 1]["evaluate"]["static"]
    assert opened.accuracy() == recorded["local"] > trained.accuracy()
    assert opened.evaluate()["static"]["local"] == recorded["local"], "measured again"
    assert opened.evaluate(split="test")["split"] == "test"
    assert trained.summary["best"] == {"round": best, "local": recorded["local"]}


def test_verbs_open_it(trained: ff.Run) -> None:
    for words in ([], ["--checkpoint", "last"], ["--checkpoint", "best"]):
        columns = json.loads(run_verb("eval", trained.folder, *words, "--split", "validation", "--json", code=0).out)
        opened = ff.load(trained.folder, "best") if "best" in words else trained
        assert columns["static"]["local"] == opened.accuracy()


def test_bits_do_not_depend_on_it(trained: ff.Run, tmp_path: Path) -> None:
    other = train(tmp_path / "test-data", split="test")
    assert_same_bits(other.server.state, trained.server.state)
    assert checkpoints(other.folder) == name_checkpoints(ROUNDS) and "best" not in other.summary


class Stop(Exception):
    pass


@pytest.mark.parametrize("last", [1, 2, 3, 6, 7])
def test_resumed_run_keeps_it(trained: ff.Run, best: int, tmp_path: Path, last: int) -> None:
    def stop(report: Any) -> None:
        if report["round"] == last:
            raise Stop

    with pytest.raises(Stop):
        train(tmp_path / "run", on_round=stop)
    if last >= best:
        assert ff.load(tmp_path / "run", "best").server.round == best
    ff.resume(tmp_path / "run", progress=False)
    for name in name_checkpoints(best, ROUNDS):
        path = Path("checkpoints") / name
        assert (tmp_path / "run" / path).read_bytes() == (trained.folder / path).read_bytes()
    assert checkpoints(tmp_path / "run") == name_checkpoints(best, ROUNDS)


def test_reports_after_the_newest_checkpoint_do_not_count(own: Path, best: int) -> None:
    """As after a kill between a round's report and its checkpoint; the round is trained again."""
    (own / "summary.json").unlink()
    report = json.loads((own / "metrics.jsonl").read_text().splitlines()[-1]) | {"round": ROUNDS + 1}
    report["evaluate"]["static"]["local"] = 1.0
    with (own / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(report) + "\n")
    assert ff.load(own, "best").server.round == best


def test_a_run_without_validation_data_has_none(own: Path, tmp_path: Path) -> None:
    other = train(tmp_path / "test-data", rounds=1, split="test")
    with raises(ff.RunError, key="evaluate.split", path=other.folder):
        ff.load(other.folder, "best")
    (own / "metrics.jsonl").unlink()
    with raises(ff.RunError, path=own):
        ff.load(own, "best")
    with raises(ff.ConfigError, "best", key="checkpoint"):
        ff.load(own, "bst")  # type: ignore[arg-type]


def test_a_missing_or_damaged_one_is_an_error(own: Path, best: int) -> None:
    path = own / "checkpoints" / name_checkpoints(best)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with raises(ff.RunError, path.name, path=own / "checkpoints"):
        ff.load(own, "best").model()
    path.unlink()
    with raises(ff.RunError, str(best), path=own / "checkpoints"):
        ff.load(own, "best").model()
    assert ff.load(own).server.round == ROUNDS


def test_clearing_keeps_it(own: Path, best: int) -> None:
    source = own / "checkpoints" / name_checkpoints(best)[0]
    shutil.copy(source, own / "checkpoints" / name_checkpoints(1)[0])
    (cleared,) = clear_checkpoints(own)
    assert [path.name for path in cleared.files] == name_checkpoints(1)
    assert checkpoints(own) == name_checkpoints(best, ROUNDS)
    clear_checkpoints(own, last=True)
    assert checkpoints(own) == []


def make_round(number: int, local: float | None, split: str = "validation", norm: str = "static") -> RoundRecord:
    accuracies = {"global": 0.5, "local": local, "levels": {}}
    return RoundRecord.load({
        "round": number, "train": {"loss": None, "clients": 1}, "failures": [], "bytes_down": 0, "bytes_up": 0,
        "seconds": 1.0, "evaluate": {"split": split, norm: accuracies},
    })  # fmt: skip


def test_first_of_equals_is_best_and_other_splits_do_not_count() -> None:
    rounds = [make_round(1, None), make_round(2, 0.5), make_round(3, 0.9, "test"), make_round(4, 0.7),
              make_round(5, 0.7), make_round(6, 0.8, norm="batch"), make_round(7, 0.6)]  # fmt: skip
    assert find_best(rounds, "static") == Best(4, 0.7)
    assert find_best(rounds, "batch") == Best(6, 0.8)
    assert find_best(rounds[:1], "static") is None and find_best([], "static") is None
    assert find_best(rounds[4:], "static", Best(1, 0.7)) == Best(1, 0.7)
    assert find_best(rounds[4:], "static", Best(1, 0.65)) == Best(5, 0.7)
