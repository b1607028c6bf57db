"""What a system or a tool puts into folders of data is never a class and never a sample."""

import io
from pathlib import Path

import numpy as np
import pytest

from fleetfit.data.files.arrays import Arrays
from fleetfit.data.files.detect import detect_format
from fleetfit.data.files.images import images
from fleetfit.data.files.plain_text import plain_text
from fleetfit.data.files.text import text

SYSTEM_FOLDERS = ("__MACOSX", "__macosx", ".ipynb_checkpoints", "@eaDir", "$RECYCLE.BIN", "System Volume Information",
                  "lost+found", ".Trashes", "__pycache__")  # fmt: skip
SYSTEM_FILES = ("._{}", ".{}")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for a set; the cache lies beside it."""
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def picture() -> bytes:
    image = pytest.importorskip("PIL.Image")
    content = io.BytesIO()
    image.fromarray(np.zeros((8, 8), np.uint8)).save(content, "PNG")
    return content.getvalue()


def fill(folder: Path, ending: str, content: bytes) -> None:
    """Two classes of ten samples, and in each folder what systems leave."""
    for label in ("red", "green"):
        (folder / label).mkdir(parents=True)
        for i in range(10):
            (folder / label / f"{i}{ending}").write_bytes(content)
        for name in SYSTEM_FILES:
            (folder / label / name.format(f"0{ending}")).write_bytes(b"\0\5\x16\7\0\2\xff")
        (folder / label / "desktop.ini").write_text("[.ShellClassInfo]")


@pytest.mark.parametrize("below", ["", "train"])
@pytest.mark.parametrize("system", SYSTEM_FOLDERS)
def test_image_classes(place: Path, system: str, below: str) -> None:
    fill(place / below, ".png", picture())
    (place / below / system).mkdir()
    (place / below / system / "._0.png").write_bytes(b"\0\5\x16\7")
    (place / below / system / "0.png").write_bytes(picture())  # a thumbnail
    assert detect_format(str(place))["name"] == "images"
    data = images(str(place))
    assert data.class_names == ("green", "red") and len(data.x) == 20 and not data.notes


@pytest.mark.parametrize("system", SYSTEM_FOLDERS)
def test_text_classes(place: Path, system: str) -> None:
    fill(place, ".txt", b"a b c")
    (place / system).mkdir()
    (place / system / "0.txt").write_bytes(b"\0\5\x16\7\xff")
    assert detect_format(str(place))["name"] == "text"
    data = text(str(place))
    assert data.class_names == ("green", "red") and len(data.x) == 20


def test_files_of_other_kinds(place: Path) -> None:
    """Running text, arrays and a single table beside what a system left."""
    for kind, name, content in (("t", "a.txt", b"some words " * 200), ("c", "iris.csv", b"a,label\n1,x\n2,y\n" * 9)):
        (place / kind / "__MACOSX").mkdir(parents=True)
        for file in (name, f"._{name}", f"__MACOSX/{name}"):
            (place / kind / file).write_bytes(content if file == name else b"\0\5\xff")
    assert plain_text(str(place / "t"), length=8).groups.unique().tolist() == [0]  # type: ignore[union-attr]
    assert detect_format(str(place / "t"))["partition"] == {"kind": "iid"}
    assert detect_format(str(place / "c"))["name"] == "table"
    (place / "n").mkdir()
    for name in ("x", "y"):
        np.save(place / "n" / f"{name}.npy", np.arange(4))
        (place / "n" / f"._{name}.npy").write_bytes(b"\0\5")
    assert Arrays(place / "n").names == ["x", "y"]


@pytest.mark.parametrize("empty", [["later"], ["blue", "later"], [f"c{i}" for i in range(9)]])
def test_a_class_folder_without_images_is_kept_with_a_line(place: Path, empty: list[str]) -> None:
    fill(place, ".png", picture())
    for i, name in enumerate(empty):
        (place / name).mkdir()
        if i:
            (place / name / "notes.txt").write_text("photos to come")
    data = images(str(place))
    assert data.class_names == tuple(sorted(["green", "red", *empty])) and len(data.x) == 20
    (note,) = data.notes
    assert all(f'"{name}"' in note for name in empty[:5]) and f"({len(empty)} of {len(empty) + 2})" in note
    for name in empty:
        for file in (place / name).iterdir():
            file.unlink()
        (place / name).rmdir()
    assert images(str(place)).class_names == ("green", "red")


def test_a_class_that_is_in_the_test_set_only_by_name(place: Path) -> None:
    """A class with test images alone is refused as before; an empty folder admits it, with a line."""
    for split in ("train", "test"):
        fill(place / split, ".png", picture())
    (place / "train" / "later").mkdir()
    (place / "test" / "later").mkdir()
    (place / "test" / "later" / "0.png").write_bytes(picture())
    data = images(str(place))
    assert data.classes == 3 and '"later"' in data.notes[0] and len(data.split("test")) == 21
