"""Secure aggregation by segments, as pure code: a server that learns sums over clients, and no client's update.

Bonawitz et al. (CCS 2017), with double masking, for clients that train different sub-models. A block is the set of
elements that the same of the cohort's sub-models cover; each pair of members masks exactly the blocks that both cover,
so that a small client sends no more than its own piece, and the server learns one sum for each block, and no level's.

Differs from the paper: a seed for each block, so that a block with too few living members stays masked while the others
are opened; shares are known by marks, so that a changed one is noticed and left out; the keys of masks go by all that
both of a pair were sent, so that a server that sends different states gets noise (Pasquini et al., CCS 2022);
identities are signed by the fleet's authority, whose key the server never has.

It knows nothing of engines, layouts or tensors: a client and a server are state machines, and what goes between them
are plain values.
"""

from dataclasses import dataclass, field
from secrets import token_hex

from fleetfit.secure.client import Lengths, SecureClient
from fleetfit.secure.journal import Journal
from fleetfit.secure.keys import Identity, Signer, certified, check_installed, digest
from fleetfit.secure.messages import (
    Agreed,
    Dealt,
    Keys,
    MaskedUpdate,
    Message,
    Opened,
    Roster,
    Sent,
    Shares,
    Signed,
    Survivors,
    packed,
    read,
    size,
)
from fleetfit.secure.quantise import Quantiser, signed
from fleetfit.secure.server import BlockSum, SecureRules, SecureServer

__all__ = [
    "SKIPPED",
    "TOO_FEW",
    "Agreed",
    "BlockSum",
    "Dealt",
    "Identity",
    "Journal",
    "Keys",
    "Lengths",
    "MaskedUpdate",
    "Message",
    "Opened",
    "Quantiser",
    "Roster",
    "SecureClient",
    "SecureRules",
    "SecureRun",
    "SecureServer",
    "Sent",
    "Shares",
    "Signed",
    "Signer",
    "Survivors",
    "certified",
    "check_installed",
    "digest",
    "packed",
    "read",
    "signed",
    "size",
]  # fmt: skip

SKIPPED = "it was begun before the run was stopped, and a secure round is never done twice"
"""The reason of a round that is left out when a run goes on."""
TOO_FEW = "fewer clients were drawn than a sum has to be over, so none was asked"
"""The reason of a private round whose cohort is too small."""


@dataclass(eq=False)
class SecureRun:
    """What a run asks of its secure rounds, and which of them were begun.

    Attributes:
        rules: Whom a round takes.
        grid: In which numbers movements are added up.
        run: What members know the run by; never the same for two runs.
        journal: The rounds that were begun.
    """

    rules: SecureRules
    grid: Quantiser
    run: str = field(default_factory=lambda: token_hex(16))
    journal: Journal = field(default_factory=Journal)

    def begun(self, round: int) -> bool:
        """Tell whether a round was begun before."""
        return self.journal.begun(self.run, round)

    def begin(self, round: int) -> None:
        """Note that a round begins, before anything of it is sent."""
        self.journal.enter(self.run, round)
