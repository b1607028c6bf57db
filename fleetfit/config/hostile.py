"""`[attack]` becomes hostile clients: who they are, what they tell, what they train on, and how that is measured."""

from dataclasses import replace
from functools import partial

import numpy as np

from fleetfit.attack import Attack, Attackers, drawn
from fleetfit.config.fleet import format_ranges
from fleetfit.config.naming import build_component
from fleetfit.config.schema import Experiment
from fleetfit.errors import ConfigError, truncate
from fleetfit.method.hooks import round_submodel
from fleetfit.rounds import Settings
from fleetfit.values import Federation, Simulation


def build_attack(experiment: Experiment, on_a_fleet: bool) -> Attack | None:
    """Return what hostile clients do, or None where there are none.

    Raises:
        ConfigError: The clients are nodes, or the attack cannot be had.
    """
    section = experiment.attack
    if section.kind is None:
        if section.settings:
            raise ConfigError(
                f"[attack] {truncate(next(iter(section.settings)))}: there is no attack that it could belong to; say "
                'which with kind = "...". `fleetfit list attacks` prints them.'
            )
        return None
    if on_a_fleet:
        raise ConfigError(
            "[attack]: hostile clients are simulated, and those of a fleet are real nodes, which do what their owners "
            "want. Leave [attack] out, or run the file with fleetfit run."
        )
    found = build_component("attacks", section.kind, "[attack]", section.settings)
    if not isinstance(found, Attack):
        raise ConfigError(f"[attack] kind: {section.kind} must return an Attack, got {type(found).__name__}.")
    if found.forge is not None and experiment.local.compress is not None:
        raise ConfigError(
            "[attack] kind: this attack changes updates, and with [local] compress they come in compressed. Leave "
            "compress out."
        )
    return found


def draw_attackers(experiment: Experiment, attack: Attack, known: Federation) -> Attackers:
    """Draw who is hostile, by the levels that clients afford in truth."""
    section, levels = experiment.attack, known.level_of
    clients = drawn(np.where(known.clients.num_examples > 0, levels, -1), section.share, section.among, experiment.seed)
    own = {client: int(levels[client]) for client in clients}
    return Attackers(attack, clients, own, partial(round_submodel, known), experiment.seed)


def apply_attack(
    federation: Federation, simulation: Simulation | None, settings: Settings, attackers: Attackers | None
) -> tuple[Federation, Simulation | None, Settings]:
    """Return what the server is told, what devices train on, and what is reported where some clients are hostile."""
    if attackers is None or simulation is None or federation.device is None:
        return federation, simulation, settings
    probe = attackers.probed(federation.device)
    data, parts = attackers.poisoned(simulation.data, simulation.parts)
    return (
        replace(federation, clients=attackers.told(federation.clients)),
        replace(simulation, data=data, parts=parts),
        replace(settings, hostile=frozenset(attackers.clients), wanted=replace(settings.wanted, triggered=probe)),
    )


def describe_attackers(attackers: Attackers | None) -> tuple[str, ...]:
    """Say who is hostile."""
    if attackers is None:
        return ()
    return (f"{len(attackers.clients)} clients are hostile: clients {format_ranges(np.array(attackers.clients))}.",)
