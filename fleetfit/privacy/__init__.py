"""Differential privacy of clients: the private round, its randomness, and its cost.

Source: McMahan et al., "Learning Differentially Private Recurrent Language Models" (ICLR 2018), with denominators fixed
in advance for each element, since clients train different sub-models. Adjacency is zero-out: a client's contribution,
or zeros in its place; the registered clients and their levels are public.
"""

from fleetfit.privacy.accountant import (
    compute_epsilon as compute_epsilon,
    find_noise as find_noise,
    max_rounds as max_rounds,
)
from fleetfit.privacy.ledger import Ledger as Ledger
from fleetfit.privacy.mechanism import Privacy as Privacy, count_registered as count_registered
from fleetfit.privacy.randomness import (
    Randomness as Randomness,
    check_key_place as check_key_place,
    load_key as load_key,
    load_or_create_key as load_or_create_key,
)
