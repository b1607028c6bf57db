"""Build hostile clients, private rounds and secure sums from `[attack]`, `[privacy]` and `[secure]`."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fleetfit.attacks.base import Attack, Attackers, draw_hostile_clients
from fleetfit.config.assemble.rounds import compute_cohort_fraction
from fleetfit.config.components import build_component
from fleetfit.config.schema import Experiment
from fleetfit.core import Federation, Simulation
from fleetfit.errors import ConfigError, RunError, format_ranges, truncate
from fleetfit.evaluation import has_batch_norm
from fleetfit.hooks import Method, get_round_submodel, keep_prefix, weigh_equally
from fleetfit.options import fedadam, fedavgm
from fleetfit.privacy import Ledger, Privacy, count_registered, find_noise, max_rounds
from fleetfit.rounds import Settings
from fleetfit.runs.folder import RunFolder
from fleetfit.secure import Quantizer, SecureRules, SecureRun, check_installed
from fleetfit.submodel import full_submodel, get_slice_plan, rolling

# ---- hostile clients -----------------------------------------------------------------------------------------------


def build_attack(experiment: Experiment, on_a_fleet: bool) -> Attack | None:
    """Return the attack of hostile clients, or None.

    Raises:
        ConfigError: The clients are nodes, or the attack cannot be built.
    """
    section = experiment.attack
    if section.kind is None:
        if section.settings:
            first = next(iter(section.settings))
            raise ConfigError(
                f"[attack] {truncate(first)}: no attack is set. Set kind, or leave it out. `fleetfit list attacks` "
                "prints the kinds.",
                key=f"attack.{first}",
            )
        return None
    if on_a_fleet:
        raise ConfigError(
            "[attack]: only simulated clients can be hostile, not nodes of a fleet. Leave [attack] out, or run the "
            "file with fleetfit run.",
            key="attack",
        )
    attack = build_component("attacks", section.kind, "[attack]", section.settings)
    if not isinstance(attack, Attack):
        raise ConfigError(
            f"[attack] kind: {section.kind} must return an Attack, got {type(attack).__name__}.", key="attack.kind"
        )
    if attack.forge is not None and experiment.local.compress is not None:
        raise ConfigError(
            "[attack] kind: this attack changes updates, which [local] compress compresses. Leave compress out.",
            key="local.compress",
        )
    return attack


def draw_attackers(experiment: Experiment, attack: Attack, federation: Federation) -> Attackers:
    """Draw the hostile clients by the levels that clients actually afford."""
    section, levels = experiment.attack, federation.level_of
    takes_part = (federation.clients.num_examples > 0) & (levels >= 0)
    levels_with_data = np.where(takes_part, np.array(federation.numbers)[levels] - 1, -1)
    clients = draw_hostile_clients(levels_with_data, section.fraction, section.among, experiment.seed)
    level_by_client = {client: int(levels[client]) for client in clients}
    return Attackers(attack, clients, level_by_client, partial(get_round_submodel, federation), experiment.seed)


def apply_attack(
    federation: Federation, simulation: Simulation | None, settings: Settings, attackers: Attackers | None
) -> tuple[Federation, Simulation | None, Settings]:
    """Apply an attack to the server's view, the devices' data, and the evaluation."""
    if attackers is None or simulation is None or federation.device is None:
        return federation, simulation, settings
    probe = attackers.make_probe_device(federation.device)
    data, parts = attackers.poison(simulation.data, simulation.parts)
    return (
        replace(federation, clients=attackers.misreport(federation.clients)),
        replace(simulation, data=data, parts=parts),
        replace(settings, hostile=frozenset(attackers.clients), scope=replace(settings.scope, triggered=probe)),
    )


def describe_attackers(attackers: Attackers | None) -> tuple[str, ...]:
    """List the hostile clients."""
    if attackers is None:
        return ()
    return (f"{len(attackers.clients)} clients are hostile: clients {format_ranges(attackers.clients)}.",)


# ---- requirements that private and secure rounds share -------------------------------------------------------------

POST_PROCESSING = ("class_prior", "fedadam", "fedavgm", "fedprox", "fedyogi")
"""Options that only use the result of a round, or run on devices."""

_PLAIN_METHODS = "Leave it out, or use fedavg, scalefl, heterofl, fedrolex or another method with FedAvg's average."


def _find_hook_owner(experiment: Experiment, hook: str) -> tuple[str, str]:
    """Return the method, option or key that sets a hook: its label in messages, and its key."""
    section, cohort = experiment.method, experiment.cohort
    if hook in section.hooks:
        return f"method.hooks.{hook}", f"method.hooks.{hook}"
    if hook == "adapt_job" and cohort.deadline_s is not None and cohort.on_deadline == "shallower":
        return 'cohort.on_deadline = "shallower"', "cohort.on_deadline"
    if hook in ("annotate", "update_server_memory") and cohort.selection != "uniform":
        return "cohort.selection", "cohort.selection"
    for option in section.options:
        if option not in POST_PROCESSING:
            return f"[method.options.{option}]", f"method.options.{option}"
    return str(section.name), "method.name"


def _check_sums(
    experiment: Experiment, method: Method, hooks: Mapping[str, str], where: str, reason: str
) -> None:  # fmt: skip
    """Refuse hooks that need more than sums of a fixed part of the model, and channels that differ by client."""
    for hook, effect in hooks.items():
        if hook in method.own_hooks:
            owner, key = _find_hook_owner(experiment, hook)
            raise ConfigError(f"{where}: {owner} {effect} (hook {hook!r}){reason}. {_PLAIN_METHODS}", key=key)
    if method.choose_channels not in (keep_prefix, rolling):
        raise ConfigError(
            f"{where}: each client gets its own channels, so too few clients share an element. Set "
            'method.hooks.choose_channels = "prefix" or "rolling".',
            key="method.hooks.choose_channels",
        )


# ---- privacy -------------------------------------------------------------------------------------------------------

_LOUD = 15.0  # norm of the noise over all elements of a level, as a multiple of the clipping norm
_PRIVATE_HOOKS = {
    "assign": "replaces the assignment of sub-models",
    "dispatch": "sends each level its own tensors",
    "update_client_memory": "keeps memory on clients, and a checkpoint holds it",
    "reply": "lets clients omit rows from updates, depending on their data",
    "filter_updates": "reads single updates",
    "annotate": "reads single updates",
    "make_aggregator": "replaces the average",
    "update_server_memory": "uses the members of a cohort and their updates",
}
"""Hooks that must be FedAvg's, and the effect of a replacement."""


def _check_no_extra(experiment: Experiment, federation: Federation, section: str, reason: str) -> None:
    """Refuse a method that sends tensors beside the model's."""
    for level in federation.levels:
        names = {
            name for shapes in federation.method.declare_extra(federation.problem, level.submodel) for name in shapes
        }
        if names:
            owner, key = _find_hook_owner(experiment, "attach")
            raise ConfigError(
                f"[{section}]: {owner} sends tensors beside the model ({', '.join(sorted(names))}), {reason}. "
                f"{_PLAIN_METHODS}",
                key=key,
            )


def build_privacy(experiment: Experiment, federation: Federation) -> Privacy | None:
    """Return the differential privacy of a run, or None.

    Raises:
        ConfigError: The run reveals more than the noise covers, or the budget is too small.
        MissingExtra: The accountant is not installed.
    """
    if not experiment.is_private:
        return None
    section = experiment.privacy
    clip, noise, epsilon, key_file = section.clipping_norm, section.noise_multiplier, section.epsilon, section.key_file
    if clip is None:
        raise ConfigError(
            "[privacy] clipping_norm: missing. Set the largest norm of a client's update, such as clipping_norm = 0.3.",
            key="privacy.clipping_norm",
        )
    if noise is None and epsilon is None:
        raise ConfigError(
            "[privacy]: noise_multiplier or epsilon is missing. Set noise_multiplier = 1.0, for example, or what the "
            "run may spend, such as epsilon = 3.0.",
            key="privacy.noise_multiplier",
        )
    if not key_file:
        raise ConfigError(
            '[privacy] key_file: missing. Set the file of the noise\'s key, such as key_file = "~/keys/phones.key", '
            "outside of the run folder. FleetFit creates it if necessary. Keep it secret: with it the noise can be "
            "removed.",
            key="privacy.key_file",
        )
    _check_private_rounds(experiment, federation)
    count, is_secure = len(federation.clients), experiment.is_secure
    rate = compute_cohort_fraction(experiment.cohort, count)
    delta = 1 / (10 * count) if section.delta is None else section.delta
    if delta >= 1 / count:
        raise ConfigError(
            f"[privacy] delta: {delta:g} allows a full disclosure of one of {count} clients. Set it well below "
            f"{1 / count:.2g}, or leave it out for the default {1 / (10 * count):.2g}.",
            key="privacy.delta",
        )
    if noise is None:
        assert epsilon is not None
        noise = find_noise(epsilon, rate, experiment.rounds, delta, is_secure)
    elif epsilon is not None and not max_rounds(noise, rate, delta, epsilon, 1, is_secure):
        raise ConfigError(
            f"[privacy] epsilon: {epsilon:g} is spent within the first round. Set more noise, a smaller "
            "cohort.fraction, or a larger epsilon.",
            key="privacy.epsilon",
        )
    ledger = Ledger(charges_repeats=federation.device is None)
    return Privacy(
        clip, noise, rate, delta, epsilon, key_file, ledger,
        noise_from_budget=section.noise_multiplier is None, known_cohorts=is_secure,
    )  # fmt: skip


def _check_private_rounds(experiment: Experiment, federation: Federation) -> None:
    """Refuse settings that reveal more than the noise covers, or whose effect cannot be bounded."""
    method, section = federation.method, experiment.method
    _check_no_extra(experiment, federation, "privacy", "which the noise does not cover")
    _check_sums(experiment, method, _PRIVATE_HOOKS, "[privacy]", ", which reveals more than the noise covers")
    if "choose_clients" in method.own_hooks:
        raise ConfigError(
            "[privacy]: clients must be drawn independently with the same probability. Leave cohort.selection and "
            "method.hooks.choose_clients out.",
            key="method.hooks.choose_clients" if "choose_clients" in section.hooks else "cohort.selection",
        )
    further = [option for option in section.options if option not in POST_PROCESSING]
    is_optimizer = getattr(method.step, "func", None) in (fedavgm.step, fedadam.step)  # fedyogi has fedadam's
    if further or ("step" in method.own_hooks and not is_optimizer):
        owner, key = _find_hook_owner(experiment, "step")
        if further:
            owner, key = f"[method.options.{further[0]}]", f"method.options.{further[0]}"
        raise ConfigError(f"[privacy]: {owner} uses more than a private round reveals. {_PLAIN_METHODS}", key=key)
    if section.hooks.get("weigh", "by_count") != "by_count":
        raise ConfigError(
            "[privacy]: all clients have the same weight. Leave method.hooks.weigh out.", key="method.hooks.weigh"
        )
    if not method.needs_budgets:
        raise ConfigError(
            f"[privacy]: {section.name} does not use clients' budgets, so the number of clients per element is not "
            f"known in advance. {_PLAIN_METHODS}",
            key="method.name",
        )
    if has_batch_norm(federation):
        raise ConfigError(
            "[privacy]: this model has batch-norm layers, whose statistics are exact sums over clients' samples. Use "
            'another normalization, such as norm = "group" in [model].',
            key="model.norm",
        )
    _check_private_settings(experiment)


def _check_private_settings(experiment: Experiment) -> None:
    if experiment.cohort.quorum != 1.0 or experiment.cohort.over_selection != 0.0:
        raise ConfigError(
            "[privacy]: a round needs all drawn clients, because its denominators are fixed in advance. Leave quorum "
            "and over_selection out of [cohort].",
            key="cohort.quorum" if experiment.cohort.quorum != 1.0 else "cohort.over_selection",
        )
    if experiment.local.compress is not None and not experiment.is_secure:  # secure rounds refuse it in their own check
        raise ConfigError(
            "[privacy]: with [local] compress a client remembers the exact error of compression, and a checkpoint "
            "holds the memory of clients. Leave compress out.",
            key="local.compress",
        )
    if experiment.evaluate.split == "train":
        raise ConfigError(
            '[privacy]: [evaluate] split: accuracy on clients\' training samples reveals them. Use "test".',
            key="evaluate.split",
        )


def apply_privacy(federation: Federation, settings: Settings, privacy: Privacy) -> tuple[Federation, Settings]:
    """Install the private hooks, and drop per-client results from the evaluation."""
    hooks: dict[str, Any] = {
        "choose_clients": privacy.choose,
        "make_aggregator": privacy.aggregate,
        "weigh": weigh_equally,
    }
    has_test_set = federation.device is not None
    evaluation = replace(
        settings.scope, clients=0, whole=has_test_set, always=has_test_set, norms=settings.scope.norms[:1]
    )
    return (
        replace(federation, method=replace(federation.method, **hooks)),
        replace(settings, rounds=privacy.max_rounds(settings.rounds), scope=evaluation, privacy=privacy),
    )


def describe_privacy(privacy: Privacy, federation: Federation, rounds: int) -> tuple[str, ...]:
    """Describe the guarantee, the number of rounds that it covers, and too much noise."""
    lasts = privacy.max_rounds(rounds)
    epsilon = replace(privacy, ledger=Ledger(begun=lasts)).make_report()["epsilon"]
    notes = [
        f"Differential privacy of clients: noise {privacy.noise_multiplier:.3g} times the clipping norm of "
        f"{privacy.clipping_norm:g}, each "
        f"client drawn with probability {privacy.rate:.3g}: epsilon {epsilon:.2f} at delta {privacy.delta:.2g} after "
        f"{lasts} rounds. Loss, cohorts, failures, bytes and the accuracy of single clients are withheld."
    ]
    if lasts < rounds:
        notes.append(f"The budget of epsilon {privacy.epsilon:g} is enough for {lasts} of the {rounds} rounds.")
    members = count_registered(federation, 0)
    loudness = {}
    for index in np.unique(federation.level_of[federation.able]).tolist():
        level = federation.levels[index]
        weights = get_slice_plan(federation.problem.layout, level.submodel).gather(members)
        loudness[level.name] = privacy.noise_multiplier * float(
            (1 / (privacy.rate * weights[weights > 0])).square().sum().sqrt()
        )
    loudest = max(loudness, key=lambda level: loudness[level])
    if loudness[loudest] > _LOUD:
        notes.append(
            f"The noise is loud: over the elements of level {loudest} it is {loudness[loudest]:.0f} times as long as "
            "the longest movement of a client. More clients, a larger cohort or fewer elements make it less."
        )
    return tuple(notes)


# ---- secure aggregation --------------------------------------------------------------------------------------------

_SECURE_HOOKS = {
    "dispatch": "sends each level its own tensors, but masks cover only tensors that all clients have",
    "adapt_job": "lets clients train less than they received, but blocks are fixed in advance",
    "reply": "lets clients omit rows from updates",
    "filter_updates": "reads single updates",
    "annotate": "reads single updates",
    "make_aggregator": "replaces the average, but the server has only sums",
    "update_server_memory": "uses single updates",
}
"""Hooks that must be FedAvg's, and the effect of a replacement."""


def build_secure_run(experiment: Experiment, federation: Federation) -> SecureRun | None:
    """Return the secure aggregation of a run, or None.

    Raises:
        ConfigError: The run needs single updates, or the numbers are out of range.
        MissingExtra: The library for secure aggregation is not installed.
    """
    if not experiment.is_secure:
        return None
    section = experiment.secure
    rules = SecureRules(section.min_clients, section.reconstruction_threshold)
    grid = Quantizer(section.clipping_range, section.bits, experiment.privacy.clipping_norm)
    check_installed()
    if federation.cohort < rules.minimum:
        raise ConfigError(
            f"[secure] min_clients: a sum needs at least {rules.minimum} clients, but a cohort has "
            f"{federation.cohort}. "
            "Set [cohort] count, or smaller min_clients.",
            key="secure.min_clients",
        )
    most = federation.cohort if grid.clip is None else len(federation.clients)
    if most > grid.clients:
        cohort = "a cohort has" if grid.clip is None else "a cohort that is drawn client by client may have"
        raise ConfigError(
            f"[secure] bits: sums of {grid.bits} bits hold {grid.clients} clients, but {cohort} {most}. Set fewer "
            "bits, or use fewer clients.",
            key="secure.bits",
        )
    if grid.clip is not None:
        _check_grid(federation, grid, grid.clip)
    _check_secure_rounds(experiment, federation)
    return SecureRun(rules, grid)


def _check_grid(federation: Federation, grid: Quantizer, clip: float) -> None:
    """Check that the grid can represent movements of the clipping norm, in one element and spread over all."""
    if grid.range < clip:
        raise ConfigError(
            f"[secure] clipping_range: {grid.range:g} is below [privacy] clipping_norm = {clip:g}, but one element "
            "may move that far. "
            f"Set clipping_range = {clip:g}, which is also the tightest bound on a client that does not clip.",
            key="secure.clipping_range",
        )
    layout = federation.problem.layout
    even = clip / get_slice_plan(layout, full_submodel(layout)).size ** 0.5
    if grid.step > even:
        raise ConfigError(
            f"[secure] bits: a movement of [privacy] clipping_norm = {clip:g} spread over the whole model moves an "
            "element by "
            f"{even:.2g}, and numbers of {grid.bits} bits up to {grid.range:g} have steps of {grid.step:.2g}: it "
            f"would be rounded to nothing. Set clipping_range = {clip:g}, or more bits.",
            key="secure.bits",
        )


def _check_secure_rounds(experiment: Experiment, federation: Federation) -> None:
    """Refuse settings that need more than sums on the server."""
    method = federation.method
    _check_no_extra(experiment, federation, "secure", "which masks do not cover")
    _check_sums(experiment, method, _SECURE_HOOKS, "[secure]", "")
    if "update_client_memory" in method.own_hooks and federation.device is not None:
        owner, key = _find_hook_owner(experiment, "update_client_memory")
        raise ConfigError(
            f"[secure]: with {owner} each client remembers its updates (hook 'remember'), and a simulation's "
            "checkpoint holds the memory of clients. Leave it out, or run on a fleet, where memory stays on the "
            "nodes.",
            key=key,
        )
    if method.weigh is not weigh_equally:
        raise ConfigError(
            "[secure]: sums give all clients the same weight, but this method weights clients. Set "
            'method.hooks.weigh = "by_count".',
            key="method.hooks.weigh",
        )
    if experiment.local.compress is not None:
        raise ConfigError(
            "[secure]: masked numbers cannot be compressed. Leave compress out of [local], and set fewer bits.",
            key="local.compress",
        )
    if "static" in experiment.evaluate.batch_norm and has_batch_norm(federation):
        raise ConfigError(
            "[secure]: this model has batch-norm layers, whose statistics each client would send to the server. Use "
            'another normalization, such as norm = "group" in [model], or set evaluate.batch_norm = ["batch"].',
            key="evaluate.batch_norm",
        )


def describe_secure_run(secure: SecureRun | None, federation: Federation, rate: float | None = None) -> tuple[str, ...]:
    """Describe the server's view, and the probability that a private cohort is too small for a sum.

    Args:
        secure: The secure aggregation, or None.
        federation: The server's view of the clients.
        rate: Probability with which a private round draws each client; None without privacy.
    """
    if secure is None:
        return ()
    minimum = secure.rules.minimum
    notes = [
        f"Secure aggregation: the server sees sums over at least {minimum} clients, of numbers of {secure.grid.bits} "
        f"bits up to {secure.grid.range:g}, and no client's update or loss. A round needs "
        f"{secure.rules.threshold:.0%} of its cohort."
    ]
    levels = federation.level_of[federation.able]
    few = [level.name for i, level in enumerate(federation.levels) if 0 < int((levels >= i).sum()) < minimum]
    if few:
        notes.append(
            f"Fewer than {minimum} clients train level {' and '.join(few)}, so the server does not see the sums of "
            "elements that only they have, and these elements are never trained. Give more clients its budget, or "
            "leave the level out."
        )
    if rate is None:
        return tuple(notes)
    notes.append(
        "Clients clip their own updates, and the server adds the noise to sums that it has seen. Epsilon is computed "
        "as if the members of a round were public, because members of a secure round know each other. A larger share "
        "of clients in each round reduces that cost."
    )
    top = int(levels.max())
    members = int((levels == top).sum())
    chance = sum(math.comb(members, n) * rate**n * (1 - rate) ** (members - n) for n in range(minimum))
    if chance > 0.05 and not few:
        notes.append(
            f"In {chance:.0%} of the rounds fewer than {minimum} clients of level {federation.levels[top].name} are "
            "drawn. Elements that only they train then get noise and no update. Use a larger cohort to make this "
            "rarer."
        )
    return tuple(notes)


# ---- secure aggregation in the run folder --------------------------------------------------------------------------

SECURE_FILE = "secure.json"


def format_secure_file(secure: SecureRun) -> str:
    """Return the content of the file: the run's identifier and the number of started rounds."""
    return json.dumps({"run": secure.run, "begun": secure.journal.last.get(secure.run, -1) + 1}) + "\n"


def resume_secure_run(secure: SecureRun, folder: RunFolder) -> None:
    """Restore identifier and journal from a run folder, and record each started round there.

    Raises:
        RunError: The file is missing or damaged.
    """
    table: Any = folder.json(SECURE_FILE)
    is_valid = isinstance(table, Mapping) and isinstance(table.get("run"), str) and type(table.get("begun")) is int
    if not is_valid or not table["run"] or not 0 <= table["begun"] < 2**31:
        raise RunError(
            f"{folder.path / SECURE_FILE} is damaged: it lacks the run's identifier or the started rounds. Restore "
            "the file; without it a round could be repeated.",
            path=folder.path / SECURE_FILE,
        )
    secure.run = table["run"]
    secure.journal.last = {secure.run: table["begun"] - 1}
    secure.journal.keep = lambda last: folder.write(SECURE_FILE, format_secure_file(secure))
