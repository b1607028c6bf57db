"""The server of a secure round as a state machine: it relays the members' messages, and learns sums.

It adds masked words up as they come, so its memory does not grow with the cohort. It learns one sum for each block that
enough living members cover, and which clients took part.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetfit.errors import RunError
from fleetfit.secure import keys, shamir
from fleetfit.secure.client import Lengths, derive_own_key, derive_pair_key, find_open_blocks, list_needed_shares
from fleetfit.secure.messages import (
    MARK,
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
    encode_survivors,
    mark,
)


@dataclass(frozen=True)
class SecureRules:
    """The settings of secure rounds.

    Attributes:
        minimum: Of members, in a cohort and in each of its blocks.
        threshold: Share of the cohort that must live for a round to be unmasked, above one half.
    """

    minimum: int
    threshold: float

    def count_needed(self, members: int) -> int:
        """Return how many members of a cohort must open their shares."""
        return max(math.ceil(self.threshold * members - 1e-9), members // 2 + 1)


@dataclass(frozen=True, eq=False)
class BlockSum:
    """The sum of a block.

    Attributes:
        block: Its number.
        words: The sum of its members' words, int64.
        clients: Number of these members.
    """

    block: int
    words: NDArray[np.int64]
    clients: int


class SecureServer:
    """The server in one round."""

    def __init__(self, run: str, round: int, rules: SecureRules, lengths: Lengths) -> None:
        """Begin a round.

        Args:
            run: Name of the run.
            round: Of the run, 0-based.
            rules: Minimum and threshold.
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
        """Pairs (holder, owner) of opened shares that were changed."""

    def enrol(self, sent: Keys) -> None:
        """Add a member's keys.

        Raises:
            RunError: It, or its member's key, is in the cohort already.
        """
        if sent.client in self._members:
            raise RunError(f"client {sent.client} is in the cohort already.", key="client")
        for other in self._members.values():
            if other.identity == sent.identity:
                raise RunError(
                    f"client {sent.client} has the member's key of client {other.client}: one file on two devices. "
                    "Make one for each (fleetfit flower member).",
                    key="client",
                )
        self._members[sent.client] = sent

    def make_roster(self) -> Roster:
        """Return the members, with the blocks that enough of them cover.

        Raises:
            RunError: Too few take part.
        """
        members = tuple(self._members[client] for client in sorted(self._members))
        needed = self._rules.count_needed(len(members))
        cohort = Roster(self._run, self._round, needed, members, ())
        self._check_count(len(members), self._rules.minimum, "sent keys")
        lengths = self._lengths(cohort.submodels)
        blocks = [
            (block, length)
            for block, length in sorted(lengths.items())
            if len(cohort.find_covering(block)) >= self._rules.minimum
        ]
        if not blocks:
            raise RunError(
                f"no part of the model is covered by {self._rules.minimum} members of the cohort, so no sum could be "
                "seen.",
                key="secure.min_clients",
            )
        self._roster = Roster(self._run, self._round, needed, members, tuple(blocks))
        return self._roster

    def _check_count(self, count: int, needed: int, action: str) -> None:
        if count < needed:
            raise RunError(f"{count} clients {action}, and at least {needed} are needed.", key="clients")

    def add_shares(self, sent: Shares) -> None:
        """Add a member's shares for the others.

        Raises:
            RunError: They are not for this roster.
        """
        others = self._members.keys() - {sent.client}
        kinds = self._kinds(sent.client)
        is_valid = (
            sent.client in self._members
            and sent.client not in self._shares
            and sorted(client for client, _ in sent.sealed) == sorted(others)
            and sorted(holder for holder, _ in sent.marks) == sorted(self._members)
            and all(len(marks) == MARK * len(kinds) for _, marks in sent.marks)
            and [block for block, _ in sent.seeds] == kinds[1:]
        )
        if not is_valid:
            raise RunError(f"client {sent.client} has not dealt one share of each secret to each member.", key="shares")
        self._shares[sent.client] = sent
        for holder, marks in sent.marks:
            for number, kind in enumerate(kinds):
                self._marks[sent.client, holder, kind] = marks[MARK * number : MARK * (number + 1)]

    def _kinds(self, client: int) -> list[int]:
        return [MASK_KEY, *self._roster.get_blocks(client)]

    def deal(self) -> dict[int, SealedShares]:
        """Return the others' shares for each member.

        Raises:
            RunError: Too few have dealt.
        """
        needed = max(self._roster.threshold, self._rules.minimum)
        self._check_count(len(self._shares), needed, "dealt shares")
        received: dict[int, list[tuple[int, bytes]]] = {client: [] for client in self._shares}
        for dealer, sent in self._shares.items():
            for holder, text in sent.sealed:
                if holder in received:
                    received[holder].append((dealer, text))
        return {client: SealedShares(tuple(texts)) for client, texts in received.items()}

    def add(self, sent: MaskedUpdate) -> None:
        """Add a member's masked words to the sums.

        Raises:
            RunError: Their number is wrong, they come twice, or from a client that has dealt no shares.
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

    def find_survivors(self) -> Survivors:
        """Return the clients whose update has come.

        Raises:
            RunError: They are too few.
        """
        self._check_count(len(self._living), max(self._roster.threshold, self._rules.minimum), "sent a masked update")
        living = sorted(self._living)
        self._survivors = Survivors(tuple(living), tuple(sorted(self._shares.keys() - set(living))))
        return self._survivors

    def add_signature(self, sent: Signature) -> None:
        """Add a member's signature of the list of survivors, if it is valid."""
        member = self._members.get(sent.client)
        statement = encode_survivors(self._roster.digest, self._survivors)
        if member is not None and keys.verify_signature(member.identity, sent.signature, statement):
            self._signatures[sent.client] = sent.signature

    def collect_signatures(self) -> Signatures:
        """Return the valid signatures.

        Raises:
            RunError: They are too few.
        """
        self._check_count(len(self._signatures), self._roster.threshold, "signed the list of survivors")
        return Signatures(tuple(sorted(self._signatures.items())))

    def add_opened(self, sent: OpenedShares) -> None:
        """Add a member's opened shares; those that were changed are left out, and listed in `tampered`."""
        opened = self._opened.setdefault(sent.client, {})
        for client, kind, share in sent.shares:
            expected = self._marks.get((client, sent.client, kind))
            if expected == mark(self._run, self._round, client, sent.client, kind, share):
                opened[client, kind] = share
            else:
                self.tampered.append((sent.client, client))

    def compute_sums(self, sent: SentDigests) -> list[BlockSum]:
        """Remove the masks.

        Args:
            sent: Digests of the members' jobs, with the states of all blocks.

        Returns:
            The sum of each block that enough living members cover.

        Raises:
            RunError: Too few members have opened their shares, or the shares give no secret.
        """
        living = set(self._living)
        dead = self._shares.keys() - living
        blocks = find_open_blocks(self._roster, living, self._rules.minimum)
        if not blocks:
            raise RunError(
                f"no block has {self._rules.minimum} members left, and a sum of fewer would reveal too much of one.",
                key="secure.min_clients",
            )
        secrets = {
            (client, kind): self._restore_secret(client, kind)
            for client, kind in list_needed_shares(self._roster, living, dead, self._rules.minimum)
        }
        for block, members in blocks.items():
            for client in members:
                keys.add_mask(self._totals[block], derive_own_key(secrets[client, block], block), -1)
        for client in sorted(dead):
            if (client, MASK_KEY) in secrets:
                self._remove_pair_masks(keys.Agreement(secrets[client, MASK_KEY]), client, blocks, sent)
        sums = {block: self._totals[block].view(np.int32).astype(np.int64) for block in blocks}  # from -2^31 on
        return [BlockSum(block, sums[block], len(members)) for block, members in blocks.items()]

    def _remove_pair_masks(
        self, pair: keys.Agreement, client: int, blocks: Mapping[int, Sequence[int]], sent: SentDigests
    ) -> None:
        """Remove the masks that living members share with a dead one."""
        shared: dict[int, list[int]] = {}
        for block, members in blocks.items():
            if self._roster.covers(client, block):
                for other in members:
                    shared.setdefault(other, []).append(block)
        for other, both in shared.items():
            secret, common = pair.secret(self._members[other].mask_key), sent.to_both(self._roster, client, other)
            for block in both:
                key = derive_pair_key(secret, self._run, self._round, client, other, block, common)
                keys.add_mask(self._totals[block], key, -1 if other < client else 1)

    def _restore_secret(self, client: int, kind: int) -> bytes:
        """Restore a secret from its shares, and compare it with its owner's commitment."""
        positions = {member.client: number for number, member in enumerate(self._roster.members, 1)}
        shares = {positions[h]: opened[client, kind] for h, opened in self._opened.items() if (client, kind) in opened}
        needed = self._roster.threshold
        if len(shares) < needed:
            liars = ", ".join(map(str, sorted({holder for holder, _ in self.tampered})))
            raise RunError(
                f"{len(shares)} clients opened their shares of client {client}, and {needed} are needed."
                + (f" Shares that were changed came from clients {liars}." if liars else ""),
                key="shares",
            )
        secret = shamir.join(dict(list(shares.items())[:needed]), keys.KEY)
        if secret is None or not self._is_secret(client, kind, secret):
            raise RunError(
                f"the shares that client {client} dealt do not give its secret: it dealt wrong ones.", key="shares"
            )
        return secret

    def _is_secret(self, client: int, kind: int, secret: bytes) -> bool:
        if kind == MASK_KEY:
            return keys.Agreement(secret).public == self._members[client].mask_key
        return keys.digest("fleetfit secure seed", secret) == dict(self._shares[client].seeds)[kind]
