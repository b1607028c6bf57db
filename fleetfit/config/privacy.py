"""`[privacy]` becomes the hooks and settings of a private run; what would leak, or could not be bounded, is refused."""

from dataclasses import replace
from typing import Any

import numpy as np

from fleetfit.config.schema import FRACTION, Experiment
from fleetfit.errors import ConfigError
from fleetfit.evaluate import has_batch_norm
from fleetfit.method import FEDAVG
from fleetfit.method.hooks import by_count
from fleetfit.privacy import Ledger, Privacy, affordable, noise_for, registered
from fleetfit.rounds import Settings
from fleetfit.submodel import cut, prefix, rolling
from fleetfit.values import Federation

OPTIMISERS = ("fedadam", "fedavgm", "fedyogi")
AFTERWARDS = (*OPTIMISERS, "fedprox")
"""Options that only go by what every round gives away, or that devices go by."""
_MUCH = 15.0  # times the longest movement of a client: noise, over all elements of a level
_KEPT = {
    "assign": "decides itself who trains what",
    "dispatch": "sends each level tensors of its own",
    "remember": "has clients remember, and a checkpoint holds what they do",
    "reply": "has clients send back less than they got, by what they have",
    "receive": "looks at single updates",
    "note": "looks at single updates",
    "merge": "averages in a way of its own",
    "observe": "learns from who took part, and with what",
}
"""Hooks that have to be FedAvg's, and what a method does that has its own."""


def build_privacy(experiment: Experiment, federation: Federation) -> Privacy | None:
    """Return what a run promises its clients; None where it promises nothing.

    Raises:
        ConfigError: It could not be kept.
        MissingExtra: The accountant is not installed.
    """
    section = experiment.privacy
    if not section.is_set:
        return None
    clip, noise, epsilon, key_file = section.clip, section.noise, section.epsilon, section.key_file
    if clip is None:
        raise ConfigError("[privacy] clip: say how far a client may move its sub-model, such as clip = 0.3.")
    if noise is None and epsilon is None:
        raise ConfigError(
            "[privacy]: say how much noise, such as noise = 1.0, or which budget the run has, such as epsilon = 3.0."
        )
    if not key_file:
        raise ConfigError(
            '[privacy] key_file: say where the key of the noise is to be, such as key_file = "~/keys/phones.key": a '
            "file outside of the run folder, which is made if it is not there. Whoever has it can take the noise away."
        )
    _check(experiment, federation)
    count = len(federation.clients)
    rate, known = _rate(experiment, count), experiment.is_secure
    delta = 1 / (10 * count) if section.delta is None else section.delta
    if delta >= 1 / count:
        raise ConfigError(
            f"[privacy] delta: {delta:g} allows that one of {count} clients is given away whole; set it well below "
            f"{1 / count:.2g}, or leave it out for {1 / (10 * count):.2g}."
        )
    if noise is None:
        assert epsilon is not None
        noise = noise_for(epsilon, rate, experiment.rounds, delta, known)
    elif epsilon is not None and not affordable(noise, rate, delta, epsilon, 1, known):
        raise ConfigError(
            f"[privacy] epsilon: {epsilon:g} is spent before the first round is over. Set more noise, a smaller "
            "cohort.fraction, or a larger epsilon."
        )
    ledger = Ledger(again=federation.device is None)
    return Privacy(clip, noise, rate, delta, epsilon, key_file, ledger, found=section.noise is None, known=known)


def _rate(experiment: Experiment, count: int) -> float:
    section = experiment.cohort
    if section.count is not None:
        return min(1.0, section.count / count)
    return FRACTION if section.fraction is None else section.fraction


def _check(experiment: Experiment, federation: Federation) -> None:
    """Refuse what does not go together with a promise.

    Raises:
        ConfigError: There is such a thing.
    """
    method = federation.method
    for hook, what in _KEPT.items():
        if getattr(method, hook) is not getattr(FEDAVG, hook):
            raise ConfigError(
                f"[privacy]: {_whose(experiment, hook)} {what} (hook {hook!r}), which gives away more than the noise "
                f"hides. {_INSTEAD}"
            )
    if method.choose is not FEDAVG.choose:
        raise ConfigError(
            "[privacy]: every client has to be drawn by itself, with one probability. Leave cohort.choose and "
            "method.hooks.choose out."
        )
    further = [option for option in experiment.method.plus if option not in AFTERWARDS]
    stepped = "step" in experiment.method.hooks or not experiment.method.plus.keys() & set(OPTIMISERS)
    if further or (method.step is not FEDAVG.step and stepped):
        whose = f"[method.plus.{further[0]}]" if further else _whose(experiment, "step")
        raise ConfigError(f"[privacy]: {whose} goes by more than a round gives away. {_INSTEAD}")
    if method.channels not in (prefix, rolling):
        raise ConfigError(
            "[privacy]: each client gets channels of its own, so that nobody can say beforehand how many cover an "
            'element. Take method.hooks.channels = "prefix" or "rolling".'
        )
    if experiment.method.hooks.get("weight", "by_count") != "by_count":
        raise ConfigError("[privacy]: every client counts alike; leave method.hooks.weight out.")
    if not method.needs_budgets:
        raise ConfigError(
            f"[privacy]: {experiment.method.name} does not ask clients for their budgets, so that nobody can say "
            f"beforehand how many train an element. {_INSTEAD}"
        )
    if has_batch_norm(federation):
        raise ConfigError(
            "[privacy]: this model has batch-norm layers, whose statistics are exact sums over clients' samples. Take "
            'a model with another normalisation, such as norm = "group" in [model].'
        )
    if experiment.cohort.quorum != 1.0 or experiment.cohort.over_selection != 0.0:
        raise ConfigError(
            "[privacy]: a round has everybody who was drawn, and its denominators are fixed before; leave quorum and "
            "over_selection out of [cohort]."
        )
    if experiment.local.compress is not None and not experiment.is_secure:  # which refuses it itself
        raise ConfigError(
            "[privacy]: with [local] compress a client remembers exactly what was lost by it, and a checkpoint holds "
            "what clients remember; leave compress out."
        )
    if experiment.evaluate.split == "train":
        raise ConfigError("[privacy]: [evaluate] split: accuracy on what clients train on gives them away; use test.")


_INSTEAD = "Use fedavg, scalefl, heterofl, fedrolex or another method that averages plainly."


def _whose(experiment: Experiment, hook: str) -> str:
    if hook in experiment.method.hooks:
        return f"method.hooks.{hook}"
    plus = [option for option in experiment.method.plus if option not in AFTERWARDS]
    return f"[method.plus.{plus[0]}]" if plus else str(experiment.method.name)


def apply_privacy(
    experiment: Experiment, federation: Federation, settings: Settings, privacy: Privacy
) -> tuple[Federation, Settings]:
    """Return the server's view with the private hooks, and what a round does without telling on anybody."""
    hooks: dict[str, Any] = {"choose": privacy.choose, "merge": privacy.merge, "weight": by_count}
    rounds = privacy.lasts(experiment.rounds)
    whole_set = federation.device is not None
    wanted = replace(settings.wanted, clients=0, whole=whole_set, always=whole_set, norms=settings.wanted.norms[:1])
    return (
        replace(federation, method=replace(federation.method, **hooks)),  # type: ignore[type-var]
        replace(settings, rounds=rounds, wanted=wanted, privacy=privacy),
    )


def describe_privacy(privacy: Privacy, federation: Federation, rounds: int) -> tuple[str, ...]:
    """Say what is promised, for how many rounds, and how loud the noise is at each level."""
    lasts = privacy.lasts(rounds)
    after = replace(privacy, ledger=Ledger(begun=lasts)).told()["epsilon"]
    found = [
        f"Differential privacy of clients: noise {privacy.noise:.3g} times the clipping norm of {privacy.clip:g}, each "
        f"client drawn with probability {privacy.rate:.3g}: epsilon {after:.2f} at delta {privacy.delta:.2g} after "
        f"{lasts} rounds. Loss, cohorts, failures, bytes and what clients score are withheld."
    ]
    if lasts < rounds:
        found.append(f"The budget of epsilon {privacy.epsilon:g} lasts for {lasts} of the {rounds} rounds.")
    loud = _loudness(privacy, federation)
    worst = max(loud, key=lambda level: loud[level])
    if loud[worst] > _MUCH:
        found.append(
            f"The noise is loud: over the elements of level {worst} it is {loud[worst]:.0f} times as long as the "
            "longest movement of a client. More clients, a larger cohort or fewer elements make it less."
        )
    return tuple(found)


def _loudness(privacy: Privacy, federation: Federation) -> dict[str, float]:
    """Return by level the norm of a round's noise as a multiple of the clipping norm."""
    layout = federation.problem.layout
    members = registered(federation, 0)
    found = {}
    for index in np.unique(federation.level_of[federation.able]).tolist():
        level = federation.levels[index]
        mine = cut(layout, level.submodel).gather(members)
        found[level.name] = privacy.noise * float((1 / (privacy.rate * mine[mine > 0])).square().sum().sqrt())
    return found
