"""Differential privacy of clients: what a round is made of, where its randomness comes from, and what it costs.

Source: McMahan et al., "Learning Differentially Private Recurrent Language Models" (ICLR 2018), with denominators fixed
in advance for each element, since clients train different sub-models. Adjacency is zero-out: a client's contribution,
or zeros in its place; who is registered, and with which level, is public.
"""

from fleetfit.privacy.accountant import affordable, noise_for, spent
from fleetfit.privacy.ledger import Ledger
from fleetfit.privacy.mechanism import Privacy, registered
from fleetfit.privacy.randomness import Randomness, key_in, made_key, outside

__all__ = [
    "Ledger",
    "Privacy",
    "Randomness",
    "affordable",
    "key_in",
    "made_key",
    "noise_for",
    "outside",
    "registered",
    "spent",
]
