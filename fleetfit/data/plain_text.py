"""Any plain text on disk as next-token data: a .txt file, or a folder of them, each of which is a natural client.

Each file is cut in time: the beginning is for training, the end of that for validation, the rest for testing.
"""

from fleetfit.data._next_tokens import Passages, last_share, next_tokens
from fleetfit.data._windows import Level, Score, check_windows, most_frequent
from fleetfit.data.dataset import Data, Facts
from fleetfit.data.text import found_path
from fleetfit.errors import DataError
from fleetfit.paths import text_of

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
    path = found_path(folder)
    name = path.resolve().stem if path.is_file() else path.resolve().name
    check_windows(name, length, level, score)
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not files:
        raise DataError(f"{name}: {path} is no file and no folder with .txt files in it.")
    groups = []
    for file in files:
        text = text_of(file, DataError)
        kept = len(text) - last_share(len(text), test, name)
        groups.append(Passages([text[:kept]], [text[kept:]]))
    size = _WORDS if vocabulary is None and level == "words" else vocabulary
    known = most_frequent(level, (text for group in groups for text in group.train), size)
    return next_tokens(name, groups, known, length, score, validation)
