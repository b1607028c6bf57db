"""Parquet files as Hugging Face `datasets` writes them, made on the spot."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLEETFIT_DATA", raising=False)


@pytest.fixture
def picture() -> Callable[..., bytes]:
    """Encode an array [H, W] or [H, W, 3] losslessly."""
    image = pytest.importorskip("PIL.Image")

    def encode(pixels: np.ndarray, form: str = "PNG") -> bytes:
        content = io.BytesIO()
        image.fromarray(pixels).save(content, form)
        return content.getvalue()

    return encode


@pytest.fixture
def write() -> Callable[..., Path]:
    """Write one Parquet file with an image column, a label column and whatever else."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write_file(
        path: Path,
        images: list[bytes | None],
        labels: list[Any],
        image: str = "image",
        label: str = "label",
        names: list[str] | None = None,
        bare: bool = False,
        **more: list[Any],
    ) -> Path:
        column = images if bare else [{"bytes": content, "path": None} for content in images]
        kind = arrow.binary() if bare else arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
        table = arrow.table({image: arrow.array(column, kind), label: labels} | more)
        if names is not None:
            features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path, row_group_size=4)
        return path

    return write_file
