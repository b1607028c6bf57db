"""Speech Commands: a second of one of 35 spoken words, by speaker, as log-mel pictures.

Warden, "Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition" (2018). Each speaker is a natural group,
so that `partition = { kind = "natural", clients = 250 }` draws 250 speakers as clients; with `division = "speakers"`
each of them has test data of its own, as in Lee et al., "Recurrent Early Exits for Federated Learning with
Heterogeneous Clients" (2024), section 5.1, and the works that it follows.

Differs from the paper: all 35 words are classes of their own, without "unknown" and "silence"; the background noise is
neither mixed in nor a class.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fleetfit.data import cache
from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files import parquet
from fleetfit.data.files.folders import (
    find_or_download,
    find_parquet_files,
    find_set_folder,
    is_system_name,
    list_class_folders,
    resolve_folder,
)
from fleetfit.data.files.sounds import Sound, Spectrogram
from fleetfit.data.image_reader import Origin
from fleetfit.data.splits import fill_missing_splits
from fleetfit.errors import DataError
from fleetfit.files import read_bytes, read_text

FACTS = Facts(
    train=94_824,
    test=11_005,
    classes=35,
    resolution="64x101",
    source="Warden (2018), version 0.02; 9,981 of the training sounds are the official validation set",
)
HUB = ("google/speech_commands", "v0.02", "refs/convert/parquet")
_LISTS = {"validation": "validation_list.txt", "test": "testing_list.txt"}
_ENDINGS = (".wav", ".flac")
_RATE = 16_000


def speech_commands(
    folder: str | None = None,
    division: Literal["official", "speakers"] = "official",
    mels: int = 64,
    window_ms: float = 25.0,
    hop_ms: float = 10.0,
    validation: float = 0.1,
    test: float = 0.2,
    augment: str | None = None,
    seed: int = 0,
    resize: int | None = None,
    hub: bool = False,
) -> Data:
    """Return Speech Commands as pictures [N, 1, mels, frames], groups = speakers.

    The folder is the unpacked archive (a folder of wav or FLAC files for each word, `validation_list.txt` and
    `testing_list.txt`; the speaker is a file's name up to `_nohash_`), or holds Parquet files with the columns audio,
    label and speaker_id. Folders and labels that begin with "_" are left out. See `fleetfit.data.files.sounds` for what
    a picture is; it is uint8, kept in the cache.

    Args:
        folder: The folder with its files or the one above; a relative path that does not exist is sought in the folder
            FLEETFIT_DATA. None: FLEETFIT_DATA names the one above.
        division: "official": the lists or files, in which no speaker is in two splits; or "speakers": every speaker
            gives up shares of its sounds, so that each can be tested on its own.
        mels: Bands, the height of a picture.
        window_ms: Length of a window in milliseconds.
        hop_ms: From one window to the next in milliseconds.
        validation: Share of each speaker's training sounds that is held out, where nothing else says.
        test: Share of each speaker's sounds that is the test set, where nothing else says.
        augment: What training batches go through, such as "crop", which moves them in time and pitch; None: nothing.
        seed: Of what is held out.
        resize: Side in pixels to which batches are brought, after augmentation; None: they stay as they are.
        hub: Whether the set is downloaded from the Hugging Face hub where it is not on disk.

    Raises:
        DataError: The files are missing or wrong, or a parameter is out of range.
        MissingExtra: soundfile or pyarrow is not installed, or `datasets` is not and the set has to be downloaded.
    """
    if division not in ("official", "speakers"):
        raise DataError(f'division must be "official" or "speakers", got {division!r}.', key="division")
    if resize is not None and resize < 1:
        raise DataError(f"speech_commands: resize must be at least 1 pixel, got {resize}.", key="resize")
    form = Spectrogram(_RATE, _RATE, mels, round(window_ms * _RATE / 1000), round(hop_ms * _RATE / 1000))
    given = None if folder is None else str(resolve_folder(folder))
    place = find_or_download("speech_commands", given, hub, *HUB, find=_look)
    top = find_set_folder("speech_commands", place)
    found = _of_folder(top) if top is not None and _words(top) else _of_parquet(place)
    rows = len(found.y)
    if not rows:
        raise DataError(f"speech_commands: no sounds in {place or 'the folder'}.", path=place)
    parameters = [rows, mels, form.window, form.hop]
    key = cache.make_key("speech_commands", found.files, parameters)
    x = cache.load_array(key, rows, lambda new: _filled(new, form, found))
    sizes = found.sizes if division == "official" else {"train": rows}
    splits = fill_missing_splits(sizes, found.speakers, validation, test, seed)
    return Data(
        name="speech_commands",
        x=torch.from_numpy(x),
        y=torch.from_numpy(found.y),
        splits={split: torch.from_numpy(indices) for split, indices in splits.items()},
        classes=len(found.words),
        groups=torch.from_numpy(found.speakers),
        class_names=found.words,
        mean=(0.39,),
        std=(0.18,),
        augment=augment,
        resize=None if resize is None else (resize, resize),
    )


@dataclass(frozen=True)
class _OnDisk:
    """What is on disk, one split after the other: labels, speakers, words, rows by split, files, sounds."""

    y: NDArray[np.int64]
    speakers: NDArray[np.int64]
    words: tuple[str, ...]
    sizes: dict[str, int]
    files: list[Path]
    sounds: Iterator[Sound]


def _filled(new: cache.Allocate, form: Spectrogram, found: _OnDisk) -> cache.Array:
    out = new((len(found.y), 1, form.mels, form.frames))
    form.fill(out, found.sounds)
    return out


def _look(name: str, folder: str | None) -> None:
    """Raise where the set is not there."""
    place = find_set_folder(name, folder)
    if place is None or not _words(place):
        find_parquet_files(name, folder)


def _words(folder: Path) -> list[str]:
    """Return the folders of words in a folder, sorted."""
    places = (place for place in list_class_folders(folder) if not place.name.startswith("_"))
    return [place.name for place in places if any(map(_is_sound, place.iterdir()))]


def _is_sound(file: Path) -> bool:
    return file.suffix.lower() in _ENDINGS and not is_system_name(file.name)


def _of_folder(folder: Path) -> _OnDisk:
    words = _words(folder)
    split_of = {}
    for split, name in _LISTS.items():
        if (folder / name).is_file():
            lines = read_text(folder / name, DataError).split()
            split_of.update({line.rpartition(".")[0]: split for line in lines})
    found = [
        (split_of.get(f"{word}/{file.stem}", "train"), label, file)
        for label, word in enumerate(words)
        for file in sorted(filter(_is_sound, (folder / word).iterdir()))
    ]
    order = ("train", "validation", "test")
    found.sort(key=lambda one: order.index(one[0]))
    sizes = {split: sum(one[0] == split for one in found) for split in order}
    files = [file for _, _, file in found]
    return _OnDisk(
        y=np.array([label for _, label, _ in found], dtype=np.int64),
        speakers=parquet.numbered(np.array([file.stem.partition("_nohash_")[0] for file in files]))[0],
        words=tuple(words),
        sizes={split: size for split, size in sizes.items() if size},
        files=files,
        sounds=((functools.partial(read_bytes, file, DataError), Origin(file)) for file in files),
    )


def _of_parquet(folder: str | None) -> _OnDisk:
    there = find_parquet_files("speech_commands", folder)
    files = [parquet.File(path) for paths in there.values() for path in paths]
    audio, label = files[0].column(None, ("audio",), "audio"), files[0].column(None, ("label",), "label")
    y, _, words = parquet.labels_of(files, label)
    used = np.array([not name.startswith("_") for name in words])[y] if words else np.ones(len(y), dtype=bool)
    kept_words = np.unique(y[used]) if not used.all() else np.arange(max(len(words), int(y.max(initial=0)) + 1))
    speakers = parquet.values_of(files, "speaker_id", missing="")[used]
    sizes, start = {}, 0
    for split, paths in there.items():
        rows = sum(file.rows for file in files if file.path in paths)
        sizes[split] = int(used[start : start + rows].sum())
        start += rows
    return _OnDisk(
        y=np.searchsorted(kept_words, y[used]).astype(np.int64),
        speakers=parquet.numbered(speakers)[0],
        words=tuple(words[i] if words else str(i) for i in kept_words),
        sizes={split: size for split, size in sizes.items() if size},
        files=[file.path for file in files],
        sounds=_rows(files, audio, used),
    )


def _rows(files: list[parquet.File], column: str, used: NDArray[np.bool_]) -> Iterator[Sound]:
    at = 0
    for file in files:
        row = 0
        for contents in file.images(column, "sound"):
            for content in contents:
                if used[at]:
                    yield functools.partial(bytes, content), file.place(row)
                row, at = row + 1, at + 1
