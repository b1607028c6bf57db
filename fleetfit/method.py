"""The method: a record of functions, one per hook, whose defaults are FedAvg's; and how a spec becomes one.

FedAvg (McMahan et al., AISTATS 2017). A method is its difference from FedAvg: a factory returns
`Method(loss=..., weight=...)`, and is rebuilt from its spec wherever a job runs, never pickled.
"""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from fleetfit import names, submodel
from fleetfit.aggregate import Aggregate, Mean, applied
from fleetfit.errors import ConfigError, did_you_mean
from fleetfit.layout import State, outputs
from fleetfit.planner import Targets
from fleetfit.seeds import numpy_rng
from fleetfit.submodel import Channels, Submodel, extract
from fleetfit.values import Device, Failure, Federation, Job, Level, Problem, Server, Update

# ---- the defaults of every hook: FedAvg --------------------------------------------------------------------------


def full_level(problem: Problem, targets: Targets) -> list[Level]:
    """Return the full model as the only level."""
    exits = (problem.architecture.blocks,)
    return [Level("1", problem.submodel(1.0, exits), 1.0, 1.0)]


def uniform(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
    """Choose clients uniformly without replacement among those who afford some level."""
    able = federation.able
    return [int(c) for c in able[rng.choice(len(able), min(federation.cohort, len(able)), replace=False)]]


def own_level(federation: Federation, server: Server, rng: np.random.Generator) -> list[tuple[int, int, Submodel]]:
    """Give each chosen client its level, with the channels of this round."""
    chosen = federation.method.choose(federation, server, rng)
    return [(c, int(federation.level_of[c]), round_submodel(federation, server.round, c)) for c in chosen]


def round_submodel(federation: Federation, round: int, client: int) -> Submodel:
    """Return the sub-model of a client's level with the channels that the method chooses in this round."""
    level = federation.levels[federation.level_of[client]]
    axes, choose = federation.problem.architecture.axes, federation.method.channels
    channels: dict[str, Channels] = {}
    for name, kept in level.submodel.channels.items():
        if axes[name].scaled and choose is not submodel.prefix:
            rng = numpy_rng(federation.seed, round, client, name)
            channels[name] = choose(axes[name], len(kept), round, client, rng)
        else:
            channels[name] = kept
    return Submodel(channels, level.submodel.exits)


def cut_out(federation: Federation, server: Server, client: int | None, piece: Submodel) -> State:
    """Send the sub-model's own tensors."""
    return extract(federation.problem.layout, server.state, piece)


def as_sent(job: Job, device: Device) -> Job | None:
    """Do the job as it was sent."""
    return job


Loss = Callable[[nn.Module, Any, Tensor], Tensor]


def last_exit_loss(job: Job, device: Device) -> Loss:
    """Train the deepest exit with the task's loss."""
    task = device.problem.task

    def loss(module: nn.Module, x: Any, y: Tensor) -> Tensor:
        return task.loss(outputs(module, x)[-1], y)

    return loss


def no_penalty(job: Job, device: Device) -> Callable[[nn.Module], Tensor] | None:
    """Add nothing to the loss."""
    return None


def nothing_new(job: Job, device: Device, state: State, loss: Any) -> Any:
    """Keep what the client remembered."""
    return device.memory


def all_of_it(job: Job, device: Device, state: State) -> tuple[Submodel, State]:
    """Send back all that was trained."""
    return job.submodel, state


def by_samples(update: Update) -> float:
    """Weigh by training samples."""
    return float(update.num_examples)


def by_count(update: Update) -> float:
    """Weigh every client alike (ScaleFL Eq. 2)."""
    return 1.0


Weight = Callable[[Update], float]


def coverage_mean(federation: Federation, server: Server, updates: Iterator[Update], weight: Weight) -> Aggregate:
    """Average each element over those who trained it."""
    first = next(iter(server.state.values()))
    mean = Mean(federation.problem.layout, first.device)
    for update in updates:
        mean.add(update.submodel, update.state, weight(update))
    return mean.result()


def take_mean(
    federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure]
) -> Server:
    """Replace what was trained by its mean."""
    if aggregate.before is None:
        return Server(applied(server.state, aggregate), server.round + 1, server.memory)
    moved = applied(aggregate.before, aggregate) if aggregate.before else {}
    return Server({**server.state, **moved}, server.round + 1, server.memory)


@dataclass(frozen=True)
class Method:
    """A method: one function per hook; DESIGN's table says what each is for. Defaults are FedAvg's."""

    levels: Callable[[Problem, Targets], list[Level]] = full_level
    channels: Callable[..., Channels] = submodel.prefix
    choose: Callable[[Federation, Server, np.random.Generator], list[int]] = uniform
    assign: Callable[[Federation, Server, np.random.Generator], list[tuple[int, int, Submodel]]] = own_level
    dispatch: Callable[[Federation, Server, int | None, Submodel], State] = cut_out
    adapt: Callable[[Job, Device], Job | None] = as_sent
    loss: Callable[[Job, Device], Loss] = last_exit_loss
    penalty: Callable[[Job, Device], Callable[[nn.Module], Tensor] | None] = no_penalty
    remember: Callable[[Job, Device, State, Any], Any] = nothing_new
    reply: Callable[[Job, Device, State], tuple[Submodel, State]] = all_of_it
    weight: Weight = by_samples
    merge: Callable[[Federation, Server, Iterator[Update], Weight], Aggregate] = coverage_mean
    step: Callable[[Federation, Server, Aggregate, Sequence[Update | Failure]], Server] = take_mean


HOOKS = tuple(f.name for f in dataclasses.fields(Method))
FEDAVG = Method()

# built-in functions by hook, for `method.hooks.channels = "rolling"`
_CHOICES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "channels": {"prefix": submodel.prefix, "window": submodel.window, "rolling": submodel.rolling,
                 "random": submodel.random},
    "choose": {"uniform": uniform},
    "weight": {"by_samples": by_samples, "by_count": by_count},
}  # fmt: skip


# ---- from a spec to a method -------------------------------------------------------------------------------------


def build(spec: Mapping[str, Any]) -> Method:
    """Build the method that a spec describes: name, hyperparameters, `plus` (options) and `hooks` (single functions).

    Raises:
        ConfigError: Unknown names or hyperparameters, or a hook that two parts set without the spec saying whose wins.
    """
    if is_portable(spec):
        # options keep their order, in which they chain; the order of all else says nothing
        return _build_cached(json.dumps({key: spec[key] for key in sorted(spec)}))
    return _build(spec)


def is_portable(spec: Any) -> bool:
    """Tell whether another process can rebuild from a spec: plain values only."""
    try:
        json.dumps(spec)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def _build_cached(text: str) -> Method:
    return _build(json.loads(text))


def _build(spec: Mapping[str, Any]) -> Method:
    values = {key: v for key, v in spec.items() if key not in ("name", "plus", "hooks")}
    method = _made("methods", spec.get("name", "fedavg"), "[method]", values)
    hooks, plus = spec.get("hooks", {}), spec.get("plus", {})
    for name, settings in plus.items():
        option = _made("options", name, f"[method.plus.{name}]", settings)
        method = _with_option(method, option, name, set(hooks))
    named = {hook: _single_hook(hook, value) for hook, value in hooks.items()}
    return replace(method, **named)


def _made(kind: str, name: Any, where: str, values: Mapping[str, Any]) -> Method:
    if isinstance(name, Method):
        return name
    factory = name if callable(name) else names.resolve(kind, name)
    label = getattr(name, "__name__", name)
    made = names.call(factory, str(label), where, values)
    if not isinstance(made, Method):
        raise ConfigError(f"{where} {label} must return a Method, got {type(made).__name__}.")
    return made


def _with_option(method: Method, option: Method, name: str, decided: set[str]) -> Method:
    """Join an option to a method: `adapt`s chain, penalties add up, any other hook may be set once."""
    changes: dict[str, Any] = {}
    for hook in HOOKS:
        ours, theirs, default = getattr(method, hook), getattr(option, hook), getattr(FEDAVG, hook)
        if theirs is default or theirs is ours:
            continue
        if ours is default:
            changes[hook] = theirs
        elif hook == "adapt":
            changes[hook] = functools.partial(_chained, ours, theirs)
        elif hook == "penalty":
            changes[hook] = functools.partial(_added, ours, theirs)
        elif hook not in decided:
            raise ConfigError(
                f'both the method and option "{name}" set hook "{hook}". Say whose wins with method.hooks.{hook} = '
                '"module:function".'
            )
    return replace(method, **changes)


def _chained(
    first: Callable[..., Job | None], second: Callable[..., Job | None], job: Job, device: Device
) -> Job | None:
    changed = first(job, device)
    return None if changed is None else second(changed, device)


def _added(first: Callable[..., Any], second: Callable[..., Any], job: Job, device: Device) -> Any:
    parts = [p for p in (first(job, device), second(job, device)) if p is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    return lambda module: parts[0](module) + parts[1](module)


def _single_hook(hook: str, value: Any) -> Callable[..., Any]:
    if hook not in HOOKS:
        raise ConfigError(f'a method has no hook "{hook}"; it has {", ".join(HOOKS)}.{did_you_mean(hook, HOOKS)}')
    if callable(value):
        return value
    known = _CHOICES.get(hook, {})
    if value in known:
        return known[value]
    if isinstance(value, str) and ":" in value:
        return names.resolve("hooks", value)
    listed = f"one of {', '.join(known)}, or " if known else ""
    raise ConfigError(
        f'method.hooks.{hook} must be {listed}"module:function", got {value!r}.{did_you_mean(str(value), known)}'
    )


def hyperparameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return a factory's hyperparameters: its signature."""
    return dict(inspect.signature(factory).parameters)
