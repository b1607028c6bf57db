"""ReeFL: depth only, one recurrent exit for all depths, the best exit teaches the others (Lee et al., ICML 2024).

The model gets a Ree module and one classifier that all exits share (`fleetfit.models.ree`: Eqs. 2 to 4); both belong to
every sub-model, whatever its depth. A client trains the sum of its exits' losses, and a divergence of each exit from
the client's best one (Eqs. 5 and 6). The best is the one with the lowest running estimate of its training loss,
e <- (1 - zeta) e + zeta new. It begins at zero in every round, as in the authors' code; with `estimate = "kept"` the
client remembers it from round to round, and it begins with the first batch's losses. The weight of the divergence grows
over the first rounds as DepthFL's does. Clients weigh by samples. `options.feddyn` and `options.fedadam` go with it.

Differs from the paper's authors: rows of Ree's position table beyond a client's depth are not sent back, since nothing
trained them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fleetfit.anatomy import State, outputs
from fleetfit.core import Device, Federation, Job, LocalResult
from fleetfit.errors import check_range
from fleetfit.factories import declare_unused
from fleetfit.hooks import Method
from fleetfit.hooks.levels import split_levels
from fleetfit.hooks.losses import best_exit_distillation, declare_temperature
from fleetfit.methods.depthfl import ramp_up
from fleetfit.models.ree import POSITION_AXIS, recurrent
from fleetfit.submodel import Submodel

_MEMORY = "exit_losses"


@declare_temperature
@declare_unused(
    "temperature", "ramp", when=lambda values: values["weight"] == 0, reason="weight = 0 switches the distillation off"
)
@declare_unused(
    *("modulate", "at", "queue", "heads", "bottleneck", "mlp"),
    when=lambda values: not values["ree"],
    reason="ree = false leaves Ree out",
)
def reefl(
    zeta: float = 0.2,
    ramp: int = 300,
    weight: float = 1.0,
    temperature: float = 1.0,
    teacher: Literal["running", "batch"] = "running",
    estimate: Literal["round", "kept"] = "round",
    ree: bool = True,
    modulate: bool = True,
    at: Literal["blocks", "exits"] = "blocks",
    queue: Literal["modulated", "original"] = "modulated",
    heads: int = 8,
    bottleneck: int = 16,
    mlp: float = 1.35,
) -> Method:
    """Make the method.

    Args:
        zeta: How much a new batch moves the running estimate, in (0, 1).
        ramp: Rounds until the distillation has its full weight; 0 is at once.
        weight: Full weight of the distillation; 0 switches it off.
        temperature: Softens the distributions that are compared.
        teacher: The exit with the lowest running estimate, or with the lowest loss on the batch (Figure 7).
        estimate: The running estimate begins at zero in every "round", or is "kept" from the first batch of all on.
        ree: Whether there is a Ree; without it, exits share a classifier and nothing else (appendix G).
        modulate: Whether the backbone continues with Ree's token (Eq. 4, Table 4).
        at: Run Ree after every block, or at exits only (Table 5).
        queue: Which tokens Ree's queue keeps; see `fleetfit.models.ree`.
        heads: Heads of Ree's attention.
        bottleneck: Features of Ree's attention.
        mlp: Features inside Ree's MLP, as a multiple of the token's width.
    """
    check_range("temperature", temperature, 0)
    check_range("zeta", zeta, 0, 1)
    check_range("ramp", ramp, 0, closed=True)
    check_range("weight", weight, 0, closed=True)
    sizes: dict[str, Any] = {"at": at, "queue": queue, "heads": heads, "bottleneck": bottleneck, "mlp": mlp}
    loss = partial(BestExitLoss, zeta=zeta, ramp=ramp, weight=weight, temperature=temperature, teacher=teacher)
    method = Method(
        adapt_model=partial(recurrent, ree=ree, modulate=modulate, **sizes),
        make_levels=partial(split_levels, scaling="depth"),
        make_loss=partial(loss, kept=estimate == "kept"),
        reply=send_used_rows,
        report=report_teachers,
    )
    return (
        replace(method, update_client_memory=store_estimate, check_memory=check_estimate)
        if estimate == "kept"
        else method
    )


class BestExitLoss:
    """The loss of all exits with the best one as teacher; counts how often each exit was it."""

    def __init__(
        self, job: Job, device: Device, zeta: float, ramp: int, weight: float, temperature: float, teacher: str,
        kept: bool,
    ) -> None:  # fmt: skip
        self.exits = job.submodel.exits
        self.estimate = _load_estimate(device, self.exits) if kept else torch.zeros(len(self.exits))
        self._task, self._zeta, self._temperature = device.problem.task, zeta, temperature
        self._share = weight * ramp_up(job.round, ramp)  # of the distillation, in this round
        self._running = teacher == "running"
        self._taught = torch.zeros(len(self.exits), device=device.accelerator)

    def __call__(self, module: nn.Module, x: Any, y: Tensor) -> Tensor:
        """Return the loss on a batch, and move the estimate."""
        logits = outputs(module, x)
        losses = torch.stack([self._task.loss(z, y) for z in logits])
        new = losses.detach()
        old = new if self.estimate is None else self.estimate.to(new.device)
        old = torch.where(old.isnan(), new, old)
        self.estimate = (1 - self._zeta) * old + self._zeta * new
        best = (self.estimate if self._running else new).argmin()
        self._taught += torch.arange(len(new), device=new.device) == best
        return best_exit_distillation(logits, losses, best, y, self._task, self._share, self._temperature)

    def count_teachers(self) -> dict[str, int]:
        """Return in how many steps each exit was the teacher."""
        return {str(e): int(n) for e, n in zip(self.exits, self._taught.tolist(), strict=True)}


def _load_estimate(device: Device, exits: tuple[int, ...]) -> Tensor | None:
    """Return the client's running estimate [E], not a number for exits that it has not trained yet."""
    stored = (device.memory or {}).get(_MEMORY)
    if stored is None:
        return None
    losses = dict(zip(stored["exits"], stored["losses"].tolist(), strict=True))
    return torch.tensor([losses.get(e, float("nan")) for e in exits])


def check_estimate(federation: Federation, memory: Mapping[str, Any]) -> None:
    """Check that a client's estimate has a number for each of its exits."""
    if _MEMORY in memory:
        exits, losses = memory[_MEMORY]["exits"], memory[_MEMORY]["losses"]
        if not {*exits} <= {*federation.problem.exits} or losses.shape != (len(exits),) or bool(losses.isnan().any()):
            raise ValueError(f"{_MEMORY} is not one number for each of its exits")


def store_estimate(job: Job, device: Device, result: LocalResult) -> Any:
    """Store the running estimate, also those of deeper exits that were not trained this time."""
    memory, loss = dict(device.memory or {}), result.loss
    stored = memory.get(_MEMORY, {"exits": [], "losses": torch.zeros(0)})
    losses = dict(zip(stored["exits"], stored["losses"].tolist(), strict=True))
    if loss.estimate is not None:
        losses |= dict(zip(loss.exits, loss.estimate.tolist(), strict=True))
    exits = sorted(losses)
    return memory | {_MEMORY: {"exits": exits, "losses": torch.tensor([losses[e] for e in exits])}}


def report_teachers(job: Job, device: Device, result: LocalResult) -> Mapping[str, Any]:
    """Report in how many steps each exit was the teacher."""
    return {"teachers": result.loss.count_teachers()} if isinstance(result.loss, BestExitLoss) else {}


def send_used_rows(job: Job, device: Device, result: LocalResult) -> tuple[Submodel, State]:
    """Send back the rows of Ree's position table that this depth uses, and all else."""
    submodel, state = job.submodel, result.state
    if POSITION_AXIS not in submodel.channels:
        return submodel, state
    rows = range(submodel.depth + 1)
    state = {name: tensor[: len(rows)] if name == "ree.positions" else tensor for name, tensor in state.items()}
    return replace(submodel, channels={**submodel.channels, POSITION_AXIS: rows}), state
