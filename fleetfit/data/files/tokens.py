"""Encode texts as tokens, with the tokenizer of a checkpoint or with word pieces learned from the training texts.

The cache holds the tokens and the tokenizer (`tokenizer.json`, which `tokenizers` and `transformers` read), so that a
second load is a memory map. The same texts and parameters give the same tokens in every process.
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
from fleetfit.errors import DataError, FleetFitError, MissingExtra, format_cause, import_optional
from fleetfit.files import parse_path, read_bytes

PAD, UNKNOWN, START, END = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_FORMAT = 1  # raise it if the same texts would give other tokens
_TEXTS = 1000  # encoded at a time
_MAX_TOKENS = 1 << 22  # of a vocabulary
_PADDING = (PAD, "<pad>", "<PAD>", "<|pad|>")  # usual names, for a tokenizer without a configured one
_NUMBERS = ("vocabulary", "padding")
Pair = tuple[str, str]
INSIDE = "##"


@dataclass(frozen=True)
class Texts:
    """Texts that are read only if the cache lacks their tokens.

    Attributes:
        files: Their files.
        key: Other settings of the texts, such as columns, as JSON values.
        read: Reads the texts, [N].
    """

    files: Sequence[Path]
    key: Sequence[object]
    read: Callable[[], list[str]]


def encode_texts(
    name: str,
    texts: Texts,
    train: NDArray[np.int64],
    tokenizer: str | None,
    vocabulary: int,
    length: int,
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Return the tokens of a set's texts, from the cache if possible, and the fields of `Data` that describe them.

    A text begins and ends with the tokenizer's marks ([CLS] and [SEP]), is cut to `length` tokens, marks included, and
    padded to it.

    Args:
        name: The set's name.
        texts: The texts.
        train: The texts for learning word pieces.
        tokenizer: Path of a checkpoint's folder or a `tokenizer.json`; None: learn word pieces.
        vocabulary: Maximal number of word pieces, the four special ones included.
        length: Tokens of each text.

    Returns:
        int64 [N, length], memory-mapped copy-on-write, and vocabulary, padding and tokenizer.

    Raises:
        DataError: A parameter is out of range, or the tokenizer cannot be read.
        MissingExtra: `tokenizers` or, for some checkpoints, `transformers` is not installed.
    """
    if length < 3:
        raise DataError(
            f"{name}: length must be at least 3 tokens, {START}, one of the text and {END}; got {length}.", key="length"
        )
    if vocabulary < 8:
        raise DataError(f"{name}: vocabulary must be at least 8, got {vocabulary}.", key="vocabulary")
    tokenizer_files = [] if tokenizer is None else _list_tokenizer_files(name, parse_path(tokenizer, "tokenizer"))
    key = [*texts.key]
    if tokenizer is None:
        key += [vocabulary, hashlib.sha256(train.tobytes()).hexdigest()]
    # by content, so that runs on the same texts share the tokens of the word pieces that each has a copy of
    key += [[file.name, hashlib.sha256(read_bytes(file, DataError)).hexdigest()] for file in tokenizer_files]
    key = [_FORMAT, _find_version(), length, *key]

    def build(folder: Path) -> None:
        every = texts.read()
        library, padding = (
            (learn_tokenizer([every[i] for i in train], vocabulary), 0)
            if tokenizer is None
            else load_tokenizer(name, parse_path(tokenizer, "tokenizer"), tokenizer_files)
        )
        if padding is None:
            raise DataError(
                f"{name}: the tokenizer in {tokenizer} has no padding token. Set pad_token in tokenizer_config.json.",
                path=tokenizer,
            )
        np.save(folder / "tokens.npy", encode(name, library, every, length, padding))
        library.save(str(folder / "tokenizer.json"))
        size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=0)
        if size > _MAX_TOKENS:
            raise DataError(
                f"{name}: the tokenizer has a token {size - 1}, above the limit of {_MAX_TOKENS:,} tokens.",
                key="tokenizer",
            )
        numbers = json.dumps(dict(zip(_NUMBERS, (size, padding), strict=True)))
        (folder / "tokens.json").write_text(numbers, encoding="utf-8")

    def load(folder: Path) -> tuple[NDArray[np.int64], dict[str, Any]]:
        x = np.load(folder / "tokens.npy", mmap_mode="c")
        facts = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        if x.dtype != np.int64 or x.shape[1:] != (length,):
            raise ValueError(f"{folder} has {x.dtype} {x.shape}")
        return x, {name: int(facts[name]) for name in _NUMBERS} | {"tokenizer": str(folder / "tokenizer.json")}

    return cache.load_folder(cache.make_key(name, texts.files, key), build, load)


def _find_version() -> str:
    """Return the version of `tokenizers` without importing it: cached tokens need no tokenizer."""
    try:
        return importlib.metadata.version("tokenizers")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtra("text", "Reading text") from error


def encode(name: str, tokenizer: Any, texts: Sequence[str], length: int, padding: int) -> NDArray[np.int64]:
    """Return tokens [N, length].

    Raises:
        DataError: The tokenizer fails on a text.
    """
    x = np.full((len(texts), length), padding, dtype=np.int64)
    try:
        tokenizer.no_padding()
        tokenizer.enable_truncation(length)
        for start in range(0, len(texts), _TEXTS):
            encodings = tokenizer.encode_batch_fast(list(texts[start : start + _TEXTS]))
            for row, encoding in enumerate(encodings, start):
                x[row, : len(encoding.ids)] = encoding.ids
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        raise DataError(f"{name}: the tokenizer fails on the texts: {format_cause(error)}") from error
    return x


# ---- tokenizers of checkpoints ---------------------------------------------------------------------------------------


def _list_tokenizer_files(name: str, path: Path) -> list[Path]:
    if path.is_file():
        config = path.with_name("tokenizer_config.json")
        return [path, config] if config.is_file() else [path]
    patterns = ("*token*.json", "vocab*", "merges.txt", "*.model", "config.json")
    files = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
    if not files:
        raise DataError(
            f'{name}: tokenizer = "{path}" must be a tokenizer.json, or the folder of a checkpoint with tokenizer.json '
            "or vocab.txt, but neither exists.",
            path=path,
        )
    return files


def load_tokenizer(name: str, path: Path, files: Sequence[Path] = ()) -> tuple[Any, int | None]:
    """Return the tokenizer of a checkpoint's folder or file, and its padding token, if it is known.

    Raises:
        DataError: It cannot be read.
        MissingExtra: `tokenizers` or, for some checkpoints, `transformers` is not installed.
    """
    file = path if path.is_file() else path / "tokenizer.json"
    try:
        if file.is_file():
            tokenizer = import_optional("tokenizers", "text", "Reading text").Tokenizer.from_file(str(file))
            pad_token = _find_pad_token(files, tokenizer)
        else:
            library = import_optional("transformers", "text", f"Reading the tokenizer in {path}")
            wrapper = library.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            tokenizer, pad_token = wrapper.backend_tokenizer, wrapper.pad_token
    except (FleetFitError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the libraries may raise anything; a Rust panic is not an Exception
        raise DataError(f"{name}: the tokenizer in {path} cannot be read: {format_cause(error)}", path=path) from error
    return tokenizer, None if pad_token is None else tokenizer.token_to_id(pad_token)


def _find_pad_token(files: Sequence[Path], tokenizer: Any) -> str | None:
    """Return the padding token of the configuration, else a usual one of the tokenizer."""
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


def learn_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Learn a lower-casing tokenizer of word pieces from texts.

    Words are split, and accents dropped, as in BERT (Devlin et al., 2019). [PAD] is token 0; [UNK], [CLS] and [SEP]
    follow.

    Args:
        texts: The training texts.
        vocabulary: Maximal number of pieces, the special ones included.
    """
    library = import_optional("tokenizers", "text", "Reading text")
    normalizer = library.normalizers.BertNormalizer(lowercase=True)
    splitter = library.pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    pieces = learn_word_pieces(words, vocabulary - len(SPECIAL))
    numbers = {piece: number for number, piece in enumerate([*SPECIAL, *pieces])}
    model = library.models.WordPiece(numbers, unk_token=UNKNOWN, continuing_subword_prefix=INSIDE)
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.decoder = library.decoders.WordPiece(prefix=INSIDE)
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, numbers[START]), (END, numbers[END])]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def learn_word_pieces(words: Mapping[str, int], size: int) -> list[str]:
    """Return word pieces: single characters, most frequent first, then merged ones in the order of merging.

    The pair of neighboring pieces with the highest count over all words becomes a piece, and so on, until there are
    enough or no pair occurs twice; of equal pairs the first in the order of code points. Single characters take at most
    half of the places; the rarest are left out, and so are the words with them.

    Own code, since the training of `tokenizers` is not deterministic: issue 1794 there, pull request 2066.

    Args:
        words: Count of each word, at least 1.
        size: Maximal number of pieces.
    """
    split_words = [([word[0], *(INSIDE + c for c in word[1:])], count) for word, count in sorted(words.items()) if word]
    singles: Counter[str] = Counter()
    for pieces, count in split_words:
        for piece in pieces:
            singles[piece] += count
    result = dict.fromkeys(sorted(singles, key=lambda piece: (-singles[piece], piece))[: size // 2])
    corpus = [(pieces, count) for pieces, count in split_words if all(piece in result for piece in pieces)]
    pairs: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)  # words with the pair
    for index, (pieces, count) in enumerate(corpus):
        for pair in pairwise(pieces):
            pairs[pair] += count
            places[pair].add(index)
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(queue)
    while queue and len(result) < size:
        count, pair = heapq.heappop(queue)
        if pairs[pair] != -count:
            continue  # outdated by a merge; the current count is in the queue, too
        if -count < 2:
            break
        merged = pair[0] + pair[1].removeprefix(INSIDE)
        result[merged] = None
        for changed in _merge_pair(corpus, pairs, places, pair, merged):
            if pairs[changed] > 0:
                heapq.heappush(queue, (-pairs[changed], changed))
    return list(result)


def _merge_pair(
    corpus: list[tuple[list[str], int]],
    pairs: Counter[Pair],
    places: defaultdict[Pair, set[int]],
    pair: Pair,
    merged: str,
) -> dict[Pair, None]:
    """Replace a pair by one piece in all words; return the pairs whose counts change."""
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
