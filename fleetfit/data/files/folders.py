"""Find the folder and the files of a data set: in its folder, in FLEETFIT_DATA, or in a copy from the hub.

Nothing is downloaded unless a run file sets `hub = true`. A download is written once, as one Parquet file per split,
below the cache folder (see `cache`), and read from there like any other set.
"""

import errno
import functools
import importlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleetfit.data.cache import find_cache_folder, load_folder, make_key
from fleetfit.data.splits import ALIASES, BY_NAME, find_splits
from fleetfit.errors import DataError, FleetFitError, format_cause, import_optional
from fleetfit.files import parse_path

_ROWS = 1000  # rows in memory at a time
_SYSTEM_NAMES = ("__macosx", "__pycache__", "@eadir", "$recycle.bin", "system volume information", "lost+found",
                 "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "network trash folder", "temporary items",
                 "thumbs.db", "ehthumbs.db", "desktop.ini")  # fmt: skip


def is_system_name(name: str) -> bool:
    """Return whether a name is that of a system's or tool's file: `__MACOSX`, `@eaDir`, hidden ones."""
    return name.startswith(".") or name.lower() in _SYSTEM_NAMES


ListFolder = Callable[[Path], tuple[list[Path], list[str]]]


def list_folder(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the subfolders of a folder, sorted, and the names of its files, without those of systems and tools."""
    with os.scandir(folder) as entries:
        own = [entry for entry in entries if not is_system_name(entry.name)]
    return sorted(folder / entry.name for entry in own if entry.is_dir()), [e.name for e in own if e.is_file()]


def list_sample_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match a pattern, sorted, without those of systems and tools."""
    paths = (path for path in folder.glob(pattern) if path.is_file())
    return sorted(path for path in paths if not any(map(is_system_name, path.relative_to(folder).parts)))


def resolve_folder(folder: str) -> Path:
    """Return a set's folder. A relative path that does not exist is looked up in the folder FLEETFIT_DATA."""
    path = parse_path(folder, "data.folder")
    root = os.environ.get("FLEETFIT_DATA")
    if root and not path.is_absolute() and not path.exists():
        return Path(root).expanduser() / path
    return path


def find_set_folder(name: str, folder: str | None) -> Path | None:
    """Return the folder of a named set: the given one, or NAME in it or in FLEETFIT_DATA; None if there is none."""
    root = folder if folder is not None else os.environ.get("FLEETFIT_DATA")
    if not root:
        return None
    base = Path(root).expanduser()
    candidates = [base / name, base] if folder is not None else [base / name]
    return next((candidate for candidate in candidates if candidate.is_dir()), None)


def find_parquet_files(name: str, folder: str | None) -> dict[str, list[Path]]:
    """Return the Parquet files of each split of a set, "train" first.

    Raises:
        DataError: The folder or the train file does not exist, or a numbered file is missing.
    """
    root = folder if folder is not None else os.environ.get("FLEETFIT_DATA")
    if not root:
        raise DataError(
            f"{name}: the folder of its files is unknown. Set folder to a folder with train.parquet and test.parquet, "
            f"or set the environment variable FLEETFIT_DATA to the folder that has {name}/train.parquet.",
            key="folder",
        )
    base = parse_path(root, "data.folder")
    if not base.is_dir():
        source = "folder" if folder is not None else "the environment variable FLEETFIT_DATA"
        raise DataError(f"{name}: {source} is {base}, which is not a folder.", path=base)
    tops = [base, base / name] if folder is not None else [base / name]
    for top in tops:
        for candidate in (top, top / "data", top / name, top / "plain_text"):
            if splits := find_splits(functools.partial(_find_split_files, candidate)):
                return splits
    tops_text = " or ".join(map(str, tops))
    raise DataError(f"{name}: no train.parquet and no train-00000-of-....parquet in {tops_text}.")


def _find_split_files(folder: Path, name: str) -> list[Path]:
    single = folder / f"{name}.parquet"
    if single.is_file():
        return [single]
    numbered = sorted(folder.glob(f"{name}-*.parquet"))
    counts = {int(match[1]) for path in numbered if (match := re.search(r"-of-(\d+)", path.name))}
    if len(counts) > 1:
        numbers = " and ".join(map(str, sorted(counts)))
        raise DataError(
            f"{folder} has its {name} split in {numbers} files. Expected one division. Remove the files of the others.",
            path=folder,
        )
    if counts and len(numbered) not in counts:
        raise DataError(f"{folder} has {len(numbered)} of the {counts.pop()} files of its {name} split.", path=folder)
    return numbered


def find_tables(path: Path, suffixes: Sequence[str]) -> dict[str, list[Path]]:
    """Return the table files of each split, "train" first: `train.csv` and so on, Parquet files, or the only table.

    Args:
        path: A file, or a folder with the files, perhaps in a subfolder `data`.
        suffixes: Suffixes of tables besides Parquet, in lower case.

    Raises:
        DataError: There are no files, or none for training.
    """
    if not path.is_dir():
        return {"train": [path]}
    for suffix in suffixes:
        for folder in (path, path / "data"):
            if splits := find_splits(functools.partial(_find_file, folder, suffix)):
                return _check_formats(splits, suffixes)
    try:
        splits = find_parquet_files(path.name, str(path))
    except DataError as error:
        names = (*suffixes, ".parquet")
        tables = [file for file in list_sample_files(path, "*") if file.suffix.lower() in names]
        if len(tables) == 1 and tables[0].stem not in BY_NAME:
            return {"train": tables}
        several = f" It has {len(tables)} tables. Name one file." if tables else ""
        raise DataError(f"{error} There is also no train file with suffix {', '.join(suffixes)}.{several}",
                        key=error.key, path=path) from None  # fmt: skip
    return _check_formats(splits, suffixes)


def _check_formats(splits: dict[str, list[Path]], suffixes: Sequence[str]) -> dict[str, list[Path]]:
    """Refuse a split of another format beside splits that lack it: it would be held out of the training rows."""
    train = splits["train"][0]
    absent = [alias for split, aliases in ALIASES.items() if split not in splits for alias in aliases]
    others = (train.with_name(f"{alias}{suffix}") for alias in absent for suffix in (*suffixes, ".parquet"))
    if other := next(filter(Path.is_file, others), None):
        raise DataError(
            f"{other} has another format than {train.name}. Expected one format for all splits. Convert one of them.",
            path=other,
        )
    return splits


def find_or_download(
    name: str,
    folder: str | None,
    hub: bool,
    repository: str,
    config: str | None = None,
    revision: str | None = None,
    find: Callable[[str, str | None], object] = find_parquet_files,
) -> str | None:
    """Return the folder of a named set: the given one, the one in FLEETFIT_DATA, or with `hub` a download.

    Args:
        name: The set's name.
        folder: The run file's `folder`; with it, nothing is downloaded.
        hub: Whether the set may be downloaded.
        repository: The hub's repository, "owner/name".
        config: A configuration of the repository.
        revision: A branch, tag or commit.
        find: Called with name and folder; raises DataError if the set is missing.

    Returns:
        The folder for a reader; None if FLEETFIT_DATA has the set.

    Raises:
        DataError: The set is missing, or the download failed.
        MissingExtra: A download is needed, but `datasets` is not installed.
    """
    try:
        find(name, folder)
        return folder
    except DataError as error:
        if folder is not None:
            raise
        if not hub:
            raise DataError(
                f"{error} To download it from the hub ({repository}), set hub = true.", key="hub", path=error.path
            ) from None
    return str(download(name, repository, config, revision))


def find_new_tables(path: Path, suffixes: Sequence[str], is_labeled: Callable[[Path], bool]) -> list[Path]:
    """Return the tables of new samples: a file, or a folder's test set, else all that it has.

    Args:
        path: A file, a folder, or a saved data set.
        suffixes: Suffixes of tables; those of the first suffix that a folder has count.
        is_labeled: Whether a table has labels. A folder with a labeled training set is a data set: it gives no table.
    """
    if path.is_file():
        return [path] if path.suffix.lower() in suffixes else []
    folder = convert_saved_dataset(path, training=False)
    every = [file for pattern in ("*", "data/*") for file in list_sample_files(folder, pattern)]
    paths = next(filter(None, ([file for file in every if file.suffix.lower() == suffix] for suffix in suffixes)), [])
    splits = [BY_NAME.get(re.split("[-.]", file.name)[0], "") for file in paths]
    if "train" in splits and is_labeled(paths[splits.index("train")]):
        return []
    return [file for file, split in zip(paths, splits, strict=True) if split == "test"] or paths


def _find_file(folder: Path, suffix: str, name: str) -> list[Path]:
    file = folder / f"{name}{suffix}"
    return [file] if file.is_file() else []


# ---- Hugging Face datasets: saved ones, and the hub ------------------------------------------------------------------


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    if (folder / "dataset_dict.json").is_file():
        return True
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def convert_saved_dataset(folder: Path, training: bool = True) -> Path:
    """Convert a saved data set to a folder of Parquet files, once, in the cache; return other paths unchanged.

    Args:
        folder: Its folder.
        training: Whether it needs a training split.

    Raises:
        DataError: The data set cannot be read, lacks a split, or does not fit on the disk.
        MissingExtra: `datasets` is not installed.
    """
    if not (folder.is_dir() and is_saved_dataset(folder)):
        return folder
    datasets = import_optional("datasets", "hub", f"Reading {folder}, which save_to_disk wrote,")
    sources = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".arrow"))

    def build(target: Path) -> None:
        try:
            dataset = datasets.load_from_disk(str(folder))
            splits = dict(dataset) if isinstance(dataset, datasets.DatasetDict) else {"train": dataset}
            for split, rows in _rename_splits(splits, str(folder), folder, training).items():
                _write_parquet(rows, target / f"{split}.parquet")
        except FleetFitError:
            raise
        except Exception as error:  # the library may raise any error on damaged files
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            raise DataError(
                f"{folder} cannot be read as a saved data set: {format_cause(error)}", path=folder
            ) from error

    def load(target: Path) -> Path:
        if not any(target.glob("train.parquet" if training else "*.parquet")):
            raise ValueError("a split is missing")
        return target

    return load_folder(make_key(folder.name, sources, ["saved"]), build, load)


def download(name: str, repository: str, config: str | None = None, revision: str | None = None) -> Path:
    """Return a folder with a set's `train.parquet` and other splits, downloaded unless cached.

    Images and sounds are inside the files, and the files' metadata has the names of the classes. `source.json` beside
    them records their origin.

    Args:
        name: The set's name.
        repository: The hub's repository, "owner/name".
        config: A configuration of the repository; None: its only one, or its default.
        revision: A branch, tag or commit; None: the newest.

    Raises:
        DataError: The download failed, there is no training split, or the files cannot be written.
        MissingExtra: `datasets` is not installed.
    """
    if (cache := find_cache_folder()) is None:
        raise DataError(f"{name}: downloads need a cache folder. Set FLEETFIT_CACHE to a folder.", key="hub")
    label = "-".join(re.sub(r"[^\w.]+", "--", part) for part in (name, repository, config, revision) if part)
    if not (cache / "hub" / label).is_dir():
        datasets = import_optional("datasets", "hub", f"Downloading {name} from the hub")

    def build(folder: Path) -> None:
        try:
            dataset = datasets.load_dataset(repository, config, revision=revision)
        except Exception as error:  # network, hub and library may raise any error
            reason = f"downloading {repository} from the Hugging Face hub failed: {format_cause(error, typed=True)}"
            remedy = "Without a network, set folder to a folder with train.parquet and test.parquet."
            raise DataError(f"{name}: {reason}. {remedy}", key="hub") from error
        splits = _rename_splits(dataset, f"{name}: {repository}")
        for split, rows in splits.items():
            _write_parquet(rows, folder / f"{split}.parquet")
        source = {"repository": repository, "config": config, "revision": revision,
                  "files": sorted(map(str, splits["train"].info.download_checksums or {}))}  # fmt: skip
        (folder / "source.json").write_text(json.dumps(source, indent=2), encoding="utf-8")

    return load_folder(f"hub/{label}", build, lambda folder: folder)


def _rename_splits(splits: Any, source: str, path: Path | None = None, training: bool = True) -> dict[str, Any]:
    """Rename the splits of a data set to FleetFit's names."""
    renamed = {BY_NAME[split]: rows for split, rows in splits.items() if split in BY_NAME}
    if "train" not in renamed and (training or not renamed):
        raise DataError(f'{source} has no split "train". Its splits are {", ".join(map(str, splits))}.', path=path)
    return renamed


def _write_parquet(rows: Any, path: Path) -> None:
    """Write one split, with the bytes of its images and sounds."""
    parquet = importlib.import_module("pyarrow.parquet")
    table = importlib.import_module("datasets.table")
    with parquet.ParquetWriter(path, rows.features.arrow_schema) as writer:
        for part in rows.with_format("arrow").iter(_ROWS):
            writer.write_table(table.embed_table_storage(part), row_group_size=_ROWS)
