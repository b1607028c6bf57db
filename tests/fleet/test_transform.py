"""The fleet's transform: nodes prepare their samples by it, whatever their kind, and so do the verbs on the server."""

import itertools
import json
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import tomli_w
import torch
from own_terms import add_terms
from support import raises, run_verb
from tiny import tiny_data

import fleetfit as ff
from fleetfit.api.inference import load_samples
from fleetfit.config import load_experiment
from fleetfit.config.assemble.data import load_data as load_set
from fleetfit.config.detect import detect_data
from fleetfit.core import DataDescription
from fleetfit.core.nodes import parse_node_description
from fleetfit.data import Data
from fleetfit.data.transform import FILE, Transform
from fleetfit.errors import ConfigError, DataError, RunError

pytest.importorskip("flwr", reason="the extra flower is not installed")
pytest.importorskip("pyarrow")
pytest.importorskip("tokenizers")

from local_grid import LocalGrid, node_file

from fleetfit.fleet import node as nodes_side
from fleetfit.fleet.node import answer, get_node
from fleetfit.fleet.protocol import compute_digest, pack_message, pack_transform, read_answer
from fleetfit.fleet.server_app import ServerAppConfig, make_node_check, serve
from fleetfit.fleet.settings import load_data, read_settings
from fleetfit.messages import pack

Image = pytest.importorskip("PIL.Image")
KINDS = ("ant", "bee", "cow")


@pytest.fixture(autouse=True)
def fresh_nodes() -> Iterator[None]:
    nodes_side.get_node.cache_clear()
    yield
    nodes_side.get_node.cache_clear()


# ---- data of every kind, of the server (all classes) and of a node (the last two) --------------------------------


def write_images(folder: Path, kinds: tuple[str, ...]) -> Path:
    for kind, number in itertools.product(kinds, range(12)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        side = 96 if len(kinds) == 3 else 40 + number  # a node's cameras have other sizes
        pixels = np.full((side, side, 3), 20 * number + KINDS.index(kind), np.uint8)
        pixels[..., 1] = 255 - pixels[..., 1]
        Image.fromarray(pixels).save(folder / kind / f"{number}.png")
    return folder


def write_sounds(folder: Path, kinds: tuple[str, ...]) -> Path:
    for kind, number in itertools.product(kinds, range(12)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        count = 4000 if len(kinds) == 3 else 3000
        tone = np.sin(np.arange(count) * (0.05 + 0.1 * KINDS.index(kind)) + number)
        with wave.open(str(folder / kind / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes((tone * 20000).astype("<i2").tobytes())
    return folder


def write_texts(folder: Path, kinds: tuple[str, ...]) -> Path:
    folder.mkdir()
    words = {"ant": "small", "bee": "yellow", "cow": "large"}
    rows = [(f"a {words[kind]} one and number {n}", kind) for n in range(12) for kind in kinds]
    pandas.DataFrame(rows, columns=["text", "label"]).to_csv(folder / "texts.csv", index=False)
    return folder / "texts.csv"


def write_table(folder: Path, kinds: tuple[str, ...]) -> Path:
    folder.mkdir()
    rows = [(n * (1.0 + KINDS.index(kind)), "xyz"[n % len(kinds)], kind) for n in range(20) for kind in kinds]
    pandas.DataFrame(rows, columns=["size", "form", "label"]).to_csv(folder / "rows.csv", index=False)
    return folder / "rows.csv"


def write_arrays(folder: Path, kinds: tuple[str, ...]) -> Path:
    folder.mkdir()
    y = np.array([kind for kind in kinds for _ in range(15)])
    x = np.arange(len(y) * 4, dtype=np.float32).reshape(-1, 4) * (1 if len(kinds) == 3 else 3)
    np.savez(folder / "samples.npz", x=x, y=y)
    return folder / "samples.npz"


def write_targets(folder: Path, kinds: tuple[str, ...]) -> Path:
    folder.mkdir()
    y = np.arange(45, dtype=np.float32) * len(kinds)
    np.savez(folder / "samples.npz", x=np.stack([y, -y], 1), y=y + 1000)
    return folder / "samples.npz"


WRITERS: dict[str, Callable[[Path, tuple[str, ...]], Path]] = {
    "images": write_images, "sounds": write_sounds, "text": write_texts, "table": write_table, "arrays": write_arrays,
    "targets": write_targets,
}  # fmt: skip


def fit(path: Path, folder: Path, **keys: Any) -> Transform:
    """Store the transform of the data at a path in a folder, as a run does; return it."""
    section = detect_data({"path": str(path), **keys})
    name = section.pop("name")
    section.pop("partition", None)
    transform = Transform.fit(load_set(name, section), name, section)
    folder.mkdir(exist_ok=True)
    for file, text in transform.to_files().items():
        (folder / file).write_text(text)
    return Transform.load(folder)


def configure(folder: Path, **data: Any) -> Path:
    (folder / "node.toml").write_text(tomli_w.dumps({"name": "pi", "data": data}))
    get_node.cache_clear()
    return folder / "node.toml"


KEYS: dict[str, dict[str, Any]] = {"images": {"size": 16}, "targets": {"task": "regression"}}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_node_prepares_its_samples_by_the_fleets_transform(kind: str, tmp_path: Path) -> None:
    keys = KEYS.get(kind, {})
    transform = fit(WRITERS[kind](tmp_path / "server", KINDS), tmp_path / "stored", **keys)
    mine = WRITERS[kind](tmp_path / "mine", KINDS[1:])
    own = {} if kind == "images" else keys
    data = load_data(read_settings(configure(tmp_path, path=str(mine), **own)), tmp_path / "stored")
    for name in ("class_names", "classes", "mean", "std", "targets", "vocabulary", "padding", "columns", "resize"):
        assert getattr(data, name) == getattr(transform, name), name
    assert tuple(data.x.shape[1:]) == transform.shape and len(data.split("train"))
    if kind == "targets":
        assert data.target_scale[0].tolist() == list(transform.targets[0]) != [data.y.mean().item()]
    else:
        assert set(data.y.tolist()) == {1, 2}, "the numbers of the fleet's classes"
    others = transform.apply(mine)  # as `predict` prepares them
    if kind != "images":
        assert torch.equal(torch.as_tensor(data.x), torch.as_tensor(others.x))
    assert sorted(data.y.flatten().tolist()) == sorted(others.y.flatten().tolist())


def test_a_function_of_the_node_gets_the_fleets_scale(tmp_path: Path) -> None:
    x = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    data = Data("mine", x, x[:, :1] * 100, {"train": torch.arange(40)}, classes=1, task="regression")
    transform = Transform.fit(data, "mine.py:load", {})
    part = data.share({"train": torch.arange(5)})
    ours = Data("mine", x[:5], part.y[:5], {"train": torch.arange(5)}, classes=1, task="regression")
    assert ours.target_scale != data.target_scale
    converted = transform.convert(ours)
    assert torch.equal(torch.stack(converted.target_scale), torch.stack(data.target_scale))
    for wrong in ({"x": x[:5, :2]}, {"task": "multi_label", "y": torch.ones(5, 1)}, {"y": x[:5, :2], "classes": 2}):
        fields = {"x": x[:5], "y": part.y[:5], "classes": 1, "task": "regression", **wrong}
        with raises(DataError, "mine", key="data"):
            transform.convert(Data("mine", splits={"train": torch.arange(5)}, **fields))


def test_what_contradicts_the_transform_is_refused(tmp_path: Path) -> None:
    fit(write_images(tmp_path / "server", KINDS), tmp_path / "stored", size=16)
    mine = write_images(tmp_path / "mine", KINDS[1:])
    with raises(ConfigError, 32, 16, key="data.size"):
        load_data(read_settings(configure(tmp_path, path=str(mine), size=32)), tmp_path / "stored")
    with raises(ConfigError, "sounds", "images", key="data"):
        sounds = write_sounds(tmp_path / "sounds", KINDS)
        load_data(read_settings(configure(tmp_path, path=str(sounds))), tmp_path / "stored")
    (mine / "cow").rename(mine / "dog")
    with raises(DataError, "dog", "ant", key="data"):
        load_data(read_settings(configure(tmp_path, path=str(mine))), tmp_path / "stored")
    with raises(ConfigError, key="data.transform"):
        read_settings(configure(tmp_path, path=str(mine), transform=str(tmp_path / "stored")))


@pytest.mark.parametrize("kind", ["text", "table"])
def test_columns_and_tokens_of_a_node_s_own_do_not_fit(kind: str, tmp_path: Path) -> None:
    """Without a transform the nodes' encodings must be equal; what the server learns of them is a digest."""
    paths = [WRITERS[kind](tmp_path / name, KINDS) for name in ("a", "b")]
    content = pandas.read_csv(paths[1])
    content.iloc[:, 0] = content.iloc[:, 0].map(lambda cell: cell * 2 if isinstance(cell, float) else f"other {cell}")
    content.to_csv(paths[1], index=False)
    facts = [ask(configure(tmp_path, path=str(path)), b"", "")["hello"]["facts"] for path in (paths[0], *paths)]
    assert facts[0] == facts[1] and len(facts[0]["encoding"]) == 64
    assert facts[1]["encoding"] != facts[2]["encoding"]
    check = run_verb("flower", "node", configure(tmp_path, path=str(paths[0])), "--check", code=0).out
    assert facts[0]["encoding"][:8] in check


def test_samples_of_nodes_are_stored_alike(tmp_path: Path) -> None:
    """A model that learns from numbers of 0 to 255 on one node and of 0 to 1 on another is wrong on one of them."""
    whole = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    described = {}
    for name, x in (("whole", whole), ("fractions", whole / 255), ("other", whole)):
        np.savez(tmp_path / f"{name}.npz", x=x.astype(np.float32) if name == "fractions" else x, y=np.arange(40) % 3)
        data = {"path": str(tmp_path / f"{name}.npz")} | ({"standardize": True} if name == "other" else {})
        described[name] = parse_node_description(ask(configure(tmp_path, **data), b"", "")["hello"])
    check = make_node_check(load_experiment({}), described["whole"].facts)
    assert check(described["whole"]) == ""
    assert "float32" in check(described["fractions"]) and "uint8 standardized" in check(described["other"])
    again = parse_node_description(described["other"].payload)
    assert again == described["other"]


def test_the_server_takes_samples_as_the_nodes_store_them() -> None:
    whole = np.full((5, 1, 8, 8), 200, np.uint8)

    def make_run(stored: str) -> Any:
        facts = DataDescription("d", "classification", (1, 8, 8), 3, stored=stored)
        return SimpleNamespace(assembly=SimpleNamespace(data=facts), files=SimpleNamespace(has=lambda name: False))

    assert load_samples(make_run("uint8"), whole).x.dtype == torch.uint8
    with raises(DataError, "uint8", "float32", key="x"):
        load_samples(make_run("uint8"), whole.astype(np.float32))
    with raises(ConfigError, key="data"):
        load_samples(make_run("uint8 standardized"), whole)


# ---- messages ----------------------------------------------------------------------------------------------------


def ask(config: Path, content: bytes, digest: str | None = None, **changes: Any) -> dict[str, Any]:
    digest = compute_digest(content) if digest is None else digest
    header = {"what": "hello", "transform": digest, **changes}
    parts = {"header": pack_message(add_terms(header))} | ({"transform": content} if content else {})
    return read_answer(answer(str(config), parts))


def test_a_node_keeps_the_transform_and_says_when_it_is_lost(tmp_path: Path) -> None:
    transform = fit(write_table(tmp_path / "server", KINDS), tmp_path / "stored")
    config = configure(tmp_path, path=str(write_table(tmp_path / "mine", KINDS[1:])))
    content = pack_transform(transform)
    facts = ask(config, content)["hello"]["facts"]
    assert (facts["sample_shape"], facts["classes"]) == ([*transform.shape], 3)
    stored = tmp_path / "fleetfit-node" / "pi" / "transforms" / compute_digest(content)
    assert Transform.load(stored) == transform
    setup = {"what": "setup", "run": "ab" * 8, "base": "", "cost": "parameters", "method": {"name": "fedavg"},
             "problem": {"model": {"name": "mlp"}}, "transform": compute_digest(content)}  # fmt: skip
    get_node.cache_clear()  # the node was started again
    assert "lost" not in ask(config, b"", **setup)
    get_node.cache_clear()
    (stored / FILE).unlink()
    assert ask(config, b"", **setup)["lost"] is True


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"data.json": 3},
        {"../data.json": torch.zeros(2, dtype=torch.uint8)},
        {"data.json": torch.full((4,), 255, dtype=torch.uint8)},
        {"data.json": torch.tensor(list(b"[1]"), dtype=torch.uint8)},
        {"data.json": torch.tensor(list(b'{"name": "x"}'), dtype=torch.uint8)},
        [1],
    ],
)
def test_no_false_transform_breaks_a_node(files: Any, tmp_path: Path) -> None:
    config = configure(tmp_path, path=str(write_table(tmp_path / "mine", KINDS)))
    assert ask(config, pack(files))["refused"]
    assert ask(config, pack(files), "0" * 64)["refused"]
    assert ask(config, pack(files), "../" + "0" * 61)["refused"]
    assert not list(tmp_path.rglob("data.json"))


# ---- a run -------------------------------------------------------------------------------------------------------


def serve_fleet(folder: Path, nodes: list[dict[str, Any]], **table: Any) -> tuple[ff.Run, list[str]]:
    """Train on nodes with the given `[data]`, all in this process."""
    files = [node_file(folder, f"node-{i}", {"budget": 1.0, "data": data}) for i, data in enumerate(nodes)]
    (folder / "run.toml").write_text(tomli_w.dumps({
        "rounds": 1, "model": {"name": "mlp"}, "method": {"name": "fedavg"},
        "engine": {"name": "flower", "nodes": len(nodes), "wait_s": 5.0}, **table,
    }))  # fmt: skip
    lines: list[str] = []
    run = serve(LocalGrid(files), ServerAppConfig(str(folder / "run.toml"), str(folder / "run")), lines.append)
    return run, lines


def test_a_regression_on_a_fleet_has_the_servers_scale_in_every_verb(tmp_path: Path) -> None:
    fit(write_targets(tmp_path / "server", KINDS), tmp_path / "stored", task="regression")
    mine = write_targets(tmp_path / "mine", KINDS[1:])
    nodes = [{"path": str(mine), "task": "regression"}] * 2
    run, _ = serve_fleet(tmp_path, nodes, data={"transform": str(tmp_path / "stored")}, local={"lr": 0.001})
    transform = Transform.load(tmp_path / "stored")
    assert Transform.load(run.folder) == transform
    run = ff.load(run.folder)
    evaluation = run.evaluate(data=mine)["static"]
    assert evaluation["samples"] == 45
    other = transform.apply(mine)
    own = Data("mine", other.x, other.y, other.splits, 1, task="regression", mean=other.mean, std=other.std)
    assert own.target_scale != other.target_scale and run.evaluate(data=own)["static"] == evaluation
    run_verb("predict", run.folder, "--data", mine, "--out", tmp_path / "predictions.csv", code=0)
    run_verb("export", run.folder, "--no-onnx", "--out", tmp_path / "device", code=0)
    assert json.loads((tmp_path / "device" / FILE).read_text()) == json.loads((run.folder / FILE).read_text())
    config = json.loads((tmp_path / "device" / "config.json").read_text())
    program = torch.export.load(tmp_path / "device" / "model.pt2").module()
    data = transform.apply(mine)
    stored = data.stored(torch.arange(8))
    assert config["input"]["inside_the_graph"]["scale"] is not None
    numbers = torch.from_numpy(run.predict(mine).labels[:8]).float()[:, None]
    assert torch.allclose(program(stored)[-1], numbers, rtol=1e-4, atol=1e-2)


def test_a_resumed_fleet_keeps_its_transform(tmp_path: Path) -> None:
    fit(write_table(tmp_path / "server", KINDS), tmp_path / "stored")
    mine = write_table(tmp_path / "mine", KINDS[1:])
    run, _ = serve_fleet(tmp_path, [{"path": str(mine)}] * 2, data={"transform": str(tmp_path / "stored")})
    for path in (tmp_path / "stored").iterdir():
        path.write_text("")
    (run.folder / "summary.json").unlink()
    files = [tmp_path / f"node-{i}.toml" for i in range(2)]
    nodes_side.get_node.cache_clear()
    again = serve(LocalGrid(files), ServerAppConfig(resume=str(run.folder)), lambda line: None)
    assert again.finished and ff.load(run.folder).evaluate(data=mine)["static"]["samples"] == 40


def test_numbers_are_the_classes_that_are_called_by_them() -> None:
    """Only where no class is called a number do they count the classes; classes without samples do not matter."""
    y = torch.tensor([1, 2, 3, 3])
    for names, expected in ((("1", "2", "3"), [0, 1, 2, 2]), (tuple("abcd"), [1, 2, 3, 3])):
        fields: dict[str, Any] = {"x": torch.rand(4, 2), "splits": {"train": torch.arange(4)}}
        ours = Data("ours", y=torch.arange(4) % len(names), classes=len(names), class_names=names, **fields)
        transform = Transform.fit(ours, "", {})
        assert transform.convert(Data("theirs", y=y, classes=4, **fields)).y.tolist() == expected
        named = Data("theirs", y=y % 2, classes=3, class_names=(*names[:2], "other"), **fields)
        assert transform.convert(named).y.tolist() == [1, 0, 1, 1]
        with raises(DataError, "other", key="data"):
            transform.convert(Data("theirs", y=torch.tensor([0, 1, 2, 2]), **{**fields, "classes": 3,
                                   "class_names": named.class_names}))  # fmt: skip


def test_nodes_with_other_names_of_classes_do_not_take_part(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        "import dataclasses\nfrom tiny import tiny_data\n\n\n"
        "def load(names: str):\n    return dataclasses.replace(tiny_data(), class_names=tuple(names))\n"
    )
    data = [{"name": str(tmp_path / "named.py:load"), "names": names} for names in ("abcd", "abcd", "abce")]
    with raises(RunError, 2, 3, key="engine.nodes"):
        serve_fleet(tmp_path, data)
    transform = Transform.fit(tiny_data(), "tiny", {}).model_copy(update={"class_names": tuple("dcba")})
    for file, text in transform.to_files().items():
        (tmp_path / file).write_text(text)
    run, _ = serve_fleet(tmp_path, [data[0], data[0]], data={"transform": str(tmp_path)})
    assert run.finished
