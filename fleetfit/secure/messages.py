"""The messages between members and the server, as plain values and as bytes."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import Any, TypeVar, cast, get_args

from fleetfit.errors import RunError
from fleetfit.secure.encoding import Plain, decode, encode
from fleetfit.secure.keys import digest

MASK_KEY = 0
"""The kind of a share of a member's mask key; a block's own number is that of a share of its seed."""


@dataclass(frozen=True)
class Keys:
    """First phase, from a member.

    Attributes:
        client: Its number.
        submodel: Its sub-model, as text.
        identity: Public half of the key that signs.
        certificate: The authority's signature of client and identity.
        mask_key: Public half of the key for masks.
        seal_key: Public half of the key for shares.
        signature: Its own, of all of this with run and round.
    """

    client: int
    submodel: str
    identity: bytes
    certificate: bytes
    mask_key: bytes
    seal_key: bytes
    signature: bytes


MARK = 16
"""Bytes of a mark."""


def encode_keys(run: str, round: int, client: int, submodel: str, mask_key: bytes, seal_key: bytes) -> bytes:
    """Return the bytes of its keys that a member signs."""
    return encode("fleetfit secure keys", run, round, client, submodel, mask_key, seal_key)


@dataclass(frozen=True)
class Roster:
    """Second phase, to each member: the members and the blocks.

    Attributes:
        run: Name of the run.
        round: Of the run, 0-based.
        threshold: Number of members that must open their shares.
        members: Their keys, in ascending order.
        blocks: The blocks that are added up, with their lengths: bit p of a block's number is set where the p-th of the
            members' sub-models, in alphabetical order, covers it.
    """

    run: str
    round: int
    threshold: int
    members: tuple[Keys, ...]
    blocks: tuple[tuple[int, int], ...]

    @cached_property
    def submodels(self) -> tuple[str, ...]:
        """The members' sub-models, in the order of the bits of a block's number."""
        return tuple(sorted({member.submodel for member in self.members}))

    def find_covering(self, block: int) -> tuple[int, ...]:
        """Return the members that cover a block."""
        return tuple(m.client for m in self.members if self.covers(m.client, block))

    def covers(self, client: int, block: int) -> bool:
        """Return whether a member covers a block."""
        return bool(block >> self._bit[client] & 1)

    @cached_property
    def _bit(self) -> dict[int, int]:
        bits = {submodel: number for number, submodel in enumerate(self.submodels)}
        return {member.client: bits[member.submodel] for member in self.members}

    def get_blocks(self, client: int) -> list[int]:
        """Return the announced blocks that a member covers."""
        return [block for block, _ in self.blocks if client in self._bit and self.covers(client, block)]

    @cached_property
    def digest(self) -> bytes:
        """Every share is bound to it, so a member with another roster cannot open one."""
        return digest("fleetfit secure roster", *astuple(self))


@dataclass(frozen=True)
class Shares:
    """Second phase, from a member.

    Attributes:
        client: Its number.
        sealed: For each other member its shares, sealed.
        marks: For each member, itself included, the marks of its shares: one for each kind of secret, ascending, one
            after the other.
        seeds: The marks of the seeds of the masks of its own, by block.
    """

    client: int
    sealed: tuple[tuple[int, bytes], ...]
    marks: tuple[tuple[int, bytes], ...]
    seeds: tuple[tuple[int, bytes], ...]


def mark(run: str, round: int, dealer: int, holder: int, kind: int, share: bytes) -> bytes:
    """Return the mark of a share, which shows that it is unchanged and reveals nothing of the secret."""
    return digest("fleetfit secure share", run, round, dealer, holder, kind, share)[:MARK]


@dataclass(frozen=True)
class SealedShares:
    """Third phase, to each member: the shares that the others sealed for it; those not among them have dropped out."""

    sealed: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class SentDigests:
    """Digests of a client's job, which is another message; the masks of pairs depend on them.

    Attributes:
        terms: Digest of the settings of training.
        states: By block the digest of the state, for all blocks that the client covers.
    """

    terms: bytes
    states: Mapping[int, bytes]

    def to_both(self, roster: Roster, one: int, other: int) -> bytes:
        """Return the digest of all that two members were both sent, on which their masks depend.

        The state of the masked block alone is not enough: a server that sends wrong states in one block can make
        gradients vanish in others, whose sums would then reveal the members with the right state.
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
    """Fourth phase, to each living member: the clients whose update has come, and those whose has not."""

    living: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """Fourth phase, from a living member: its signature of the survivors, so that all have the same list."""

    client: int
    signature: bytes


@dataclass(frozen=True)
class Signatures:
    """Fifth phase, to each living member: the signatures of the same list by others."""

    signatures: tuple[tuple[int, bytes], ...]


def encode_survivors(roster: bytes, survivors: Survivors) -> bytes:
    """Return the bytes of the survivors that a member signs; `roster`: the digest of its roster."""
    return encode("fleetfit secure survivors", roster, survivors.living, survivors.dead)


@dataclass(frozen=True)
class OpenedShares:
    """Fifth phase, from a member: its shares of the secrets of masks, as (member, kind, share)."""

    client: int
    shares: tuple[tuple[int, int, bytes], ...]


Message = Keys | Roster | Shares | SealedShares | MaskedUpdate | Survivors | Signature | Signatures | OpenedShares

M = TypeVar("M", bound=Message)
_Member = tuple[int, int, bytes, bytes, bytes, bytes, bytes]  # as `Keys`, with the number of its sub-model
_Roster = tuple[str, int, int, tuple[str, ...], tuple[_Member, ...], tuple[tuple[int, int], ...]]
"""The values of a roster in a message, which has each sub-model once."""


def pack_message(message: Message) -> bytes:
    """Return a message as bytes."""
    return encode(_as_values(message))


def read_message(kind: type[M], text: bytes) -> M:
    """Return the message of untrusted bytes.

    Raises:
        RunError: They are not a message of this kind.
    """
    value = decode(text)
    if not _fits(value, _Roster if kind is Roster else kind):
        raise RunError(
            f"a message of secure aggregation is not of the type {kind.__name__.lower()}.",
            key=kind.__name__.lower(),
        )
    return cast(M, _from_value(value, kind))


def _as_values(message: Message) -> tuple[Plain, ...]:
    values = tuple(getattr(message, name) for name in message.__dataclass_fields__)
    if isinstance(message, Roster):
        numbers = {submodel: number for number, submodel in enumerate(message.submodels)}
        members = tuple((m.client, numbers[m.submodel], *_as_values(m)[2:]) for m in message.members)
        return (*values[:3], message.submodels, members, message.blocks)
    return values


def _fits(value: Plain, kind: Any) -> bool:
    """Return whether a value has the types of a message's fields, or those of a tuple."""
    if kind in (int, str, bytes):
        return type(value) is kind
    parts = get_args(kind) or tuple(field.type for field in fields(kind))
    if not isinstance(value, tuple):
        return False
    if parts[-1] is ...:
        return all(_fits(one, parts[0]) for one in value)
    return len(value) == len(parts) and all(map(_fits, value, parts))


def _from_value(value: Any, kind: Any) -> Any:
    if kind is not Roster:
        return kind(*value)
    run, round, threshold, submodels, members, blocks = value
    if not all(0 <= member[1] < len(submodels) for member in members):
        raise RunError("a member of a roster has a sub-model that is not on it.", key="roster")
    named = tuple(Keys(member[0], submodels[member[1]], *member[2:]) for member in members)
    roster = Roster(run, round, threshold, named, blocks)
    if roster.submodels != submodels:
        raise RunError("a roster has other sub-models than its members.", key="roster")
    return roster
