"""Whether what a user asked for is used: keys that would be ignored are refused before a run begins, or said.

What is given for one run (`--set`, keywords) is refused where the run does not use it, for it was given to change that
run. A run file serves many runs, so a key of it that this one does not use is a note; a hook or an option that its
method never calls is a contradiction, and refused.
"""

from collections.abc import Iterable

from fleetfit.config import Experiment
from fleetfit.config.unused import Unused
from fleetfit.errors import ConfigError

_CONTRADICTIONS = ("method.hooks.", "method.plus.", "cohort.choose")


def check_single(experiment: Experiment, verb: str) -> None:
    """Refuse a comparison where one run is asked for.

    Raises:
        ConfigError: The experiment has a `[compare]`.
    """
    parts = experiment.compare.given
    if parts:
        said = f"[[compare.{parts[0]}]]" if parts[0] in ("row", "setting") else f"[compare] {parts[0]}"
        raise ConfigError(
            f"{said}: {verb} is for one run, and this file compares several: use `fleetfit compare`. For one of its "
            "runs, give `fleetfit run` the config.toml in that run's folder, or a file without [compare]."
        )


def check_asked(unused: Iterable[Unused], experiment: Experiment) -> None:
    """Refuse keys that the run does not use, where they were asked for beside the file or contradict its method.

    Args:
        unused: The keys that the run does not use.
        experiment: The description, as it was asked for.

    Raises:
        ConfigError: There is such a key.
    """
    for one in unused:
        if one.key.startswith(_CONTRADICTIONS) or any(covers(one.key, key) for key in experiment.asked.keys):
            raise ConfigError(f"{one} Leave it out.")


def covers(unused: str, key: str) -> bool:
    """Tell whether a key is among those of which one is not used: the same, inside of it, or around it."""
    return f"{unused}.".startswith(f"{key}.") or f"{key}.".startswith(f"{unused}.")


def gone(experiment: Experiment) -> list[str]:
    """Return a note for the keys of a file that went with the name to which they belonged."""
    by_section: dict[str, list[str]] = {}
    for key in experiment.asked.gone:
        section, _, inner = key.partition(".")
        by_section.setdefault(section, []).append(inner)
    return [
        f"[{section}] {', '.join(keys)}, as the run file has it, went with the name to which it belonged."
        for section, keys in by_section.items()
    ]
