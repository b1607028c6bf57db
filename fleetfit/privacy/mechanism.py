"""The private round: Poisson cohorts, clipped movements, fixed denominators, noise on every element of every round.

Each client is drawn by itself with probability q, before it is known who is connected. Its movement d_k, all of it in
its own sub-model, is scaled to at most C, and

    x_j <- x_j + (sum_k d_kj + N(0, (sigma C)^2)) / D_j,    D_j = q N_j,

with N_j the registered clients whose level covers j: never the number that came back. Where nobody trained, the noise
comes all the same, in a round without any client too, so that nothing shows who took part. What no registered client
covers keeps its bits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate
from fleetfit.errors import RunError
from fleetfit.method.hooks import round_submodel
from fleetfit.privacy.accountant import affordable, spent
from fleetfit.privacy.ledger import Ledger
from fleetfit.privacy.randomness import Randomness
from fleetfit.secure import SKIPPED, TOO_FEW
from fleetfit.submodel import concat_state, full_submodel, get_slice_plan
from fleetfit.training import one_thread
from fleetfit.values import Federation, RoundSums, Server, Update

_CHUNK = 1 << 20  # elements
_BELOW = 1 - 1e-6  # so that rounding makes no clipped movement longer than the clipping norm


@dataclass(eq=False)
class Privacy:
    """What is promised, and the hooks that keep it; it draws nothing before it has a ledger and a key.

    Attributes:
        clip: The largest norm of a client's movement, C.
        noise: Standard deviation of the noise as a multiple of C, sigma.
        rate: Probability with which a client is drawn, q.
        delta: Of (epsilon, delta).
        epsilon: The budget; None: none but the rounds.
        key_file: Where the key is.
        ledger: What is spent.
        randomness: The run's; None before it begins.
        write: Writes the ledger.
        found: Whether the noise was found from the budget, and not given.
        known: Whether it is counted as known who was drawn, as where the server sees sums only
            (`fleetfit.secured`).
    """

    clip: float
    noise: float
    rate: float
    delta: float
    epsilon: float | None
    key_file: str
    ledger: Ledger = field(default_factory=Ledger)
    randomness: Randomness | None = None
    write: Callable[[], None] = lambda: None
    found: bool = False
    known: bool = False

    # -- where it is kept

    def kept_in(self, nest: Any, key: bytes, write: Callable[[str], None]) -> None:
        """Take up what a run's file holds; from then on rounds can be drawn and paid for.

        Args:
            nest: The file's value.
            key: The secret.
            write: Writes the file's text.

        Raises:
            ValueError: It is no ledger.
            RunError: The run has promised something else, or began with another key.
        """
        ledger, changed = Ledger.of(nest), []
        for name in ("clip", "noise", "rate", "delta"):
            before = nest.get(name)
            if type(before) not in (int, float) or not 0 < before < float("inf"):
                raise ValueError(f"{name} is no number above 0")
            if name == "noise" and self.found:
                self.noise = float(before)
            elif before != getattr(self, name):
                changed.append(f"{name} was {before:g} and is {getattr(self, name):g}")
        if nest.get("known", False) is not self.known:
            changed.append("[secure] was there and is gone" if nest.get("known") else "[secure] is new")
        if changed:
            raise RunError(
                f"[privacy]: {', '.join(changed)}. Rounds that were trained with the one cannot be followed by rounds "
                "with the other. Set it back, or begin a new run.",
                key="privacy",
            )
        self.randomness, self.ledger = ledger.randomness(key), ledger
        self.write = lambda: write(self.text())

    def text(self) -> str:
        """Return the text of the run's file."""
        return self.ledger.text(**self.told(), known=self.known)

    # -- what it costs

    def left(self, round: int, most: int) -> int:
        """Return how many further rounds the budget has, at most so many."""
        done = self.ledger.begun if self.ledger.again else round
        return max(0, min(most, self.lasts(done + most) - done))

    def lasts(self, most: int) -> int:
        """Return how many rounds, at most so many, the budget is enough for."""
        if self.epsilon is None:
            return most
        return affordable(self.noise, self.rate, self.delta, self.epsilon, most, self.known)

    def told(self, rounds: int | None = None) -> dict[str, Any]:
        """Return what is spent, by default on all rounds that were begun: as reports and the ledger's file have it."""
        draws = self.ledger.begun if rounds is None or self.ledger.again else rounds
        epsilon = spent(self.noise, self.rate, draws, self.delta, self.known)
        return {"epsilon": epsilon, "delta": self.delta, "noise": self.noise, "clip": self.clip, "rate": self.rate}

    def begin(self, round: int) -> None:
        """Pay for a round, before anything of it is drawn."""
        self.ledger.begin(round, self.write)

    # -- the hooks

    def choose(self, federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
        """Draw each client by itself, and return those of them who are connected."""
        numbers = self._generator("cohort", server.round).random(len(federation.clients))
        here = federation.reachable(server.round)
        return [int(client) for client in here[numbers[here] < self.rate]]

    def aggregate(self, federation: Federation, server: Server) -> "PrivateMean":
        """Return the aggregator of a round."""
        return PrivateMean(self, federation, server)

    def release_sums(self, federation: Federation, server: Server, summed: RoundSums) -> Aggregate:
        """Return the same of sums of what clients have clipped themselves.

        Of what no sum was opened the sum is zero, and noise comes there too.
        """
        total = torch.zeros_like(concat_state(server.state))
        with one_thread():
            for block in summed.blocks:
                total[block.places.to(total.device)] = (block.sums.double() * summed.step).float().to(total.device)
            return self.release(federation, server, total)

    def release(self, federation: Federation, server: Server, total: Tensor) -> Aggregate:
        """Return the state after the round, of the sum of clipped movements, which is written over."""
        layout, state = federation.problem.layout, concat_state(server.state)
        full, members = (
            get_slice_plan(layout, full_submodel(layout)),
            registered(federation, server.round).to(state.device),
        )
        self._noise_on(total, server.round)
        mean = total.div_((members * self.rate).clamp_min_(self.rate)).add_(state)
        return Aggregate(full.views(mean), full.views(members))

    def clamp_sums(self, summed: RoundSums, most: int) -> RoundSums:
        """Return sums as clients that clip themselves can add up to; what is beyond is cut off, element by element.

        It is not refused: a refusal that goes by the sum would tell of it. What each client counts is known before,
        so a sum in which counts are wrong, as where masks are left in it, can be refused.

        Args:
            summed: What came of the round.
            most: The largest whole number of one client's movement.
        """
        blocks = []
        for block in summed.blocks:
            if bool((block.counts != block.clients).any()):
                return replace(summed, blocks=(), lost=COUNTS)
            bound = block.clients * most
            blocks.append(replace(block, sums=block.sums.clamp(-bound, bound)))
        return replace(summed, blocks=tuple(blocks))

    def _noise_on(self, total: Tensor, round: int) -> None:
        rng, size = self._generator("noise", round), self.noise * self.clip
        for start in range(0, total.numel(), _CHUNK):
            here = total[start : start + _CHUNK]
            drawn = torch.from_numpy(rng.standard_normal(here.numel(), dtype=np.float32))
            here.add_(drawn.to(here.device), alpha=size)

    def _generator(self, purpose: str, round: int) -> np.random.Generator:
        assert self.randomness is not None, "drawn before the run has its key"
        return self.randomness.generator(purpose, self.ledger.index(round))

    # -- what stands in files

    def redact_report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return what of a round's report does not show who took part and what they have."""
        undone: dict[str, Any] = {}
        if "undone" in report:
            reason, withheld = report["undone"]["reason"], UNDONE_SUMS if self.known else UNDONE
            undone = {"undone": {"reason": reason if reason in (SKIPPED, TOO_FEW) else withheld, "reported": []}}
        return {
            "round": report["round"],
            "lr": report["lr"],
            "train": {"loss": None, "clients": None, "samples": None, "by_level": {}},
            "failures": [],
            "bytes_down": None,
            "bytes_up": None,
            "privacy": self.told(report["round"]),
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
        with one_thread():
            movement = concat_state(update.state).to(self._state.device) - submodel.gather(self._state)
            length = float(torch.linalg.vector_norm(movement, dtype=torch.float64))
            if not math.isfinite(length):  # the difference of two numbers that are finite
                return
            if length > self._privacy.clip:
                movement.mul_(self._privacy.clip / length * _BELOW)
            submodel.scatter(self._total, movement, add=True)

    def result(self) -> Aggregate:
        """Return the state after the round."""
        with one_thread():
            return self._privacy.release(self._federation, self._server, self._total)


UNDONE = "it would have left numbers that are not finite; what it cost is not given back"
"""The reason of a round that is undone: what it was in detail is withheld."""
UNDONE_SUMS = (
    "too few clients stayed to the end to open a sum, or what was opened is none that they can have; what it cost is "
    "not given back"
)
"""The same where the server sees sums only."""
COUNTS = "its sums count other clients than are in them: some were sent other states, or lie."
"""Why the sums of a round are none."""


def registered(federation: Federation, round: int) -> Tensor:
    """Return how many registered clients cover each element of the full model, flat: N_j."""
    layout = federation.problem.layout
    found = torch.zeros(get_slice_plan(layout, full_submodel(layout)).size)
    levels = federation.level_of[federation.able]
    for level in np.unique(levels).tolist():
        mine = federation.able[levels == level]
        get_slice_plan(layout, round_submodel(federation, round, int(mine[0]))).scatter_scalar(found, float(len(mine)))
    return found
