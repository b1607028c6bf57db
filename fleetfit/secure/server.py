"""The server of a secure round as a state machine: it carries what members tell each other, and learns sums.

It adds masked words up as they come, so that memory does not grow with the cohort. What it learns is one sum for each
block that enough living members cover, and who took part.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetfit.errors import RunError
from fleetfit.secure import keys, shamir
from fleetfit.secure.client import Lengths, open_blocks, own_key, pair_key, wanted_shares
from fleetfit.secure.messages import (
    MARK,
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
    of_survivors,
)
from fleetfit.secure.quantise import signed


@dataclass(frozen=True)
class SecureRules:
    """What a run asks of its secure rounds.

    Attributes:
        minimum: Of members, in a cohort and in each of its blocks.
        threshold: Share of the cohort that has to live for a round to be unmasked, above one half.
    """

    minimum: int
    threshold: float

    def needed(self, members: int) -> int:
        """Return how many members of a cohort unmask."""
        return max(math.ceil(self.threshold * members - 1e-9), members // 2 + 1)


@dataclass(frozen=True, eq=False)
class BlockSum:
    """The sum of a block.

    Attributes:
        block: Its number.
        words: What the words of its members add up to, int64.
        clients: How many these are.
    """

    block: int
    words: NDArray[np.int64]
    clients: int


class SecureServer:
    """The server in one round."""

    def __init__(self, run: str, round: int, rules: SecureRules, lengths: Lengths) -> None:
        """Begin a round.

        Args:
            run: Which run.
            round: Which round of it, 0-based.
            rules: Whom it takes.
            lengths: Computes the blocks of a cohort.
        """
        self._run, self._round, self._rules, self._lengths = run, round, rules, lengths
        self._members: dict[int, Keys] = {}
        self._shares: dict[int, Shares] = {}
        self._marks: dict[tuple[int, int, int], bytes] = {}
        self._totals: dict[int, NDArray[np.uint32]] = {}
        self._living: list[int] = []
        self._signatures: dict[int, bytes] = {}
        self._opened: dict[int, dict[tuple[int, int], bytes]] = {}
        self.tampered: list[tuple[int, int]] = []
        """Who has opened a share, and of whom, that was not the one that was dealt."""

    def enrol(self, sent: Keys) -> None:
        """Take a member's keys.

        Raises:
            RunError: It has sent some.
        """
        if sent.client in self._members:
            raise RunError(f"client {sent.client} is in the cohort already.", key="client")
        self._members[sent.client] = sent

    def roster(self) -> Roster:
        """Return who takes part, with the blocks that enough of them cover.

        Raises:
            RunError: Too few take part.
        """
        members = tuple(self._members[client] for client in sorted(self._members))
        needed = self._rules.needed(len(members))
        everything = Roster(self._run, self._round, needed, members, ())
        self._enough(len(members), self._rules.minimum, "sent keys")
        found = self._lengths(everything.pieces)
        blocks = [
            (block, length)
            for block, length in sorted(found.items())
            if len(everything.covering(block)) >= self._rules.minimum
        ]
        if not blocks:
            raise RunError(
                f"no part of the model is covered by {self._rules.minimum} members of the cohort, so no sum could be "
                "seen.",
                key="minimum",
            )
        self._roster = Roster(self._run, self._round, needed, members, tuple(blocks))
        return self._roster

    def _enough(self, found: int, wanted: int, what: str) -> None:
        if found < wanted:
            raise RunError(f"{found} clients {what}, and at least {wanted} are needed.", key="clients")

    def deal(self, sent: Shares) -> None:
        """Take a member's shares for the others.

        Raises:
            RunError: They are not for this roster.
        """
        others = self._members.keys() - {sent.client}
        kinds = self._kinds(sent.client)
        fits = (
            sent.client in self._members
            and sent.client not in self._shares
            and sorted(client for client, _ in sent.sealed) == sorted(others)
            and sorted(holder for holder, _ in sent.marks) == sorted(self._members)
            and all(len(marks) == MARK * len(kinds) for _, marks in sent.marks)
            and [block for block, _ in sent.seeds] == kinds[1:]
        )
        if not fits:
            raise RunError(
                f"what client {sent.client} dealt is not one share of each secret for each member.", key="shares"
            )
        self._shares[sent.client] = sent
        for holder, marks in sent.marks:
            for place, kind in enumerate(kinds):
                self._marks[sent.client, holder, kind] = marks[MARK * place : MARK * (place + 1)]

    def _kinds(self, client: int) -> list[int]:
        return [MASK_KEY, *self._roster.blocks_of(client)]

    def dealt(self) -> dict[int, Dealt]:
        """Return what each member gets of the others' shares.

        Raises:
            RunError: Too few have dealt.
        """
        needed = max(self._roster.threshold, self._rules.minimum)
        self._enough(len(self._shares), needed, "dealt shares")
        found: dict[int, list[tuple[int, bytes]]] = {client: [] for client in self._shares}
        for dealer, sent in self._shares.items():
            for holder, text in sent.sealed:
                if holder in found:
                    found[holder].append((dealer, text))
        return {client: Dealt(tuple(texts)) for client, texts in found.items()}

    def add(self, sent: MaskedUpdate) -> None:
        """Add a member's masked words up.

        Raises:
            RunError: They are not as many as announced, or come twice, or from nobody who has dealt.
        """
        lengths = dict(self._roster.blocks)
        if sent.client not in self._shares or sent.client in self._living:
            raise RunError(f"client {sent.client} has no masked update to send.", key="update")
        if [block for block, _ in sent.blocks] != self._kinds(sent.client)[1:] or any(
            len(text) != 4 * lengths[block] for block, text in sent.blocks
        ):
            raise RunError("its masked update has not the blocks and lengths that were announced.", key="update")
        for block, text in sent.blocks:
            words = np.frombuffer(text, dtype="<u4")
            if block in self._totals:
                self._totals[block] += words
            else:
                self._totals[block] = words.astype(np.uint32)
        self._living.append(sent.client)

    def survivors(self) -> Survivors:
        """Return whose update has come.

        Raises:
            RunError: Too few have.
        """
        self._enough(len(self._living), max(self._roster.threshold, self._rules.minimum), "sent a masked update")
        living = sorted(self._living)
        self._survivors = Survivors(tuple(living), tuple(sorted(self._shares.keys() - set(living))))
        return self._survivors

    def agree(self, sent: Signed) -> None:
        """Take a member's signature under who lives; one that does not fit is left out."""
        member = self._members.get(sent.client)
        told = of_survivors(self._roster.digest, self._survivors)
        if member is not None and keys.signed_by(member.identity, sent.signature, told):
            self._signatures[sent.client] = sent.signature

    def agreed(self) -> Agreed:
        """Return who has signed.

        Raises:
            RunError: Too few have.
        """
        self._enough(len(self._signatures), self._roster.threshold, "signed who lives")
        return Agreed(tuple(sorted(self._signatures.items())))

    def open(self, sent: Opened) -> None:
        """Take a member's shares; one that was not dealt so is left out, and noted in `tampered`."""
        kept = self._opened.setdefault(sent.client, {})
        for client, kind, share in sent.shares:
            dealt = self._marks.get((client, sent.client, kind))
            if dealt == mark(self._run, self._round, client, sent.client, kind, share):
                kept[client, kind] = share
            else:
                self.tampered.append((sent.client, client))

    def sums(self, given: Sent) -> list[BlockSum]:
        """Take the masks away.

        Args:
            given: What members were sent, with the states of all blocks.

        Returns:
            Of each block that enough living members cover.

        Raises:
            RunError: Too few have opened their shares, or what was dealt gives no secret.
        """
        living = set(self._living)
        dead = self._shares.keys() - living
        blocks = open_blocks(self._roster, living, self._rules.minimum)
        if not blocks:
            raise RunError(
                f"no block has {self._rules.minimum} members left, and a sum of fewer would reveal too much of one.",
                key="minimum",
            )
        secrets = {
            (client, kind): self._secret(client, kind)
            for client, kind in wanted_shares(self._roster, living, dead, self._rules.minimum)
        }
        for block, members in blocks.items():
            for client in members:
                keys.masked(self._totals[block], own_key(secrets[client, block], block), -1)
        for client in sorted(dead):
            if (client, MASK_KEY) in secrets:
                self._unpaired(keys.Agreement.of(secrets[client, MASK_KEY]), client, blocks, given)
        return [BlockSum(block, signed(self._totals[block]), len(found)) for block, found in blocks.items()]

    def _unpaired(self, pair: keys.Agreement, client: int, blocks: Mapping[int, Sequence[int]], given: Sent) -> None:
        """Take away what living members share with a dead one."""
        shared: dict[int, list[int]] = {}
        for block, members in blocks.items():
            if client in self._roster.covering(block):
                for other in members:
                    shared.setdefault(other, []).append(block)
        for other, both in shared.items():
            secret, sent = pair.secret(self._members[other].mask_key), given.to_both(self._roster, client, other)
            for block in both:
                key = pair_key(secret, self._run, self._round, client, other, block, sent)
                keys.masked(self._totals[block], key, -1 if other < client else 1)

    def _secret(self, client: int, kind: int) -> bytes:
        """Put a secret together, and compare it with what its owner said of it."""
        places = {member.client: place for place, member in enumerate(self._roster.members, 1)}
        shares = {places[h]: found[client, kind] for h, found in self._opened.items() if (client, kind) in found}
        needed = self._roster.threshold
        if len(shares) < needed:
            raise RunError(
                f"{len(shares)} clients opened their shares of client {client}, and {needed} are needed."
                + self._who_lied(),
                key="shares",
            )
        found = shamir.join(dict(list(shares.items())[:needed]), keys.KEY)
        if found is None or not self._is(client, kind, found):
            raise RunError(
                f"the shares that client {client} dealt do not give its secret: it dealt wrong ones.", key="shares"
            )
        return found

    def _is(self, client: int, kind: int, secret: bytes) -> bool:
        if kind == MASK_KEY:
            return keys.Agreement.of(secret).public == self._members[client].mask_key
        return keys.digest("fleetfit secure seed", secret) == dict(self._shares[client].seeds)[kind]

    def _who_lied(self) -> str:
        liars: Iterable[int] = sorted({holder for holder, _ in self.tampered})
        return f" Shares that were changed came from clients {', '.join(map(str, liars))}." if liars else ""
