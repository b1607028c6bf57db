"""Where the files of a set lie: in the folder given, in FLEETFIT_DATA, or in a copy of the Hugging Face hub's.

Nothing is downloaded unless a run file says `hub = true`. What is downloaded is written once, as one Parquet file per
split, below the cache folder (see `cache`), and read from there as if it had been there all along.
"""

import errno
import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetfit.data.cache import cache_folder, kept, key
from fleetfit.data.splits import ALIASES, SPLITS
from fleetfit.errors import DataError, FleetFitError, MissingExtra
from fleetfit.files import parse_path

_HUB_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation",
           "dev": "validation", "test": "test"}  # fmt: skip
_ROWS = 1000  # rows in memory at a time
_OF_SYSTEMS = ("__macosx", "__pycache__", "@eadir", "$recycle.bin", "system volume information", "lost+found",
               "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "network trash folder", "temporary items",
               "thumbs.db", "ehthumbs.db", "desktop.ini")  # fmt: skip


def is_system_name(name: str) -> bool:
    """Return whether a system or a tool made a file or folder of this name: `__MACOSX`, `@eaDir`, hidden ones."""
    return name.startswith(".") or name.lower() in _OF_SYSTEMS


def class_folders(place: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without those that a system or a tool made."""
    with os.scandir(place) as entries:
        return sorted(place / entry.name for entry in entries if entry.is_dir() and not is_system_name(entry.name))


def sample_files(place: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match a pattern, sorted, without those that a system or a tool made."""
    found = (file for file in place.glob(pattern) if file.is_file())
    return sorted(file for file in found if not any(map(is_system_name, file.relative_to(place).parts)))


def set_folder(folder: str) -> Path:
    """Return a set's folder: a relative path that does not exist is sought in the folder FLEETFIT_DATA."""
    path = parse_path(folder, "data.folder")
    root = os.environ.get("FLEETFIT_DATA")
    if root and not path.is_absolute() and not path.exists():
        return Path(root).expanduser() / path
    return path


def readable(path: Path) -> Path:
    """Return where the files of a set are read: of what `datasets` saved, a copy in Parquet; of others, there."""
    return from_saved(path) if path.is_dir() and is_saved(path) else path


def found_folder(name: str, folder: str | None) -> Path | None:
    """Return the folder of a known set, where it is the one given, or lies below it or below FLEETFIT_DATA; or None."""
    root = folder if folder is not None else os.environ.get("FLEETFIT_DATA")
    if not root:
        return None
    base = Path(root).expanduser()
    tops = [base / name, base] if folder is not None else [base / name]
    return next((top for top in tops if top.is_dir()), None)


def locate(name: str, folder: str | None) -> dict[str, list[Path]]:
    """Return the files of each split that is there, "train" first.

    Raises:
        DataError: There is no such folder, no train file, or a numbered file is missing.
    """
    root = folder if folder is not None else os.environ.get("FLEETFIT_DATA")
    if not root:
        raise DataError(
            f'{name}: where are the files? Give folder = "..." (with train.parquet and test.parquet in it), or set the '
            f"environment variable FLEETFIT_DATA to the folder that holds {name}/train.parquet.",
            key="folder",
        )
    base = parse_path(root, "data.folder")
    if not base.is_dir():
        source = "folder" if folder is not None else "the environment variable FLEETFIT_DATA"
        raise DataError(f"{name}: {source} names {base}, which is not a folder.", path=base)
    tops = [base, base / name] if folder is not None else [base / name]
    for top in tops:
        for place in (top, top / "data", top / name, top / "plain_text"):
            splits = {split: _files_of(place, split) for split in SPLITS}
            if splits["train"]:
                return {split: paths for split, paths in splits.items() if paths}
    places = " or ".join(str(top) for top in tops)
    raise DataError(f"{name}: no train.parquet and no train-00000-of-....parquet in {places}.")


def _files_of(place: Path, split: str) -> list[Path]:
    for alias in ALIASES[split]:
        whole = place / f"{alias}.parquet"
        if whole.is_file():
            return [whole]
        parts = sorted(place.glob(f"{alias}-*.parquet"))
        if not parts:
            continue
        counts = {match.group(1) for part in parts if (match := re.search(r"-of-(\d+)", part.name))}
        if len(counts) == 1 and int(next(iter(counts))) != len(parts):
            raise DataError(
                f"{place} has {len(parts)} of the {int(next(iter(counts)))} files of its {alias} split.", path=place
            )
        return parts
    return []


# ---- what `save_to_disk` of Hugging Face datasets wrote --------------------------------------------------------------


def is_saved(folder: Path) -> bool:
    """Return whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote a folder."""
    whole = (folder / "dataset_dict.json").is_file()
    return whole or ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file())


def from_saved(folder: Path) -> Path:
    """Return a folder of the cache with the rows of a saved data set, as one Parquet file for each split.

    Raises:
        DataError: It cannot be read, there is no training split, or there is no room for it.
        MissingExtra: `datasets` is not installed.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtra("hub", f"Reading {folder}, which save_to_disk wrote,") from error
    stamps = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix in (".json", ".arrow"))

    def build(target: Path) -> None:
        try:
            found = datasets.load_from_disk(str(folder))
            splits = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
            named = {_HUB_SPLITS[split]: rows for split, rows in splits.items() if split in _HUB_SPLITS}
            if "train" not in named:
                raise DataError(f'{folder} has no split "train", but {", ".join(map(str, splits))}.', path=folder)
            for split, rows in named.items():
                _write(rows, target / f"{split}.parquet")
        except FleetFitError:
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            raise DataError(f"{folder} cannot be read: {error}", path=folder) from error
        except Exception as error:  # whatever the library comes across in damaged files
            said = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{folder} cannot be read as a saved data set: {said[:300]}", path=folder) from error

    return kept(key(folder.name, stamps, ["saved"], suffix=""), build, _whole)


def _whole(folder: Path) -> Path:
    if not (folder / "train.parquet").is_file():
        raise ValueError("there is no train.parquet")
    return folder


# ---- the hub ---------------------------------------------------------------------------------------------------------


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
            raise DataError(
                f"{error} Or have it downloaded from the hub ({repository}): hub = true.", key="hub", path=error.path
            ) from error
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
    cache = cache_folder()
    if cache is None:
        raise DataError(f"{name}: downloads need a cache folder; set FLEETFIT_CACHE to a folder.", key="hub")
    marks = "-".join(re.sub(r"[^\w.]+", "--", part) for part in (name, repository, config, revision) if part)
    target = cache / "hub" / marks
    if target.is_dir():
        return target
    splits = _downloaded(name, repository, config, revision)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(prefix=f"{marks}.", dir=target.parent))
    except OSError as error:
        raise DataError(f"{name}: {target.parent} cannot be written to: {error}", path=target.parent) from error
    try:
        for split, rows in splits.items():
            _write(rows, working / f"{split}.parquet")
        source = {"repository": repository, "config": config, "revision": revision, "files": _origins(splits["train"])}
        (working / "source.json").write_text(json.dumps(source, indent=2), encoding="utf-8")
        if not target.is_dir():  # else another process was faster
            working.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise DataError(f"{name}: {target} cannot be written: {error}", path=target) from error
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
            f'Without a network, give folder = "..." with train.parquet and test.parquet in it.',
            key="hub",
        ) from error
    splits = {_HUB_SPLITS[split]: rows for split, rows in found.items() if split in _HUB_SPLITS}
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
