"""A member of a round as a state machine: keys, shares, masked update, agreement, unmask; and what it refuses.

What is secret to one client stays here: the private halves of its keys, and a seed for each of its blocks. The server
carries what members tell each other, and may lie; whatever does not fit together is refused, and a member that has
refused says nothing more in that round.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fleetfit.errors import RunError
from fleetfit.secure import keys, shamir
from fleetfit.secure.encoding import encoded
from fleetfit.secure.journal import Journal
from fleetfit.secure.messages import (
    MASK_KEY,
    Agreed,
    Dealt,
    Keys,
    MaskedUpdate,
    Opened,
    Roster,
    Sent,
    Shares,
    Signed,
    Survivors,
    mark,
    of_round,
    of_survivors,
)

Lengths = Callable[[Sequence[str]], Mapping[int, int]]
"""Returns the blocks of sub-models, in the order in which blocks count them, with the length of each."""


def pair_key(secret: bytes, run: str, round: int, one: int, other: int, block: int, sent: bytes) -> bytes:
    """Return the key of the stream with which two members mask a block; `sent`: digest of what both were sent."""
    low, high = sorted((one, other))
    return keys.derived(secret, "fleetfit secure mask", run, round, low, high, block, sent)


def own_key(seed: bytes, block: int) -> bytes:
    """Return the key of the stream with which a member masks a block alone."""
    return keys.derived(seed, "fleetfit secure own mask", block)


@dataclass(frozen=True, eq=False)
class _Secrets:
    masks: keys.Agreement
    seals: keys.Agreement
    sent: Keys


class SecureClient:
    """One client in one round; each of its phases happens once and in order."""

    def __init__(
        self, number: int, identity: keys.Identity, authority: bytes, minimum: int, lengths: Lengths, journal: Journal
    ) -> None:
        """Take part.

        Args:
            number: Of the client.
            identity: What it signs with.
            authority: The public key of the fleet's authority.
            minimum: Of members, in the cohort and in each block of it: the client's own word.
            lengths: Computes the blocks of a cohort.
            journal: The rounds that the client has taken part in; it has to outlast the process.
        """
        self.number = number
        self._identity, self._authority, self._minimum = identity, authority, minimum
        self._lengths, self._journal = lengths, journal
        self._run, self._round, self._phase = "", -1, "keys"
        self._seeds: dict[int, bytes] = {}
        self._held: dict[tuple[int, int], bytes] = {}

    def _enter(self, phase: str, following: str) -> None:
        """Go into a phase; unless it ends well, there is no other.

        Raises:
            RunError: It is not this phase's turn.
        """
        if self._phase != phase:
            raise RunError(
                f"client {self.number} was asked for its {phase} when it was not their turn: each phase of a secure "
                "round happens once and in order, and none after a refusal.",
                key="phase",
            )
        self._phase, self._next = "refused", following

    def _left(self) -> None:
        self._phase = self._next

    # ---- keys

    def begin(self, run: str, round: int, piece: str) -> Keys:
        """Return the keys of a round.

        Args:
            run: Which run.
            round: Which round of it.
            piece: The sub-model that the client was sent.

        Raises:
            RunError: The client has taken part in this round before.
        """
        self._enter("keys", "shares")
        self._journal.enter(run, round)
        masks, seals = keys.Agreement.new(), keys.Agreement.new()
        signer = self._identity.signer
        signature = signer.sign(of_round(run, round, self.number, piece, masks.public, seals.public))
        sent = Keys(
            self.number, piece, signer.public, self._identity.certificate, masks.public, seals.public, signature
        )
        self._secrets, self._run, self._round = _Secrets(masks, seals, sent), run, round
        self._left()
        return sent

    # ---- shares

    def shares(self, roster: Roster) -> Shares:
        """Return the shares of this client's secrets for the members of a roster.

        Raises:
            RunError: The roster is not one to take part in.
        """
        self._enter("shares", "masked update")
        self._check(roster)
        self._roster = roster
        self._place = {member.client: place for place, member in enumerate(roster.members, 1)}
        self._mine = roster.blocks_of(self.number)
        self._seeds = {block: secrets.token_bytes(keys.KEY) for block in self._mine}
        hidden = {MASK_KEY: self._secrets.masks.private, **self._seeds}
        dealt = {kind: shamir.split(it, roster.threshold, len(self._place)) for kind, it in hidden.items()}
        sealed, marks = [], []
        for member in roster.members:
            mine = [(kind, shares[self._place[member.client] - 1]) for kind, shares in dealt.items()]
            marks.append((member.client, b"".join(self._mark(member.client, kind, share) for kind, share in mine)))
            if member.client == self.number:
                self._held |= {(self.number, kind): share for kind, share in mine}
                continue
            key = self._seal_key(member, self.number, member.client)
            text = keys.sealed(key, b"".join(share for _, share in mine), self._bound(self.number, member.client))
            sealed.append((member.client, text))
        seeds = tuple((block, keys.digest("fleetfit secure seed", seed)) for block, seed in self._seeds.items())
        self._left()
        return Shares(self.number, tuple(sealed), tuple(marks), seeds)

    def _mark(self, holder: int, kind: int, share: bytes) -> bytes:
        return mark(self._run, self._round, self.number, holder, kind, share)

    def _seal_key(self, other: Keys, dealer: int, holder: int) -> bytes:
        return keys.derived(self._secrets.seals.secret(other.seal_key), "fleetfit secure seal", dealer, holder)

    def _bound(self, dealer: int, holder: int) -> bytes:
        return encoded(self._roster.digest, dealer, holder)

    def _check(self, roster: Roster) -> None:
        """Refuse a roster.

        Raises:
            RunError: It lies, or hides too few.
        """
        if (roster.run, roster.round) != (self._run, self._round):
            raise RunError(
                "the roster is one of another run or round than the keys that were asked for.", key="roster.round"
            )
        numbers = [member.client for member in roster.members]
        if any(one >= other for one, other in pairwise(numbers)):
            raise RunError("a client is on the roster twice, or its members are out of order.", key="roster.members")
        for what in ("identity", "mask_key", "seal_key"):
            if len({getattr(member, what) for member in roster.members}) < len(numbers):
                raise RunError(
                    "two members of the roster have the same key: one client under two names.", key="roster.mask_key"
                )
        if self._secrets.sent not in roster.members:
            raise RunError(
                f"the roster has other keys, or another sub-model, for client {self.number} than it has sent.",
                key="roster",
            )
        if len(numbers) < self._minimum:
            raise RunError(
                f"the cohort has {len(numbers)} members, and at least {self._minimum} are asked for.", key="roster"
            )
        if roster.threshold > len(numbers):
            raise RunError(
                f"a threshold of {roster.threshold} among {len(numbers)} members is never met.", key="roster.threshold"
            )
        if 2 * roster.threshold <= len(numbers):
            raise RunError(
                f"a threshold of {roster.threshold} among {len(numbers)} members is not more than half of them: the "
                "server could show two halves different rosters.",
                key="roster.threshold",
            )
        for member in roster.members:
            self._check_member(member)
        self._check_blocks(roster)

    def _check_member(self, member: Keys) -> None:
        if not keys.signed_by(self._authority, member.certificate, keys.membership(member.identity)):
            raise RunError(
                f"the key of client {member.client} is not signed by the fleet's authority: anyone could have made it.",
                key="roster.member",
            )
        told = of_round(self._run, self._round, member.client, member.piece, member.mask_key, member.seal_key)
        if not keys.signed_by(member.identity, member.signature, told):
            raise RunError(
                f"client {member.client} has not signed its keys and its sub-model as the roster has them: they were "
                "changed, or belong to another round.",
                key="roster.signature",
            )

    def _check_blocks(self, roster: Roster) -> None:
        """Compute the blocks, and compare what was announced with them."""
        lengths = self._lengths(roster.pieces)
        if len(dict(roster.blocks)) < len(roster.blocks):
            raise RunError("a block was announced twice.", key="roster.blocks")
        for block, length in roster.blocks:
            if lengths.get(block) != length:
                raise RunError(
                    f"a block of {length} numbers was announced that the sub-models of the roster do not have.",
                    key="roster.blocks",
                )
            members = len(roster.covering(block))
            if members < self._minimum:
                raise RunError(
                    f"a block was announced that {members} members cover, and at least {self._minimum} are asked for: "
                    "its sum would reveal too much of one.",
                    key="roster.blocks",
                )

    # ---- masked update

    @property
    def pieces(self) -> tuple[str, ...]:
        """The members' sub-models, in the order that blocks count by."""
        return self._roster.pieces

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks of which this client sends its words."""
        return tuple(self._mine)

    def masked(self, dealt: Dealt, words: Mapping[int, NDArray[np.uint32]], sent: Sent) -> MaskedUpdate:
        """Return the client's words under masks.

        Args:
            dealt: What the other members have sealed for this one.
            words: By block.
            sent: What the client was sent.

        Raises:
            RunError: Too few have dealt, or a share is not what was sealed.
        """
        self._enter("masked update", "signature")
        self._open(dealt)
        found = []
        for block in self._mine:
            length = dict(self._roster.blocks)[block]
            if len(words[block]) != length:
                raise RunError(
                    f"client {self.number} has {len(words[block])} words of a block of {length}.", key="update"
                )
            out = words[block].astype("<u4")
            keys.masked(out, own_key(self._seeds[block], block), 1)
            found.append((block, out))
        for member in self._roster.members:
            if member.client == self.number or member.client not in self._dealers:
                continue
            theirs = set(self._roster.blocks_of(member.client))
            shared = [(block, out) for block, out in found if block in theirs]
            if not shared:
                continue
            secret = self._secrets.masks.secret(member.mask_key)
            given = sent.to_both(self._roster, self.number, member.client)
            for block, out in shared:
                key = pair_key(secret, self._run, self._round, self.number, member.client, block, given)
                keys.masked(out, key, 1 if self.number < member.client else -1)
        self._left()
        return MaskedUpdate(self.number, tuple((block, out.tobytes()) for block, out in found))

    def _open(self, dealt: Dealt) -> None:
        members = {member.client: member for member in self._roster.members}
        dealers = [client for client, _ in dealt.sealed]
        if len(set(dealers)) < len(dealers) or not set(dealers) <= members.keys() - {self.number}:
            raise RunError("shares came twice from one member, or from one that is not on the roster.", key="shares")
        self._dealers = {self.number, *dealers}
        if len(self._dealers) < max(self._roster.threshold, self._minimum):
            raise RunError(
                f"{len(self._dealers)} members have dealt their shares, and at least "
                f"{max(self._roster.threshold, self._minimum)} are asked for.",
                key="shares",
            )
        for dealer, text in dealt.sealed:
            key = self._seal_key(members[dealer], dealer, self.number)
            opened = keys.unsealed(key, text, self._bound(dealer, self.number))
            kinds = [MASK_KEY, *self._roster.blocks_of(dealer)]
            if opened is None or len(opened) != shamir.SIZE * len(kinds):
                raise RunError(
                    f"the shares of client {dealer} are not what it has sealed for client {self.number}: they were "
                    "changed on the way, or it was shown another roster.",
                    key="shares",
                )
            for place, kind in enumerate(kinds):
                self._held[dealer, kind] = opened[place * shamir.SIZE : (place + 1) * shamir.SIZE]

    # ---- agree and unmask

    def sign(self, survivors: Survivors) -> Signed:
        """Sign who is said to live.

        Raises:
            RunError: It was asked before, or somebody is said to be both living and dead, or too few live.
        """
        self._enter("signature", "answer to who lives")
        living, dead = set(survivors.living), set(survivors.dead)
        if living & dead:
            raise RunError(
                f"client {min(living & dead)} is listed as living and as dead: both of its secrets together reveal "
                "its update.",
                key="living",
            )
        told = [*survivors.living, *survivors.dead]
        if len(set(told)) < len(told) or set(told) != self._dealers or self.number not in living:
            raise RunError(
                "the clients listed as living and dead are not the members that have dealt their shares.", key="living"
            )
        if len(living) < max(self._roster.threshold, self._minimum):
            raise RunError(
                f"{len(living)} members live, and at least {max(self._roster.threshold, self._minimum)} are asked for.",
                key="living",
            )
        self._survivors = survivors
        signature = self._identity.signer.sign(of_survivors(self._roster.digest, survivors))
        self._left()
        return Signed(self.number, signature)

    def unmask(self, agreed: Agreed) -> Opened:
        """Return the shares with which masks are taken away: of the living their own, of the dead those of pairs.

        A block with fewer living members than the minimum stays masked. Without signatures a server could tell each
        member another story of who lives: of a block that few cover it would get the keys of all but one.

        Raises:
            RunError: It was asked before, or too few have signed the same.
        """
        self._enter("answer to who lives", "nothing")
        living, dead = set(self._survivors.living), set(self._survivors.dead)
        told = of_survivors(self._roster.digest, self._survivors)
        identities = {member.client: member.identity for member in self._roster.members if member.client in living}
        signed = {
            c for c, signature in agreed.signatures if c in living and keys.signed_by(identities[c], signature, told)
        }
        if len(signed) < self._roster.threshold:
            raise RunError(
                f"{len(signed)} living members have signed who lives as client {self.number} was told it, and at least "
                f"{self._roster.threshold} have to: others may have received another list.",
                key="living.signatures",
            )
        wanted = wanted_shares(self._roster, living, dead, self._minimum)
        self._left()
        self._seeds.clear()
        return Opened(self.number, tuple((client, kind, self._held[client, kind]) for client, kind in wanted))


def open_blocks(roster: Roster, living: set[int], minimum: int) -> dict[int, list[int]]:
    """Return the blocks whose sum may be seen, each with its living members."""
    found = {block: [c for c in roster.covering(block) if c in living] for block, _ in roster.blocks}
    return {block: members for block, members in found.items() if len(members) >= minimum}


def wanted_shares(roster: Roster, living: set[int], dead: set[int], minimum: int) -> list[tuple[int, int]]:
    """Return which secrets are to be put together: member and kind."""
    blocks = open_blocks(roster, living, minimum)
    seeds = [(client, block) for block, members in blocks.items() for client in members]
    pairs = [client for client in sorted(dead) if any(client in roster.covering(block) for block in blocks)]
    return [*seeds, *((client, MASK_KEY) for client in pairs)]
