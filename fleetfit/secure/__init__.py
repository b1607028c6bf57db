"""Secure aggregation by segments, as pure code: a server that learns sums over clients, and no client's update.

Bonawitz et al. (CCS 2017), with double masking, for clients that train different sub-models. A block is the set of
elements that the same sub-models of the cohort cover. Each pair of members masks exactly the blocks that both cover: a
small client sends no more than its own sub-model, and the server learns one sum for each block, and no level's.

Differs from the paper: each block has a seed, so a block with too few living members stays masked while the others are
opened. Shares have marks, so a changed one is detected and left out. The keys of masks depend on all that both members
of a pair were sent, so a server that sends different states gets noise (Pasquini et al., CCS 2022). The fleet's
authority, whose key the server never has, signs identities.

This package uses no engines, layouts or tensors: a client and a server are state machines with plain values between
them.
"""

from dataclasses import dataclass, field
from secrets import token_hex

from fleetfit.secure.client import Journal as Journal, SecureClient as SecureClient
from fleetfit.secure.keys import (
    Identity as Identity,
    Signer as Signer,
    check_installed as check_installed,
    digest as digest,
    make_identity as make_identity,
)
from fleetfit.secure.messages import (
    Keys as Keys,
    MaskedUpdate as MaskedUpdate,
    OpenedShares as OpenedShares,
    Roster as Roster,
    SealedShares as SealedShares,
    SentDigests as SentDigests,
    Shares as Shares,
    Signature as Signature,
    Signatures as Signatures,
    Survivors as Survivors,
    pack_message as pack_message,
    read_message as read_message,
)
from fleetfit.secure.quantize import Quantizer as Quantizer
from fleetfit.secure.server import BlockSum as BlockSum, SecureRules as SecureRules, SecureServer as SecureServer

SKIPPED = "it was begun before the run was stopped, and a secure round is never done twice"
"""The reason of a round that a resumed run leaves out."""
TOO_FEW = "fewer clients were drawn than a sum must have, so none was asked"
"""The reason of a private round whose cohort is too small."""


@dataclass(eq=False)
class SecureRun:
    """A run's settings of secure rounds, and which of them were begun.

    Attributes:
        rules: Minimum and threshold of a round.
        grid: Quantizes movements.
        run: The run's name in the messages, different for every run.
        journal: The rounds that were begun.
    """

    rules: SecureRules
    grid: Quantizer
    run: str = field(default_factory=lambda: token_hex(16))
    journal: Journal = field(default_factory=Journal)
