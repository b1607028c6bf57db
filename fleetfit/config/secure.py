"""`[secure]` becomes rounds whose sums alone the server sees; what it could then not be asked is refused."""

import json
import math
from collections.abc import Mapping
from typing import Any

from fleetfit.config.schema import Experiment
from fleetfit.errors import ConfigError, RunError
from fleetfit.evaluate import has_batch_norm
from fleetfit.method import FEDAVG
from fleetfit.method.hooks import by_count
from fleetfit.records import RunFolder
from fleetfit.secure import Quantiser, SecureRules, SecureRun, check_installed
from fleetfit.submodel import cut, prefix, rolling, whole
from fleetfit.values import Federation

FILE = "secure.json"
_KEPT = {
    "dispatch": "sends each level tensors of its own, and masks go by what all were sent",
    "adapt": "has clients train less than they were sent, and blocks are agreed on before",
    "reply": "has clients leave rows out of what they send back",
    "receive": "looks at single updates",
    "note": "looks at single updates",
    "merge": "averages in a way of its own, and the server has sums only",
    "observe": "learns from what each client did",
}
"""Hooks that have to be FedAvg's, and what a method does that has its own."""


def build_secure_run(experiment: Experiment, federation: Federation) -> SecureRun | None:
    """Return what a run asks of its secure rounds; None where they are plain.

    Raises:
        ConfigError: It asks for what the server could not see then.
        MissingExtra: The library is not installed.
    """
    if not experiment.is_secure:
        return None
    section = experiment.secure
    rules = SecureRules(section.minimum, section.threshold)
    grid = Quantiser(section.range, section.bits, experiment.privacy.clip)
    check_installed()
    _check_numbers(federation, rules, grid)
    if grid.clip is not None:
        _check_clip(federation, grid)
    _check_method(experiment, federation)
    return SecureRun(rules, grid)


def _check_numbers(federation: Federation, rules: SecureRules, grid: Quantiser) -> None:
    if federation.cohort < rules.minimum:
        raise ConfigError(
            f"[secure] minimum: {rules.minimum} clients at least are to be added up, and a cohort has "
            f"{federation.cohort}. Set [cohort] count, or a smaller minimum."
        )
    most = federation.cohort if grid.clip is None else len(federation.clients)
    if most > grid.clients:
        whose = "a cohort has" if grid.clip is None else "a cohort that is drawn client by client may have"
        raise ConfigError(
            f"[secure] bits: sums of {grid.bits} bits hold {grid.clients} clients, and {whose} {most}. Set fewer bits, "
            "or have fewer clients."
        )


def _check_clip(federation: Federation, grid: Quantiser) -> None:
    """Check that whole numbers can stand for movements of the clipping norm."""
    assert grid.clip is not None
    if grid.range < grid.clip:
        raise ConfigError(
            f"[secure] range: {grid.range:g} does not hold a movement of [privacy] clip = {grid.clip:g}, which may lie "
            f"in one element. Set range = {grid.clip:g}, which also bounds best what a client can do that does not "
            "clip."
        )
    layout = federation.problem.layout
    even = grid.clip / cut(layout, whole(layout)).size ** 0.5
    if grid.step > even:
        raise ConfigError(
            f"[secure] bits: a movement of [privacy] clip = {grid.clip:g} that is spread over the whole model moves an "
            f"element by {even:.2g}, and numbers of {grid.bits} bits up to {grid.range:g} have steps of "
            f"{grid.step:.2g}: it would be rounded to nothing. Set range = {grid.clip:g}, or more bits."
        )


def _check_method(experiment: Experiment, federation: Federation) -> None:
    method = federation.method
    for hook, what in _KEPT.items():
        if getattr(method, hook) is not getattr(FEDAVG, hook):
            raise ConfigError(
                f"[secure]: {_whose(experiment, hook)} {what} (hook {hook!r}). Leave it out, or take fedavg, scalefl, "
                "heterofl, fedrolex or another method that averages plainly."
            )
    remembers = getattr(method, "remember", FEDAVG.remember) is not FEDAVG.remember
    if remembers and federation.device is not None:
        raise ConfigError(
            f"[secure]: with {_whose(experiment, 'remember')} each client remembers what its update tells (hook "
            "'remember'), and a simulation's checkpoint holds what clients remember. Leave it out; on a fleet it stays "
            "on the nodes."
        )
    if method.weight is not by_count:
        raise ConfigError(
            "[secure]: sums count every client alike, and here clients weigh by what they have. Set "
            'method.hooks.weight = "by_count".'
        )
    if method.channels not in (prefix, rolling):
        raise ConfigError(
            "[secure]: each client gets channels of its own, so that few have an element in common. Take "
            'method.hooks.channels = "prefix" or "rolling".'
        )
    if experiment.local.compress is not None:
        raise ConfigError(
            "[secure]: masked numbers cannot be compressed; leave compress out of [local], and set fewer bits."
        )
    if "static" in experiment.evaluate.norms and has_batch_norm(federation):
        raise ConfigError(
            "[secure]: this model has batch-norm layers, whose statistics each client would tell the server. Take a "
            'model with another normalisation, such as norm = "group" in [model], or evaluate.norms = ["batch"].'
        )


def _whose(experiment: Experiment, hook: str) -> str:
    if hook in experiment.method.hooks:
        return f"method.hooks.{hook}"
    section, cohort = experiment.method, experiment.cohort
    if hook == "adapt" and cohort.deadline_s is not None and cohort.late == "shallower":
        return 'cohort.late = "shallower"'
    if hook in ("note", "observe") and cohort.choose != "uniform":
        return "cohort.choose"
    return f"[method.plus.{next(iter(section.plus))}]" if section.plus else str(section.name)


def describe_secure_run(secure: SecureRun | None, federation: Federation, rate: float | None = None) -> tuple[str, ...]:
    """Say what the server sees, and where a private cohort is often too small for that."""
    if secure is None:
        return ()
    found = (
        f"Secure aggregation: the server sees sums over at least {secure.rules.minimum} clients, of numbers of "
        f"{secure.grid.bits} bits up to {secure.grid.range:g}, and no client's update or loss. A round needs "
        f"{secure.rules.threshold:.0%} of its cohort.",
    )
    if rate is None:
        return found
    return (
        *found,
        "Clients clip their movements themselves, and the server adds the noise to sums that it has seen. Epsilon is "
        "counted as if everybody knew who was drawn, since members of a secure round do; the more of the clients take "
        "part in each round, the less that costs.",
        *_too_small(secure.rules.minimum, federation, rate),
    )


def _too_small(minimum: int, federation: Federation, rate: float) -> tuple[str, ...]:
    """Say how often a cohort has too few clients of the largest level for a sum, if that is not rare."""
    levels = federation.level_of[federation.able]
    top = int(levels.max())
    there = int((levels == top).sum())
    chance = sum(math.comb(there, n) * rate**n * (1 - rate) ** (there - n) for n in range(minimum))
    if chance <= 0.05:
        return ()
    return (
        f"In {chance:.0%} of the rounds fewer than {minimum} clients of level {federation.levels[top].name} are drawn. "
        "What they alone train then gets noise and no update. A larger cohort makes it rarer.",
    )


# ---- in the run folder ---------------------------------------------------------------------------------------------


def format_secure_file(secure: SecureRun) -> str:
    """Return what the run folder keeps: what the run is known by, and the last round that was begun."""
    return json.dumps({"run": secure.run, "begun": secure.journal.last.get(secure.run, -1) + 1}) + "\n"


def resume_secure_run(secure: SecureRun, folder: RunFolder) -> None:
    """Go on with what a run folder keeps, and write there which rounds are begun.

    Raises:
        RunError: The file is gone or damaged.
    """
    nest: Any = folder.json(FILE)
    fits = isinstance(nest, Mapping) and isinstance(nest.get("run"), str) and type(nest.get("begun")) is int
    if not fits or not nest["run"] or not 0 <= nest["begun"] < 2**31:
        raise RunError(
            f"{folder.path / FILE} is damaged: it has not the run's name and the rounds that were begun. Nobody knows "
            "which rounds must not be done again, so the run cannot go on."
        )
    secure.run = nest["run"]
    secure.journal.last = {secure.run: nest["begun"] - 1}
    secure.journal.keep = lambda last: folder.write(FILE, format_secure_file(secure))
