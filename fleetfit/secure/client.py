"""A member of a secure round as a state machine: keys, shares, masked update, signature, opened shares; its refusals.

The secrets of a client stay here: the private halves of its keys, and a seed for each of its blocks. The server relays
the members' messages, and may lie. A member refuses messages that contradict each other, and sends nothing more in a
round that it has refused.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fleetfit.errors import RunError
from fleetfit.secure import keys, shamir
from fleetfit.secure.encoding import encode
from fleetfit.secure.messages import (
    MASK_KEY,
    Keys,
    MaskedUpdate,
    OpenedShares,
    Roster,
    SealedShares,
    SentDigests,
    Shares,
    Signature,
    Signatures,
    Survivors,
    encode_keys,
    encode_survivors,
    mark,
)

Lengths = Callable[[Sequence[str]], Mapping[int, int]]
"""Returns the length of each block of some sub-models, which are in the order by which blocks are numbered."""


def derive_pair_key(secret: bytes, run: str, round: int, one: int, other: int, block: int, sent: bytes) -> bytes:
    """Return the key of the stream with which two members mask a block; `sent`: digest of what both were sent."""
    low, high = sorted((one, other))
    return keys.derive_key(secret, "fleetfit secure mask", run, round, low, high, block, sent)


def derive_own_key(seed: bytes, block: int) -> bytes:
    """Return the key of the stream with which a member masks a block alone."""
    return keys.derive_key(seed, "fleetfit secure own mask", block)


@dataclass(eq=False)
class Journal:
    """The last round that was begun of each run, so that none is done twice.

    Training is deterministic: if a round were done again with one client fewer, the difference of the two sums would be
    exactly that client's update.

    Attributes:
        last: By run.
        keep: Stores `last` where it outlasts the process, before a round begins.
    """

    last: dict[str, int] = field(default_factory=dict)
    keep: Callable[[Mapping[str, int]], None] = lambda last: None

    def has_begun(self, run: str, round: int) -> bool:
        """Return whether a round, or one after it, was begun."""
        return round <= self.last.get(run, -1)

    def enter(self, run: str, round: int) -> None:
        """Begin a round.

        Raises:
            RunError: It was begun before.
        """
        if self.has_begun(run, round):
            raise RunError(
                f"round {round + 1} of this run was begun before: done twice, the difference of two sums would show a "
                "single update.",
                key="round",
            )
        self.last[run] = round
        self.keep(self.last)


class SecureClient:
    """One client in one round; each of its phases happens once and in order.

    Attributes:
        submodels: The members' sub-models on the roster, in the order that blocks count by.
        blocks: The blocks of which this client sends its words.
    """

    submodels: tuple[str, ...]
    blocks: Sequence[int]

    def __init__(
        self, number: int, identity: keys.Identity, authority: bytes, minimum: int, lengths: Lengths, journal: Journal
    ) -> None:
        """Make a member.

        Args:
            number: Of the client.
            identity: Its key and certificate.
            authority: The public key of the fleet's authority.
            minimum: Of members, in the cohort and in each block of it, by the client's own setting.
            lengths: Computes the blocks of a cohort.
            journal: The client's earlier rounds; it must outlast the process.
        """
        self.number = number
        self._identity, self._authority, self._minimum = identity, authority, minimum
        self._lengths, self._journal = lengths, journal
        self._run, self._round, self._phase = "", -1, "keys"
        self._seeds: dict[int, bytes] = {}
        self._held: dict[tuple[int, int], bytes] = {}

    def _enter(self, phase: str, following: str) -> None:
        """Enter a phase; after a refusal no other follows."""
        if self._phase != phase:
            raise RunError(
                f"client {self.number} was asked for its {phase} when it was not their turn: each phase of a secure "
                "round happens once and in order, and none after a refusal.",
                key="phase",
            )
        self._phase, self._next = "refused", following

    def _leave(self) -> None:
        self._phase = self._next

    # ---- keys

    def begin(self, run: str, round: int, submodel: str) -> Keys:
        """Return the keys of a round.

        Args:
            run: Which run.
            round: Which round of it.
            submodel: The client's sub-model, as text.

        Raises:
            RunError: The client has taken part in this round before.
        """
        self._enter("keys", "shares")
        self._journal.enter(run, round)
        self._run, self._round = run, round
        self._masks, self._seals, signer = keys.Agreement(), keys.Agreement(), self._identity.signer
        public = self._masks.public, self._seals.public
        signature = signer.sign(encode_keys(run, round, self.number, submodel, *public))
        self._sent = Keys(self.number, submodel, signer.public, self._identity.certificate, *public, signature)
        self._leave()
        return self._sent

    # ---- shares

    def share(self, roster: Roster) -> Shares:
        """Return the shares of this client's secrets for the members of a roster.

        Raises:
            RunError: The roster is refused.
        """
        self._enter("shares", "masked update")
        self._check(roster)
        self._roster, self.submodels, self.blocks = roster, roster.submodels, roster.get_blocks(self.number)
        self._position = {member.client: number for number, member in enumerate(roster.members, 1)}
        self._seeds = {block: secrets.token_bytes(keys.KEY) for block in self.blocks}
        hidden = {MASK_KEY: self._masks.private, **self._seeds}
        shares = {kind: shamir.split(it, roster.threshold, len(self._position)) for kind, it in hidden.items()}
        sealed, marks = [], []
        for member in roster.members:
            own = [(kind, parts[self._position[member.client] - 1]) for kind, parts in shares.items()]
            own_marks = [mark(self._run, self._round, self.number, member.client, *share) for share in own]
            marks.append((member.client, b"".join(own_marks)))
            if member.client == self.number:
                self._held |= {(self.number, kind): share for kind, share in own}
                continue
            key = self._derive_seal_key(member, self.number, member.client)
            text = keys.seal(key, b"".join(share for _, share in own), self._encode_binding(self.number, member.client))
            sealed.append((member.client, text))
        seeds = tuple((block, keys.digest("fleetfit secure seed", seed)) for block, seed in self._seeds.items())
        self._leave()
        return Shares(self.number, tuple(sealed), tuple(marks), seeds)

    def _derive_seal_key(self, other: Keys, dealer: int, holder: int) -> bytes:
        return keys.derive_key(self._seals.secret(other.seal_key), "fleetfit secure seal", dealer, holder)

    def _encode_binding(self, dealer: int, holder: int) -> bytes:
        return encode(self._roster.digest, dealer, holder)

    def _check(self, roster: Roster) -> None:
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
        if self._sent not in roster.members:
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
        if not keys.verify_signature(self._authority, member.certificate, keys.encode_membership(member.identity)):
            raise RunError(
                f"the key of client {member.client} is not signed by the fleet's authority: anyone could have made it.",
                key="roster.member",
            )
        statement = encode_keys(
            self._run, self._round, member.client, member.submodel, member.mask_key, member.seal_key
        )
        if not keys.verify_signature(member.identity, member.signature, statement):
            raise RunError(
                f"client {member.client} has not signed its keys and its sub-model as the roster has them: they were "
                "changed, or belong to another round.",
                key="roster.signature",
            )

    def _check_blocks(self, roster: Roster) -> None:
        """Compute the blocks, and compare the announced ones with them."""
        lengths = self._lengths(roster.submodels)
        if len(dict(roster.blocks)) < len(roster.blocks):
            raise RunError("a block was announced twice.", key="roster.blocks")
        for block, length in roster.blocks:
            if lengths.get(block) != length:
                raise RunError(
                    f"a block of {length} numbers was announced that the sub-models of the roster do not have.",
                    key="roster.blocks",
                )
            members = len(roster.find_covering(block))
            if members < self._minimum:
                raise RunError(
                    f"a block was announced that {members} members cover, and at least {self._minimum} are asked for: "
                    "its sum would reveal too much of one.",
                    key="roster.blocks",
                )

    # ---- masked update

    def mask(self, shares: SealedShares, words: Mapping[int, NDArray[np.uint32]], sent: SentDigests) -> MaskedUpdate:
        """Return the client's words under masks.

        Args:
            shares: The other members' shares for this one.
            words: By block.
            sent: Digests of the client's job.

        Raises:
            RunError: Too few members have dealt shares, or a share was changed.
        """
        self._enter("masked update", "signature")
        self._open(shares)
        masked = []
        for block in self.blocks:
            length = dict(self._roster.blocks)[block]
            if len(words[block]) != length:
                raise RunError(
                    f"client {self.number} has {len(words[block])} words of a block of {length}.", key="update"
                )
            out = words[block].astype("<u4")
            keys.add_mask(out, derive_own_key(self._seeds[block], block), 1)
            masked.append((block, out))
        for member in self._roster.members:
            if member.client == self.number or member.client not in self._dealers:
                continue
            theirs = set(self._roster.get_blocks(member.client))
            shared = [(block, out) for block, out in masked if block in theirs]
            if not shared:
                continue
            secret = self._masks.secret(member.mask_key)
            common = sent.to_both(self._roster, self.number, member.client)
            for block, out in shared:
                key = derive_pair_key(secret, self._run, self._round, self.number, member.client, block, common)
                keys.add_mask(out, key, 1 if self.number < member.client else -1)
        self._leave()
        return MaskedUpdate(self.number, tuple((block, out.tobytes()) for block, out in masked))

    def _open(self, shares: SealedShares) -> None:
        members = {member.client: member for member in self._roster.members}
        dealers = [client for client, _ in shares.sealed]
        if len(set(dealers)) < len(dealers) or not set(dealers) <= members.keys() - {self.number}:
            raise RunError("shares came twice from one member, or from one that is not on the roster.", key="shares")
        self._dealers = {self.number, *dealers}
        self._check_count(len(self._dealers), "have dealt their shares", "shares")
        for dealer, text in shares.sealed:
            key = self._derive_seal_key(members[dealer], dealer, self.number)
            opened = keys.unseal(key, text, self._encode_binding(dealer, self.number))
            kinds = [MASK_KEY, *self._roster.get_blocks(dealer)]
            if opened is None or len(opened) != shamir.SIZE * len(kinds):
                raise RunError(
                    f"the shares of client {dealer} are not what it has sealed for client {self.number}: they were "
                    "changed on the way, or it was shown another roster.",
                    key="shares",
                )
            for number, kind in enumerate(kinds):
                self._held[dealer, kind] = opened[number * shamir.SIZE : (number + 1) * shamir.SIZE]

    def _check_count(self, members: int, action: str, key: str) -> None:
        needed = max(self._roster.threshold, self._minimum)
        if members < needed:
            raise RunError(f"{members} members {action}, and at least {needed} are asked for.", key=key)

    # ---- agree and unmask

    def sign(self, survivors: Survivors) -> Signature:
        """Sign the list of survivors.

        Raises:
            RunError: It was asked before, or the list has a client as living and as dead, or too few live.
        """
        self._enter("signature", "opened shares")
        living, dead = set(survivors.living), set(survivors.dead)
        if living & dead:
            raise RunError(
                f"client {min(living & dead)} is listed as living and as dead: both of its secrets together reveal "
                "its update.",
                key="living",
            )
        listed = [*survivors.living, *survivors.dead]
        if len(set(listed)) < len(listed) or set(listed) != self._dealers or self.number not in living:
            raise RunError(
                "the clients listed as living and dead are not the members that have dealt their shares.", key="living"
            )
        self._check_count(len(living), "live", "living")
        self._survivors = survivors
        signature = self._identity.signer.sign(encode_survivors(self._roster.digest, survivors))
        self._leave()
        return Signature(self.number, signature)

    def unmask(self, signatures: Signatures) -> OpenedShares:
        """Return the shares that remove masks: of the living their own masks, of the dead those of pairs.

        A block with fewer living members than the minimum stays masked. Without signatures a server could send each
        member another list of survivors: of a block that few cover it would get the keys of all but one.

        Raises:
            RunError: It was asked before, or too few members have signed the same list.
        """
        self._enter("opened shares", "nothing")
        living, dead = set(self._survivors.living), set(self._survivors.dead)
        statement = encode_survivors(self._roster.digest, self._survivors)
        identities = {member.client: member.identity for member in self._roster.members if member.client in living}
        signed = {
            c
            for c, signature in signatures.signatures
            if c in living and keys.verify_signature(identities[c], signature, statement)
        }
        if len(signed) < self._roster.threshold:
            raise RunError(
                f"{len(signed)} living members have signed the survivors that client {self.number} was sent, and at "
                f"least {self._roster.threshold} have to: others may have received another list.",
                key="living.signatures",
            )
        needed = list_needed_shares(self._roster, living, dead, self._minimum)
        self._leave()
        self._seeds.clear()
        return OpenedShares(self.number, tuple((client, kind, self._held[client, kind]) for client, kind in needed))


def find_open_blocks(roster: Roster, living: set[int], minimum: int) -> dict[int, list[int]]:
    """Return the blocks whose sum may be seen, each with its living members."""
    living_members = {block: [c for c in roster.find_covering(block) if c in living] for block, _ in roster.blocks}
    return {block: members for block, members in living_members.items() if len(members) >= minimum}


def list_needed_shares(roster: Roster, living: set[int], dead: set[int], minimum: int) -> list[tuple[int, int]]:
    """Return the secrets to be restored, as (member, kind)."""
    blocks = find_open_blocks(roster, living, minimum)
    seeds = [(client, block) for block, members in blocks.items() for client in members]
    pairs = [client for client in sorted(dead) if any(roster.covers(client, block) for block in blocks)]
    return [*seeds, *((client, MASK_KEY) for client in pairs)]
