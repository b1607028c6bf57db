"""Encoded images of Parquet files, copied once end to end into one file of the cache.

Parquet compresses rows in blocks, so that a single image cannot be read without its neighbours; in one plain file any
image is one read. The copy takes as much room as the images do in the Parquet files.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fleetfit.data import _cache
from fleetfit.data._decode import Source
from fleetfit.data._encoded import Rows
from fleetfit.data._kept import kept


def unpacked(name: str, files: Sequence[Source], column: str) -> Rows:
    """Return where each image of a column lies.

    Raises:
        DataError: A row has no image, or there is no room in the cache.
    """

    def build(folder: Path) -> None:
        offsets = np.zeros(sum(file.rows for file in files) + 1, dtype=np.int64)
        sources: list[tuple[str, int]] = []
        at = row = 0
        with (folder / "images.bin").open("wb") as out:
            for file in files:
                sources.append((str(file.path), row))
                for encoded in file.images(column):
                    out.writelines(encoded)
                    ends = at + np.cumsum([len(image) for image in encoded], dtype=np.int64)
                    offsets[row + 1 : row + 1 + len(encoded)] = ends
                    row, at = row + len(encoded), int(ends[-1]) if len(ends) else at
        np.save(folder / "offsets.npy", offsets)
        (folder / "sources.json").write_text(json.dumps(sources))

    def load(folder: Path) -> Rows:
        offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        if (folder / "images.bin").stat().st_size != offsets[-1]:
            raise ValueError("the images have another length than their index says")
        sources = tuple((str(path), int(first)) for path, first in json.loads((folder / "sources.json").read_text()))
        return Rows(folder / "images.bin", offsets, sources)

    return kept(_cache.key(name, [file.path for file in files], ["encoded", column], suffix=""), build, load)
