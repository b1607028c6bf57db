"""Any plain text on disk as next-token data: a .txt file, or a folder of them, each of which is a natural client.

Each file is cut in time: the beginning is for training, the end of that for validation, the rest for testing. Running
text becomes windows of tokens, each token with the one that follows it.
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
"""Tab, line feed and the 95 printable characters of ASCII, in that order from token 2 on."""
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]|\n")
FACTS = Facts(train=None, test=None, classes=None, resolution="any", source="a .txt file, or a folder of them")
_WORDS = 10_000


def plain_text(
    folder: str,
    level: Level = "characters",
    length: int = 80,
    score: Score = "all",
    vocabulary: int | None = None,
    validation: float = 0.1,
    test: float = 0.1,
) -> Data:
    """Return text as windows of tokens with what follows each token, [N, length], named after its folder or file.

    The groups are the files, in the order of their paths.

    Args:
        folder: A file, or a folder, of whose .txt files, those in its subfolders included, each is a group; a relative
            path that does not exist is sought in the folder FLEETFIT_DATA.
        level: "characters", or "words" (lower-cased; marks and line ends are words too).
        length: Tokens of a window.
        score: "all": every token of a window predicts the next one, and windows do not overlap. "last": only a
            window's last one, and there is a window for each token; takes `length` times the memory and time.
        vocabulary: Tokens at most: the most frequent ones of the training text, with padding and the unknown one.
            None: every character that occurs in it, or 10,000 words.
        validation: Share of a file's training windows, the last ones, that is held out; rounded down.
        test: Share of a file's characters, the last ones, that is for testing; rounded down.

    Raises:
        DataError: A file is missing or is no text in UTF-8, or a number is out of range.
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
        kept = len(text) - last_share(len(text), test, name, "test")
        groups.append(Passages([text[:kept]], [text[kept:]]))
    size = _WORDS if vocabulary is None and level == "words" else vocabulary
    known = most_frequent(level, (text for group in groups for text in group.train), size)
    return next_tokens(name, groups, known, length, score, validation)


# ---- passages of text, by group --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passages:
    """What one group (a role, a file) has said, in order; no window reaches from one passage into the next.

    Attributes:
        train: For training and, at the end, validation.
        test: For testing.
    """

    train: Sequence[str]
    test: Sequence[str]


def last_share(count: int, share: float, name: str, key: str) -> int:
    """Return how many of so many lines, characters or windows a share at the end is, rounded down.

    Raises:
        DataError: The share is out of range.
    """
    if not 0 <= share < 1:
        raise DataError(f"{name}: {key} must be at least 0 and below 1, got {share}.", key=key)
    return int(count * share + 1e-9)


def next_tokens(
    name: str, groups: Sequence[Passages], vocabulary: "Vocabulary", length: int, score: Score, validation: float
) -> Data:
    """Return windows of tokens with what follows each token; see `windows`.

    Args:
        name: What the data are called.
        groups: What each group has said; its place in this order is the group's number.
        vocabulary: What a token is.
        length: Tokens of a window.
        score: Which positions are scored.
        validation: Share of a group's training windows, the last ones, that is held out, rounded down.

    Raises:
        DataError: There is not a single training window, or a share is out of range.
    """
    parts: dict[str, list[Ints]] = {"x": [], "y": [], "split": [], "group": []}
    for number, passages in enumerate(groups):
        for place, texts in (("train", passages.train), ("test", passages.test)):
            pairs = [windows(tokens, length, score) for tokens in vocabulary.encoded(texts)]
            rows = sum(len(x) for x, _ in pairs)
            where = np.full(rows, SPLITS.index(place))
            if place == "train":
                where[rows - last_share(rows, validation, name, "validation") :] = SPLITS.index("validation")
            parts["x"] += [x for x, _ in pairs]
            parts["y"] += [y for _, y in pairs]
            parts["split"].append(where)
            parts["group"].append(np.full(rows, number))
    of = np.concatenate([np.empty(0, dtype=np.int64), *parts["split"]])
    if not (of == 0).any():
        raise DataError(f"{name}: it has no text to train on; a passage needs two {vocabulary.level} at least.")
    return Data(
        name=name,
        x=torch.from_numpy(np.concatenate(parts["x"])),
        y=torch.from_numpy(np.concatenate(parts["y"])),
        splits={split: torch.from_numpy(np.flatnonzero(of == i)) for i, split in enumerate(SPLITS)},
        classes=len(vocabulary),
        groups=torch.from_numpy(np.concatenate(parts["group"])),
        task="next_token",
        vocabulary=len(vocabulary),
        padding=PADDING,
    )


# ---- tokens and windows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """Characters or words and their tokens: 0 is padding, 1 whatever is not known, the first known one 2.

    Attributes:
        level: What a token is.
        known: Each once.
    """

    level: Level
    known: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.known) + 2

    def encoded(self, texts: Iterable[str]) -> list[Ints]:
        """Return the tokens of each text, int64 [n]."""
        if self.level == "characters":
            return [_looked_up(_codes(text), *self._characters) for text in texts]
        numbers = self._words
        return [np.array([numbers.get(w, UNKNOWN) for w in words_of(text)], dtype=np.int64) for text in texts]

    @functools.cached_property
    def _words(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.known, 2)}

    @functools.cached_property
    def _characters(self) -> tuple[NDArray[np.uint32], Ints]:
        """The known code points in ascending order and their tokens."""
        codes = np.array([ord(character) for character in self.known], dtype=np.uint32)
        order = np.argsort(codes)
        return codes[order], order + 2


def words_of(text: str) -> list[str]:
    """Return the lower-cased words, punctuation marks and line ends of a text."""
    return _WORD.findall(text.lower())


def most_frequent(level: Level, texts: Iterable[str], size: int | None) -> Vocabulary:
    """Return the vocabulary of a text: its most frequent characters or words, first in code points where equal.

    Args:
        level: What a token is.
        texts: The training texts.
        size: Number of tokens at most, padding and the unknown one included; None: every one that occurs.

    Raises:
        DataError: There is no room for a single one.
    """
    if size is not None and size < 3:
        raise DataError(
            f"vocabulary must be at least 3 (padding, the unknown token and one more), got {size}.", key="vocabulary"
        )
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words_of(text) if level == "words" else text)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return Vocabulary(level, tuple(ranked if size is None else ranked[: size - 2]))


def windows(tokens: Ints, length: int, score: Score = "all") -> tuple[Ints, Ints]:
    """Cut running tokens t_0, t_1, ... into windows x and what follows each token in them, y.

    With "all", windows follow each other without a gap or an overlap, x = t_s ... t_{s+L-1} and
    y = t_{s+1} ... t_{s+L} for s = 0, L, 2L, ...; the last one is filled up with padding, and its y with -100. With
    "last" (LEAF's way) there is a window for every token that has L tokens before it (or for the last token, if there
    are fewer), and only y_{L-1} is scored. An unknown token that follows is never scored.

    Args:
        tokens: int64 [n].
        length: L, at least 1.
        score: Which positions of a window are scored.

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
    """Refuse parameters that are out of range.

    Raises:
        DataError: One is.
    """
    for key, value, choices in (("level", level, ("characters", "words")), ("score", score, ("all", "last"))):
        if value not in choices:
            raise DataError(f'{name}: {key} must be "{choices[0]}" or "{choices[1]}", got {value!r}.', key=key)
    if length < 1:
        raise DataError(f"{name}: length must be at least 1 token, got {length}.", key="length")


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def _looked_up(codes: NDArray[np.uint32], known: NDArray[np.uint32], tokens: Ints) -> Ints:
    """Return the token of each code point; `known` is in ascending order."""
    if not len(known):
        return np.full(len(codes), UNKNOWN, dtype=np.int64)
    places = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[places] == codes, tokens[places], UNKNOWN).astype(np.int64)
