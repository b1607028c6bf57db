"""What members and the server tell each other: plain values, and how many bytes they take."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

from fleetfit.errors import RunError
from fleetfit.secure.encoding import Plain, decoded, encoded
from fleetfit.secure.keys import digest

MASK_KEY = 0
"""The kind of a share of a member's mask key; a block's own number is that of a share of its seed."""


@dataclass(frozen=True)
class Keys:
    """First phase, from a member.

    Attributes:
        client: Who it is.
        piece: Which sub-model it was sent, in words that all read alike.
        identity: The key that it signs with.
        certificate: The authority's signature under client and identity.
        mask_key: Public half of the key for masks.
        seal_key: Public half of the key for shares.
        signature: Its own, under all of this with run and round.
    """

    client: int
    piece: str
    identity: bytes
    certificate: bytes
    mask_key: bytes
    seal_key: bytes
    signature: bytes


MARK = 16
"""Bytes of a mark."""


def of_round(run: str, round: int, client: int, piece: str, mask_key: bytes, seal_key: bytes) -> bytes:
    """Return what a member signs."""
    return encoded("fleetfit secure keys", run, round, client, piece, mask_key, seal_key)


@dataclass(frozen=True)
class Roster:
    """Second phase, to each member: who takes part.

    Attributes:
        run: Which run.
        round: Which round of it, 0-based.
        threshold: How many members unmask.
        members: What each sent, in ascending order.
        blocks: The blocks that are added up, with their lengths: bit p of a block's number is set where the p-th of the
            members' sub-models, in alphabetical order, covers it.
    """

    run: str
    round: int
    threshold: int
    members: tuple[Keys, ...]
    blocks: tuple[tuple[int, int], ...]

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The members' sub-models, in the order that blocks count by."""
        return tuple(sorted({member.piece for member in self.members}))

    def covering(self, block: int) -> tuple[int, ...]:
        """Return the members that cover a block."""
        if block not in self._covering:
            self._covering[block] = tuple(m.client for m in self.members if self.covers(m.client, block))
        return self._covering[block]

    def covers(self, client: int, block: int) -> bool:
        """Tell whether a member covers a block."""
        return bool(block >> self._place[client] & 1)

    @cached_property
    def _place(self) -> dict[int, int]:
        place = {piece: number for number, piece in enumerate(self.pieces)}
        return {member.client: place[member.piece] for member in self.members}

    @cached_property
    def _covering(self) -> dict[int, tuple[int, ...]]:
        return {}

    def blocks_of(self, client: int) -> list[int]:
        """Return the announced blocks that a member covers."""
        return self._covered.get(client, [])

    @cached_property
    def _covered(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for block, _ in self.blocks:
            for client in self.covering(block):
                found.setdefault(client, []).append(block)
        return found

    @cached_property
    def digest(self) -> bytes:
        """What all shares are bound to, so that nobody can be shown another roster."""
        return digest("fleetfit secure roster", *astuple(self))


@dataclass(frozen=True)
class Shares:
    """Second phase, from a member.

    Attributes:
        client: Who it is.
        sealed: For each other member its shares, sealed.
        marks: For each member, itself included, the marks of its shares, by which they are known: one for each kind of
            secret, ascending, one after the other.
        seeds: The marks of the seeds of the masks of its own, by block.
    """

    client: int
    sealed: tuple[tuple[int, bytes], ...]
    marks: tuple[tuple[int, bytes], ...]
    seeds: tuple[tuple[int, bytes], ...]


def mark(run: str, round: int, dealer: int, holder: int, kind: int, share: bytes) -> bytes:
    """Return what a share is known by, which says nothing of the secret: a share alone is any number."""
    return digest("fleetfit secure share", run, round, dealer, holder, kind, share)[:MARK]


@dataclass(frozen=True)
class Dealt:
    """Third phase, to each member: the shares that the others sealed for it. Who is not among them has gone."""

    sealed: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class Sent:
    """What a client was sent to train on; it travels by itself, and the masks of pairs go by it.

    Attributes:
        terms: Digest of how it is to train.
        states: By block the digest of the state, for all blocks that the client covers.
    """

    terms: bytes
    states: Mapping[int, bytes]

    def to_both(self, roster: Roster, one: int, other: int) -> bytes:
        """Return what the masks of two members go by: all that both were sent.

        Not the state of the masked block alone: whoever sends other states in one block makes gradients vanish in
        others, which would then show those who were sent the right one.
        """
        both = [b for b in sorted(self.states) if roster.covers(one, b) and roster.covers(other, b)]
        return digest("fleetfit secure sent", self.terms, *((block, self.states[block]) for block in both))


@dataclass(frozen=True)
class MaskedUpdate:
    """Third phase, from a member: its words of each block, masked, little-endian."""

    client: int
    blocks: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class Survivors:
    """Fourth phase, to each living member: whose update has come, and whose has not."""

    living: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True)
class Signed:
    """Fourth phase, from a living member: its signature under who lives, so that all are told the same."""

    client: int
    signature: bytes


@dataclass(frozen=True)
class Agreed:
    """Fifth phase, to each living member: who has signed what it was told, too."""

    signatures: tuple[tuple[int, bytes], ...]


def of_survivors(roster: bytes, survivors: Survivors) -> bytes:
    """Return what a member signs of who lives; `roster`: the digest of its roster."""
    return encoded("fleetfit secure survivors", roster, survivors.living, survivors.dead)


@dataclass(frozen=True)
class Opened:
    """Fifth phase, from a member: its shares of what has to be taken away; member, kind, share."""

    client: int
    shares: tuple[tuple[int, int, bytes], ...]


Message = Keys | Roster | Shares | Dealt | MaskedUpdate | Survivors | Signed | Agreed | Opened

M = TypeVar("M", bound=Message)
_KEYS = (int, str, *[bytes] * 5)
_MEMBER = (int, int, *[bytes] * 5)  # of a roster, which has each sub-model once
_FORMS: dict[type, Any] = {
    Keys: _KEYS,
    Roster: (str, int, int, [str], [_MEMBER], [(int, int)]),
    Shares: (int, [(int, bytes)], [(int, bytes)], [(int, bytes)]),
    Dealt: ([(int, bytes)],),
    MaskedUpdate: (int, [(int, bytes)]),
    Survivors: ([int], [int]),
    Signed: (int, bytes),
    Agreed: ([(int, bytes)],),
    Opened: (int, [(int, int, bytes)]),
}
"""What each message is made of: a list has any number of its one form, a tuple one value of each."""


def packed(message: Message) -> bytes:
    """Return a message as it travels."""
    return encoded(_plain(message))


def size(message: Message) -> int:
    """Return the bytes of a message."""
    return len(packed(message))


def read(kind: type[M], text: bytes) -> M:
    """Return the message of bytes that may come from a stranger.

    Raises:
        RunError: They are no message of this kind.
    """
    value = decoded(text)
    if not _fits(value, kind):
        raise RunError(
            f"a message of secure aggregation is not of the type {kind.__name__.lower()}.",
            key=kind.__name__.lower(),
        )
    return cast(M, _made(value, kind))


def _plain(message: Message) -> tuple[Plain, ...]:
    values = tuple(getattr(message, name) for name in message.__dataclass_fields__)
    if isinstance(message, Roster):
        number = {piece: place for place, piece in enumerate(message.pieces)}
        members = tuple((m.client, number[m.piece], *_plain(m)[2:]) for m in message.members)
        return (*values[:3], message.pieces, members, message.blocks)
    return values


def _fits(value: Plain, form: Any) -> bool:
    if isinstance(form, list):
        return isinstance(value, tuple) and all(_fits(one, form[0]) for one in value)
    parts = _FORMS.get(form, form)
    if isinstance(parts, tuple):
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
    return type(value) is form


def _made(value: Any, kind: Any) -> Any:
    if kind is not Roster:
        return kind(*value)
    run, round, threshold, pieces, members, blocks = value
    named = tuple(Keys(m[0], _named(pieces, m[1]), *m[2:]) for m in members)
    found = Roster(run, round, threshold, named, blocks)
    if found.pieces != pieces:
        raise RunError("a roster has other sub-models than its members.", key="roster")
    return found


def _named(pieces: tuple[str, ...], number: int) -> str:
    if not 0 <= number < len(pieces):
        raise RunError("a member of a roster has a sub-model that is not on it.", key="roster")
    return pieces[number]
