"""`Run.predict`: every form of samples, every choice of an exit, and the object that comes back."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.metrics import r2_score
from support import raises
from torch.utils.data import DataLoader, Dataset, RandomSampler, SubsetRandomSampler, TensorDataset

import fleetfit as ff
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, FleetFitError, MissingExtra

RNG = np.random.default_rng(3)
NAMES = np.array(["ant", "bee", "cow", "dog"])
Y = np.arange(160) % 4
PIXELS = np.clip(RNG.integers(0, 120, (160, 1, 4, 4)) + 45 * Y[:, None, None, None], 0, 255).astype(np.uint8)
X = RNG.normal(size=(160, 5)) + Y[:, None]
MLP: dict[str, Any] = {"rounds": 1, "model": {"name": "mlp", "hidden": 16}, "progress": False}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    """A run on pixels and names of classes, whose largest level has three exits."""
    return ff.run(
        {"rounds": 2, "model": {"name": "tiny:tiny"}, "method": "scalefl", "fleet": {"groups": [{"budget": 0.3},
         {"budget": 1.0}], "tolerance": 0.5}, "local": {"max_steps": 5}},
        data=(PIXELS, NAMES[Y]), out=tmp_path_factory.mktemp("images") / "run", progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    return ff.run(data=make_frame(), out=tmp_path_factory.mktemp("rows") / "run", **MLP)


def make_frame(label: bool = True) -> pandas.DataFrame:
    frame = pandas.DataFrame(X, columns=list("abcde")).assign(color=np.array(["red", "blue"])[Y % 2])
    return frame.assign(kind=NAMES[Y]) if label else frame


class Bare(Dataset[Any]):
    """Samples without labels."""

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, row: int) -> Any:
        return PIXELS[row]


# ---- forms of samples ------------------------------------------------------------------------------------------------


def test_samples_in_memory_are_prepared_as_in_training(images: ff.Run) -> None:
    """The logits of the module for pixels from 0 to 1, which is all that this run does to them."""
    with torch.no_grad():
        expected = images.model()(torch.from_numpy(PIXELS) / 255)[-1].softmax(1).numpy()
    x, y = torch.from_numpy(PIXELS), torch.from_numpy(Y)
    pairs = TensorDataset(x, y)
    forms: dict[str, Any] = {
        "array": PIXELS, "tensor": x, "list": [*PIXELS], "dict": {"x": PIXELS}, "tuples": TensorDataset(x),
        "dataset": Bare(), "loader": DataLoader(Bare(), batch_size=7), "pair": (PIXELS, NAMES[Y]),
        "labeled loader": DataLoader(pairs, batch_size=7, shuffle=True), "dict of both": {"x": PIXELS, "y": Y},
        "data": ff.Data("mine", x, y, {"test": torch.arange(160)}, 4, class_names=tuple(NAMES.tolist())),
    }  # fmt: skip
    for name, form in forms.items():
        result = images.predict(form)
        np.testing.assert_allclose(result.probabilities, expected, atol=1e-6, err_msg=name)
        assert result.labels == NAMES[expected.argmax(1)].tolist(), name
        is_labeled = name in ("pair", "data") or "both" in name or "labeled" in name
        assert (result.truth == NAMES[Y].tolist()) if is_labeled else (result.truth is result.accuracy is None), name
    logits = list(images.predict_exits(PIXELS[:9]))
    np.testing.assert_allclose(logits[-1].softmax(1).numpy(), expected[:9], atol=1e-6)


def test_the_runs_own_split_and_a_clients(images: ff.Run) -> None:
    data: Any = images.assembly.data
    for split in ("test", "validation"):
        result = images.predict(split=split, batch_size=3)
        assert result.samples.tolist() == data.split(split).tolist() and result.split == split
        assert result.accuracy == np.mean(
            [a == b for a, b in zip(result.labels, NAMES[Y[result.samples]], strict=True)]
        )
    part = images.assembly.simulation.parts[0]["validation"]  # type: ignore[union-attr]
    assert images.predict(client=0, split="validation").samples.tolist() == part.tolist()


@pytest.mark.parametrize("keys", [
    {"sampler": range(9)}, {"sampler": SubsetRandomSampler(range(9))}, {"batch_sampler": [[3, 1]]},
    {"collate_fn": lambda batch: torch.stack([x / 2 for x, _ in batch])},
    {"sampler": RandomSampler(range(160), replacement=True, num_samples=9)},
])  # fmt: skip
def test_a_loader_that_changes_its_samples_is_refused(images: ff.Run, keys: dict[str, Any]) -> None:
    with raises(DataError, "DataLoader", "Subset", key="data"):
        images.predict(DataLoader(TensorDataset(torch.from_numpy(PIXELS), torch.from_numpy(Y)), **keys))


def test_tables_in_memory(rows: ff.Run, tmp_path: Path) -> None:
    """Rows stay in their order; a frame, its file, its columns and a pyarrow table are the same."""
    pyarrow = pytest.importorskip("pyarrow")
    frame = make_frame(label=False)
    frame.to_csv(tmp_path / "new.csv", index=False)
    first = rows.predict(frame)
    assert first.truth is None and len(first) == 160 and set(first.labels) <= set(NAMES)
    for form in (tmp_path / "new.csv", str(tmp_path / "new.csv"), {"path": str(tmp_path / "new.csv")},
                 pyarrow.Table.from_pandas(frame), {name: frame[name].tolist() for name in frame}):  # fmt: skip
        np.testing.assert_allclose(rows.predict(form).probabilities, first.probabilities, atol=1e-6)
    labeled = rows.predict(make_frame())
    assert labeled.labels == first.labels and labeled.truth == NAMES[Y].tolist()
    assert labeled.accuracy == pytest.approx(rows.evaluate(make_frame())["static"]["full"])
    assert rows.predict(frame[::-1]).labels == first.labels[::-1]
    with raises(ConfigError, "table", key="data"):
        rows.predict(X)


def test_a_reader_and_its_file_are_the_same_rows_as_the_path(rows: ff.Run, tmp_path: Path) -> None:
    """They have the encoding of the training rows, also of a class that they lack; a partition divides them."""
    path, frame = str(tmp_path / "few.csv"), make_frame()
    frame[(frame.kind != "dog") & (frame.a > 0)].to_csv(path, index=False)
    section = {"name": "table", "folder": path}
    np.testing.assert_array_equal(rows.predict(section).probabilities, rows.predict(path).probabilities)
    assert rows.evaluate(section)["static"] == rows.evaluate(path)["static"]
    parts = rows.evaluate({**section, "partition": {"kind": "iid", "clients": 4}, "test": 0.5})
    assert "local" in parts["static"]
    for ask in (rows.evaluate, rows.predict):
        with raises(ConfigError, key="data.label"):
            ask({"path": path, "label": "a"})


def test_the_runs_own_set_by_name_is_normalized_as_in_training(tmp_path: Path) -> None:
    def make(shift: float = 0.0) -> ff.Data:
        x, y = torch.tensor(X, dtype=torch.float32), torch.from_numpy(Y)
        splits = {"train": torch.arange(120), "test": torch.arange(120, 160)}
        return ff.Data("rows", x, y, splits, 4, mean=(shift,), std=(1.0,))

    run = ff.run(data={"name": make, "shift": 2.0}, out=tmp_path / "run", **MLP)
    expected = run.predict()
    for data in (make, {"name": make}, {"name": make, "shift": 1.0}):
        np.testing.assert_array_equal(run.predict(data).probabilities, expected.probabilities)
    assert run.evaluate({"name": make, "shift": 1.0})["static"] == run.evaluate()["static"]


def test_files_of_rows_without_labels(rows: ff.Run, tmp_path: Path) -> None:
    """Every format of a table has the rows of the frame, and so has a folder without a training set."""
    datasets = pytest.importorskip("datasets", reason="the extra hub is not installed")
    frame = make_frame(label=False)
    expected = rows.predict(frame)
    frame.to_parquet(tmp_path / "new.parquet", index=False)
    frame.to_json(tmp_path / "new.jsonl", orient="records", lines=True, double_precision=15)
    frame.to_json(tmp_path / "new.json", orient="records", double_precision=15)
    for name in ("test", "other"):
        (tmp_path / name).mkdir()
        frame.to_csv(tmp_path / name / f"{name}.csv", index=False)
    (tmp_path / "parts").mkdir()
    frame[:100].to_json(tmp_path / "parts" / "a.jsonl", orient="records", lines=True, double_precision=15)
    frame[100:].to_json(tmp_path / "parts" / "b.jsonl", orient="records", lines=True, double_precision=15)
    datasets.DatasetDict({"test": datasets.Dataset.from_pandas(frame)}).save_to_disk(str(tmp_path / "saved"))
    for name in ("new.parquet", "new.jsonl", "new.json", "test", "other", "parts", "saved"):
        result = rows.predict(tmp_path / name)
        assert result.truth is None and len(result) == 160, name
        np.testing.assert_allclose(result.probabilities, expected.probabilities, atol=1e-6)
    (tmp_path / "mixed.jsonl").write_text('{"a": 1}\n{"a": "one"}\n')
    (tmp_path / "empty.json").write_text("[]")
    for name in ("mixed.jsonl", "empty.json"):
        with raises(DataError, path=tmp_path / name):
            rows.predict(tmp_path / name)


def test_files_of_arrays_without_labels(images: ff.Run, tmp_path: Path) -> None:
    """A file has the samples of the array, by whatever name; several arrays are told apart by their names."""
    expected = images.predict(PIXELS[:9]).probabilities
    np.save(tmp_path / "new.npy", PIXELS[:9])
    np.savez(tmp_path / "unnamed.npz", PIXELS[:9])
    np.savez(tmp_path / "named.npz", pictures=PIXELS[:9])
    np.savez(tmp_path / "test.npz", x_test=PIXELS[:9], x_validation=PIXELS[9:12])
    np.savez(tmp_path / "labeled.npz", x_test=PIXELS[:9], y_test=NAMES[Y][:9])
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "x.npy", PIXELS[:9])
    for name in ("new.npy", "unnamed.npz", "named.npz", "test.npz", "labeled.npz", "folder"):
        result = images.predict(tmp_path / name)
        np.testing.assert_allclose(result.probabilities, expected, atol=1e-6, err_msg=name)
        assert result.truth == (NAMES[Y][:9].tolist() if name == "labeled.npz" else None)
    np.savez(tmp_path / "two.npz", a=PIXELS[:9], b=PIXELS[:9])
    with raises(DataError, "x", "a, b", path=tmp_path / "two.npz"):
        images.predict(tmp_path / "two.npz")


def test_sparse_samples_and_a_function(tmp_path: Path) -> None:
    run = ff.run(data=(X, Y), out=tmp_path / "run", **MLP)
    expected = run.predict(X)
    np.testing.assert_allclose(run.predict(csr_matrix(X)).probabilities, expected.probabilities, atol=1e-6)
    np.testing.assert_allclose(run.predict(pandas.DataFrame(X).to_numpy().tolist()).probabilities,
                               expected.probabilities, atol=1e-6)  # fmt: skip
    assert expected.labels == expected.classes.tolist()  # type: ignore[union-attr]
    mine = ff.Data("mine", torch.from_numpy(X), torch.from_numpy(Y), {"test": torch.arange(9)}, 4)
    assert len(run.predict(lambda: mine)) == 9


# ---- exits -----------------------------------------------------------------------------------------------------------


def test_each_exit_answers_with_its_cost(images: ff.Run) -> None:
    with torch.no_grad():
        logits = images.model()(torch.from_numpy(PIXELS) / 255)
    result = images.predict(PIXELS, exit="all")
    assert len(result.by_exit) == len(logits) > 1
    for number, (one, expected) in enumerate(zip(result.by_exit, logits, strict=True), 1):
        np.testing.assert_allclose(one.probabilities, expected.softmax(1).numpy(), atol=1e-6)
        assert set(one.exits) == {number} and one.by_exit == ()
    costs = [one.costs[0] for one in result.by_exit]
    assert costs == sorted(set(costs)) and result.labels == result.by_exit[-1].labels
    last = images.predict(PIXELS)
    assert (
        set(last.exits) == {len(logits)}
        and set(last.costs) == {images.plan.levels[-1].multiply_adds}
        and last.costs[0] < costs[-1]
    )
    best = images.predict(exit="best")
    assert set(best.exits) == {images.best_exit()} and best.costs[0] == costs[images.best_exit() - 1]


def test_samples_stop_at_the_calibrated_thresholds(images: ff.Run) -> None:
    with raises(ConfigError, "run.calibrate", key="exit"):
        images.predict(exit="early", level=2)
    policy = images.calibrate(budget=0.8).policy
    each, result = images.predict(PIXELS, exit="all").by_exit, images.predict(PIXELS, exit="early", batch_size=64)
    confident = [one.probabilities.max(1) >= limit for one, limit in zip(each, policy.thresholds, strict=True)]
    exits = np.argmax([*confident[:-1], np.ones(160, bool)], axis=0)
    assert result.exits.tolist() == (exits + 1).tolist() and len(set(exits)) > 1
    assert result.labels == [each[e].labels[i] for i, e in enumerate(exits)]
    assert result.costs.tolist() == [each[e].costs[i] for i, e in enumerate(exits)]


@pytest.mark.parametrize(
    ("options", "key"),
    [({"exit": "frist"}, "exit"), ({"batch_size": 0}, "batch_size"), ({"split": "tset"}, "split"),
     ({"level": 9}, "level"),
     ({"client": 99}, "client"), ({"client": "3"}, "client"), ({"client": 1.5}, "client"),
     ({"data": PIXELS, "client": 0}, "client"), ({"data": "digitz"}, "data")],
)  # fmt: skip
def test_wrong_options_name_themselves(images: ff.Run, options: dict[str, Any], key: str) -> None:
    with pytest.raises(FleetFitError) as caught:
        images.predict(**options)
    assert caught.value.key == key


# ---- other data ------------------------------------------------------------------------------------------------------


def make_data(**changes: Any) -> Data:
    """The samples of `images` with their splits: every fifth for testing."""
    rows = torch.arange(160)
    facts: dict[str, Any] = {"y": torch.from_numpy(Y), "class_names": tuple(NAMES.tolist()), **changes}
    splits = {"train": rows[rows % 5 > 0], "test": rows[rows % 5 == 0]}
    return Data("mine", torch.from_numpy(PIXELS), splits=splits, classes=4, **facts)


def test_classes_in_another_order_are_those_of_the_run(images: ff.Run) -> None:
    data, reversed_names = make_data(), tuple(NAMES[::-1].tolist())
    other = make_data(y=torch.from_numpy(3 - Y), class_names=reversed_names)
    ours, theirs = images.predict(data), images.predict(other)
    assert (theirs.labels, theirs.truth) == (ours.labels, ours.truth) and theirs.truth == NAMES[Y[::5]].tolist()
    assert images.evaluate(other)["static"]["full"] == images.evaluate(data)["static"]["full"]
    with pytest.raises(DataError) as caught:
        images.predict(make_data(class_names=("ant", "bee", "cow", "eel")))
    assert caught.value.key == "data"


def test_another_normalization_has_a_warning(images: ff.Run, caplog: pytest.LogCaptureFixture) -> None:
    images.predict(make_data())
    assert not caplog.records
    images.predict(make_data(mean=(0.5,), std=(0.25,)))
    assert [record.args for record in caplog.records] == [("mine", (0.5,), (0.25,), (), ())]


def test_missing_statistics_are_measured(images: ff.Run) -> None:
    """A checkpoint after an evaluation of a part has none."""
    again = ff.load(images.folder, data=(PIXELS, NAMES[Y]))
    assert again.checkpoint["statistics"]
    again.__dict__["checkpoint"] = {**again.checkpoint, "statistics": None}
    assert again.evaluate((PIXELS, NAMES[Y])) == images.evaluate((PIXELS, NAMES[Y]))


def test_keys_that_other_data_have_no_use_for_are_refused(images: ff.Run) -> None:
    pair = (PIXELS, NAMES[Y])
    assert images.evaluate(pair, evaluate={"samples": 10})["static"]["samples"] == 10
    for sections, key in (({"evaluate": {"clients": 3}}, "evaluate.clients"), ({"local": {"lr": 0.1}}, "local")):
        with pytest.raises(ConfigError) as caught:
            images.evaluate(pair, **sections)
        assert caught.value.key == key


# ---- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [1, 2])
def test_a_regression_gives_numbers(targets: int, tmp_path: Path) -> None:
    y = 100 + 7 * X[:, :targets]
    run = ff.run(data=(X, y), out=tmp_path / "run", **MLP)
    data: Any = run.assembly.data
    mean, std = data.target_scale
    x = (torch.tensor(X) - torch.tensor(data.mean)) / torch.tensor(data.std)
    with torch.no_grad():
        expected = (run.model()(x.float())[-1] * std + mean).squeeze(1)
    result = run.predict((X, y))
    assert result.labels == pytest.approx(expected.numpy(), rel=1e-5)
    assert result.truth == pytest.approx(np.squeeze(y)) and result.classes is result.probabilities is None
    assert result.accuracy == pytest.approx(r2_score(y, result.labels, multioutput="variance_weighted"), abs=1e-6)
    result.to_csv(tmp_path / "p.csv")
    columns = ["label", "prediction"] if targets == 1 else ["label1", "label2", "prediction1", "prediction2"]
    assert pandas.read_csv(tmp_path / "p.csv").columns.tolist() == ["sample", *columns]
    assert result.to_frame().columns.tolist() == [*columns, "exit", "cost"]
    with raises(ConfigError, key="exit"):
        run.predict(X, exit="all")


def test_several_labels_of_a_sample(tmp_path: Path) -> None:
    y = np.stack([X[:, 0] > 1, X[:, 1] > 1, X[:, 2] > 1], 1).astype(int)
    run = ff.run(data=(X, y), out=tmp_path / "run", **MLP)
    result = run.predict((X, y))
    probabilities, classes = result.probabilities, result.classes
    assert probabilities is not None and classes is not None
    data: Any = run.assembly.data
    x = (torch.tensor(X) - torch.tensor(data.mean)) / torch.tensor(data.std)
    with torch.no_grad():
        np.testing.assert_allclose(probabilities, run.model()(x.float())[-1].sigmoid().numpy(), atol=1e-6)
    assert (classes == (probabilities >= 0.5)).all()
    assert result.labels == [tuple(str(i) for i in range(3) if row[i]) for row in classes]
    assert result.accuracy == pytest.approx((classes == y).mean())
    columns, tested = run.evaluate((X, y))["static"], len(data.split("test"))
    assert result.accuracy == pytest.approx(columns["full"])
    assert columns["samples"] == 160 and run.columns["static"]["test_samples"] == tested, "samples, not labels"


def test_next_tokens_are_refused(tmp_path: Path) -> None:
    tokens = RNG.integers(0, 9, (40, 6))
    data = {"name": (tokens, tokens), "task": "next_token", "vocabulary": 9, "partition": {"kind": "iid"}}
    model = {"name": "word_lstm", "hidden": 8, "layers": 1}
    run = ff.run(data=data, rounds=1, progress=False, model=model, out=tmp_path / "run")
    with raises(ConfigError, "run.model", key="task"):
        run.predict(tokens)


# ---- the object ------------------------------------------------------------------------------------------------------


def test_a_frame_of_predictions_fits_the_frame_of_samples(tmp_path: Path) -> None:
    """Its index, and whole numbers as classes; the accuracy by hand, and as `evaluate` has it."""
    frame = pandas.DataFrame(X, columns=list("abcde")).assign(target=Y + 5).iloc[::-1]
    run = ff.run(data=frame, out=tmp_path / "classes", **MLP)
    answers = run.predict(frame[40:]).to_frame()
    assert answers.index.equals(frame[40:].index) and set(answers["prediction"]) <= {5, 6, 7, 8}
    accuracy = run.predict(frame[40:]).accuracy
    assert (answers["prediction"] == frame["target"][40:]).mean() == accuracy
    assert run.evaluate(frame[40:])["static"]["full"] == pytest.approx(accuracy)
    assert run.predict(frame[40:], exit="all").by_exit[0].to_frame().index.equals(frame[40:].index)


def test_classes_that_only_look_like_numbers_stay_texts(tmp_path: Path) -> None:
    frame = pandas.DataFrame(X, columns=list("abcde")).assign(zip=np.array(["01", "02"])[Y % 2])
    run = ff.run(data={"name": frame, "label": "zip"}, out=tmp_path / "run", **MLP)
    assert set(run.predict(frame).to_frame()["prediction"]) <= {"01", "02"}


def test_predictions_are_a_data_frame(rows: ff.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = rows.predict(make_frame())
    frame = result.to_frame()
    assert frame.columns.tolist() == ["label", "prediction", "exit", "probability", "cost"] and len(frame) == 160
    assert (
        frame["prediction"].tolist() == result.labels
        and (frame["label"] == frame["prediction"]).mean() == result.accuracy
    )
    assert frame["probability"].tolist() == result.probabilities.max(1).tolist()  # type: ignore[union-attr]
    assert "label" not in rows.predict(make_frame(label=False)).to_frame()
    assert "160 samples" in repr(result) and "accuracy" in repr(result)
    result.to_csv(tmp_path / "p.csv")
    written = pandas.read_csv(tmp_path / "p.csv")
    assert written.columns.tolist() == ["sample", "label", "prediction", "exit"]
    assert written["prediction"].tolist() == result.labels and written["sample"].tolist() == list(range(160))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with raises(MissingExtra, extra="tables"):
        result.to_frame()
