"""Images are trained as people see them: every reader turns them as EXIF or XMP says, and as Pillow does."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fleetfit as ff
from fleetfit.cli import main
from fleetfit.data.files.detect import detect_format
from fleetfit.data.files.images import images
from fleetfit.data.sets import imagenet as imagenet_module
from fleetfit.data.sets.imagenet import imagenet

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")
ORIENTATION = 0x112
Write = Callable[..., Path]


def photograph(seed: int, orientation: int | None = None, form: str = "PNG", size: tuple[int, int] = (10, 14)) -> bytes:
    """An image file of noise, [height, width] as stored, with an orientation in its EXIF."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    exif, content = Image.Exif(), io.BytesIO()
    if orientation is not None:
        exif[ORIENTATION] = orientation
    Image.fromarray(pixels).save(content, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
    return content.getvalue()


def as_seen(content: bytes) -> np.ndarray:
    """What a viewer shows, uint8 [3, H, W]."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")).transpose(2, 0, 1)


def write_files(folder: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


def pixels(data: Any) -> torch.Tensor:
    return data.x.index_select(0, torch.arange(len(data.x)))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(2, 9))
def test_every_orientation_of_every_format_is_turned(tmp_path: Path, orientation: int, form: str, lazy: bool) -> None:
    """Squares, so that all have one size; those of 5 to 8 are turned by a quarter."""
    files = {f"{c}/{i}.{form.lower()}": photograph(i, orientation if i else None, form, (12, 12))
             for c in "ab" for i in range(3)}  # fmt: skip
    data = images(write_files(tmp_path / "photos", files), lazy=lazy)
    assert pixels(data).numpy().tolist() == [as_seen(content).tolist() for content in files.values()]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_quarter_turn_changes_the_size(tmp_path: Path, lazy: bool, write: Write) -> None:
    """Upright images are all 14x10 although half of them are stored as 10x14; in folders and in Parquet files."""
    content = [photograph(i, 6, size=(10, 14)) if i % 2 else photograph(i, size=(14, 10)) for i in range(6)]
    seen = torch.from_numpy(np.stack([as_seen(one) for one in content]))
    folder = write_files(tmp_path / "photos", {f"{'ab'[i // 3]}/{i}.png": one for i, one in enumerate(content)})
    write(tmp_path / "parquet" / "train.parquet", content, [0, 0, 0, 1, 1, 1])
    for place in (folder, str(tmp_path / "parquet")):
        data = images(place, lazy=lazy)
        assert data.sample_shape == (3, 14, 10) and torch.equal(pixels(data), seen)


def test_the_square_is_cut_out_of_the_upright_image(tmp_path: Path) -> None:
    """Part of a wide image that is stored on its side: cut after the turn, as Pillow does by hand."""
    content = photograph(0, 8, size=(40, 24))
    folder = write_files(tmp_path / "p", {"a/0.png": content, "b/0.png": photograph(1, size=(24, 40))})
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    box = ((upright.width - 12) / 2, (upright.height - 12) / 2, (upright.width + 12) / 2, (upright.height + 12) / 2)
    square = np.asarray(upright.resize((8, 8), Image.Resampling.BILINEAR, box=box)).transpose(2, 0, 1)
    for lazy in (False, True):
        assert np.array_equal(pixels(images(folder, size=8, center=0.5, lazy=lazy))[0].numpy(), square)


def test_imagenet_has_the_key_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{split}/{c}/{i}.png": photograph(i, 3, size=(8, 8)) for split in ("train", "val") for c in "ab"
             for i in range(4)}  # fmt: skip
    folder = write_files(tmp_path / "imagenet", files)
    monkeypatch.setattr(imagenet_module, "FACTS", ff.data.Facts(8, 8, 2, "any", "made here"))
    upright, stored = (imagenet(folder, size=8, center=1.0, exif_orientation=e, lazy=False) for e in (True, False))
    assert torch.equal(pixels(upright), pixels(stored).flip(2, 3)) and not torch.equal(upright.x, stored.x)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_xmp_is_read_and_a_damaged_exif_is_not_in_the_way(tmp_path: Path) -> None:
    """An orientation in XMP alone counts, as in Pillow; bytes that are no EXIF, an unknown value, are ignored."""
    plain = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8))
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><r tiff:Orientation="3"/></x:xmpmeta>'
    files = {}
    for name, more in {"xmp": {"xmp": xmp}, "damaged": {"exif": b"Exif\0\0MM\0*\0\0\xff\xff broken"},
                       "cut": {"exif": b"Exif\0\0"}, "unknown": {}}.items():  # fmt: skip
        content = io.BytesIO()
        exif = Image.Exif()
        exif[ORIENTATION] = 99
        plain.save(content, "JPEG", quality=95, **(more or {"exif": exif}))
        files[f"{'a' if name == 'xmp' else 'b'}/{name}.jpg"] = content.getvalue()
    data = images(write_files(tmp_path / "p", files))
    stored = np.asarray(Image.open(io.BytesIO(files["b/cut.jpg"]))).transpose(2, 0, 1)
    assert np.array_equal(pixels(data)[0].numpy(), stored[:, ::-1, ::-1])
    assert all(np.array_equal(one.numpy(), stored) for one in pixels(data)[1:])


def test_predictions_are_of_upright_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bright above or below; what is stored upside down is told apart like all others, in training and afterwards."""

    def half(kind: str, turned: bool) -> bytes:
        pixels, exif, content = np.zeros((16, 16, 3), np.uint8), Image.Exif(), io.BytesIO()
        pixels[slice(0, 8) if (kind == "above") is not turned else slice(8, 16)] = 255
        if turned:
            exif[ORIENTATION] = 3
        Image.fromarray(pixels).save(content, "JPEG", exif=exif)
        return content.getvalue()

    place = write_files(
        tmp_path / "p", {f"{k}/{i}.jpg": half(k, i % 2 == 1) for k in ("above", "below") for i in range(40)}
    )
    run = ff.run({"data": {"path": place, "partition": {"kind": "iid", "clients": 4}}, "rounds": 6,
                  "cohort": {"fraction": 1.0}}, out=tmp_path / "run")  # fmt: skip
    new = write_files(tmp_path / "new", {f"{k}/{i}.jpg": half(k, i > 1) for k in ("above", "below") for i in range(4)})
    with pytest.raises(SystemExit) as caught:
        main(["predict", str(run.folder), "--data", new, "--out", str(tmp_path / "found.csv")])
    assert caught.value.code == 0, capsys.readouterr().err
    with (tmp_path / "found.csv").open() as file:
        assert [row["prediction"] for row in csv.DictReader(file)] == ["above"] * 4 + ["below"] * 4


def test_detected_size_is_that_of_upright_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half are stored on their side: upright they differ in size, as stored not. Nothing is decoded."""
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    for form in ("JPEG", "WEBP", "PNG"):
        files = {f"{c}/{i}.{form.lower()}": photograph(i, 6 if i % 2 else None, form, (10, 14))
                 for c in "ab" for i in range(6)}  # fmt: skip
        folder = write_files(tmp_path / form, files)
        assert detect_format(folder).get("size") == 32
        assert "size" not in detect_format(folder, {"exif_orientation": False})
        upright = write_files(tmp_path / f"{form}2", {n: c for n, c in files.items() if int(n[2]) % 2})
        assert "size" not in detect_format(upright)
