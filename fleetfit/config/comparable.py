"""Whether updates can be compared with each other, for the options that do so: refused before the first round."""

from collections.abc import Callable
from functools import partial

import numpy as np

from fleetfit.config.schema import Experiment
from fleetfit.errors import ConfigError
from fleetfit.method import FEDAVG
from fleetfit.method.hooks import round_submodel
from fleetfit.options import krum, outliers, trimmed_mean
from fleetfit.values import Federation

JUDGES: dict[str, Callable[..., bool]] = {
    "outliers": outliers.judges,
    "krum": krum.judges,
    "trimmed_mean": trimmed_mean.judges,
}
"""Options that compare the updates of a round, and whether so many are enough for one with its keys."""
_MOST = 10_000
_LOOKED_AT = 4  # clients of a level, and rounds: of few channels two draws may be the same


def check_comparable(experiment: Experiment, federation: Federation) -> None:
    """Refuse options that compare updates where there is nothing to compare.

    Raises:
        ConfigError: The cohort is too small, or clients of one level do not train the same elements.
    """
    for option in sorted(experiment.method.plus.keys() & JUDGES.keys()):
        where = f"[method.plus.{option}]"
        judges = partial(JUDGES[option], **experiment.method.plus[option])
        if not judges(federation.cohort):
            enough = next((n for n in range(federation.cohort, _MOST) if judges(n)), _MOST)
            raise ConfigError(
                f"{where} compares the updates of a round with each other, and with a cohort of {federation.cohort} "
                f"there is nobody to tell by; it takes at least {enough} with its keys. Set [cohort] count, or leave "
                "the option out."
            )
        if federation.method.dispatch is not FEDAVG.dispatch:
            raise ConfigError(
                f"{where} compares what all clients do to the same elements, and {experiment.method.name} sends each "
                "level tensors of its own. Leave the option out, or choose another method."
            )
        if _drawn_anew(federation):
            raise ConfigError(
                f"{where} compares clients that train the same channels, and here each client gets channels of its "
                "own, so that few have an element in common. Take the first or rolling channels "
                '(method.hooks.channels = "prefix" or "rolling"), or leave the option out.'
            )


def _drawn_anew(federation: Federation) -> bool:
    """Tell whether two clients of one level train other channels in the same round."""
    levels = federation.level_of
    for level in range(len(federation.levels)):
        some = np.flatnonzero(levels == level)[:_LOOKED_AT].tolist()
        if any(len({round_submodel(federation, r, client) for client in some}) > 1 for r in range(_LOOKED_AT)):
            return True
    return False
