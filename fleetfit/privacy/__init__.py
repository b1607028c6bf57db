"""Differential privacy of clients: the private round, its randomness, and its cost.

Source: McMahan et al., "Learning Differentially Private Recurrent Language Models" (ICLR 2018), with denominators fixed
in advance for each element, since clients train different sub-models. Adjacency is zero-out: a client's contribution,
or zeros in its place; the registered clients and their levels are public.
"""

from fleetfit.privacy.accountant import compute_epsilon, find_noise, max_rounds
from fleetfit.privacy.ledger import Ledger
from fleetfit.privacy.mechanism import Privacy, count_registered
from fleetfit.privacy.randomness import Randomness, check_key_place, load_key, load_or_create_key

__all__ = [
    "Ledger",
    "Privacy",
    "Randomness",
    "check_key_place",
    "compute_epsilon",
    "count_registered",
    "find_noise",
    "load_key",
    "load_or_create_key",
    "max_rounds",
]
