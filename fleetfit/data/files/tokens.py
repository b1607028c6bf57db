"""Texts become tokens: by the tokeniser of a checkpoint, or by word pieces learned from the training texts.

Both are kept in the cache, the tokens and the tokeniser (`tokenizer.json`, which `tokenizers` and `transformers` read),
so that a second load is a memory map. The same texts and parameters give the same tokens in every process.
"""

import hashlib
import heapq
import importlib.metadata
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetfit.data import cache
from fleetfit.data.cache import load_folder
from fleetfit.errors import DataError, FleetFitError, MissingExtra, format_cause, import_optional
from fleetfit.files import parse_path

PAD, UNKNOWN, START, END = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_FORMAT = 1  # raise it when the same texts would give other tokens
_TEXTS = 1000  # encoded at a time
_MOST_TOKENS = 1 << 22  # of a vocabulary
_PADDING = (PAD, "<pad>", "<PAD>", "<|pad|>")  # where a tokeniser does not say
Pair = tuple[str, str]
INSIDE = "##"


@dataclass(frozen=True)
class Tokens:
    """Encoded texts.

    Attributes:
        x: int64 [N, L], memory-mapped copy-on-write.
        vocabulary: Tokens are below it.
        padding: The token that fills short texts.
        tokenizer: The file of the tokeniser that made them, in the cache.
    """

    x: NDArray[np.int64]
    vocabulary: int
    padding: int
    tokenizer: str


def encoded(
    name: str,
    files: Sequence[Path],
    marks: Sequence[object],
    texts: Callable[[], Sequence[str]],
    train: NDArray[np.int64],
    tokenizer: str | None,
    vocabulary: int,
    length: int,
) -> Tokens:
    """Return the tokens of a set's texts, from the cache if they are there.

    A text begins and ends as the tokeniser has it ([CLS] and [SEP]), is cut to `length` tokens, those two included, and
    filled up to it.

    Args:
        name: The set's name.
        files: Where the texts are read from.
        marks: What else decides about the texts, such as their columns.
        texts: Reads them.
        train: The texts that word pieces are learned from.
        tokenizer: Path of a checkpoint's folder or a `tokenizer.json`; None: word pieces are learned.
        vocabulary: Number of word pieces at most, the four special ones included.
        length: Tokens of each text.

    Raises:
        DataError: A parameter is out of range, or the tokeniser cannot be read.
        MissingExtra: `tokenizers` or, for some checkpoints, `transformers` is not installed.
    """
    if length < 3:
        raise DataError(
            f"{name}: length must be at least 3 tokens, {START}, one of the text and {END}; got {length}.", key="length"
        )
    if vocabulary < 8:
        raise DataError(f"{name}: vocabulary must be at least 8, got {vocabulary}.", key="vocabulary")
    own = [] if tokenizer is None else _files_of(name, parse_path(tokenizer, "tokenizer"))
    if tokenizer is None:
        marks = [*marks, vocabulary, hashlib.sha256(train.tobytes()).hexdigest()]
    marks = [_FORMAT, _version(), length, *marks]

    def build(folder: Path) -> None:
        every = texts()
        if tokenizer is None:
            chosen, padding = learned([every[i] for i in train], vocabulary), 0
        else:
            chosen, padding = _theirs(name, parse_path(tokenizer, "tokenizer"), own)
        x = _encoded(name, chosen, every, length, padding)
        np.save(folder / "tokens.npy", x)
        chosen.save(str(folder / "tokenizer.json"))
        size = 1 + max(chosen.get_vocab(with_added_tokens=True).values(), default=0)
        if size > _MOST_TOKENS:
            raise DataError(
                f"{name}: the tokeniser has a token {size - 1}, above the {_MOST_TOKENS:,} that there may be.",
                key="tokenizer",
            )
        (folder / "tokens.json").write_text(json.dumps({"vocabulary": size, "padding": padding}), encoding="utf-8")

    def load(folder: Path) -> Tokens:
        x = np.load(folder / "tokens.npy", mmap_mode="c")
        facts = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        if x.dtype != np.int64 or x.shape[1:] != (length,):
            raise ValueError(f"{folder} holds {x.dtype} {x.shape}")
        return Tokens(x, int(facts["vocabulary"]), int(facts["padding"]), str(folder / "tokenizer.json"))

    return load_folder(cache.make_key(name, [*files, *own], marks, suffix=""), build, load)


def _version() -> str:
    """Return the version of `tokenizers`, without importing it: tokens that are kept need no tokeniser."""
    try:
        return importlib.metadata.version("tokenizers")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtra("text", "Reading text") from error


def learned(texts: Sequence[str], vocabulary: int) -> Any:
    """Return a lower-casing tokeniser of word pieces that are learned from texts.

    Words are split, and accents dropped, as BERT does (Devlin et al., 2019). [PAD] is token 0; [UNK], [CLS] and [SEP]
    follow.

    Args:
        texts: The training texts.
        vocabulary: Number of pieces at most, the special ones included.
    """
    library = import_optional("tokenizers", "text", "Reading text")
    normal = library.normalizers.BertNormalizer(lowercase=True)
    divided = library.pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in divided.pre_tokenize_str(normal.normalize_str(text)))
    pieces = word_pieces(words, vocabulary - len(SPECIAL))
    numbers = {piece: number for number, piece in enumerate([*SPECIAL, *pieces])}
    model = library.models.WordPiece(numbers, unk_token=UNKNOWN, continuing_subword_prefix=INSIDE)
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normal, divided
    tokenizer.decoder = library.decoders.WordPiece(prefix=INSIDE)
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, numbers[START]), (END, numbers[END])]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _encoded(name: str, tokenizer: Any, texts: Sequence[str], length: int, padding: int) -> NDArray[np.int64]:
    """Return tokens [N, length].

    Raises:
        DataError: The tokeniser cannot cope with a text.
    """
    try:
        return _encode(tokenizer, texts, length, padding)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # as above
        raise DataError(f"{name}: the tokeniser fails on the texts: {format_cause(error)}") from error


def _encode(tokenizer: Any, texts: Sequence[str], length: int, padding: int) -> NDArray[np.int64]:
    """Return tokens [N, length]."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    x = np.full((len(texts), length), padding, dtype=np.int64)
    for start in range(0, len(texts), _TEXTS):
        for row, found in enumerate(tokenizer.encode_batch_fast(list(texts[start : start + _TEXTS])), start):
            x[row, : len(found.ids)] = found.ids
    return x


# ---- tokenisers of others ----------------------------------------------------------------------------------------


def _files_of(name: str, path: Path) -> list[Path]:
    """Return the files that a tokeniser is made of."""
    if path.is_file():
        beside = path.with_name("tokenizer_config.json")
        return [path, beside] if beside.is_file() else [path]
    patterns = ("*token*.json", "vocab*", "merges.txt", "*.model", "config.json")
    found = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
    if not found:
        raise DataError(
            f'{name}: tokenizer = "{path}" must be a tokenizer.json, or the folder of a checkpoint with tokenizer.json '
            "or vocab.txt in it; neither is there.",
            path=path,
        )
    return found


def _theirs(name: str, path: Path, files: Sequence[Path]) -> tuple[Any, int]:
    """Return a checkpoint's tokeniser and its padding token."""
    whole = path if path.is_file() else path / "tokenizer.json"
    try:
        if whole.is_file():
            tokenizer = import_optional("tokenizers", "text", "Reading text").Tokenizer.from_file(str(whole))
            wanted = _padding_of(files, tokenizer)
        else:
            library = import_optional("transformers", "text", f"Reading the tokeniser in {path}")
            both = library.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            tokenizer, wanted = both.backend_tokenizer, both.pad_token
    except FleetFitError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the libraries raise whatever they come across; a panic in Rust is no Exception
        raise DataError(f"{name}: the tokeniser in {path} cannot be read: {format_cause(error)}", path=path) from error
    padding = None if wanted is None else tokenizer.token_to_id(wanted)
    if padding is None:
        raise DataError(
            f"{name}: the tokeniser in {path} has no padding token; name one as pad_token in tokenizer_config.json.",
            path=path,
        )
    return tokenizer, padding


def _padding_of(files: Sequence[Path], tokenizer: Any) -> str | None:
    """Return the padding token that a configuration names, else a usual one that the tokeniser has."""
    for file in files:
        if file.name == "tokenizer_config.json":
            token = json.loads(file.read_text(encoding="utf-8")).get("pad_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                return str(token)
    if tokenizer.padding is not None:
        return str(tokenizer.padding["pad_token"])
    return next((token for token in _PADDING if tokenizer.token_to_id(token) is not None), None)


# ---- word pieces -----------------------------------------------------------------------------------------------------


def word_pieces(words: Mapping[str, int], size: int) -> list[str]:
    """Return word pieces: single characters, most frequent first, then merged ones in the order of merging.

    The pair of neighbouring pieces with the highest count over all words becomes a piece, and so on, until there are
    enough or no pair occurs twice; of equal pairs the first in the order of code points. Single characters take at most
    half of the places, the rarest are left out, and so are the words that have them.

    Args:
        words: How often each word occurs, at least once.
        size: Number of pieces at most.
    """
    split = [(_characters(word), count) for word, count in sorted(words.items()) if word]
    singles: Counter[str] = Counter()
    for pieces, count in split:
        for piece in pieces:
            singles[piece] += count
    found = dict.fromkeys(sorted(singles, key=lambda piece: (-singles[piece], piece))[: size // 2])
    corpus = [(pieces, count) for pieces, count in split if all(piece in found for piece in pieces)]
    pairs, places = _counted(corpus)
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(queue)
    while queue and len(found) < size:
        count, pair = heapq.heappop(queue)
        if pairs[pair] != -count:
            continue  # merges have used some of them up since; the right count is in the queue too
        if -count < 2:
            break
        merged = pair[0] + pair[1].removeprefix(INSIDE)
        found[merged] = None
        for changed in _merge(corpus, pairs, places, pair, merged):
            if pairs[changed] > 0:
                heapq.heappush(queue, (-pairs[changed], changed))
    return list(found)


def _characters(word: str) -> list[str]:
    return [word[0], *(INSIDE + character for character in word[1:])]


def _counted(corpus: list[tuple[list[str], int]]) -> tuple[Counter[Pair], defaultdict[Pair, set[int]]]:
    """Return how often each pair of neighbours occurs, and in which words."""
    pairs: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, (pieces, count) in enumerate(corpus):
        for pair in pairwise(pieces):
            pairs[pair] += count
            places[pair].add(index)
    return pairs, places


def _merge(
    corpus: list[tuple[list[str], int]],
    pairs: Counter[Pair],
    places: defaultdict[Pair, set[int]],
    pair: Pair,
    merged: str,
) -> dict[Pair, None]:
    """Replace a pair by one piece wherever it occurs; return the pairs whose counts have changed."""
    changed: dict[Pair, None] = {}
    for index in sorted(places.pop(pair)):
        pieces, count = corpus[index]
        for old in pairwise(pieces):
            pairs[old] -= count
            changed[old] = None
        at = 0
        while at < len(pieces) - 1:
            if (pieces[at], pieces[at + 1]) == pair:
                pieces[at : at + 2] = [merged]
            at += 1
        for new in pairwise(pieces):
            pairs[new] += count
            places[new].add(index)
            changed[new] = None
    return changed
