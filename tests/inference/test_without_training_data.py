"""A run folder is enough to predict, evaluate, calibrate and export, where the training data have moved."""

import csv
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from support import raises, run_verb

import fleetfit as ff
from fleetfit.errors import DataError, RunError

RNG = np.random.default_rng(4)
Y = np.arange(120) % 3
X = (RNG.normal(size=(120, 5)) * 40 + 7 + 60 * Y[:, None]).astype(np.float32)
QUICK: dict[str, Any] = {"rounds": 1, "local": {"max_steps": 2}, "progress": False}
SMALL = {"name": "mlp", "hidden": 16, "layers": 4}


def write_table(folder: Path, rows: slice) -> None:
    frame = pandas.DataFrame(X[rows], columns=list("pqrst")).assign(state=np.array(["off", "on", "up"])[Y[rows]])
    frame.to_parquet(folder / "rows.parquet")


def write_arrays(folder: Path, rows: slice) -> None:
    np.savez(folder / "rows.npz", x=X[rows], y=Y[rows])


def write_images(folder: Path, rows: slice) -> None:
    for i in range(120)[rows]:
        (folder / "rows" / "abc"[Y[i]]).mkdir(parents=True, exist_ok=True)
        pixels = RNG.integers(0, 80 + 80 * Y[i], (9, 12, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "rows" / "abc"[Y[i]] / f"{i}.png")


def write_texts(folder: Path, rows: slice) -> None:
    words = ["copper tide ladder", "sunday orange vapour", "hinge walnut amber"]
    lines = [json.dumps({"text": f"{words[Y[i]]} {words[i % 2]}", "label": "uvw"[Y[i]]}) for i in range(120)[rows]]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def write_sounds(folder: Path, rows: slice) -> None:
    for i in range(120)[rows]:
        (folder / "rows" / "abc"[Y[i]]).mkdir(parents=True, exist_ok=True)
        with wave.open(str(folder / "rows" / "abc"[Y[i]] / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            tone = 9000 * np.sin(np.arange(1600) * (0.3 + 0.6 * Y[i] + 0.001 * i))
            file.writeframes(tone.astype("<i2").tobytes())


KINDS: dict[str, tuple[Callable[[Path, slice], None], str, dict[str, Any]]] = {
    "table": (write_table, "rows.parquet", {"model": SMALL}),
    "arrays": (write_arrays, "rows.npz", {"model": SMALL}),
    "images": (write_images, "rows", {}),
    "sounds": (write_sounds, "rows", {"model": "cnn"}),
    "texts": (write_texts, "rows.jsonl", {}),
}


def read_predictions(file: Path) -> list[list[str]]:
    with file.open() as lines:
        return list(csv.reader(lines))


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_those_of_before(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, name, settings = KINDS[kind]
    monkeypatch.setenv("FLEETFIT_CACHE", str(tmp_path / "cache"))
    for folder, rows in (("old", slice(0, 120)), ("new", slice(0, 12))):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, rows)
    if kind == "texts":
        pytest.importorskip("tokenizers", reason="it is an extra: fleetfit[text]")
    run = ff.run(data={"path": str(tmp_path / "old" / name)}, out=tmp_path / "run", **settings, **QUICK)
    new = str(tmp_path / "new" / name)
    files = [tmp_path / "before.csv", tmp_path / "after.csv"]
    run_verb("predict", run.folder, "--data", new, "--out", files[0], code=0)
    before, columns = run.model(1).state_dict(), run.evaluate(data=Path(new))["static"]
    (tmp_path / "old").rename(tmp_path / "gone")
    monkeypatch.setenv("FLEETFIT_CACHE", str(tmp_path / "cleared"))
    run_verb("predict", run.folder, "--data", new, "--out", files[1], code=0)
    assert len(read_predictions(files[1])) == 13 and read_predictions(files[1]) == read_predictions(files[0])
    again = ff.load(run.folder)
    assert again.accuracy("local") == run.accuracy("local")
    for key, tensor in again.model(1).state_dict().items():
        assert torch.equal(tensor, before[key])
    assert again.evaluate(data=Path(new))["static"]["full"] == columns["full"]
    if kind in ("table", "images"):
        run_verb("export", run.folder, "--out", tmp_path / "device", "--no-onnx", "--data", new, code=0)
    if len(again.assembly.federation.levels[-1].submodel.exits) > 1:
        run_verb("calibrate", run.folder, "--data", new, code=0)
    if kind in ("arrays", "texts"):
        run_verb("export", run.folder, "--out", tmp_path / "other", "--no-onnx", code=0)
    for verb in ("predict", "eval"):
        refusal = run_verb(verb, run.folder, code=2).err
        assert "old" in refusal and "--data" in refusal and "data=" in refusal


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    out = tmp_path_factory.mktemp("memory") / "run"
    return ff.run(data={"name": (X, Y), "partition": {"clients": 3}}, model=SMALL, out=out, **QUICK)


def test_a_run_on_data_in_memory_is_opened_without_them(in_memory: ff.Run, tmp_path: Path) -> None:
    """The right logits: samples standardized by NumPy, of the training split alone."""
    again = ff.load(in_memory.folder)
    data = in_memory.assembly.data
    assert isinstance(data, ff.Data)
    train = X[data.split("train").numpy()].astype(np.float64)
    x = torch.tensor((X - train.mean(0)) / train.std(0), dtype=torch.float32)
    logits = again.model()(x)[-1]
    for one in (again, in_memory):
        result = one.predict(X)
        torch.testing.assert_close(torch.from_numpy(result.probabilities), logits.softmax(1).detach())
        assert result.truth is None and result.classes.tolist() == logits.argmax(1).tolist()
    np.savez(tmp_path / "new.npz", x=X[:9])
    run_verb("predict", again.folder, "--data", tmp_path / "new.npz", "--out", tmp_path / "p.csv", code=0)
    assert [int(row[1]) for row in read_predictions(tmp_path / "p.csv")[1:]] == logits[:9].argmax(1).tolist()
    assert again.evaluate(data=(X, Y))["static"]["samples"] == 120
    with raises(DataError, "data=...", key="data"):
        again.evaluate()


def test_an_unfinished_run_needs_its_data_to_go_on(in_memory: ff.Run, tmp_path: Path) -> None:
    def stop(report: Any) -> None:
        raise RunError("stop")

    settings = {**QUICK, "rounds": 2}
    with raises(RunError):
        ff.run(data=(X, Y), model=SMALL, out=tmp_path / "run", on_round=stop, **settings)
    with raises(DataError, "data=...", key="data"):
        ff.resume(tmp_path / "run", progress=False)
    assert ff.resume(tmp_path / "run", data=(X, Y), progress=False).finished


@pytest.mark.parametrize("change", [{"shape": [-1]}, {"dtype": "complex64"}, {"mean": [1.0, 2.0]}, {"resize": [1]},
                                    {"std": [0.0] * 5}])  # fmt: skip
def test_a_damaged_file_is_named(in_memory: ff.Run, tmp_path: Path, change: dict[str, Any]) -> None:
    file = in_memory.folder / "data.json"
    text = file.read_text()
    try:
        file.write_text(json.dumps(json.loads(text) | change))
        with raises(RunError, path=file):
            ff.load(in_memory.folder)
    finally:
        file.write_text(text)
