"""A vocabulary of word pieces, learned from counted words: always the same one for the same words.

Pieces are merged by frequency as in Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword
Units" (2016), and written as in Schuster and Nakajima, "Japanese and Korean Voice Search" (2012): what does not begin a
word has "##" before it. Words are later cut into the longest pieces, from left to right.

Written here because the trainers of `tokenizers` break ties by a hash table's order, which differs from process to
process, and so do the vocabularies.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise

Pair = tuple[str, str]
INSIDE = "##"


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
