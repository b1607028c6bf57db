"""Named data sets from the Hugging Face hub, kept on disk in the layout that is read without a network.

Nothing is downloaded unless a run file says `hub = true`. What is downloaded is written once, as one Parquet file per
split, below the cache folder (see `_cache`), and read from there as if it had been there all along.
"""

import importlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetfit.data import _cache
from fleetfit.data.parquet import locate
from fleetfit.errors import DataError, MissingExtra

_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation",
           "dev": "validation", "test": "test"}  # fmt: skip
_ROWS = 1000  # rows in memory at a time


def folder_of(
    name: str,
    folder: str | None,
    hub: bool,
    repository: str,
    config: str | None = None,
    revision: str | None = None,
    found: Callable[[str, str | None], object] = locate,
) -> str | None:
    """Return the folder from which a named set is read.

    That is the folder given, else the one in FLEETFIT_DATA, else, if asked for, the copy of the hub's.

    Args:
        name: The set's name.
        folder: The run file's `folder`; where it is given, the hub is not asked.
        hub: Whether the set may be downloaded.
        repository: Where the hub has it, "owner/name".
        config: Which of the repository's configurations.
        revision: Which of its branches, tags or commits.
        found: Called with name and folder; raises DataError where the set is not there.

    Returns:
        What a reader takes as its folder; None: FLEETFIT_DATA holds the set.

    Raises:
        DataError: The set is nowhere, or the download failed.
        MissingExtra: It has to be downloaded and `datasets` is not installed.
    """
    try:
        found(name, folder)
        return folder
    except DataError as error:
        if folder is not None:
            raise
        if not hub:
            raise DataError(f"{error} Or have it downloaded from the hub ({repository}): hub = true.") from error
    return str(from_hub(name, repository, config, revision))


def from_hub(name: str, repository: str, config: str | None = None, revision: str | None = None) -> Path:
    """Return a folder with a set's `train.parquet` and so on, downloaded if it is not there yet.

    Images and sounds are in the files themselves, and the files' metadata has the names of the classes. `source.json`
    beside them says where they come from.

    Args:
        name: The set's name.
        repository: Where the hub has it, "owner/name".
        config: Which of the repository's configurations; None: its only one, or its default.
        revision: Which of its branches, tags or commits; None: the newest.

    Raises:
        DataError: The download failed, there is no training split, or there is no place to keep the files.
        MissingExtra: `datasets` is not installed.
    """
    cache = _cache.cache_folder()
    if cache is None:
        raise DataError(f"{name}: there is no place to keep what the hub sends; set FLEETFIT_CACHE to a folder.")
    marks = "-".join(re.sub(r"[^\w.]+", "--", part) for part in (name, repository, config, revision) if part)
    target = cache / "hub" / marks
    if target.is_dir():
        return target
    splits = _downloaded(name, repository, config, revision)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(prefix=f"{marks}.", dir=target.parent))
    except OSError as error:
        raise DataError(f"{name}: {target.parent} cannot be written to: {error}") from error
    try:
        for split, rows in splits.items():
            _write(rows, working / f"{split}.parquet")
        source = {"repository": repository, "config": config, "revision": revision, "files": _origins(splits["train"])}
        (working / "source.json").write_text(json.dumps(source, indent=2), encoding="utf-8")
        if not target.is_dir():  # else another process was faster
            working.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise DataError(f"{name}: {target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return target


def _downloaded(name: str, repository: str, config: str | None, revision: str | None) -> dict[str, Any]:
    """Return the splits under our names, as objects of `datasets`."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtra("hub", f"Downloading {name} from the hub") from error
    try:
        found = datasets.load_dataset(repository, config, revision=revision)
    except Exception as error:  # whatever the network, the hub or the library comes across
        raise DataError(
            f"{name}: downloading {repository} from the Hugging Face hub failed: {type(error).__name__}: {error}. "
            f'Without a network, give folder = "..." with train.parquet and test.parquet in it.'
        ) from error
    splits = {_SPLITS[split]: rows for split, rows in found.items() if split in _SPLITS}
    if "train" not in splits:
        raise DataError(f'{name}: {repository} has no split "train", but {", ".join(map(str, found))}.')
    return splits


def _write(rows: Any, path: Path) -> None:
    """Write one split, the bytes of its images and sounds included."""
    parquet = importlib.import_module("pyarrow.parquet")
    table = importlib.import_module("datasets.table")
    with parquet.ParquetWriter(path, rows.features.arrow_schema) as writer:
        for part in rows.with_format("arrow").iter(_ROWS):
            writer.write_table(table.embed_table_storage(part), row_group_size=_ROWS)


def _origins(rows: Any) -> list[str]:
    """Return the addresses that the rows came from, with the commit where the library tells it."""
    return sorted(map(str, rows.info.download_checksums or {}))
