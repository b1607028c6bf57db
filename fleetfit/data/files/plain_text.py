"""Running text on disk as next-token data: a .txt file, or a folder of them, one per natural client.

Each file is split in order: the beginning for training, with its end for validation, and the rest for testing. Text
becomes windows of tokens, each token with the next one as its label.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fleetfit.data.dataset import NOT_SCORED, Data, Facts
from fleetfit.data.files.folders import list_sample_files, resolve_folder
from fleetfit.data.splits import SPLITS
from fleetfit.errors import DataError
from fleetfit.files import read_text

Ints = NDArray[np.int64]
Level = Literal["characters", "words"]
Score = Literal["all", "last"]

PADDING, UNKNOWN = 0, 1
PRINTABLE = ("\t", "\n", *map(chr, range(32, 127)))
"""Tab, line feed and the 95 printable characters of ASCII, tokens 2 to 98."""
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]|\n")
FACTS = Facts(source="a .txt file, or a folder of them")
_WORDS = 10_000  # of a vocabulary of words, by default


def plain_text(
    folder: str,
    level: Level = "characters",
    length: int = 80,
    score: Score = "all",
    vocabulary: int | None = None,
    validation: float = 0.1,
    test: float = 0.1,
) -> Data:
    """Return text as windows of tokens with the next tokens, [N, length], named after its folder or file.

    The groups are the files, in the order of their paths.

    Args:
        folder: A file, or a folder whose .txt files, including subfolders, are the groups. A relative path that does
            not exist is looked up in the folder FLEETFIT_DATA.
        level: "characters", or "words" (lower-cased; punctuation marks and line ends are words, too).
        length: Tokens of a window.
        score: "all": every token of a window predicts the next one, and windows do not overlap. "last": only the last
            token of a window does, and each token has a window; takes `length` times the memory and time.
        vocabulary: Maximal number of tokens: the most frequent ones of the training text, padding and the unknown token
            included. None: every character of it, or 10,000 words.
        validation: Share of a file's training windows, the last ones, to hold out; rounded down.
        test: Share of a file's characters, the last ones, for testing; rounded down.

    Raises:
        DataError: A file is missing or not UTF-8 text, or a number is out of range.
    """
    path = resolve_folder(folder)
    name = path.resolve().stem if path.is_file() else path.resolve().name
    check_windows(name, length, level, score)
    files = [path] if path.is_file() else list_sample_files(path, "**/*.txt")
    if not files:
        raise DataError(f"{name}: {path} is neither a file nor a folder with .txt files.", path=path)
    groups = []
    for file in files:
        text = read_text(file, DataError)
        end = len(text) - count_share(len(text), test, name, "test")
        groups.append(Passages([text[:end]], [text[end:]]))
    size = _WORDS if vocabulary is None and level == "words" else vocabulary
    tokens = build_vocabulary(level, (text for group in groups for text in group.train), size)
    return make_data(name, groups, tokens, length, score, validation)


# ---- passages of text, by group --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passages:
    """The text of a group (a role, a file), in order. Windows do not cross passages.

    Attributes:
        train: For training and, at the end, validation.
        test: For testing.
    """

    train: Sequence[str]
    test: Sequence[str]


def count_share(count: int, share: float, name: str, key: str) -> int:
    """Return a share of a number of lines, characters or windows, rounded down.

    Raises:
        DataError: The share is out of range.
    """
    if not 0 <= share < 1:
        raise DataError(f"{name}: {key} must be at least 0 and below 1, got {share}.", key=key)
    return int(count * share + 1e-9)


def make_data(
    name: str, groups: Sequence[Passages], vocabulary: "Vocabulary", length: int, score: Score, validation: float
) -> Data:
    """Return the windows of all groups as a data set (see `cut_windows`).

    Args:
        name: The set's name.
        groups: The text of each group; its index is the group's number.
        vocabulary: The tokens.
        length: Tokens of a window.
        score: The positions that are scored.
        validation: Share of a group's training windows, the last ones, to hold out, rounded down.

    Raises:
        DataError: There is no training window, or a share is out of range.
    """
    parts: dict[str, list[Ints]] = {"x": [], "y": [], "split": [], "group": []}
    for number, passages in enumerate(groups):
        for split, texts in (("train", passages.train), ("test", passages.test)):
            pairs = [cut_windows(tokens, length, score) for tokens in vocabulary.encode(texts)]
            rows = sum(len(x) for x, _ in pairs)
            window_splits = np.full(rows, SPLITS.index(split))
            if split == "train":
                window_splits[rows - count_share(rows, validation, name, "validation") :] = SPLITS.index("validation")
            parts["x"] += [x for x, _ in pairs]
            parts["y"] += [y for _, y in pairs]
            parts["split"].append(window_splits)
            parts["group"].append(np.full(rows, number))
    splits = np.concatenate([np.empty(0, dtype=np.int64), *parts["split"]])
    if not (splits == 0).any():
        raise DataError(f"{name} has no text to train on: a passage needs at least two {vocabulary.level}.")
    return Data(
        name=name,
        x=torch.from_numpy(np.concatenate(parts["x"])),
        y=torch.from_numpy(np.concatenate(parts["y"])),
        splits={split: torch.from_numpy(np.flatnonzero(splits == i)) for i, split in enumerate(SPLITS)},
        classes=len(vocabulary),
        groups=torch.from_numpy(np.concatenate(parts["group"])),
        task="next_token",
        vocabulary=len(vocabulary),
        padding=PADDING,
    )


# ---- tokens and windows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """Characters or words as tokens: 0 is padding, 1 the unknown token, 2 the first known one.

    Attributes:
        level: The kind of tokens.
        known: The known characters or words, without duplicates.
    """

    level: Level
    known: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.known) + 2

    def encode(self, texts: Iterable[str]) -> list[Ints]:
        """Return the tokens of each text, int64 [n]."""
        if self.level == "characters":
            return [self._encode_characters(text) for text in texts]
        tokens = self._word_tokens
        return [np.array([tokens.get(w, UNKNOWN) for w in split_words(text)], dtype=np.int64) for text in texts]

    @functools.cached_property
    def _word_tokens(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.known, 2)}

    @functools.cached_property
    def _characters(self) -> tuple[NDArray[np.uint32], Ints]:
        """The known code points in ascending order and their tokens."""
        codes = np.array([ord(character) for character in self.known], dtype=np.uint32)
        order = np.argsort(codes)
        return codes[order], order + 2

    def _encode_characters(self, text: str) -> Ints:
        characters, tokens = self._characters
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        if not len(characters):
            return np.full(len(codes), UNKNOWN, dtype=np.int64)
        indices = np.minimum(np.searchsorted(characters, codes), len(characters) - 1)
        return np.where(characters[indices] == codes, tokens[indices], UNKNOWN).astype(np.int64)


def split_words(text: str) -> list[str]:
    """Return the lower-cased words, punctuation marks and line ends of a text."""
    return _WORD.findall(text.lower())


def build_vocabulary(level: Level, texts: Iterable[str], size: int | None) -> Vocabulary:
    """Return the most frequent characters or words of texts as a vocabulary; ties go to the first.

    Args:
        level: The kind of tokens.
        texts: The training texts.
        size: Maximal number of tokens, including padding and the unknown token; None: all of the texts.

    Raises:
        DataError: The size is below 3.
    """
    if size is not None and size < 3:
        raise DataError(
            f"vocabulary must be at least 3 (padding, the unknown token and one more), got {size}.", key="vocabulary"
        )
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_words(text) if level == "words" else text)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return Vocabulary(level, tuple(ranked if size is None else ranked[: size - 2]))


def cut_windows(tokens: Ints, length: int, score: Score = "all") -> tuple[Ints, Ints]:
    """Cut running tokens t_0, t_1, ... into windows x and the next tokens y.

    With "all", windows follow each other without a gap or an overlap, x = t_s ... t_{s+L-1} and
    y = t_{s+1} ... t_{s+L} for s = 0, L, 2L, ...; the last one is padded, and its y with -100. With "last" (as in LEAF)
    every token with L tokens before it has a window (or the last token, if there are fewer), and only y_{L-1} is
    scored. An unknown token that follows is never scored.

    Args:
        tokens: int64 [n].
        length: L, at least 1.
        score: The positions of a window that are scored.

    Returns:
        x and y, int64 [windows, L]; none if there are fewer than two tokens.
    """
    pairs = len(tokens) - 1
    if pairs < 1:
        return np.empty((0, length), dtype=np.int64), np.empty((0, length), dtype=np.int64)
    following = np.where(tokens[1:] == UNKNOWN, NOT_SCORED, tokens[1:])
    if score == "last" and pairs >= length:
        x = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length).copy()
        y = np.full_like(x, NOT_SCORED)
        y[:, -1] = following[length - 1 :]
        return x, y
    rows = -(-pairs // length)
    x = np.full(rows * length, PADDING, dtype=np.int64)
    y = np.full(rows * length, NOT_SCORED, dtype=np.int64)
    x[:pairs] = tokens[:-1]
    if score == "last":
        y[pairs - 1] = following[-1]
    else:
        y[:pairs] = following
    return x.reshape(rows, length), y.reshape(rows, length)


def check_windows(name: str, length: int, level: str, score: str) -> None:
    """Check the parameters of windows.

    Raises:
        DataError: A parameter is out of range.
    """
    for key, value, choices in (("level", level, ("characters", "words")), ("score", score, ("all", "last"))):
        if value not in choices:
            raise DataError(f'{name}: {key} must be "{choices[0]}" or "{choices[1]}", got {value!r}.', key=key)
    if length < 1:
        raise DataError(f"{name}: length must be at least 1 token, got {length}.", key="length")
