"""The private round: Poisson cohorts, clipped movements, fixed denominators, noise on every element.

McMahan et al. (ICLR 2018), Algorithm 1, with a denominator per element. Each client is drawn independently with
probability q, before connections are known. Its movement d_k, over its whole sub-model, is scaled to a norm of at most
C, and

    x_j <- x_j + (sum_k d_kj + N(0, (sigma C)^2)) / D_j,    D_j = q N_j,

with N_j the registered clients whose level covers j, whatever the number of updates. Elements that no client trained
get the noise, too, also in a round without any client, so that participation stays hidden. Elements that no registered
client covers keep their bits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate
from fleetfit.core import Federation, RoundSums, Server, Update
from fleetfit.errors import RunError
from fleetfit.hooks.fedavg import get_round_submodel
from fleetfit.hooks.movements import count_clients, get_movement
from fleetfit.machine import use_threads
from fleetfit.privacy.accountant import compute_epsilon, max_rounds
from fleetfit.privacy.ledger import Ledger
from fleetfit.privacy.randomness import Randomness
from fleetfit.secure import SKIPPED, TOO_FEW
from fleetfit.submodel import concat_state, full_submodel, get_slice_plan

_CHUNK = 1 << 20  # elements
_MARGIN = 1 - 1e-6  # rounding must not make a clipped movement longer than the clipping norm


@dataclass(eq=False)
class Privacy:
    """The privacy guarantee of a run, and the hooks that keep it; it needs a ledger and a key before it draws.

    Attributes:
        clipping_norm: The largest norm of a client's movement, C.
        noise_multiplier: Standard deviation of the noise as a multiple of C, sigma.
        rate: Probability with which a client is drawn, q.
        delta: Of (epsilon, delta).
        epsilon: The budget; None for a budget of rounds only.
        key_file: The file of the key.
        ledger: The rounds that have begun.
        randomness: The run's random numbers; None before it begins.
        write: Writes the ledger.
        noise_from_budget: Whether the noise follows from the budget, and was not given.
        known_cohorts: Whether the cohort of each round counts as known, as with secure aggregation
            (`fleetfit.engines.secure`).
    """

    clipping_norm: float
    noise_multiplier: float
    rate: float
    delta: float
    epsilon: float | None
    key_file: str
    ledger: Ledger = field(default_factory=Ledger)
    randomness: Randomness | None = None
    write: Callable[[], None] = lambda: None
    noise_from_budget: bool = False
    known_cohorts: bool = False

    # -- the ledger's file

    def load_ledger(self, table: Any, key: bytes, write: Callable[[str], None]) -> None:
        """Load the ledger of a run; from then on rounds can be drawn and paid for.

        Args:
            table: The JSON of the ledger's file.
            key: The secret.
            write: Writes the file's text.

        Raises:
            ValueError: It is not a ledger.
            RunError: The run began with another guarantee or another key.
        """
        ledger, changed = Ledger.parse(table), []
        for name in ("clipping_norm", "noise_multiplier", "rate", "delta"):
            before = table.get(name)
            if type(before) not in (int, float) or not 0 < before < float("inf"):
                raise ValueError(f"{name} is not a number above 0")
            is_found = name == "noise_multiplier" and self.noise_from_budget
            if is_found and math.isclose(before, self.noise_multiplier, rel_tol=0.005):  # `find_noise` is as exact
                self.noise_multiplier = float(before)
            elif before != getattr(self, name):
                cause = " by epsilon and rounds" * is_found
                changed.append(f"{name} was {before:g} and is {getattr(self, name):g}{cause}")
        if table.get("known", False) is not self.known_cohorts:
            changed.append("[secure] was set and is missing" if table.get("known") else "[secure] is new")
        if changed:
            raise RunError(
                f"[privacy]: {', '.join(changed)}. Rounds with one setting cannot be followed by rounds with "
                "another. Set it back, or begin a new run.",
                key="privacy",
            )
        self.randomness, self.ledger = ledger.make_randomness(key), ledger
        self.write = lambda: write(self.to_text())

    def to_text(self) -> str:
        """Return the text of the ledger's file."""
        return self.ledger.to_text(**self.make_report(), known=self.known_cohorts)

    # -- the cost

    def remaining_rounds(self, round: int, limit: int) -> int:
        """Return the number of further rounds within the budget, up to a limit."""
        done = self.ledger.begun if self.ledger.charges_repeats else round
        return max(0, min(limit, self.max_rounds(done + limit) - done))

    def max_rounds(self, limit: int) -> int:
        """Return the number of rounds within the budget, up to a limit."""
        if self.epsilon is None:
            return limit
        return max_rounds(self.noise_multiplier, self.rate, self.delta, self.epsilon, limit, self.known_cohorts)

    def make_report(self, rounds: int | None = None) -> dict[str, Any]:
        """Return the cost of rounds, by default of all that have begun, as reports and the ledger's file have it."""
        draws = self.ledger.begun if rounds is None or self.ledger.charges_repeats else rounds
        epsilon = compute_epsilon(self.noise_multiplier, self.rate, draws, self.delta, self.known_cohorts)
        return {
            "epsilon": epsilon,
            "delta": self.delta,
            "noise_multiplier": self.noise_multiplier,
            "clipping_norm": self.clipping_norm,
            "rate": self.rate,
        }

    def begin_round(self, round: int) -> None:
        """Pay for a round, before anything of it is drawn."""
        self.ledger.begin_round(round, self.write)

    # -- the hooks

    def choose(self, federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
        """Draw each client independently, and return the connected ones of them."""
        numbers = self._make_generator("cohort", server.round).random(len(federation.clients))
        reachable = federation.reachable(server.round)
        return [int(client) for client in reachable[numbers[reachable] < self.rate]]

    def aggregate(self, federation: Federation, server: Server) -> "PrivateMean":
        """Return the aggregator of a round."""
        return PrivateMean(self, federation, server)

    def release_sums(self, federation: Federation, server: Server, summed: RoundSums) -> Aggregate:
        """Return the aggregate of sums of movements that clients have clipped themselves.

        Elements without an opened sum have the sum zero, and get noise, too.
        """
        total = torch.zeros_like(concat_state(server.state))
        with use_threads(1):
            for block in summed.blocks:
                total[block.places.to(total.device)] = (block.sums.double() * summed.step).float().to(total.device)
            return self.release(federation, server, total)

    def release(self, federation: Federation, server: Server, total: Tensor) -> Aggregate:
        """Return the state after the round, from the sum of clipped movements, which is written over."""
        layout, state = federation.problem.layout, concat_state(server.state)
        full = get_slice_plan(layout, full_submodel(layout))
        counts = count_registered(federation, server.round).to(state.device)
        self._add_noise(total, server.round)
        mean = total.div_((counts * self.rate).clamp_min_(self.rate)).add_(state)
        return Aggregate(full.views(mean), full.views(counts))

    def clamp_sums(self, summed: RoundSums, most: int) -> RoundSums:
        """Return sums clamped to the range that clients with clipped movements can reach, element by element.

        A larger sum is not refused: a refusal that depends on the sum would reveal something of it. The counts of the
        clients are known beforehand, so a sum with wrong counts, as with masks left in it, can be refused.

        Args:
            summed: The sums of the round.
            most: The largest whole number of one client's movement.
        """
        blocks = []
        for block in summed.blocks:
            if bool((block.counts != block.clients).any()):
                return replace(summed, blocks=(), lost=COUNTS)
            bound = block.clients * most
            blocks.append(replace(block, sums=block.sums.clamp(-bound, bound)))
        return replace(summed, blocks=tuple(blocks))

    def _add_noise(self, total: Tensor, round: int) -> None:
        rng, deviation = self._make_generator("noise", round), self.noise_multiplier * self.clipping_norm
        for start in range(0, total.numel(), _CHUNK):
            chunk = total[start : start + _CHUNK]
            noise = torch.from_numpy(rng.standard_normal(chunk.numel(), dtype=np.float32))
            chunk.add_(noise.to(chunk.device), alpha=deviation)

    def _make_generator(self, purpose: str, round: int) -> np.random.Generator:
        assert self.randomness is not None, "drawn before the run has its key"
        return self.randomness.make_generator(purpose, self.ledger.get_draw(round))

    # -- the public report

    def redact_report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return a round's report without fields that reveal participants or their data."""
        undone: dict[str, Any] = {}
        if "undone" in report:
            reason, withheld = report["undone"]["reason"], UNDONE_SUMS if self.known_cohorts else UNDONE
            undone = {"undone": {"reason": reason if reason in (SKIPPED, TOO_FEW) else withheld, "reported": []}}
        return {
            "round": report["round"],
            "lr": report["lr"],
            "train": {"loss": None, "clients": None, "samples": None, "by_level": {}},
            "failures": [],
            "bytes_down": None,
            "bytes_up": None,
            "privacy": self.make_report(report["round"]),
            **undone,
        }


class PrivateMean:
    """Adds up the clipped movements of a round; the result is the state after it, with noise.

    Its coverage is the number of registered clients of each element.
    """

    def __init__(self, privacy: Privacy, federation: Federation, server: Server) -> None:
        self._privacy, self._federation, self._server = privacy, federation, server
        self._state = concat_state(server.state)
        self._total = torch.zeros_like(self._state)

    def add(self, update: Update, weight: float) -> None:
        """Add the movement of an update, clipped; the weight does not count."""
        submodel = get_slice_plan(self._federation.problem.layout, update.submodel)
        with use_threads(1):
            movement = get_movement(self._federation, self._server, update).to(self._state.device)
            length = float(torch.linalg.vector_norm(movement, dtype=torch.float64))
            if not math.isfinite(length):  # the difference of two finite numbers may overflow
                return
            if length > self._privacy.clipping_norm:
                movement.mul_(self._privacy.clipping_norm / length * _MARGIN)
            submodel.scatter(self._total, movement, add=True)

    def result(self) -> Aggregate:
        """Return the state after the round."""
        with use_threads(1):
            return self._privacy.release(self._federation, self._server, self._total)


UNDONE = "it would have left numbers that are not finite; its cost is not refunded"
"""The public reason of a round that is rolled back; details are withheld."""
UNDONE_SUMS = (
    "too few clients stayed to the end to open a sum, or an opened sum is out of range; its cost is not refunded"
)
"""The same with secure aggregation."""
COUNTS = "its sums count other clients than are in them: some were sent other states, or lie."
"""The reason for which the sums of a round are refused."""


def count_registered(federation: Federation, round: int) -> Tensor:
    """Return the number of registered clients that cover each element of the full model, flat: N_j."""
    return count_clients(federation, lambda level, client: get_round_submodel(federation, round, client))
