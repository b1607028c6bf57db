"""Data that people have, from a path or in memory, through runs, predictions, calibrations, exports and nodes."""

import csv
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_iris
from sklearn.metrics import mean_absolute_error, r2_score
from support import raises
from torch import nn

import fleetfit as ff
from fleetfit.api.inference import load_samples, prepare_export
from fleetfit.cli import main
from fleetfit.cli.listing import make_key_table
from fleetfit.config import load_experiment
from fleetfit.config.assemble.data import build_data, build_partition
from fleetfit.data.files.detect import detect_format
from fleetfit.data.files.table import table
from fleetfit.data.files.text import text as read_text_table
from fleetfit.errors import ConfigError, DataError, ModelError
from fleetfit.report.tables import make_level_table, make_row_level_table, make_total_table

IRIS = load_iris()
QUICK: dict[str, Any] = {"rounds": 2, "model": {"name": "mlp", "hidden": 16, "layers": 4}, "local": {"epochs": 10}}
Called = Callable[..., str]


def write_iris(path: Path, rows: range, label: bool = True) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*IRIS.feature_names, *(["species"] if label else [])])
        for row in rows:
            name = [IRIS.target_names[IRIS.target[row]]] if label else []
            writer.writerow([*IRIS.data[row].tolist(), *name])
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def done(place: Path) -> ff.Run:
    table = write_iris(place / "iris.csv", range(150))
    return ff.run({"data": {"path": str(table)}}, out=place / "run", **QUICK)


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Called:
    def call(*arguments: object, code: int = 0) -> str:
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as caught:
            main([str(one) for one in arguments])
        printed = capsys.readouterr()
        assert caught.value.code == code, printed.err
        return printed.out if code == 0 else printed.err

    return call


def test_a_table_is_learned_and_said(done: ff.Run) -> None:
    assert done.accuracy("local") > 0.8
    assert "iris.csv" in done.notes[0] and "4 numeric" in done.notes[0]
    columns = json.loads((done.folder / "columns.json").read_text())
    assert columns["label"]["classes"] == ["setosa", "versicolor", "virginica"]
    assert ff.load(done.folder).experiment.data.partition.clients == 4
    assert done.experiment.data.name == "table" and done.experiment.cohort.fraction == 1.0


def test_short_texts_are_learned_by_default(tmp_path: Path) -> None:
    """One word of ten decides; a new transformer with SGD answers at chance here."""
    rng = np.random.default_rng(0)
    words = {0: ["awful", "sad", "poor"], 1: ["great", "happy", "lovely"]}
    others = ["the", "film", "of", "story", "and", "scene", "with", "music", "actor"]
    rows = [(" ".join([*rng.choice(others, 9), rng.choice(words[n % 2])]), n % 2) for n in range(300)]
    pandas.DataFrame(rows, columns=["text", "label"]).to_csv(tmp_path / "texts.csv", index=False)
    run = ff.run(data=tmp_path / "texts.csv", rounds=15, out=tmp_path / "run")
    assert run.accuracy("local") > 0.8


def test_new_rows_are_prepared_as_in_training(done: ff.Run, called: Called, place: Path) -> None:
    """Predictions of the command line are those of the model for numbers computed here from the training rows."""
    rows = write_iris(place / "new.csv", range(150), label=False)
    output = called("predict", done.folder, "--data", rows, "--out", place / "found.csv")
    assert "without labels" in output
    with (place / "found.csv").open() as file:
        predictions = [row["prediction"] for row in csv.DictReader(file)]
    train = done.assembly.data.splits["train"].numpy()  # type: ignore[union-attr]
    x = (IRIS.data - IRIS.data[train].mean(0)) / IRIS.data[train].std(0)
    with torch.no_grad():
        answers = done.model()(torch.tensor(x, dtype=torch.float32))[-1].argmax(-1)
    assert predictions == [IRIS.target_names[i] for i in answers.tolist()]


def test_other_verbs_take_a_path(done: ff.Run, called: Called, place: Path) -> None:
    few = write_iris(place / "few.csv", range(0, 150, 3))
    columns = json.loads(called("eval", done.folder, "--data", few, "--json"))
    assert columns["data"] == "few" and columns["static"]["full"] > 0.7
    assert "accuracy" in called("predict", done.folder, "--data", few)
    for verb in ("predict", "eval"):
        message = called(verb, done.folder, "--data", few, "--split", "validation", code=2)
        assert "few" in message and "validation" in message, verb
    assert "few" in called("calibrate", done.folder, "--data", few, "--budget", "0.8")
    called("export", done.folder, "--no-onnx", "--out", place / "device")
    for name in ("columns.json", "data.json"):
        assert (place / "device" / name).read_text() == (done.folder / name).read_text()
    assert "columns.json" in (place / "device" / "README.md").read_text()
    message = called("eval", done.folder, "--data", write_iris(place / "bare.csv", range(9), label=False), code=2)
    assert "bare" in message and "predict" in message
    assert "nowhere/a.csv" in called("predict", done.folder, "--data", "nowhere/a.csv", code=2)


@pytest.mark.parametrize("gaps", [(0,), (1, 4, 7), range(8)])
def test_rows_without_a_label_are_left_out_of_an_evaluation(
    gaps: Sequence[int], done: ff.Run, called: Called, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a file and of a frame: the numbers are those of the table without such rows."""
    rows = range(45, 145, 11)
    frame = pandas.read_csv(write_iris(place / "gaps.csv", rows))
    labeled = frame.drop(index=[*gaps])
    frame.loc[[*gaps], "species"] = None
    frame.to_csv(place / "gaps.csv", index=False)
    labeled.to_csv(place / "kept.csv", index=False)
    result, expected = (
        json.loads(called("eval", done.folder, "--data", place / f"{name}.csv", "--json")) for name in ("gaps", "kept")
    )
    assert result["static"] == expected["static"] and result["static"]["full"] < 1
    assert done.evaluate(data=frame)["static"] == done.evaluate(data=labeled)["static"]
    assert f"{len(gaps)} of {len(frame)}" in caplog.text
    assert "without labels" in called("predict", done.folder, "--data", place / "gaps.csv")
    frame["species"] = None
    with raises(ConfigError, key="data"):
        done.evaluate(data=frame)


def test_a_split_without_samples_is_no_table_of_dashes(tmp_path: Path, called: Called) -> None:
    table = write_iris(tmp_path / "all.csv", range(150))
    run = ff.run({"data": {"path": str(table), "validation": 0.0}}, out=tmp_path / "run", **QUICK)
    for verb in ("predict", "eval"):
        assert "validation" in called(verb, run.folder, "--split", "validation", code=2), verb
    assert run.evaluate()["static"]["full"] == run.evaluate(evaluate={"split": "test"})["static"]["full"]


def test_a_run_keeps_its_numbers_when_the_table_changes(tmp_path: Path) -> None:
    table = write_iris(tmp_path / "t.csv", range(150))
    run = ff.run({"data": {"path": str(table)}}, out=tmp_path / "run", **{**QUICK, "rounds": 1})
    before = ff.load(run.folder).assembly.data
    write_iris(table, range(0, 150, 2))
    after = ff.load(run.folder).assembly.data
    assert after.columns == before.columns != ""  # type: ignore[union-attr]
    assert torch.equal(after.x[0], before.x[0])  # type: ignore[union-attr, index]


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_run_keeps_its_word_pieces_when_its_texts_change(tmp_path: Path, in_memory: bool) -> None:
    frame = pandas.DataFrame({"text": [f"word{i % 7} {'good' if i % 2 else 'bad'}" for i in range(60)],
                              "label": ["yes" if i % 2 else "no" for i in range(60)]})  # fmt: skip
    other = pandas.concat([frame, pandas.DataFrame({"text": ["zeppelin quixotic"] * 30, "label": ["yes"] * 30})])
    file = tmp_path / "texts.csv"
    frame.to_csv(file, index=False)
    objects = {"data": other} if in_memory else {}
    run = ff.run(data=frame if in_memory else str(file), rounds=1, out=tmp_path / "run", progress=False)
    other.to_csv(file, index=False)
    assert ff.load(run.folder, **objects).evaluate()["static"]["test_samples"] == 18
    assert ff.resume(run.folder, rounds=2, progress=False, **objects).finished


def test_a_run_prepares_its_data_by_the_transform_of_another(done: ff.Run, tmp_path: Path) -> None:
    """Named in a run file by a relative path; a resumed run has its own copy."""
    rows = write_iris(tmp_path / "half.csv", range(50, 150, 2))  # two of the three classes
    (tmp_path / "first").mkdir()
    for name in ("data.json", "columns.json"):
        shutil.copy(done.folder / name, tmp_path / "first" / name)
    (tmp_path / "run.toml").write_text(f'[data]\npath = "{rows.name}"\ntransform = "first"\n')
    run = ff.run(tmp_path / "run.toml", out=tmp_path / "run", **{**QUICK, "rounds": 1})
    ours, data = done.assembly.data, run.assembly.data
    assert data.columns == ours.columns and data.class_names == ours.class_names  # type: ignore[union-attr]
    assert torch.equal(data.x, ours.x[50:150:2]) and set(data.y.tolist()) == {1, 2}  # type: ignore[union-attr, index]
    shutil.rmtree(tmp_path / "first")
    again = ff.load(run.folder)
    assert torch.equal(again.assembly.data.x, data.x)  # type: ignore[union-attr, arg-type]
    assert not any("transform" in note for note in run.notes)


def test_an_export_needs_no_data(tmp_path: Path) -> None:
    """Its graphs scale samples by the stored transform; it is the same with the data and without."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.normal(7, 3, (60, 4)).astype(np.float32), y=np.arange(60) % 3)
    run = ff.run(data=tmp_path / "a.npz", out=tmp_path / "run", **{**QUICK, "rounds": 1})
    x = torch.tensor(rng.normal(7, 3, (5, 4)), dtype=torch.float32)
    logits = []
    for folder in (tmp_path / "with", tmp_path / "without"):
        ff.load(run.folder).export(folder, 1, ())
        logits.append(torch.export.load(folder / "model.pt2").module()(x)[-1])
        (tmp_path / "a.npz").unlink(missing_ok=True)
    assert torch.equal(*logits)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("with", "without")]
    assert configs[0] == configs[1] and configs[0]["input"]["inside_the_graph"]["shift"]
    transform = json.loads((run.folder / "data.json").read_text())
    mean, std = (torch.tensor(transform[key]) for key in ("mean", "std"))
    with torch.no_grad():
        assert torch.allclose(logits[0], run.model(1)((x - mean) / std)[-1], atol=1e-5)


class Stop(Exception):
    pass


def cut_off(report: Any) -> None:
    raise Stop


def begin_run(table: Path, out: Path, **more: Any) -> Path:
    """Begin a run on a table, and cut it off after its first round."""
    with pytest.raises(Stop):
        ff.run({"data": {"path": str(table)}, **more}, out=out, on_round=cut_off, **QUICK)
    return out


def read_environment(folder: Path) -> dict[str, Any]:
    environment: dict[str, Any] = json.loads((folder / "environment.json").read_text())
    return environment


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (range(0, 150, 2), "samples 150 then, 75 now"),
        (range(149, -1, -1), "other labels, or the same labels in another order"),
    ],
)
def test_a_run_that_goes_on_with_other_data_says_so(
    tmp_path: Path, called: Called, caplog: pytest.LogCaptureFixture, rows: range, says: str
) -> None:
    table = write_iris(tmp_path / "t.csv", range(150))
    folder, other = begin_run(table, tmp_path / "run"), begin_run(table, tmp_path / "other")
    assert read_environment(folder)["data"]["splits"] == {"train": 108, "validation": 12, "test": 30}
    write_iris(table, rows)
    resumed = ff.resume(folder, progress=False)
    (note,) = (
        note for note in resumed.summary["notes"] if note.startswith("The data have changed since this run began")
    )
    assert says in note and note in caplog.text
    assert f"began: {says}" in " ".join(called("resume", other).split())


@pytest.mark.parametrize("label", ["species", "sepal length (cm)"])
def test_a_run_that_goes_on_with_the_same_data_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, label: str
) -> None:
    table = write_iris(tmp_path / "t.csv", range(150))
    with pytest.raises(Stop):
        ff.run({"data": {"path": str(table), "label": label}}, out=tmp_path / "run", on_round=cut_off, **QUICK)
    resumed = ff.resume(tmp_path / "run")
    assert not any("changed" in note for note in resumed.summary["notes"]) and not caplog.text


def test_damaged_facts_on_data_give_no_note(tmp_path: Path) -> None:
    table = write_iris(tmp_path / "t.csv", range(150))
    folder = begin_run(table, tmp_path / "run")
    write_iris(table, range(0, 150, 2))
    for text in (json.dumps({**read_environment(folder), "data": 3}), "[]", "{"):
        (folder / "environment.json").write_text(text)
        assert not any("changed" in note for note in ff.load(folder).notes), text


def test_nothing_is_written_of_data_that_are_withheld(tmp_path: Path) -> None:
    table = write_iris(tmp_path / "t.csv", range(150))
    withheld: dict[str, dict[str, Any]] = {
        "private": {"privacy": {"clipping_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01,
                                "key_file": str(tmp_path / "keys" / "key")},
                    "method": {"name": "fedavg"}},
        "secure": {"secure": {}, "method": {"name": "fedavg", "hooks": {"weigh": "by_count"}}},
        "open": {"method": {"name": "fedavg"}},
    }  # fmt: skip
    for name, sections in withheld.items():
        run = ff.run({"data": {"path": str(table)}, **sections}, out=tmp_path / name, **{**QUICK, "rounds": 1})
        assert ("data" in read_environment(run.folder)) == (name == "open"), name


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_comparison_that_goes_on_with_other_data_says_so(tmp_path: Path, jobs: int) -> None:
    table, file = write_iris(tmp_path / "iris.csv", range(150)), tmp_path / "both.toml"
    file.write_text(
        f'rounds = 1\n[data]\npath = "{table}"\n[model]\nname = "mlp"\nhidden = 16\nlayers = 4\n'
        '[[compare.row]]\nmethod.name = "fedavg"\n[[compare.row]]\nmethod.name = "heterofl"\n'
    )
    first = ff.compare(file, out=tmp_path / "both", jobs=jobs)
    shutil.rmtree(tmp_path / "both" / "fedavg")
    write_iris(table, range(0, 150, 2))
    notes: list[str] = []
    again = ff.compare(file, out=tmp_path / "both", jobs=jobs, on_run=lambda *event: notes.extend(event[3].notes))
    assert not any("150 " in note and "75 " in note for note in first.table.notes)
    (note,) = (note for note in again.table.notes if "150 " in note and "75 " in note)
    assert "heterofl, seed 0" in note and "fedavg, seed 0" in note
    assert [one for one in notes if "heterofl, seed 0" in one and "75 " in one], "said before it is trained, too"
    assert note in ff.load_comparison(tmp_path / "both").table.notes


def test_a_finished_comparison_says_that_its_data_have_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def compare(rows: Sequence[int]) -> list[str]:
        frame = pandas.DataFrame(IRIS.data, columns=IRIS.feature_names).assign(kind=IRIS.target).iloc[rows]
        table = {"row": [{"method": {"name": "fedavg"}}, {"method": {"name": "heterofl"}}]}
        model = {"name": "mlp", "hidden": 16, "layers": 4}
        caplog.clear()
        comparison = ff.compare(rounds=1, compare=table, data=frame, model=model, out=tmp_path / "c", progress=False)
        return [note for note in comparison.table.notes if "75 " in note]

    assert not compare(range(150)) and not caplog.records
    (note,) = compare(range(0, 150, 2))
    assert "fedavg, seed 0" in note and "heterofl, seed 0" in note and "150 " in note
    assert [record.message for record in caplog.records] == [note]
    assert not compare(range(150))


def test_a_comparison_names_runs_with_changed_data(tmp_path: Path) -> None:
    table, file = write_iris(tmp_path / "iris.csv", range(150)), tmp_path / "one.toml"
    file.write_text(
        f'rounds = 2\n[data]\npath = "{table}"\n[model]\nname = "mlp"\nhidden = 16\nlayers = 4\n'
        '[[compare.row]]\nmethod.name = "fedavg"\n'
    )
    with pytest.raises(Stop):
        ff.compare(file, out=tmp_path / "one", on_run=lambda *_: cut_off)
    write_iris(table, range(0, 150, 2))
    for _ in range(2):  # also when it is finished
        comparison = ff.compare(file, out=tmp_path / "one")
        (note,) = (note for note in comparison.table.notes if "150 " in note and "75 " in note)
        assert note.startswith("fedavg, seed 0: ")


def test_from_memory(tmp_path: Path) -> None:
    names = IRIS.target_names[IRIS.target]
    run = ff.run(data=(IRIS.data, names), out=tmp_path / "run", **{**QUICK, "rounds": 1})
    data = run.assembly.data
    assert isinstance(data, ff.Data) and data.class_names == tuple(IRIS.target_names)
    x = data.batch(data.splits["train"])[0]
    assert x.mean(0).abs().max() < 1e-4 and (x.std(0, correction=0) - 1).abs().max() < 1e-3
    assert ff.load(run.folder, data=(IRIS.data, names)).accuracy("local") == run.accuracy("local")
    assert not ff.resume(run.folder, data=(IRIS.data, names)).assembly.data.columns  # type: ignore[union-attr]
    frame = pandas.DataFrame(IRIS.data, columns=IRIS.feature_names).assign(kind=names)
    table = build_data(load_experiment(data=frame).data)
    assert table.class_names == tuple(IRIS.target_names) and table.columns
    own_test = ((IRIS.data[:100], IRIS.target[:100]), (IRIS.data[100:], IRIS.target[100:]))
    pair = build_data(load_experiment(data=own_test).data)
    assert pair.splits["test"].tolist() == list(range(100, 150))


def compute_accuracy(run: ff.Run, x: Any, y: Any) -> float:
    """Accuracy of the full model, with the run's means, of samples whose classes stand in the run's order."""
    data = run.assembly.data
    assert isinstance(data, ff.Data)
    standard = (torch.tensor(x, dtype=torch.float32) - torch.tensor(data.mean)) / torch.tensor(data.std)
    return float((run.model()(standard)[-1].argmax(1) == torch.tensor(y)).float().mean())


def test_the_server_s_own_data_are_in_memory_too(tmp_path: Path) -> None:
    samples = IRIS.data.astype("float32"), IRIS.target
    data = {"name": samples, "server": (samples[0][::2], samples[1][::2])}
    run = ff.run(data=data, method={"name": "feddf", "steps": 2}, out=tmp_path / "run", progress=False, **QUICK)
    longer = ff.resume(run.folder, rounds=3, data=data, progress=False)
    assert longer.finished and len(longer.metrics) == 3
    with pytest.raises(ConfigError) as refused:  # a run file has no object
        load_experiment(run.folder / "config.toml")
    assert refused.value.key == "data.name"


@pytest.mark.parametrize("form", ["file", "table", "arrays", "key", "texts"])
def test_groups_that_are_named_become_the_clients(form: str, tmp_path: Path) -> None:
    users = np.repeat([f"user {i}" for i in (4, 2, 9)], 50)
    x, y = IRIS.data.astype(np.float32), IRIS.target
    frame = pandas.DataFrame({**{f"n{i}": x[:, i] for i in range(4)}, "user": users, "kind": y})
    frame.to_csv(tmp_path / "table.csv", index=False)
    texts = [f"a text of {value}" for value in y]
    data: Any = {
        "file": {"path": str(tmp_path / "table.csv"), "groups": "user", "label": "kind"},
        "table": {"name": frame, "groups": "user", "label": "kind"},
        "arrays": {"x": x, "y": y, "groups": users},
        "key": {"name": (x, y), "groups": users},
        "texts": {"name": (texts, y), "groups": users, "length": 8},
    }[form]
    experiment = load_experiment({"data": data})
    assembled = build_data(experiment.data)
    parts = build_partition(experiment, assembled)
    rows = {tuple(sorted(torch.cat([*part.values()]).tolist())) for part in parts}
    assert rows == {tuple(range(100)[50:]), tuple(range(50)), tuple(range(100, 150))}
    nested = {**data, "partition": {"alpha": 0.5}} if "name" in data or "path" in data else {}
    if nested:
        assert load_experiment({"data": nested}).data.partition.kind == "dirichlet"


def test_groups_in_memory_fit_their_samples() -> None:
    x, y = IRIS.data.astype(np.float32), IRIS.target
    for data in ({"x": x, "y": y, "groups": y[:5]}, {"name": ((x, y), (x, y)), "groups": y}):
        with raises(DataError, key="groups"):
            load_experiment({"data": data})
    with raises(DataError, key="groups"):
        load_experiment({"data": {"name": (["a good text", "a bad text"] * 5, [0, 1] * 5), "groups": [1, 2]}})


def test_tokens_in_memory_have_a_vocabulary(tmp_path: Path) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.EmbeddingBag(50, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.table(x))

    y = np.arange(90) % 3
    x = np.random.default_rng(0).integers(0, 16, (90, 7)) + 16 * y[:, None]
    data = {"name": (x, y), "vocabulary": 50, "partition": {"kind": "iid", "clients": 3}}
    run = ff.run(model=Bag(), data=data, rounds=8, cohort={"fraction": 1.0}, out=tmp_path / "run")
    assert (run.assembly.data.vocabulary, run.assembly.data.classes) == (50, 3) and run.accuracy("global") > 0.7
    with raises(ModelError, "vocabulary", 50, key="model.name"):
        ff.run(model=Bag(), data=(x, y), out=tmp_path / "numbers")
    with raises(ConfigError, -1, key="data.vocabulary"):
        ff.run(model=Bag(), data={**data, "vocabulary": -1}, out=tmp_path / "wrong")


def test_samples_in_memory_are_prepared_as_in_training(tmp_path: Path) -> None:
    """Nothing is fitted to them: neither means nor the order of classes; all of them are for testing."""
    names = IRIS.target_names[IRIS.target]
    run = ff.run(data=(IRIS.data, names), out=tmp_path / "run", **{**QUICK, "rounds": 3})
    moved, last = IRIS.data * 2 + 1, IRIS.target > 0  # two of the three classes
    for x, y, labels in ((IRIS.data, IRIS.target, names), (moved[last], IRIS.target[last], names[last])):
        columns = run.evaluate(data=(x, labels))["static"]
        assert columns["samples"] == len(x) and columns["full"] == pytest.approx(compute_accuracy(run, x, y), abs=1e-6)
    pairs = ((IRIS.data[:10], names[:10]), (moved, names))
    assert run.evaluate(data=pairs)["static"]["full"] == pytest.approx(
        compute_accuracy(run, moved, IRIS.target), abs=1e-6
    )
    with raises(DataError, "ape", "setosa", "versicolor", key="y"):
        run.evaluate(data=(IRIS.data[:2], ["ape", "setosa"]))
    with raises(ConfigError, "columns.json", key="data"):
        run.evaluate(data=pandas.DataFrame(IRIS.data).assign(kind=names))
    with raises(ConfigError, "(x, y)", key="data"):
        run.evaluate(IRIS.data, names)  # type: ignore[arg-type]
    with raises(DataError, "[150, 2]", "[N, 4]", key="x"):
        run.evaluate(data=(IRIS.data[:, :2], names))
    with raises(DataError, 2, 1, key="y"):
        run.evaluate(data=(IRIS.data[:2], ["setosa"]))
    with raises(DataError, "uint8", "float64", key="x"):
        run.evaluate(data=(IRIS.data.astype(np.uint8), names))


def test_another_frame_is_read_as_the_run_s_columns_say(tmp_path: Path) -> None:
    """A category that it lacks, or has for the first time, moves no feature: as with the same rows in a file."""
    frame = pandas.DataFrame(IRIS.data, columns=list("abcd")).assign(
        color=np.where(IRIS.data[:, 0] > 5.5, "red", "green"), kind=IRIS.target_names[IRIS.target]
    )
    run = ff.run(data=frame, out=tmp_path / "run", **{**QUICK, "rounds": 3})
    other = frame[60:].assign(a=frame.a * 3, color="zinc")
    other.to_csv(tmp_path / "other.csv", index=False)
    in_memory, in_a_file = run.evaluate(data=other)["static"], run.evaluate(data=str(tmp_path / "other.csv"))["static"]
    assert in_memory == in_a_file and in_memory["samples"] == 90


def test_a_regression_is_scored_in_the_unit_of_the_run(tmp_path: Path) -> None:
    """1 - (mean squared error / variance of the run's training targets), on targets with another mean and spread."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)).astype(np.float32)
    y = (10 + 5 * x[:, 0] + x[:, 1]).astype(np.float32) + 0.25
    np.savez(tmp_path / "ours.npz", x=x, y=y)
    np.savez(tmp_path / "theirs.npz", x=x[y > 10], y=y[y > 10])
    table = {"data": {"path": str(tmp_path / "ours.npz"), "task": "regression"}}
    run = ff.run({**table, **QUICK, "rounds": 6}, out=tmp_path / "run")
    ours = run.assembly.data
    assert isinstance(ours, ff.Data) and ours.task == "regression"
    mean, std = ours.target_scale
    standard = (torch.from_numpy(x[y > 10]) - torch.tensor(ours.mean)) / torch.tensor(ours.std)
    with torch.no_grad():
        answers, truth = (run.model()(standard)[-1] * std + mean)[:, 0], torch.from_numpy(y[y > 10])
    assert run.predict(x[y > 10]).labels == pytest.approx(answers.numpy(), rel=1e-5)
    expected = 1 - float((answers - truth).square().mean() / std.square())
    theirs = load_samples(run, str(tmp_path / "theirs.npz"))
    objects = ff.Data("theirs", torch.from_numpy(x[y > 10]), truth[:, None], {"test": torch.arange(len(truth))}, 1,
                      mean=ours.mean, std=ours.std, task="regression")  # fmt: skip
    for source in (str(tmp_path / "theirs.npz"), (x[y > 10], y[y > 10])):
        assert run.evaluate(data=source)["static"]["full"] == pytest.approx(expected, abs=1e-4)
    for data in (theirs, objects):
        assert [moment.tolist() for moment in prepare_export(run, None, data).data.target_scale] == [
            mean.tolist(),
            std.tolist(),
        ]


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        ([1.0, 2.0], [0, 1], "x must be [N, ...]"),
        ([[1.0], [2.0]], [0, 1, 1], "one label per sample"),
        ([[1.0], [float("nan")]], [0, 1], "is not finite"),
        ([["a"], ["b"]], [0, 1], "x must have numbers"),
        ([[1.0], [2.0, 3.0]], [0, 1], "x cannot be converted to an array"),
    ],
)
def test_what_does_not_fit_in_memory_is_a_sentence(x: Any, y: Any, says: str) -> None:
    with pytest.raises(DataError) as error:
        load_experiment(data=(x, y))
    assert says in str(error.value)


def test_each_kind_is_found_with_a_model_that_fits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(8):
        folder = tmp_path / "photos" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (20 + i, 20), dtype=np.uint8)).save(folder / f"{i}.png")
    np.savez(tmp_path / "rows.npz", X=rng.normal(size=(9, 4)), y=np.arange(9) % 2)
    np.savez(tmp_path / "gray.npz", x=rng.integers(0, 255, (9, 12, 12), dtype=np.uint8), y=np.arange(9) % 2)
    (tmp_path / "book.txt").write_text("to be or not to be. " * 50)
    words = [" ".join(rng.choice(["good", "bad", "old", "new", "film"], 9)) for _ in range(30)]
    reviews = pandas.DataFrame({"review": words, "label": [i % 2 for i in range(30)]})
    reviews.to_csv(tmp_path / "reviews.csv", index=False)
    datasets.Dataset.from_pandas(reviews).save_to_disk(str(tmp_path / "saved"))
    picture = datasets.Dataset.from_dict(
        {"picture": [Image.new("L", (9, 9), i) for i in range(9)], "kind": [0, 1, 2] * 3}
    )
    datasets.DatasetDict(train=picture, test=picture).save_to_disk(str(tmp_path / "pictures"))
    expected = {
        "photos": ("images", "cnn"), "rows.npz": ("arrays", "mlp"), "gray.npz": ("arrays", "cnn"),
        "book.txt": ("plain_text", "char_lstm"), "reviews.csv": ("text", "bert"), "saved": ("text", "bert"),
        "pictures": ("images", "cnn"),
    }  # fmt: skip
    for name, (kind, model) in expected.items():
        experiment = load_experiment({"data": {"path": str(tmp_path / name)}})
        assert (experiment.data.name, experiment.model.name) == (kind, model), name
        ff.plan(load_experiment(experiment, ["data.partition.kind=iid", "data.partition.clients=4"]))
    assert load_experiment(None, [f"data={tmp_path / 'rows.npz'}"]).data.settings["standardize"] is True
    assert load_experiment({"data": {"path": str(tmp_path / "photos"), "size": 12}}).data.settings["size"] == 12
    chosen = load_experiment({"data": {"path": str(tmp_path / "photos")}, "model": {"name": "resnet20"}})
    assert chosen.model.name == "resnet20"


@pytest.mark.parametrize(
    ("sizes", "keys", "quoted"),
    [
        ([(50 + n, 120 - n) for n in range(24)], {}, ("50 to 120", "32x32")),
        ([(96, 96)], {}, ("sides of 96 ", "64x64")),
        ([(40, 40), (30, 44)], {"size": 12}, ("30 to 44", "12x12")),
        ([(20, 24)], {}, ()),
        ([(16, 16)], {"size": 16}, ()),
    ],
)
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_note_says_from_and_to_what_size_photos_are_resized(
    sizes: list[tuple[int, int]], keys: dict[str, int], quoted: tuple[str, ...], is_listed: bool, tmp_path: Path
) -> None:
    """Of class folders and of a table of files."""
    rows = []
    for n in range(48):
        file = f"{'ab'[n % 2]}/{n}.png"
        (tmp_path / "photos" / "ab"[n % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("L", sizes[n % len(sizes)], 5 * n).save(tmp_path / "photos" / file)
        rows.append((file, "ab"[n % 2]))
    pandas.DataFrame(rows, columns=["file", "label"]).to_csv(tmp_path / "photos" / "list.csv", index=False)
    path = tmp_path / "photos" / "list.csv" if is_listed else tmp_path / "photos"
    data = {"path": str(path), "partition": {"kind": "iid", "clients": 4}, **keys}
    run = ff.run({"data": data, "rounds": 1, "local": {"max_steps": 1}}, out=tmp_path / "run")
    about = [note for note in run.notes if "data.size" in note]
    assert len(about) == bool(quoted) and all(text in about[0] for text in quoted)
    [description] = [note for note in run.notes if "height x width" in note]
    assert ("resized" in description) == bool(quoted or keys)


def test_both_places_of_a_path_that_is_nowhere_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sets").mkdir()
    monkeypatch.setenv("FLEETFIT_DATA", str(tmp_path / "sets"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "iris.csv").write_text("a,label\n")
    with raises(DataError, "irris.csv", f"{tmp_path}/sets/irris.csv", "FLEETFIT_DATA", '"iris.csv"'):
        detect_format("irris.csv")
    with pytest.raises(DataError) as error:
        detect_format("~/irris.csv")
    assert "nor" not in str(error.value)


def test_a_folder_of_splits_is_called_by_its_own_name(tmp_path: Path) -> None:
    rows = "a,label\n" + "".join(f"{i / 10},{'xy'[i % 2]}\n" for i in range(40))
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text(rows)
    notes = table(str(tmp_path)).notes
    assert notes[0].startswith(f"table {tmp_path.name}: ")


@pytest.mark.parametrize(
    ("name", "mention"),
    [("a.docx", ".docx"), ("a.npy", "a.npy"), ("empty/notes.rst", "train/CLASS/*.jpg")],
)
def test_unknown_formats(name: str, mention: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    place = path.parent if "/" in name else path
    with raises(DataError, mention, path=tmp_path if name == "a.npy" else place):
        detect_format(str(place))
    with raises(DataError, path.with_suffix(""), f'"{path.name}"'):
        detect_format(str(path.with_suffix("")))
    with raises(ConfigError, "digits"):
        load_experiment({"data": {"name": "digits", "path": str(path)}})


def test_a_name_with_hyphens_stands_for_the_same_run() -> None:
    keys = ["data.name=CIFAR-10", "model.name=ResNet-20", "method.options.fed-prox.mu=0.1"]
    experiment = load_experiment(None, keys)
    assert (experiment.data.name, experiment.model.name, list(experiment.method.options)) == (
        "cifar10",
        "resnet20",
        ["fedprox"],
    )
    groups = [{"budget": 1.0, "profile": "Jetson_Nano"}]
    experiment = load_experiment(None, ["data.partition.kind=Dirichlet"], fleet={"groups": groups})
    assert (experiment.data.partition.kind, experiment.fleet.groups[0].profile) == ("dirichlet", "jetson-nano")
    for kind, name, plain in (("models", "ResNet-20", "resnet20"), ("data", "ag-news", "ag_news")):
        assert make_key_table(kind, name) == make_key_table(kind, plain)


def _is_called_r2(run: ff.Run, evaluated: str) -> None:
    """Expect no table, plot and page to call the score of a regression accuracy."""
    summary = run.files.read_summary()
    tables = make_level_table(summary), make_total_table(summary), make_row_level_table({("a", ""): [summary]})
    text = " ".join(table.to_markdown() for table in tables)
    assert "local R2 %" in text and "global R2 %" in text
    assert "local R2 %" in evaluated and "accuracy" not in evaluated
    page = re.sub(r"<script.*?</script>", "", (run.folder / "report.html").read_text(), flags=re.DOTALL)
    assert "local R2" in page and "R2 over rounds" in page
    assert not re.search("(local|global) accuracy|Accuracy (over|of|and)|accuracy %", page)
    assert run.files.replace_contents(stored_summary=None).summary.score == "R2", "before the end"
    drawn = (run.folder / "report.html").read_text()
    assert "R2 (%)" in drawn and "accuracy (%)" not in drawn


def test_a_regression_is_predicted_in_its_own_unit(called: Called, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    y = 500 + 80 * x[:, 0] - 40 * x[:, 1]
    frame = pandas.DataFrame(x, columns=["a", "b", "c"]).assign(price=y.round(2))
    frame.to_csv(tmp_path / "prices.csv", index=False)
    run = ff.run({"data": {"path": str(tmp_path / "prices.csv")}}, out=tmp_path / "run", **{**QUICK, "rounds": 3})
    assert "(regression)" in run.notes[0] and run.accuracy("local") > 0.5
    _is_called_r2(run, called("eval", run.folder))
    frame[:50].drop(columns="price").to_csv(tmp_path / "new.csv", index=False)
    assert "lowest prediction" in called("predict", run.folder, "--data", tmp_path / "new.csv")
    frame[:50].to_csv(tmp_path / "known.csv", index=False)
    output = called("predict", run.folder, "--data", tmp_path / "known.csv", "--out", tmp_path / "found.csv")
    predictions = pandas.read_csv(tmp_path / "found.csv")
    error, explained = (float(number) for number in re.findall(r"│ ([\d.]+) ", output))
    assert error == pytest.approx(mean_absolute_error(y[:50], predictions.prediction), rel=2e-3)
    assert explained == pytest.approx(100 * r2_score(y[:50], predictions.prediction), abs=0.02)
    assert "adaptive" in called("predict", run.folder, "--adaptive", code=2)


def _write_pictures(folder: Path, labels: list[str]) -> None:
    for number, label in enumerate(labels):
        (folder / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 9, 3), 5 * number, dtype=np.uint8)).save(folder / label / f"{number}.png")


def make_own_data(kind: str, labels: list[str], folder: Path) -> Any:
    """Return data of a kind with a label for each sample: a path, or data in memory."""
    texts = [
        f"the {word} of day {n}" for n, word in enumerate(["sun", "moon", "rain"] * len(labels)) if n < len(labels)
    ]
    numbers = np.random.default_rng(0).normal(size=(len(labels), 3))
    frame = pandas.DataFrame(numbers, columns=["a", "b", "c"]).assign(kind=labels)
    codes = np.unique(labels, return_inverse=True)[1]
    if kind == "images":
        _write_pictures(folder / "own", labels)
    elif kind == "texts":
        for number, label in enumerate(labels):
            (folder / "own" / label).mkdir(parents=True, exist_ok=True)
            (folder / "own" / label / f"{number}.txt").write_text(texts[number])
    elif kind == "jsonl":
        rows = [json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=True)]
        (folder / "own").write_text("\n".join(rows))
        (folder / "own").rename(folder / "own.jsonl")
        return str(folder / "own.jsonl")
    elif kind == "csv":
        frame.to_csv(folder / "own.csv", index=False)
        return str(folder / "own.csv")
    elif kind == "arrays":
        np.savez(folder / "own.npz", x=numbers, y=codes + 1)
        return str(folder / "own.npz")
    elif kind == "saved":
        datasets.Dataset.from_pandas(frame).save_to_disk(str(folder / "own"))
    else:
        return {"frame": frame, "pair": (numbers, labels), "codes": (numbers, codes)}[kind]
    return str(folder / "own")


KINDS = ["images", "texts", "jsonl", "csv", "arrays", "saved", "frame", "pair", "codes"]


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_one_class_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        ff.run(data=make_own_data(kind, ["calm"] * 24, tmp_path), rounds=1, out=tmp_path / "run")
    assert caught.value.key in ("data", "label") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("mark", "labels"), [(";", ["wind;rain", "wind", "rain;wind"]), ("|", ["a|b", "b|c", "c"]),
                                              (", ", ["crime, drama", "drama", "war"])])  # fmt: skip
@pytest.mark.parametrize("kind", ["images", "jsonl", "csv", "frame", "pair"])
def test_labels_that_join_others_are_named(mark: str, labels: list[str], kind: str, tmp_path: Path) -> None:
    run = ff.run(data=make_own_data(kind, labels * 8, tmp_path), out=tmp_path / "run", rounds=1, local={"max_steps": 1})
    assert sum("multi_label" in note and mark.strip() in note for note in run.notes) == 1


def test_a_mark_within_single_classes_is_not_named(tmp_path: Path) -> None:
    run = ff.run(data=make_own_data("csv", ["north;east", "south;west", "up"] * 8, tmp_path), out=tmp_path / "run",
                 rounds=1, local={"max_steps": 1})  # fmt: skip
    assert not any("multi_label" in note for note in run.notes)


def test_several_columns_of_0_and_1_at_the_end_are_named(tmp_path: Path) -> None:
    """Without a named label, the last one is the label, and those before it are features."""
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"size": rng.normal(size=60), **{name: rng.integers(0, 2, 60) for name in "abc"}})
    for data in (frame, frame.astype(dict.fromkeys("abc", bool))):
        run = ff.run(data=data, rounds=1, local={"max_steps": 1}, out=tmp_path / str(id(data)))
        (note,) = [note for note in run.notes if "multi_label" in note]
        assert "a, b" in note and '"c"' in note
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert any("multi_label" in note for note in table(str(tmp_path / "t.csv")).notes)
    assert not any("multi_label" in note for note in table(str(tmp_path / "t.csv"), label="c").notes)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_a_table_read_as_texts_names_its_columns(suffix: str, tmp_path: Path) -> None:
    words = np.array(["amber", "gate", "slow", "river", "cedar"])
    some = np.random.default_rng(0).choice(words, (40, 9))
    frame = pandas.DataFrame({"head": [" ".join(row[:4]) for row in some], "body": [" ".join(row) for row in some],
                              "views": range(40), "author": list("pq") * 20, "desk": list("uuvv") * 10})  # fmt: skip
    path = tmp_path / f"t.{suffix}"
    if suffix == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif suffix == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="," if suffix == "csv" else "\t")
    (note,) = read_text_table(str(path), text=("head", "body"), label="desk", groups="author").notes
    used, left_out = note.split(";")
    assert all(f'"{name}"' in used for name in ("head", "body", "desk", "author")) and '"views"' in left_out


POPULATIONS = [40_000_000 + 4_037 * row for row in range(60)]


@pytest.mark.parametrize("values", [POPULATIONS, [0.1 + row for row in range(60)], [1e-7 * row for row in range(60)],
                                    [f"{row},000,000" for row in range(10, 70)]])  # fmt: skip
@pytest.mark.parametrize("form", ["csv", "parquet", "npz"])
def test_a_regression_s_predictions_keep_their_digits(
    values: list[Any], form: str, called: Called, tmp_path: Path
) -> None:
    """Labels as they were read, and what the model returns times the deviation of the targets plus their mean."""
    path, a = tmp_path / f"t.{form}", np.random.default_rng(0).normal(size=(60, 2))
    frame = pandas.DataFrame(a, columns=["a", "b"]).assign(price=values)
    numbers = np.array([float(str(value).replace(",", "")) for value in values])
    more: dict[str, Any] = {}
    if form == "npz":
        np.savez(path, x=a, y=numbers)
        more = {"task": "regression"}
    else:
        frame.to_csv(path, index=False) if form == "csv" else frame.to_parquet(path)
    run = ff.run({"data": {"path": str(path), **more}}, out=tmp_path / "run", **{**QUICK, "rounds": 1})
    called("predict", run.folder, "--data", path, "--out", tmp_path / "p.csv")
    table = pandas.read_csv(tmp_path / "p.csv")
    assert table.label.tolist() == numbers.tolist()
    data = run.assembly.data
    mean, std = data.target_scale  # type: ignore[union-attr]
    with torch.no_grad():
        outputs = run.model()(data.batch(torch.arange(60))[0])[-1][:, 0].double()  # type: ignore[union-attr]
    assert table.prediction.tolist() == pytest.approx((outputs * std + mean).tolist(), rel=1e-6)
    assert table.prediction.nunique() == outputs.unique().numel()


def test_a_comparison_on_a_table_goes_on(place: Path, done: ff.Run, tmp_path: Path) -> None:
    file = tmp_path / "both.toml"
    file.write_text(
        f'rounds = 1\n[data]\npath = "{place / "iris.csv"}"\n[model]\nname = "mlp"\nhidden = 16\nlayers = 4\n'
        '[[compare.row]]\nmethod.name = "fedavg"\n[[compare.row]]\nmethod.name = "heterofl"\n'
    )
    first = ff.compare(file, out=tmp_path / "both")
    again = ff.compare(file, out=tmp_path / "both")  # nothing is trained, and nothing is refused
    assert again.tables[0].rows == first.tables[0].rows


# ---- which samples of other data are for testing ---------------------------------------------------------------------


def write_arrays(place: Path, test: str | None) -> Path:
    rng = np.random.default_rng(0)
    parts = {"_train": 40, test: 10} if test else {"": 50}
    inputs = {f"X{part}": rng.normal(size=(count, 4)) for part, count in parts.items()}
    np.savez(place / "rows.npz", **inputs, **{f"y{part}": np.arange(count) % 2 for part, count in parts.items()})
    return place / "rows.npz"


def write_parquet(place: Path, test: str | None, column: str, values: Callable[[int], list[Any]]) -> Path:
    (place / "data").mkdir()
    for part, count in {"train": 40, test: 10}.items() if test else [("train", 50)]:
        rows = datasets.Dataset.from_dict({column: values(count), "label": [i % 2 for i in range(count)]})
        rows.to_parquet(str(place / "data" / f"{part}-00000-of-00001.parquet"))
    return place


def write_images(place: Path, test: str | None) -> Path:
    return write_parquet(place, test, "image", lambda count: [Image.new("L", (9, 9), 2 * i) for i in range(count)])


def write_texts(place: Path, test: str | None) -> Path:
    return write_parquet(place, test, "text", lambda count: [f"a {['good', 'bad'][i % 2]} film" for i in range(count)])


def write_lines(place: Path, test: str | None) -> Path:
    for part, count in {"train": 40, test: 10}.items() if test else [("train", 50)]:
        rows = [{"text": f"a {['good', 'bad'][i % 2]} film", "label": i % 2} for i in range(count)]
        (place / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


def write_class_folders(place: Path, test: str | None) -> Path:
    """Class folders, one of which begins like the folder of a test set."""
    for part, count in {"train/": 40, f"{test}/": 10}.items() if test else [("", 50)]:
        for i in range(count):
            folder = place / f"{part}{'tests' if i % 2 else 'valid ones'}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (9, 9), 4 * i).save(folder / f"{i}.png")
    return place


@pytest.mark.parametrize(
    ("make", "tests"),
    [(write_arrays, ["_test", "_validation"]), (write_images, ["test", "valid"]), (write_texts, ["test", "validation"]),
     (write_lines, ["dev", "test"]), (write_class_folders, ["test", "val"])],
)  # fmt: skip
def test_other_data_are_tested_on_their_test_set_or_all_rows(
    tmp_path: Path, called: Called, make: Callable[[Path, str | None], Path], tests: list[str]
) -> None:
    """A test set is what the readers take for one; training samples used to be scored among those for testing."""
    small = {"name": "bert", "hidden": 16, "layers": 4, "attention_heads": 4, "intermediate": 16}
    places = {}
    for test in (None, *tests):
        (tmp_path / f"{make.__name__} {test}").mkdir()
        places[test] = make(tmp_path / f"{make.__name__} {test}", test)
    for trained_on in (None, tests[0]):
        more = {"model": small, "fleet": {"tolerance": 0.5}} if make in (write_texts, write_lines) else {}
        folder = tmp_path / f"run {trained_on}"
        ff.run({"data": {"path": str(places[trained_on])}, "rounds": 1, **more}, out=folder)
        for test, place in places.items():
            assert f"on {10 if test else 50} samples" in called("predict", folder, "--data", place), test


def test_gaps_in_other_samples_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, y = np.random.default_rng(0).normal(0, 1, (90, 4)), np.arange(90) % 2
    run = ff.run(data=(x, y), out=tmp_path / "run", **QUICK)
    other = x.copy()
    other[7, 2] = np.nan
    run.evaluate(data=(other, y))
    assert [r for r in caplog.records if "sample 7, column 2 (nan); samples: 1 of 90" in r.getMessage()]
