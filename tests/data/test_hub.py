"""Sets from the hub: the library is real, what it would download is made by the test."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import raises

from fleetfit.data.files import folders
from fleetfit.data.files.images import images
from fleetfit.errors import DataError, MissingExtra

datasets = pytest.importorskip("datasets")
Picture = Callable[..., bytes]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, ...]]]:
    """Let the hub serve something; the list grows with every request."""

    def serve(answer: Any) -> list[tuple[Any, ...]]:
        requests: list[tuple[Any, ...]] = []

        def load_dataset(repository: str, config: str | None, revision: str | None = None) -> Any:
            requests.append((repository, config, revision))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return requests

    return serve


def rows(**columns: list[Any]) -> Any:
    return datasets.Dataset.from_dict(columns)


def test_files_of_images_are_written_with_their_bytes(
    tmp_path: Path, picture: Picture, served: Callable[[Any], list[Any]]
) -> None:
    """An image that the hub's copy only has as a path is in our file, and the class names too."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    for i, p in enumerate(pixels):
        (tmp_path / f"{i}.png").write_bytes(picture(p))
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"]), "who": datasets.Value("string")}
    )
    content = {"image": [str(tmp_path / f"{i}.png") for i in range(4)], "label": [0, 1, 1, 0], "who": list("zaaz")}
    whole = datasets.Dataset.from_dict(content, features=features)
    requests = served(datasets.DatasetDict({"train": whole, "test": whole.select([3, 0])}))

    folder = folders.download("pets", "somebody/pets", "small", "refs/convert/parquet")
    for i in range(4):
        (tmp_path / f"{i}.png").unlink()

    data = images(str(folder), groups="who", validation=0.0)
    assert np.array_equal(data.x.numpy(), pixels[[0, 1, 2, 3, 3, 0]].transpose(0, 3, 1, 2))
    assert data.y.tolist() == [0, 1, 1, 0, 0, 0] and data.class_names == ("cat", "dog")
    assert data.groups is not None and data.groups.tolist() == [1, 0, 0, 1, 1, 1]
    assert data.split("test").tolist() == [4, 5]
    assert requests == [("somebody/pets", "small", "refs/convert/parquet")]
    source = json.loads((folder / "source.json").read_text())
    assert (source["repository"], source["config"]) == ("somebody/pets", "small")


def test_downloaded_once_and_apart_by_configuration(served: Callable[[Any], list[Any]]) -> None:
    requests = served({"train": rows(text=["a"], label=[0])})
    first = folders.download("t", "o/t")
    assert folders.download("t", "o/t") == first and len(requests) == 1
    others = {
        folders.download("t", "o/t", "en"),
        folders.download("t", "o/t", revision="v2"),
        folders.download("t", "p/t"),
    }
    assert len({first, *others}) == 4 and len(requests) == 4
    assert [p.name for p in sorted(first.parent.iterdir()) if "." in p.name.removesuffix(".parquet")] == []


@pytest.mark.parametrize("split", ["validation", "valid", "val", "dev"])
def test_splits_get_our_names(split: str, served: Callable[[Any], list[Any]]) -> None:
    one = rows(text=["a"], label=[0])
    served({"train": one, split: one, "test": one, "unsupervised": one})
    folder = folders.download("t", "o/t")
    assert sorted(p.name for p in folder.glob("*.parquet")) == ["test.parquet", "train.parquet", "validation.parquet"]


def test_local_files_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Callable[[Any], list[Any]]
) -> None:
    requests = served({"train": rows(text=["a"], label=[0])})

    def there(name: str, folder: str | None) -> None:
        if not (Path(folder or tmp_path / "absent") / "here").exists():
            raise DataError("nothing there.")

    (tmp_path / "here").touch()
    assert folders.find_or_download("t", str(tmp_path), True, "o/t", find=there) == str(tmp_path)
    with raises(DataError, key=None):  # a folder that is given must be right, the hub is not named
        folders.find_or_download("t", str(tmp_path / "other"), True, "o/t", find=there)
    with raises(DataError, "o/t", "hub = true", key="hub"):
        folders.find_or_download("t", None, False, "o/t", find=there)
    assert requests == []
    download = folders.find_or_download("t", None, True, "o/t", find=there)
    assert download == str(folders.download("t", "o/t")) and len(requests) == 1
    monkeypatch.setenv("FLEETFIT_DATA", str(Path(download).parent))
    (Path(download).parent / "u").mkdir()
    (Path(download) / "train.parquet").rename(Path(download).parent / "u" / "train.parquet")
    assert folders.find_or_download("u", None, True, "o/t") is None and len(requests) == 1


def test_failed_downloads(monkeypatch: pytest.MonkeyPatch, served: Callable[[Any], list[Any]]) -> None:
    served(ConnectionError("no route"))
    with raises(DataError, "o/t", key="hub"):
        folders.download("t", "o/t")
    served({"everything": rows(text=["a"])})
    with raises(DataError, "o/t", '"train"'):
        folders.download("t", "o/t")
    monkeypatch.setattr(folders, "find_cache_folder", lambda: None)
    with raises(DataError, "FLEETFIT_CACHE", key="hub"):
        folders.download("t", "o/t")


def test_a_failed_download_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, served: Callable[[Any], list[Any]], tmp_path: Path
) -> None:
    served({"train": rows(text=["a"], label=[0])})

    def full(*_: object) -> None:
        raise OSError(28, "device")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "_write_parquet", full)
        with raises(DataError, "device", "t-o--t", path="cache"):
            folders.download("t", "o/t")
    assert list((tmp_path / "cache" / "hub").iterdir()) == []
    assert folders.download("t", "o/t").is_dir()


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises(MissingExtra, extra="hub"):
        folders.download("t", "o/t")


@pytest.mark.network
def test_the_real_hub() -> None:
    """The smallest of the named sets, 600 kB."""
    folder = folders.download("sst2", "stanfordnlp/sst2")
    from fleetfit.data.files.parquet import File

    assert File(folder / "train.parquet").rows == 67_349
    assert torch.tensor(File(folder / "validation.parquet").rows) == 872
