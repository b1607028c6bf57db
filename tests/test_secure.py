"""Secure aggregation as pure code: sums against brute force with losses in each phase, refusals, lies, masks.

The members here are of three kinds, whose "sub-models" are the first 5, 9 or 14 elements of a vector, in the words
"05", "09" and "14". So the blocks are elements 0 to 4 (all three: bits 0, 1, 2), 5 to 8 (bits 1, 2) and 9 to 13 (bit
2).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support import Expected, raises

from fleetfit.errors import RunError
from fleetfit.secure import (
    BlockSum,
    Identity,
    Journal,
    Keys,
    MaskedUpdate,
    OpenedShares,
    Quantizer,
    Roster,
    SealedShares,
    SecureClient,
    SecureRules,
    SecureServer,
    SentDigests,
    Shares,
    Signatures,
    Signer,
    Survivors,
    digest,
    keys as primitives,
    make_identity,
    pack_message,
    read_message,
)
from fleetfit.secure.client import derive_own_key, derive_pair_key
from fleetfit.secure.messages import encode_survivors
from fleetfit.secure.shamir import join, split

RUN, ROUND = "a run", 4
GRID = Quantizer(1.0, 20)
SIZES = ("05", "09", "14")
ALL, TWO, ONE = 0b111, 0b110, 0b100
PLACES = {ALL: range(5), TWO: range(5, 9), ONE: range(9, 14)}
STATES = {block: digest("state", block) for block in range(1, 8)}
SENT = SentDigests(b"terms", {block: STATES[block] for block in PLACES})
PHASES = ("shares", "upload", "sign", "unmask")


def sent_to(piece: str, blocks: Mapping[int, range], terms: bytes = SENT.terms, **states: bytes) -> SentDigests:
    """Return what a client was sent: the states of its own blocks only."""
    mine = {block: STATES[block] for block, places in blocks.items() if places[0] < int(piece)}
    return SentDigests(terms, mine | {int(block[1:]): state for block, state in states.items()})


def lengths(pieces: Sequence[str]) -> dict[int, int]:
    """Return the blocks of vectors that begin alike, by counting for each element who has it."""
    blocks: dict[int, int] = {}
    for element in range(max(map(int, pieces))):
        block = sum(1 << p for p, piece in enumerate(pieces) if element < int(piece))
        blocks[block] = blocks.get(block, 0) + 1
    return blocks


def cohort_of(*counts: int) -> dict[int, str]:
    """Return so many clients of each size, with numbers that are not in the order of the sizes."""
    pieces = [piece for piece, count in zip(SIZES, counts, strict=True) for _ in range(count)]
    return {3 + 20 * (place * 5 % len(pieces)) + place: piece for place, piece in enumerate(pieces)}


def words_of(client: int, piece: str) -> np.ndarray:
    return np.random.default_rng(client).integers(-GRID.most, GRID.most + 1, int(piece))


def in_blocks(words: np.ndarray, blocks: Mapping[int, range] = PLACES) -> dict[int, np.ndarray]:
    parts = {block: words[list(places)] for block, places in blocks.items() if places[0] < len(words)}
    return {block: part.astype(np.int32).view(np.uint32) for block, part in parts.items()}


Change = Callable[[Any], Any]


@dataclass
class Play:
    """A round between real members and a server, in which what travels may be changed.

    Attributes:
        cohort: The sub-model of each client.
        gone: Who goes away before its shares, its upload, its answer at unmasking.
        lies: What becomes of a message: by its name, or its name and the client that gets or sends it.
        words: What each client adds; random numbers of the whole range by default.
        sent: What single clients were sent instead: arguments of `sent_to`.
    """

    cohort: Mapping[int, str]
    gone: Mapping[str, Sequence[int]] = field(default_factory=dict)
    lies: Mapping[Any, Change] = field(default_factory=dict)
    words: Mapping[int, np.ndarray] = field(default_factory=dict)
    sent: Mapping[int, Mapping[str, bytes]] = field(default_factory=dict)
    rules: SecureRules = field(default_factory=lambda: SecureRules(2, 0.6))
    minimum: int = 2
    blocks: Mapping[int, range] = field(default_factory=lambda: PLACES)

    def __post_init__(self) -> None:
        self.authority = Signer()
        self.identities = {c: make_identity(self.authority) for c in self.cohort}
        self.journals = {c: Journal() for c in self.cohort}
        self.clients = {c: self.client(c) for c in self.cohort}
        self.server = SecureServer(RUN, ROUND, self.rules, lengths)
        self.uploads: dict[int, MaskedUpdate] = {}

    def client(self, number: int) -> SecureClient:
        identity = self.identities[number]
        return SecureClient(number, identity, self.authority.public, self.minimum, lengths, self.journals[number])

    def lie_about(self, name: str, client: int, message: Any) -> Any:
        for key in (name, (name, client)):
            message = self.lies[key](message) if key in self.lies else message
        return message

    def here(self, phase: str) -> list[int]:
        gone = [c for p in PHASES[: PHASES.index(phase) + 1] for c in self.gone.get(p, ())]
        return [c for c in self.cohort if c not in gone]

    def keys(self) -> Roster:
        for number, client in self.clients.items():
            self.server.enrol(self.lie_about("keys", number, client.begin(RUN, ROUND, self.cohort[number])))
        return self.server.make_roster()

    def shares(self, roster: Roster) -> dict[int, SealedShares]:
        for number in self.here("shares"):
            self.server.add_shares(
                self.lie_about("shares", number, self.clients[number].share(self.lie_about("roster", number, roster)))
            )
        return self.server.deal()

    def upload(self, dealt: Mapping[int, SealedShares]) -> Survivors:
        for number in self.here("upload"):
            words = self.words.get(number, words_of(number, self.cohort[number]))
            sent = sent_to(self.cohort[number], self.blocks, **self.sent.get(number, {}))
            sealed = self.lie_about("dealt", number, dealt[number])
            upload = self.uploads[number] = self.clients[number].mask(sealed, in_blocks(words, self.blocks), sent)
            self.server.add(self.lie_about("masked", number, upload))
        return self.server.find_survivors()

    def unmask(self, survivors: Survivors) -> list[BlockSum]:
        for number in self.here("sign"):
            signed = self.clients[number].sign(self.lie_about("survivors", number, survivors))
            self.server.add_signature(self.lie_about("signed", number, signed))
        agreed = self.server.collect_signatures()
        for number in self.here("unmask"):
            opened = self.clients[number].unmask(self.lie_about("agreed", number, agreed))
            self.server.add_opened(self.lie_about("opened", number, opened))
        return self.server.compute_sums(SentDigests(SENT.terms, {block: STATES[block] for block in self.blocks}))

    def sums(self) -> dict[int, BlockSum]:
        return {block_sum.block: block_sum for block_sum in self.unmask(self.upload(self.shares(self.keys())))}


def brute(
    cohort: Mapping[int, str], living: Sequence[int], blocks: Mapping[int, range] = PLACES
) -> dict[int, tuple[list[int], int]]:
    """Add up element by element, client by client; and count who is in each block."""
    totals = {}
    for block, places in blocks.items():
        there = [c for c in living if places[-1] < int(cohort[c])]
        totals[block] = ([sum(int(words_of(c, cohort[c])[e]) for c in there) for e in places], len(there))
    return totals


MIXED = cohort_of(4, 3, 5)
MANY = sorted(MIXED)


# ---- the sums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gone",
    [
        {},
        {"shares": MANY[:2]},
        {"upload": MANY[1:3]},
        {"sign": MANY[4:6]},
        {"unmask": MANY[4:6]},
        {"shares": [MANY[0]], "upload": [MANY[5]], "sign": [MANY[7]], "unmask": [MANY[9]]},
        {"upload": [MANY[0], MANY[3], MANY[11], MANY[6]]},
    ],
)
def test_sums_equal_brute_force_after_dropouts(gone: dict[str, list[int]]) -> None:
    """Who goes away before unmasking has sent its update, which counts; who goes before that does not."""
    play = Play(MIXED, gone)
    sums = play.sums()
    living = [c for c in MIXED if c not in [*gone.get("shares", ()), *gone.get("upload", ())]]
    expected = {block: both for block, both in brute(MIXED, living).items() if both[1] >= 2}
    assert {block: (one.words.tolist(), one.clients) for block, one in sums.items()} == expected
    assert not play.server.tampered


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_sums_are_right_for_any_cohort_and_any_losses(data: st.DataObject) -> None:
    counts = data.draw(st.tuples(*[st.integers(0, 4)] * 3).filter(lambda c: sum(c) >= 3))
    pieces = [piece for piece, count in zip(SIZES, counts, strict=True) for _ in range(count)]
    cohort = dict(enumerate(pieces))
    most = len(cohort) - SecureRules(2, 0.6).count_needed(len(cohort))
    gone = data.draw(st.lists(st.tuples(st.sampled_from(PHASES), st.sampled_from(sorted(cohort))),
                              max_size=most, unique_by=lambda one: one[1]))  # fmt: skip
    places: dict[int, list[int]] = {}
    kinds = sorted(set(pieces))
    for element in range(int(kinds[-1])):
        places.setdefault(sum(1 << p for p, k in enumerate(kinds) if element < int(k)), []).append(element)
    blocks = {block: range(elements[0], elements[-1] + 1) for block, elements in places.items()}
    lost = {phase: [c for p, c in gone if p == phase] for phase in PHASES}
    play = Play(cohort, lost, blocks=blocks)
    living = [c for c in cohort if c not in (*lost["shares"], *lost["upload"])]
    expected = {b: both for b, both in brute(cohort, living, blocks).items() if both[1] >= 2}
    assert {b: (one.words.tolist(), one.clients) for b, one in play.sums().items()} == expected


def test_small_blocks_stay_masked() -> None:
    large = [c for c, piece in MIXED.items() if piece == "14"]
    play = Play(MIXED, {"upload": large[:3]}, rules=SecureRules(3, 0.6), minimum=3)
    sums = play.sums()
    living = [c for c in MIXED if c not in large[:3]]
    expected = {b: both for b, both in brute(MIXED, living).items() if b != ONE}
    assert {b: (one.words.tolist(), one.clients) for b, one in sums.items()} == expected


def test_a_block_that_too_few_cover_is_not_announced() -> None:
    play = Play(cohort_of(4, 3, 1))
    roster = play.keys()
    assert dict(roster.blocks) == {ALL: 5, TWO: 4}
    words = {one.block: one.words.tolist() for one in play.unmask(play.upload(play.shares(roster)))}
    assert words == {b: both[0] for b, both in brute(play.cohort, list(play.cohort)).items() if b != ONE}


# ---- what an upload shows --------------------------------------------------------------------------------------------

LONG = 1 << 15
LONG_COHORT = {1: "1", 2: "1", 3: "1", 4: "1"}


def long_lengths(pieces: Sequence[str]) -> dict[int, int]:
    return {1: LONG}


def long_upload(words: np.ndarray) -> tuple[np.ndarray, SecureClient, Roster]:
    """Return what the first of four clients sends of one long block, and the client."""
    authority = Signer()
    members = {
        c: SecureClient(c, make_identity(authority), authority.public, 2, long_lengths, Journal()) for c in LONG_COHORT
    }
    server = SecureServer(RUN, ROUND, SecureRules(2, 0.6), long_lengths)
    for number, member in members.items():
        server.enrol(member.begin(RUN, ROUND, LONG_COHORT[number]))
    roster = server.make_roster()
    for member in members.values():
        server.add_shares(member.share(roster))
    sent = members[1].mask(server.deal()[1], {1: words}, SentDigests(b"t", {1: b"s"}))
    return np.frombuffer(sent.blocks[0][1], dtype="<u4"), members[1], roster


def looks_uniform(words: np.ndarray) -> bool:
    """Chi-square of each of the four bytes: 255 degrees of freedom, deviation 22.6; 430 is over seven of them away."""
    for byte in np.ascontiguousarray(words).view(np.uint8).reshape(-1, 4).T:
        counts = np.bincount(byte, minlength=256)
        if ((counts - len(byte) / 256) ** 2 / (len(byte) / 256)).sum() > 430:
            return False
    return True


@pytest.mark.parametrize("kept_masks", ["both", "own", "pairs"])
def test_an_upload_looks_uniform(kept_masks: str) -> None:
    """Also with the masks of pairs taken away, and also with the own mask taken away: each hides by itself."""
    words = np.arange(LONG, dtype=np.uint32) % 7
    assert not looks_uniform(words)
    sent, client, roster = long_upload(words)
    counts, digests = sent.copy(), SentDigests(b"t", {1: b"s"}).to_both(roster, 1, 2)
    if kept_masks == "pairs":
        primitives.add_mask(counts, derive_own_key(client._seeds[1], 1), -1)
    if kept_masks == "own":
        for other in roster.members[1:]:
            secret = client._masks.secret(other.mask_key)
            primitives.add_mask(counts, derive_pair_key(secret, RUN, ROUND, 1, other.client, 1, digests), -1)
    assert looks_uniform(counts)
    assert abs(np.corrcoef(counts.astype(float), words.astype(float))[0, 1]) < 6 / LONG**0.5
    assert (counts == words).mean() < 0.001
    if kept_masks == "both":  # and both together are all that hides it
        primitives.add_mask(counts, derive_own_key(client._seeds[1], 1), -1)
        for other in roster.members[1:]:
            secret = client._masks.secret(other.mask_key)
            primitives.add_mask(counts, derive_pair_key(secret, RUN, ROUND, 1, other.client, 1, digests), -1)
        assert (counts == words).all()


def test_masks_are_never_the_same_twice() -> None:
    words = np.zeros(LONG, dtype=np.uint32)
    one, two = long_upload(words)[0], long_upload(words)[0]
    assert (one == two).mean() < 0.001


def test_pair_keys_differ() -> None:
    base: tuple[Any, ...] = (bytes(32), RUN, 1, 2, 3, 4, b"s")
    other: tuple[Any, ...] = (bytes(31) + b"1", "b", 2, 5, 4, 5, b"t")
    others = [(*base[:place], other[place], *base[place + 1 :]) for place in range(len(base))]
    pair_keys = [derive_pair_key(*arguments) for arguments in (base, *others)]
    assert len(set(pair_keys)) == len(pair_keys)
    assert derive_pair_key(*base) == derive_pair_key(bytes(32), RUN, 1, 3, 2, 4, b"s"), "both of a pair have the same"


# ---- a server that lies ----------------------------------------------------------------------------------------------


def without(roster: Roster, *clients: int) -> Roster:
    return replace(roster, members=tuple(m for m in roster.members if m.client not in clients))


def changed(roster: Roster, place: int, **fields: Any) -> Roster:
    members = list(roster.members)
    members[place] = replace(members[place], **fields)
    return replace(roster, members=tuple(members))


def signed_anew(keys: Keys) -> Keys:
    """Return keys of a member that the authority does not know, all else in order."""
    from fleetfit.secure.messages import encode_keys

    stranger = Signer()
    identity = make_identity(stranger)
    encoded = encode_keys(RUN, ROUND, keys.client, keys.submodel, keys.mask_key, keys.seal_key)
    return replace(keys, identity=identity.signer.public, certificate=identity.certificate,
                   signature=identity.signer.sign(encoded))  # fmt: skip


def test_one_member_file_on_two_devices_is_one_member() -> None:
    play = Play({0: "1", 1: "1", 2: "1"})
    play.identities[2] = play.identities[1]
    keys = [play.client(number).begin(RUN, ROUND, "1") for number in (0, 1, 2)]
    for one in keys[:2]:
        play.server.enrol(one)
    with raises(RunError, key="client"):
        play.server.enrol(keys[2])


LAST = len(MANY) - 1
ROSTERS: dict[str, tuple[Change, Expected]] = {
    "another round": (lambda r: replace(r, round=ROUND + 1), Expected(key="roster.round")),
    "another run": (lambda r: replace(r, run="b"), Expected(key="roster.round")),
    "too few members": (lambda r: without(r, *MANY[1:]), Expected(1, 2, key="roster")),
    "half is enough": (lambda r: replace(r, threshold=len(MANY) // 2), Expected(6, 12, key="roster.threshold")),
    "more than all": (lambda r: replace(r, threshold=len(MANY) + 1), Expected(13, 12, key="roster.threshold")),
    "a stranger": (lambda r: changed(r, LAST, **vars(signed_anew(r.members[LAST]))), Expected(key="roster.member")),
    "a certificate of another": (lambda r: changed(r, LAST, certificate=r.members[1].certificate),
                                 Expected(key="roster.member")),
    "another mask key": (lambda r: changed(r, LAST, mask_key=bytes(32)), Expected(key="roster.signature")),
    "another seal key": (lambda r: changed(r, LAST, seal_key=bytes(32)), Expected(key="roster.signature")),
    "another level": (lambda r: changed(r, LAST, submodel="14" if r.members[LAST].submodel != "14" else "05"),
                      Expected(key="roster.signature")),
    "my own level changed": (lambda r: changed(r, 0, submodel="14" if r.members[0].submodel != "14" else "05"),
                             Expected(MANY[0], key="roster")),
    "I am not on it": (lambda r: without(r, MANY[0]), Expected(MANY[0], key="roster")),
    "twice": (lambda r: replace(r, members=(*r.members, r.members[LAST])), Expected(key="roster.members")),
    "one key, two names": (lambda r: changed(r, LAST, mask_key=r.members[1].mask_key), Expected(key="roster.mask_key")),
    "a longer block": (lambda r: replace(r, blocks=((ALL, 6),)), Expected(6, key="roster.blocks")),
    "a made-up block": (lambda r: replace(r, blocks=((0b001, 5),)), Expected(5, key="roster.blocks")),
    "a block twice": (lambda r: replace(r, blocks=((ALL, 5), (ALL, 5))), Expected(key="roster.blocks")),
}  # fmt: skip


@pytest.mark.parametrize("lie", ROSTERS)
def test_false_rosters_are_refused(lie: str) -> None:
    change, expected = ROSTERS[lie]
    play = Play(MIXED)
    roster = play.keys()
    client = play.clients[MANY[0]]
    with raises(RunError, expected):
        client.share(change(roster))
    with raises(RunError, key="phase"):
        client.share(roster)


def test_a_client_refuses_a_block_that_too_few_cover() -> None:
    """The server's minimum is 1; the client goes by its own."""
    play = Play(cohort_of(4, 3, 1), rules=SecureRules(1, 0.6))
    roster = play.keys()
    assert ONE in dict(roster.blocks)
    with raises(RunError, 1, 2, key="roster.blocks"):
        play.clients[min(play.cohort)].share(roster)


def test_two_rosters_for_two_halves_are_noticed() -> None:
    """Each of them is a good one; but shares are bound to the roster that their dealer saw."""
    play = Play(MIXED)
    roster = play.keys()
    other = without(roster, MANY[-1])
    other = replace(other, threshold=roster.threshold)
    dealt = [play.clients[c].share(other if c == MANY[1] else roster) for c in MANY[:2]]
    mine = SealedShares(tuple((s.client, dict(s.sealed)[MANY[0]]) for s in dealt[1:]))
    texts = [(c, play.clients[c].share(roster)) for c in MANY[2:]]
    mine = SealedShares((*mine.sealed, *((c, dict(s.sealed)[MANY[0]]) for c, s in texts)))
    with raises(RunError, MANY[1], key="shares"):
        play.clients[MANY[0]].mask(mine, in_blocks(words_of(MANY[0], MIXED[MANY[0]])), SENT)


def flipped(text: bytes) -> bytes:
    return text[:-1] + bytes([text[-1] ^ 1])


DEALT: dict[str, tuple[Change, Expected]] = {
    "a share changed": (lambda d: SealedShares(((d.sealed[0][0], flipped(d.sealed[0][1])), *d.sealed[1:])),
                        Expected(MANY[0], key="shares")),
    "two swapped": (lambda d: SealedShares(((d.sealed[0][0], d.sealed[1][1]), *d.sealed[1:])),
                    Expected(MANY[0], key="shares")),
    "too few": (lambda d: SealedShares(d.sealed[:3]), Expected(4, 8, key="shares")),
    "one twice": (lambda d: SealedShares((*d.sealed, d.sealed[0])), Expected(key="shares")),
    "from nobody": (lambda d: SealedShares((*d.sealed, (10_000, d.sealed[0][1]))), Expected(key="shares")),
}  # fmt: skip


@pytest.mark.parametrize("lie", DEALT)
def test_a_client_refuses_changed_shares(lie: str) -> None:
    change, expected = DEALT[lie]
    play = Play(MIXED)
    dealt = play.shares(play.keys())
    with raises(RunError, expected):
        play.clients[MANY[0]].mask(change(dealt[MANY[0]]), in_blocks(words_of(MANY[0], MIXED[MANY[0]])), SENT)


def moved(survivors: Survivors, *clients: int, both: bool = False) -> Survivors:
    living = survivors.living if both else tuple(c for c in survivors.living if c not in clients)
    return Survivors(living, tuple(sorted((*survivors.dead, *clients))))


SURVIVORS: dict[str, tuple[Change, Expected]] = {
    "living and dead": (lambda s: moved(s, MANY[3], both=True), Expected(MANY[3], key="living")),
    "I am dead": (lambda s: moved(s, MANY[0]), Expected(key="living")),
    "somebody is neither": (lambda s: Survivors(s.living[:-1], s.dead), Expected(key="living")),
    "somebody new": (lambda s: Survivors((*s.living, 10_000), s.dead), Expected(key="living")),
    "twice": (lambda s: Survivors((*s.living, s.living[-1]), s.dead), Expected(key="living")),
    "too few live": (lambda s: moved(s, *MANY[7:]), Expected(7, 8, key="living")),
}


@pytest.mark.parametrize("lie", SURVIVORS)
def test_false_survivors_open_nothing(lie: str) -> None:
    change, expected = SURVIVORS[lie]
    play = Play(MIXED)
    survivors = play.upload(play.shares(play.keys()))
    with raises(RunError, expected):
        play.clients[MANY[0]].sign(change(survivors))


def test_clients_open_one_kind_of_secret() -> None:
    play = Play(MIXED, {"upload": [MANY[2]]})
    survivors = play.upload(play.shares(play.keys()))
    client = play.clients[MANY[0]]
    signed = {c: play.clients[c].sign(survivors) for c in survivors.living}
    for one in signed.values():
        play.server.add_signature(one)
    opened = client.unmask(play.server.collect_signatures())
    assert {who for who, kind, _ in opened.shares if kind == 0} == {MANY[2]}
    assert {who for who, kind, _ in opened.shares if kind != 0} == set(MANY) - {MANY[2]}
    with raises(RunError, key="phase"):
        client.unmask(play.server.collect_signatures())
    with raises(RunError, key="phase"):
        client.sign(survivors)


def stories(target: int, others: Sequence[int], most: int) -> dict[int, Survivors]:
    """Tell each member that other ones of a block are dead, each of them as often as can be, and never the target."""
    often, outcomes = dict.fromkeys(others, 0), {}
    for number in MANY:
        dead = sorted((c for c in others if c != number), key=lambda c: often[c])[:most]
        for client in dead:
            often[client] += 1
        outcomes[number] = Survivors(tuple(c for c in MANY if c not in dead), tuple(sorted(dead)))
    return outcomes


def stolen(play: Play, roster: Roster, opened: Sequence[OpenedShares], target: int, block: int) -> list[int] | None:
    """Take all masks off one client's words of a block with what members opened; None where that is not enough."""
    place = {member.client: p for p, member in enumerate(roster.members, 1)}
    held: dict[tuple[int, int], dict[int, bytes]] = {}
    for one in opened:
        for client, kind, share in one.shares:
            held.setdefault((client, kind), {})[place[one.client]] = share
    others = [c for c in roster.find_covering(block) if c != target]
    needed = [(target, block), *((c, 0) for c in others)]
    if any(len(held.get(secret, {})) < roster.threshold for secret in needed):
        return None
    keys = {s: join(dict(list(held[s].items())[: roster.threshold]), 32) for s in needed}
    words = np.frombuffer(dict(play.uploads[target].blocks)[block], dtype="<u4").copy()
    primitives.add_mask(words, derive_own_key(keys[target, block], block), -1)
    mine = {m.client: m for m in roster.members}[target].mask_key
    for other in others:
        secret = primitives.Agreement(keys[other, 0]).secret(mine)
        key = derive_pair_key(secret, RUN, ROUND, target, other, block, SENT.to_both(roster, target, other))
        primitives.add_mask(words, key, -1 if target < other else 1)
    return words.view(np.int32).tolist()


@pytest.mark.parametrize("lie", ["all signatures", "one's own only", "one's own many times", "made up"])
def test_different_survivors_reveal_nothing(lie: str) -> None:
    """A threshold above one half is not enough: of a block of five, each of four can be dead in most of the stories."""
    play = Play(MIXED)
    roster = play.keys()
    play.upload(play.shares(roster))
    large = [c for c, piece in MIXED.items() if piece == "14"]
    target, others = large[0], large[1:]
    signed = {c: play.clients[c].sign(story) for c, story in stories(target, others, 3).items()}
    all_of_them = tuple((c, one.signature) for c, one in signed.items())
    opened, refused = [], []
    for number, client in play.clients.items():
        own = (number, signed[number].signature)
        signatures = {"all signatures": all_of_them, "one's own only": (own,), "one's own many times": (own,) * 12,
                      "made up": tuple((c, own[1]) for c in MANY)}[lie]  # fmt: skip
        try:
            opened.append(client.unmask(Signatures(signatures)))
        except RunError as error:
            refused.append(error.key)
    assert stolen(play, roster, opened, target, ONE) is None
    assert not opened and refused == ["living.signatures"] * len(MANY)


def test_a_signature_of_another_round_does_not_count() -> None:
    """With the same living and the same dead."""
    play = Play(MIXED)
    roster = play.keys()
    survivors = play.upload(play.shares(roster))
    other = replace(roster, round=ROUND - 1)
    old = tuple((c, play.identities[c].signer.sign(encode_survivors(other.digest, survivors))) for c in MANY)
    client = play.clients[MANY[0]]
    client.sign(survivors)
    with raises(RunError, 0, key="living.signatures"):
        client.unmask(Signatures(old))


def test_unfit_signatures_are_left_out() -> None:
    lying = {("signed", c): lambda s: replace(s, signature=bytes(64)) for c in MANY[:2]}
    sums = Play(MIXED, lies=lying).sums()
    assert {b: one.words.tolist() for b, one in sums.items()} == {b: both[0] for b, both in brute(MIXED, MANY).items()}
    with raises(RunError, 7, 8, key="clients"):
        Play(MIXED, lies={("signed", c): lying["signed", MANY[0]] for c in MANY[:5]}).sums()


def test_a_restarted_client_refuses_the_same_round() -> None:
    play = Play(MIXED)
    play.keys()
    states: list[dict[str, int]] = []
    journal = Journal(dict(play.journals[MANY[0]].last), lambda last: states.append(dict(last)))
    again = SecureClient(MANY[0], play.identities[MANY[0]], play.authority.public, 2, lengths, journal)
    with raises(RunError, 5, key="round"):
        again.begin(RUN, ROUND, "05")
    following = SecureClient(MANY[0], play.identities[MANY[0]], play.authority.public, 2, lengths, journal)
    following.begin(RUN, ROUND + 1, "05")
    assert states == [{RUN: ROUND + 1}], "it is written before anything is sent"
    earlier = SecureClient(MANY[0], play.identities[MANY[0]], play.authority.public, 2, lengths, journal)
    with raises(RunError, 1, key="round"):
        earlier.begin(RUN, 0, "05")


def test_phases_happen_in_order() -> None:
    client = Play(MIXED).clients[MANY[0]]
    with raises(RunError, key="phase"):
        client.sign(Survivors((), ()))
    with raises(RunError, key="phase"):
        client.mask(SealedShares(()), {}, SENT)


def test_different_states_give_noise() -> None:
    """Of every block, not only of the one whose state is another: it may have made gradients vanish in the others."""
    odd = next(c for c, piece in MIXED.items() if piece == "14")
    for change in ({f"b{TWO}": digest("another state")}, {"terms": digest("another learning rate")}):
        sums = Play(MIXED, sent={odd: change}).sums()
        for block, (expected, clients) in brute(MIXED, MANY).items():
            assert not set(sums[block].words.tolist()) & set(expected)
            assert (np.abs(sums[block].words) > clients * GRID.most).any(), "beyond what so many can add up to"


def test_masks_ignore_states_that_a_pair_does_not_share() -> None:
    """So that a smaller client adds up with larger ones, whose further blocks it has never seen."""
    odd = {c: {f"b{ONE}": digest("another state")} for c, piece in MIXED.items() if piece == "14"}
    sums, expected = Play(MIXED, sent=odd).sums(), brute(MIXED, MANY)
    assert all(sums[block].words.tolist() == expected[block][0] for block in (ALL, TWO, ONE))


def test_a_state_that_was_not_announced_binds_too() -> None:
    """What two cover, of three that are asked for, is never added up; but both have to be sent the same of it."""
    cohort = cohort_of(4, 3, 2)
    odd = next(c for c, piece in cohort.items() if piece == "14")
    play = Play(cohort, sent={odd: {f"b{ONE}": digest("another state")}}, rules=SecureRules(3, 0.6), minimum=3)
    sums, expected = play.sums(), brute(cohort, list(cohort))
    assert sums.keys() == {ALL, TWO}
    assert all(sums[block].words.tolist() != expected[block][0] for block in sums)


# ---- members that lie ------------------------------------------------------------------------------------------------


def with_changed_shares(opened: OpenedShares) -> OpenedShares:
    return replace(opened, shares=tuple((c, kind, flipped(share)) for c, kind, share in opened.shares))


def test_a_tampered_share_is_left_out() -> None:
    play = Play(MIXED, {"upload": [MANY[2]]}, {("opened", MANY[5]): with_changed_shares})
    sums = play.sums()
    expected = brute(MIXED, [c for c in MANY if c != MANY[2]])
    assert {b: one.words.tolist() for b, one in sums.items()} == {b: both[0] for b, both in expected.items()}
    assert {liar for liar, _ in play.server.tampered} == {MANY[5]}


def test_too_many_tampered_shares_end_the_round() -> None:
    liars = MANY[:5]
    play = Play(MIXED, lies={("opened", c): with_changed_shares for c in liars})
    with raises(RunError, 7, 8, ", ".join(map(str, liars)), key="shares"):
        play.sums()


def test_false_dealers_are_named() -> None:
    """It deals shares of some other seed, with marks that fit them."""

    def lying(shares: Shares) -> Shares:
        return replace(shares, seeds=tuple((block, bytes(32)) for block, _ in shares.seeds))

    with raises(RunError, MANY[4], key="shares"):
        Play(MIXED, lies={("shares", MANY[4]): lying}).sums()


@pytest.mark.parametrize(
    ("message", "lie", "expected"),
    [
        ("shares", lambda s: replace(s, sealed=s.sealed[1:]), Expected(key="shares")),
        ("shares", lambda s: replace(s, marks=s.marks[1:]), Expected(key="shares")),
        ("shares", lambda s: replace(s, marks=((s.marks[0][0], b""), *s.marks[1:])), Expected(3, key="shares")),
        ("shares", lambda s: replace(s, client=10_000), Expected(key="shares")),
        ("masked", lambda m: replace(m, blocks=m.blocks[1:]), Expected(key="update")),
        (
            "masked",
            lambda m: replace(m, blocks=tuple((b, t[4:]) for b, t in m.blocks)),
            Expected(key="update"),
        ),
        ("masked", lambda m: replace(m, client=10_000), Expected(10000, key="update")),
    ],
)
def test_the_server_refuses_malformed_messages(message: str, lie: Change, expected: Expected) -> None:
    with raises(RunError, expected):
        Play(MIXED, lies={(message, MANY[0]): lie}).sums()


def test_nothing_is_accepted_twice() -> None:
    play = Play(MIXED)
    roster = play.keys()
    with raises(RunError, key="client"):
        play.server.enrol(roster.members[0])
    play.upload(play.shares(roster))
    with raises(RunError, key="update"):
        play.server.add(play.uploads[MANY[0]])


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("shares", Expected(7, 8, key="clients")),
        ("upload", Expected(7, 8, key="clients")),
        ("sign", Expected(7, 8, key="clients")),
        ("unmask", Expected(7, 8, key="shares")),
    ],
)
def test_too_few_left_end_the_round(phase: str, expected: Expected) -> None:
    with raises(RunError, expected):
        Play(MIXED, {phase: MANY[:5]}).sums()


def test_a_cohort_that_is_too_small_does_not_begin() -> None:
    with raises(RunError, 2, 3, key="clients"):
        Play(cohort_of(2, 0, 0), rules=SecureRules(3, 0.6)).keys()


def test_messages_travel_as_bytes_and_come_back_equal() -> None:
    seen: dict[type, Any] = {}

    def carried(message: Any) -> Any:
        seen[type(message)] = message
        sums = read_message(type(message), pack_message(message))
        assert sums == message
        return sums

    names = ("keys", "roster", "shares", "dealt", "masked", "survivors", "signed", "agreed", "opened")
    sums = Play(MIXED, {"upload": MANY[:1]}, dict.fromkeys(names, carried)).sums()
    assert {b: one.words.tolist() for b, one in sums.items()} == {
        b: both[0] for b, both in brute(MIXED, MANY[1:]).items()
    }
    assert len(seen) == len(names)
    for kind, message in seen.items():
        text = pack_message(message)
        for wrong in (text[:-1], text + b"i", b"", text[1:], b"t" + text[1:5], b"t\xff\xff\xff\xff" + text[5:]):
            with raises(RunError, key="message"):
                read_message(kind, wrong)
        for other in seen.keys() - {kind}:
            if {kind, other} != {SealedShares, Signatures}:  # both are bytes of members
                with raises(RunError, key=other.__name__.lower()):
                    read_message(other, text)


@given(st.binary(max_size=200), st.integers(0, 100), st.sampled_from([Keys, Roster, Shares, OpenedShares]))
def test_any_bytes_are_read_or_refused(noise: bytes, cut: int, kind: type) -> None:
    text = b"t\0\0\0\x05" + noise
    for given_text in (noise, text, text[:cut]):
        with suppress(RunError):
            assert pack_message(read_message(kind, given_text)) == given_text, "one message is written in one way only"


def test_messages_say_how_large_they_are() -> None:
    play = Play(MIXED)
    play.upload(play.shares(play.keys()))
    for number, piece in MIXED.items():
        assert 4 * int(piece) < len(pack_message(play.uploads[number])) < 4 * int(piece) + 60, (
            "an update is its own piece's"
        )


# ---- shares, numbers -------------------------------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.integers(0, 5), st.randoms(use_true_random=False))
def test_threshold_shares_give_the_secret(secret: bytes, t: int, more: int, rng: Any) -> None:
    shares = dict(enumerate(split(secret, t, t + more), 1))
    chosen = rng.sample(sorted(shares), t)
    assert join({place: shares[place] for place in chosen}, 32) == secret
    if t > 1:
        assert join({place: shares[place] for place in chosen[1:]}, 32) != secret


def test_shares_of_one_secret_differ_each_time() -> None:
    assert split(bytes(32), 3, 5) != split(bytes(32), 3, 5)


@given(st.lists(st.floats(-3, 3, width=32), min_size=1), st.integers(8, 24), st.sampled_from([0.1, 1.0, 4.0]))
def test_quantized_numbers_are_the_nearest(values: list[float], bits: int, reach: float) -> None:
    grid = Quantizer(reach, bits)
    words, clipped = grid.quantize(np.array(values, dtype=np.float32))
    assert clipped == any(abs(v) > reach + grid.step / 2 for v in values) or any(
        abs(abs(v) - reach - grid.step / 2) < 1e-6 for v in values
    )
    for value, number in zip(values, words.tolist(), strict=True):
        assert abs(number) <= grid.most
        assert abs(number * grid.step - min(max(value, -reach), reach)) <= grid.step / 2 * (1 + 1e-6)


def test_sums_of_a_grids_clients_stay_below_the_modulus() -> None:
    assert Quantizer(1.0, 20).clients == 4096
    for bits in range(8, 25):
        assert Quantizer(1.0, bits).clients * Quantizer(1.0, bits).most < 2**31


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    with raises(RunError, key="movement"):
        GRID.quantize(np.array([0.0, value], dtype=np.float32))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from fleetfit.errors import MissingExtra

    primitives._library.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    with raises(MissingExtra, extra="secure"):
        primitives.check_installed()
    primitives._library.cache_clear()


def test_an_identity_is_one_members() -> None:
    authority = Signer()
    identity: Identity = make_identity(authority)
    check = primitives.verify_signature
    assert check(authority.public, identity.certificate, primitives.encode_membership(identity.signer.public))
    assert not check(authority.public, identity.certificate, primitives.encode_membership(Signer().public))
    assert not check(identity.signer.public, identity.certificate, primitives.encode_membership(identity.signer.public))
    again = Signer(identity.signer.private)
    assert again.public == identity.signer.public and check(again.public, again.sign(b"a"), b"a")
