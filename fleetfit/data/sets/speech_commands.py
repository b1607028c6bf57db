"""Speech Commands: one of 35 spoken words in a second of sound, by speaker, as log-mel spectrograms.

Warden, "Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition" (2018). Each speaker is a natural group,
so that `partition = { kind = "natural", clients = 250 }` draws 250 speakers as clients; with `division = "speakers"`
each of them has test data of its own, as in Lee et al., "Recurrent Early Exits for Federated Learning with
Heterogeneous Clients" (2024), section 5.1, and the works that it follows.

Differs from the paper: all 35 words are classes, without "unknown" and "silence"; the background noise is neither mixed
in nor a class.
"""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files import parquet
from fleetfit.data.files.folders import (
    find_or_download,
    find_parquet_files,
    find_set_folder,
    is_system_name,
    list_folder,
    resolve_folder,
)
from fleetfit.data.files.sounds import Spectrogram, iter_files, iter_rows, load_spectrograms
from fleetfit.data.rows import Rows
from fleetfit.data.splits import SPLITS
from fleetfit.errors import DataError
from fleetfit.files import read_text

FACTS = Facts(
    train=94_824,
    test=11_005,
    classes=35,
    resolution="64x101",
    source="Warden (2018), version 0.02; 9,981 of the training sounds are the official validation set",
)
HUB = ("google/speech_commands", "v0.02", "refs/convert/parquet")
_LISTS = {"validation": "validation_list.txt", "test": "testing_list.txt"}
_SUFFIXES = (".wav", ".flac")
_RATE = 16_000


def speech_commands(
    folder: str | None = None,
    division: Literal["official", "speakers"] = "official",
    n_mels: int = 64,
    window_ms: float = 25.0,
    hop_ms: float = 10.0,
    validation: float = 0.1,
    test: float = 0.2,
    augment: str | None = None,
    seed: int = 0,
    resize: int | None = None,
    hub: bool = False,
) -> Data:
    """Return Speech Commands as spectrograms [N, 1, mels, frames], groups = speakers.

    The folder is the unpacked archive (a folder of wav or FLAC files for each word, `validation_list.txt` and
    `testing_list.txt`; the speaker is a file's name up to `_nohash_`), or has Parquet files with the columns audio,
    label and speaker_id. Folders and labels that begin with "_" are left out. The spectrograms (see
    `fleetfit.data.files.sounds`) are uint8 and stored in the cache.

    Args:
        folder: The folder with its files or the one above; a relative path that does not exist is searched for in the
            folder FLEETFIT_DATA. None: in the folder FLEETFIT_DATA.
        division: "official": the lists or files, in which no speaker is in two splits; or "speakers": shares of every
            speaker's sounds are held out, so that each can be tested on its own.
        n_mels: Bands, the height of a spectrogram.
        window_ms: Length of a window in milliseconds.
        hop_ms: Milliseconds from one window to the next.
        validation: Share of each speaker's training sounds to hold out, if there is no validation set.
        test: Share of each speaker's sounds to hold out as the test set, if there is none.
        augment: Augmentation of training batches, such as "crop", which moves them in time and pitch; None: nothing.
        seed: Seed of the held out samples.
        resize: Side in pixels to which batches are resized after augmentation; None: no resizing.
        hub: Whether to download the set from the Hugging Face hub if it is not on disk.

    Raises:
        DataError: The files are missing or wrong, or a parameter is out of range.
        MissingExtra: soundfile is not installed, or `datasets` is not and the set has to be downloaded.
    """
    if division not in ("official", "speakers"):
        raise DataError(f'division must be "official" or "speakers", got {division!r}.', key="division")
    spectrogram = Spectrogram(_RATE, _RATE, n_mels, round(window_ms * _RATE / 1000), round(hop_ms * _RATE / 1000))
    if folder is not None:
        folder = str(resolve_folder(folder))
    folder = find_or_download(
        "speech_commands", folder, hub, *HUB, find=lambda *place: _list_words(place[1]) or find_parquet_files(*place)
    )
    words = _list_words(folder)
    sounds = _read_archive(words) if words else _read_parquet(folder)
    (files, contents), rows = sounds.x, len(sounds.y)
    if not rows:
        raise DataError(f"speech_commands: no sounds in {folder or 'the folder'}.", path=folder)

    if division == "speakers":
        sounds = replace(sounds, sizes={"train": rows})
    return sounds.make_data(
        "speech_commands",
        load_spectrograms("speech_commands", files, rows, contents, spectrogram),
        sounds.divide("speech_commands", validation, test, seed),
        mean=(0.39,),
        std=(0.18,),
        augment=augment,
        resize=resize,
    )


def _list_words(folder: str | None) -> list[Path]:
    """Return the folders of words, sorted; none without the unpacked archive."""
    archive = find_set_folder("speech_commands", folder)
    words = [] if archive is None else [path for path in list_folder(archive)[0] if not path.name.startswith("_")]
    return [path for path in words if any(map(_is_sound, path.iterdir()))]


def _is_sound(file: Path) -> bool:
    return file.suffix.lower() in _SUFFIXES and not is_system_name(file.name)


def _read_archive(words: list[Path]) -> Rows:
    split_names = {}
    for split, name in _LISTS.items():
        if (file := words[0].parent / name).is_file():
            lines = read_text(file, DataError).split()
            split_names.update({line.rpartition(".")[0]: split for line in lines})
    rows = [
        (split_names.get(f"{word.name}/{file.stem}", "train"), label, file)
        for label, word in enumerate(words)
        for file in sorted(filter(_is_sound, word.iterdir()))
    ]
    rows.sort(key=lambda row: SPLITS.index(row[0]))
    counts = Counter(split for split, _, _ in rows)
    files = [file for _, _, file in rows]
    return Rows(
        x=(files, iter_files(files)),
        y=np.array([label for _, label, _ in rows], dtype=np.int64),
        sizes={split: counts[split] for split in SPLITS if counts[split]},
        classes=len(words),
        class_names=tuple(word.name for word in words),
        groups=parquet.encode_values(np.array([file.stem.partition("_nohash_")[0] for file in files]))[0],
    )


def _read_parquet(folder: str | None) -> Rows:
    paths = find_parquet_files("speech_commands", folder)
    files = [parquet.File(path) for split_paths in paths.values() for path in split_paths]
    audio, label = files[0].column(None, ("audio",), "audio"), files[0].column(None, ("label",), "label")
    y, _, words = parquet.read_labels(files, label)
    is_word = np.array([not name.startswith("_") for name in words])[y] if words else np.ones(len(y), dtype=bool)
    classes = np.unique(y[is_word]) if not is_word.all() else np.arange(max(len(words), int(y.max(initial=0)) + 1))
    speakers = parquet.read_values(files, "speaker_id", missing="")[is_word]
    sizes, start = {}, 0
    for split, split_paths in paths.items():
        rows = sum(file.rows for file in files if file.path in split_paths)
        sizes[split] = int(is_word[start : start + rows].sum())
        start += rows
    return Rows(
        x=([file.path for file in files], itertools.compress(iter_rows(files, audio), is_word)),
        y=np.searchsorted(classes, y[is_word]).astype(np.int64),
        sizes={split: size for split, size in sizes.items() if size},
        classes=len(classes),
        class_names=tuple(words[i] if words else str(i) for i in classes),
        groups=parquet.encode_values(speakers)[0],
    )
