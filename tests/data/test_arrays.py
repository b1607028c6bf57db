"""Data sets in NumPy files: every task, memory-mapped, and Widar made as its documentation says."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Expected, raises

import fleetfit as ff
from fleetfit.config import load_experiment
from fleetfit.config.assemble.data import build_data, share_data
from fleetfit.data import partition
from fleetfit.data.files import arrays as arrays_module
from fleetfit.data.files.arrays import arrays, wrap_arrays
from fleetfit.data.sets import widar
from fleetfit.errors import ConfigError, DataError
from fleetfit.factories import find_unused_parameters

RNG = np.random.default_rng(0)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    def save_arrays(compressed: bool = False, **content: Any) -> str:
        (np.savez_compressed if compressed else np.savez)(tmp_path / "mine.npz", **content)
        return str(tmp_path / "mine.npz")

    return save_arrays


def test_classification_with_groups(save: Callable[..., str]) -> None:
    x = RNG.random((40, 3, 5), dtype=np.float32)
    y, who = RNG.integers(0, 4, 40, dtype=np.int32), np.array(["b", "a", "d", "c"] * 10)
    data = arrays(save(x=x, y=y, who=who), groups="who", test=0.2, validation=0.25)
    assert data.name == "mine" and data.classes == 4
    assert np.array_equal(data.x.numpy(), x) and data.y.tolist() == y.tolist()
    assert data.groups is not None and data.groups.tolist() == [1, 0, 3, 2] * 10
    for split, share in (("test", 2), ("validation", 2), ("train", 6)):
        assert torch.bincount(data.groups[data.split(split)]).tolist() == [share] * 4
    assert torch.equal(data.batch(torch.tensor([3]))[0], data.x[3:4])
    assert len(partition(data, "natural", None, 0)) == 4


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "float32", "float64"])
def test_samples_are_mapped(
    save: Callable[..., str], monkeypatch: pytest.MonkeyPatch, compressed: bool, dtype: str
) -> None:
    tokens: dict[str, Any] = {"vocabulary": 200} if dtype == "int64" else {}
    x = (RNG.random((30, 18) if tokens else (30, 2, 3, 3)) * 200).astype(dtype)
    file = save(compressed, x=x, y=np.arange(30) % 2, other=np.zeros(1000))
    before = Path(file).read_bytes()
    data = arrays(file, **tokens)
    assert np.array_equal(data.x.numpy(), x) and str(data.x.dtype) == f"torch.{dtype}"
    assert isinstance(arrays_module.Arrays(Path(file)).load("x"), np.memmap)
    data.x.fill_(1)
    assert Path(file).read_bytes() == before and np.array_equal(arrays(file, **tokens).x.numpy(), x)
    monkeypatch.setattr(arrays_module.zipfile.ZipFile, "extract", None)  # unpacked once only
    assert np.array_equal(arrays(file, **tokens).x.numpy(), x)


def test_fortran_order_and_empty_arrays(save: Callable[..., str]) -> None:
    x = np.asfortranarray(RNG.random((12, 4)))
    assert np.array_equal(arrays(save(x=x, y=np.arange(12) % 3)).x.numpy(), x)
    with raises(DataError, column="x", path="mine.npz"):
        arrays(save(x=x[:0], y=np.arange(12)))


def test_splits_of_the_file(save: Callable[..., str]) -> None:
    """As `mnist.npz`: gray images without a channel."""
    first, second = (RNG.integers(0, 256, (n, 4, 4), dtype=np.uint8) for n in (10, 6))
    file = save(x_train=first, y_train=np.arange(10) % 5, x_test=second, y_test=np.arange(6) % 5)
    data = arrays(file, validation=0.2)
    assert np.array_equal(data.x.numpy(), np.concatenate([first, second])[:, None])
    assert data.split("test").tolist() == list(range(10, 16))
    assert [len(data.split(s)) for s in ("train", "validation")] == [8, 2]
    assert data.y.tolist() == [*range(5), *range(5), *range(5), 0]
    whole = save(x_train=first, x_val=second, x_test=second, y=np.zeros(22, np.int8))
    assert [len(arrays(whole).split(s)) for s in ("train", "validation", "test")] == [10, 6, 6]


def test_a_folder_of_npy_files(tmp_path: Path) -> None:
    (tmp_path / "sensors").mkdir()
    x = RNG.random((20, 7))
    np.save(tmp_path / "sensors" / "x.npy", x)
    np.save(tmp_path / "sensors" / "y.npy", np.array(["walk", "run"] * 10))
    data = arrays(str(tmp_path / "sensors"))
    assert data.name == "sensors" and data.class_names == ("run", "walk") and data.y.tolist() == [1, 0] * 10
    assert np.array_equal(data.x.numpy(), x)


def test_regression_and_multi_label(save: Callable[..., str]) -> None:
    x = RNG.random((20, 3))
    one = arrays(save(x=x, y=np.arange(20)), task="regression")
    assert one.y.shape == (20, 1) and one.classes == 1
    two = arrays(save(x=x, y=RNG.random((20, 2))), task="regression")
    train = two.batch(two.split("train"))[1]
    assert two.classes == 2 and train.mean(0).abs().max() < 1e-5
    many = arrays(save(x=x, y=RNG.random((20, 5)) > 0.5), task="multi_label")
    assert many.classes == 5 and many.batch(torch.arange(3))[1].dtype == torch.float32
    with raises(DataError, 0, 1, key="y"):
        arrays(save(x=x, y=np.full((20, 5), 2)), task="multi_label")


def test_tokens(save: Callable[..., str]) -> None:
    x = RNG.integers(1, 9, (20, 6), dtype=np.uint16)
    data = arrays(save(x=x, y=np.roll(x, -1, 1)), task="next_token", vocabulary=9, padding=0)
    assert data.classes == data.vocabulary == 9 and data.padding == 0 and data.x.dtype == torch.int64
    assert data.y[2].tolist() == np.roll(x, -1, 1)[2].tolist()
    assert arrays(save(x=x, y=np.arange(20) % 2), vocabulary=9, classes=3).classes == 3
    assert arrays(save(x=x, y=np.arange(20) % 2), vocabulary=9).classes == 2  # of the labels, not the tokens


def test_channels_last_and_other_numbers(save: Callable[..., str]) -> None:
    x = RNG.integers(0, 256, (8, 4, 5, 3), dtype=np.uint8)
    data = arrays(save(x=x, y=np.arange(8) % 2), channels_last=True, augment="flip", resize=8)
    assert data.x.shape == (8, 3, 4, 5) and data.sample_shape == (3, 8, 8)
    assert np.array_equal(data.x.numpy(), x.transpose(0, 3, 1, 2))
    batch = data.batch(torch.arange(8), torch.Generator().manual_seed(0))[0]
    assert batch.shape == (8, 3, 8, 8) and float(batch.max()) <= 1
    for dtype in (np.int16, np.bool_, ">f4"):
        other = arrays(save(x=(x > 9).astype(dtype), y=np.arange(8) % 2), channels_last=False)
        assert other.x.dtype == torch.float32 and other.x.numpy().tolist() == (x > 9).tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_standardized_by_the_training_samples(
    save: Callable[..., str], monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    monkeypatch.setattr("fleetfit.data.files.arrays._ROWS", 7)
    x = (RNG.random((50, 3, 4, 4)) * [[[[200]], [[50]], [[0]]]] + 20).astype(dtype)
    data = arrays(save(x=x, y=np.arange(50) % 2), standardize=True)
    train = data.batch(data.split("train"))[0]
    assert train.mean((0, 2, 3)).abs().max() < 1e-4
    assert torch.allclose(train.std((0, 2, 3), correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-3)


def test_samples_far_from_zero_keep_their_deviation(save: Callable[..., str]) -> None:
    """A constant has the deviation 1. A note names the last column, whose samples float32 cannot tell apart."""
    x = RNG.normal(size=(80, 3)) * [1, 0, 1] + [1e4, 0.1, 1e9]
    data = arrays(save(x=x, y=np.arange(80) % 2), standardize=True)
    np.testing.assert_allclose(
        data.std, [*x[data.split("train")].std(0)[:1], 1, x[data.split("train")].std(0)[2]], 1e-6
    )
    (note,) = [note for note in data.notes if "1e+09" in note]
    assert " 2 " in note and data.batch(torch.arange(80))[0][:, 1].abs().max() < 1e-6


@pytest.mark.parametrize("statistics", [{"mean": [0.5], "std": [2.0]}, {"mean": [0.5] * 3, "std": [2.0] * 3}])
def test_what_somebody_says_of_mean_and_std_counts(save: Callable[..., str], statistics: dict[str, Any]) -> None:
    x = RNG.random((40, 3))
    file = save(x=x, y=np.arange(40) % 2)
    settings = load_experiment({"data": {"path": file, **statistics}}).data.settings
    data = arrays(**settings)
    np.testing.assert_allclose(data.batch(torch.arange(40))[0].numpy(), (x - 0.5) / 2, rtol=1e-5, atol=1e-6)
    with raises(DataError, key="mean"):
        arrays(**{**settings, "std": []})
    with raises(DataError, "standardize = true", "standardize = false", key="standardize"):
        arrays(**{**settings, "standardize": True})


def test_the_array_that_somebody_names_is_looked_at(save: Callable[..., str]) -> None:
    file = save(x=RNG.random((40, 3)), gray=RNG.integers(0, 255, (40, 9, 9), dtype=np.uint8), y=np.arange(40) % 2)
    assert load_experiment({"data": {"path": file}}).data.settings["standardize"] is True
    assert load_experiment({"data": {"path": file, "x": "gray"}}).data.settings["standardize"] is False


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16, np.bool_])
def test_whole_numbers_are_numbers_unless_they_are_tokens(save: Callable[..., str], tmp_path: Path, dtype: Any) -> None:
    x, y = RNG.integers(0, 2 if dtype == np.bool_ else 90, (60, 3)).astype(dtype), np.arange(60) % 2
    file = save(x=x, y=y)
    assert arrays(file).x.dtype == torch.float32
    named = arrays(**load_experiment({"data": {"path": file}}).data.settings)
    for data in (named, wrap_arrays(x, y), wrap_arrays(x.tolist(), y.tolist())):
        train = data.batch(data.split("train"))[0]
        assert train.dtype == torch.float32 and train.mean(0).abs().max() < 1e-5
        assert (train.std(0, correction=0) - 1).abs().max() < 1e-4
    for tokens in ({"vocabulary": 90}, {"task": "next_token"}):
        assert not load_experiment({"data": {"path": file, **tokens}}).data.settings["standardize"]
    following = arrays(save(x=x, y=x.astype(np.int64)), task="next_token")
    assert following.x.dtype == torch.int64 and following.x.tolist() == x.astype(int).tolist()
    model = {"name": "mlp", "hidden": 8, "layers": 4}
    run = ff.run(data=(x, y), rounds=1, model=model, local={"epochs": 1}, evaluate={"every": 0}, out=tmp_path / "run")
    assert run.folder.is_dir()


def test_a_number_of_classes_that_is_not_there_is_refused(save: Callable[..., str]) -> None:
    x, texts = RNG.random((20, 3)), np.array(["walk", "run"] * 10)
    assert arrays(save(x=x, y=texts), classes=2).classes == 2
    for y, task, count in ((texts, "classification", 7), (RNG.random((20, 5)) > 0.5, "multi_label", 4)):
        with raises(DataError, count, 2 if y is texts else 5, key="classes", column="y", path="mine.npz"):
            arrays(save(x=x, y=y), task=task, classes=count)  # type: ignore[arg-type]
    with raises(DataError, 1, 0, key="classes"):
        arrays(save(x=x, y=texts), classes=0)


def test_data_are_shared_by_sections_with_the_same_keys(save: Callable[..., str]) -> None:
    own = {"name": "arrays", "file": save(x=RNG.random((20, 3)), y=RNG.random(20)), "task": "regression"}
    data = load_experiment({"data": {**own, "server": own}}).data
    assert data.server is not None
    with share_data():
        assert build_data(data) is build_data(data.server, "[data] server")


def test_keys_without_effect_are_declared() -> None:
    unused = find_unused_parameters(
        arrays, {"file": "x.npz", "task": "regression", "classes": 7, "padding": 0}, "regression"
    )
    assert set(unused) == {"classes", "padding"}
    used = {"file": "x.npz", "classes": 4, "padding": 0, "vocabulary": 9}
    assert not find_unused_parameters(arrays, used, "classification")


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ({"x": np.zeros((4, 2)), "label": np.zeros(4)}, {}, Expected(column="y", path="mine.npz")),
        ({"xs": np.zeros((4, 2)), "y": np.zeros(4)}, {}, Expected('"xs"', column="x", path="mine.npz")),
        ({"x": np.zeros((4, 2)), "y": np.zeros(3, int)}, {}, Expected('"x"', 4, 3, column="y", path="mine.npz")),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4)}, {}, Expected("float64", key="y")),
        ({"x": np.array(["a"] * 4), "y": np.zeros(4, int)}, {}, Expected(key="x")),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4, int), "g": np.zeros(4)}, {"groups": "g"}, Expected(key="groups")),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4, int)}, {"groups": "g"}, Expected(column="g", path="mine.npz")),
        ({"x": np.array([{}] * 4), "y": np.zeros(4, int)}, {}, Expected(column="x", path="mine.npz")),
        (
            {"x_train": np.zeros((4, 2)), "x_test": np.zeros((4, 3)), "y": np.zeros(8, int)},
            {},
            Expected(path="mine.npz"),
        ),
        (
            {"x_train": np.zeros((4, 2)), "y_train": np.zeros(4, int), "y_test": np.zeros(4)},
            {},
            Expected(column="y", path="mine.npz"),
        ),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4, int)}, {"test": 1.0}, Expected(1, key="test")),
        ({"x": np.zeros(4), "y": np.zeros(4, int)}, {"channels_last": True}, Expected(key="channels_last")),
        ({"x": np.zeros((4, 2)), "y": np.arange(4)}, {"classes": 3}, Expected("0..2", key="y")),
        (
            {"x": np.zeros((4, 2), int), "y": np.arange(4)},
            {"standardize": True, "vocabulary": 9},
            Expected(key="standardize"),
        ),
    ],
)
def test_says_what_is_wrong(
    save: Callable[..., str], content: dict[str, Any], options: dict[str, Any], expected: Expected
) -> None:
    with raises(DataError, expected):
        arrays(save(**content), **options)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"rubbish")
    (tmp_path / "empty").mkdir()
    for name, expected in (
        ("x.npz", Expected(path="x.npz")),
        ("y.npz", Expected("y.npz")),
        ("empty", Expected(path="empty")),
    ):
        with raises(DataError, expected):
            arrays(str(tmp_path / name))
    np.savez_compressed(tmp_path / "objects.npz", x=np.array([{}] * 4), y=np.zeros(4, int))
    with raises(DataError, column="x", path="objects.npz"):
        arrays(str(tmp_path / "objects.npz"))


@pytest.mark.slow
def test_a_regression_trains_from_a_run_file(save: Callable[..., str], tmp_path: Path) -> None:
    x = RNG.random((60, 1, 4, 4), dtype=np.float32)
    file = save(x=x, y=x.mean((1, 2, 3)))
    sections = {
        "rounds": 2, "data": {"name": "arrays", "file": file, "task": "regression",
                              "partition": {"kind": "iid", "clients": 3}},
        "model": {"name": "cnn"}, "local": {"epochs": 1}, "evaluate": {"every": 0},
    }  # fmt: skip
    run = ff.run(**sections, out=tmp_path / "run")
    assert run.folder.is_dir()
    with raises(ConfigError, "task", "regresion"):
        ff.run(**{**sections, "data": {**sections["data"], "task": "regresion"}}, out=tmp_path / "other")


def test_a_file_beside_the_run_file_is_found(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 2)), y=np.arange(4))
    (tmp_path / "run.toml").write_text('data.name = "arrays"\ndata.file = "mine.npz"\n')
    file = load_experiment(tmp_path / "run.toml").data.settings["file"]
    assert file == str((tmp_path / "mine.npz").resolve())


def test_widar_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program in the module's documentation is run on a folder in SenseFi's layout."""
    profiles = RNG.random((22 * 3 * 2, 22, 400)).astype(np.float32)
    rows = iter(profiles)
    for split in ("train", "test"):
        for name in [f"{i}-Gesture" for i in range(22)]:
            place = tmp_path / "Widardata" / split / name
            place.mkdir(parents=True)
            for user in ("user1", "user2", "user17"):
                np.savetxt(place / f"{user}-1-2-3-4-5-x.csv", next(rows), delimiter=",")
    doc = widar.__doc__ or ""
    program = textwrap.dedent(doc[doc.index("    import numpy") :])
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(compile(program, "widar", "exec"), scope)
    scope["pack"]("Widardata")
    data = widar.widar(str(tmp_path / "widar.npz"), validation=0.0)
    assert data.x.shape == (132, 22, 20, 20) and data.classes == 22
    assert len(data.split("train")) == len(data.split("test")) == 66
    assert data.groups is not None and sorted(set(data.groups.tolist())) == [0, 1, 2]
    assert len(partition(data, "natural", None, 0)[0]["test"]) == 22
    names = sorted(f"{i}-Gesture" for i in range(22))
    assert data.class_names == tuple(names)
    first = np.loadtxt(tmp_path / "Widardata" / "train" / names[0] / "user1-1-2-3-4-5-x.csv", delimiter=",")
    sample = data.batch(torch.tensor([0]))[0][0]
    assert np.allclose(sample.numpy(), (first.reshape(22, 20, 20) - 0.0025) / 0.0119, atol=1e-3)
    np.savez(tmp_path / "other.npz", x_train=np.zeros((4, 2)), y_train=np.arange(4))
    with raises(DataError, 22, path="other.npz"):
        widar.widar(str(tmp_path / "other.npz"))
    monkeypatch.chdir(tmp_path / "Widardata")
    with raises(DataError, "widar.npz"):
        widar.widar()


def make_values_with_gap(shape: tuple[int, ...], *at: int, value: float = np.nan, dtype: str = "float32") -> np.ndarray:
    values = RNG.random(shape).astype(dtype)
    values[at] = value
    return values


GAPS = [
    (make_values_with_gap((20, 4), 7, 2), "sample 7, column 2 (nan); samples: 1 of 20"),
    (
        make_values_with_gap((20, 4), 19, 0, value=np.inf, dtype="float64"),
        "sample 19, column 0 (inf); samples: 1 of 20",
    ),
    (make_values_with_gap((20, 3, 5, 5), 3, 1, 4, 0, value=-np.inf), "sample 3, at [1, 4, 0] (-inf); samples: 1 of 20"),
    (make_values_with_gap((20, 2, 7), slice(5, 9), 1, 6), "sample 5, at [1, 6] (nan); samples: 4 of 20"),
    (make_values_with_gap((20,), 11), "sample 11 (nan); samples: 1 of 20"),
]


@pytest.mark.parametrize(("x", "where"), GAPS)
def test_numbers_that_are_not_finite_are_found(x: np.ndarray, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (4096, 3):
        monkeypatch.setattr(arrays_module, "_ROWS", rows)
        assert arrays_module.find_not_finite(x) == where
        assert arrays_module.find_not_finite(np.nan_to_num(x)) == "" == arrays_module.find_not_finite(x > 0)


@pytest.mark.parametrize(("x", "where"), GAPS[:4])
def test_gaps_name_array_sample_and_column(save: Callable[..., str], x: np.ndarray, where: str) -> None:
    y, fine = np.arange(20) % 2, np.nan_to_num(x)
    (note,) = arrays(save(x=x, y=y)).notes
    assert '"x"' in note and where in note
    with raises(DataError, '"x"', where, key="standardize"):
        arrays(save(x=x, y=y), standardize=True, test=0.0, validation=0.0)
    splits = arrays(save(x_train=fine, x_test=x, y_train=y, y_test=y), standardize=True)  # its mean is finite
    (note,) = [note for note in splits.notes if "channels_last" not in note]
    assert '"x_test"' in note and where in note and "diverges" not in note
    for inputs, name in (((x, y), "x"), ((fine, y, (x, y)), "x_test")):
        with raises(DataError, f"{name} ", where):
            wrap_arrays(*inputs)


def test_targets_that_are_not_finite(save: Callable[..., str]) -> None:
    x, y = RNG.random((20, 4)), make_values_with_gap((20, 2), 6, 1)
    with raises(DataError, 6, 1, column="y", path="mine.npz"):
        arrays(save(x=x, y=y), task="regression")
    with raises(DataError, 6, 1, key="y"):
        wrap_arrays(x, y)
    with raises(DataError, 6, 1, key="y"):
        ff.Data("own", torch.from_numpy(x), torch.from_numpy(y), {"train": torch.arange(20)}, 2, task="regression")
