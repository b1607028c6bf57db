"""Which keys of an experiment its run does not use: those that differ from their default and that nobody read.

Nobody keeps a list of them. While a run is assembled, sections note which of their keys are read (`fleetfit.used`),
factories say which of their parameters the others leave without effect, and `fleetfit.method.unused` tells which parts
of the method no round would call. What is known here is only why, for the sentence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from fleetfit import used
from fleetfit.config.schema import Experiment, LocalSection
from fleetfit.config.section import Open, Section
from fleetfit.method.unused import unused_parts
from fleetfit.used import Reading

_ELSEWHERE = ("name", "callbacks", "compare", "checkpoint", "engine.name", "engine.settings")
"""Read by whoever runs what is assembled, whatever the rest says; an engine refuses what it does not have."""

_WHY = {
    "attack.share": "there is no kind of attack",
    "attack.among": "there is no kind of attack",
    "cohort.late": "there is no deadline_s",
    "cohort.quorum": "no group has a profile, so nobody is faster than another",
    "cohort.over_selection": "no group has a profile, so nobody is faster than another",
    "local.check_every": "there is no patience",
    "cohort.fraction": "count says how many",
    "data.server": "the server trains in methods such as feddf only",
    "evaluate.statistics_samples": 'norms has no "static"',
    "fleet.tolerance": "each of the groups has its own",
    "fleet.levels": "the method has levels of its own",
    "engine.memory_format": "the model has no convolutions, whose images could lie otherwise",
    "engine.features_bytes": "nothing of the model is frozen",
    "engine.chosen": 'with speed = "exact" nothing is chosen',
    "fleet.drift.low": "with jump = 0 no budget ever jumps",
}
_ON_A_FLEET = "on a fleet the nodes have their own"


@dataclass(frozen=True)
class Unused:
    """A key that a run does not use.

    Attributes:
        key: As it is written: "cohort.late".
        why: Why not.
    """

    key: str
    why: str

    def __str__(self) -> str:
        """Return the sentence: `[cohort] late is not used here: there is no deadline_s.`."""
        section, dot, inner = self.key.partition(".")
        return f"{f'[{section}] {inner}' if dot else section} is not used here: {self.why}."


def unused_of(
    experiment: Experiment, found: Reading, spec: Mapping[str, Any], on_a_fleet: bool = False
) -> tuple[Unused, ...]:
    """Return the keys of an experiment that were not used when its run was assembled.

    Args:
        experiment: The description.
        found: What was read meanwhile.
        spec: The method's.
        on_a_fleet: Whether the clients are nodes.
    """
    parts = unused_parts(spec)
    with used.looking():
        unread = {key: _why(key, on_a_fleet) for key in _unread(experiment, found, "")}
        default = LocalSection(optimiser=experiment.local.optimiser)
        found_idle = {
            _in_file(key, experiment): why
            for key, why in (found.idle | parts).items()
            if not key.startswith("local.") or getattr(experiment.local, key[6:]) != getattr(default, key[6:])
        }
    return tuple(Unused(key, why) for key, why in (unread | found_idle).items())


def _in_file(key: str, experiment: Experiment) -> str:
    """Return the key that stands for an option which the run brought along itself."""
    brought = key == "method.plus.in_time" and "in_time" not in experiment.method.plus
    return "cohort.late" if brought else key


def _why(key: str, on_a_fleet: bool) -> str:
    if on_a_fleet and key.partition(".")[0] in ("data", "fleet"):
        return _ON_A_FLEET
    return _WHY.get(key, "nothing in this run reads it")


def _unread(section: Section, found: Reading, place: str) -> Iterator[str]:
    """Yield the keys of a section, and of those in it, that differ from their default and were not read."""
    for key, field in type(section).model_fields.items():
        where = f"{place}{key}"
        value = getattr(section, key)
        if where in _ELSEWHERE or (get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1):
            continue  # a tag says which of several sections this is
        default = field.default if field.default is not PydanticUndefined else _made(field)
        if not found.has(section, key) and not isinstance(default, Section):
            if value != default:
                yield where
        elif isinstance(value, Section):
            yield from _unread(value, found, f"{where}.")
        elif isinstance(value, list):
            for number, inner in enumerate(value, 1):
                if isinstance(inner, Section):
                    yield from _unread(inner, found, f"{where}.#{number}.")
    read = f"{place}settings" in _ELSEWHERE or found.has(section, "settings")
    if isinstance(section, Open) and section.settings and not read:
        yield from (f"{place}{key}" for key in section.settings)


def _made(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not None else None
