"""Errors that speak to the person who made the mistake.

Every error that FleetFit raises on purpose is a `FleetFitError`. Its message says what was wrong, what was expected and
what to do; the command line prints the message without a traceback and exits with code 2.
"""

import difflib
from collections.abc import Iterable


class FleetFitError(Exception):
    """Base of all errors that a user of FleetFit can cause and mend."""


class ConfigError(FleetFitError):
    """A run file, an override or an argument is wrong."""


class DataError(FleetFitError):
    """A data set, a file of it, or a partition is wrong."""


class ModelError(FleetFitError):
    """An architecture, its layout or a state does not fit."""


class PlanError(FleetFitError):
    """No plan satisfies the budgets."""


class RunError(FleetFitError):
    """A run, its folder or one of its rounds cannot go on."""


class Unexpected(RunError):
    """Code of a plug-in or of FleetFit itself raised in a worker what nobody has foreseen."""

    def __init__(self, message: str, details: str, foreign: bool) -> None:
        """Take the sentence and what is behind it.

        Args:
            message: What happened.
            details: The traceback.
            foreign: Whether it was a plug-in's code.
        """
        super().__init__(message)
        self.details, self.foreign = details, foreign


class MissingExtra(FleetFitError):
    """A feature needs an optional dependency that is not installed."""

    def __init__(self, extra: str, what: str) -> None:
        """Say which extra to install.

        Args:
            extra: Name of the extra, as in `pip install "fleetfit[extra]"`.
            what: The feature that needs it, as the start of a sentence ("Reading Parquet files").
        """
        super().__init__(f'{what} needs an optional dependency: pip install "fleetfit[{extra}]"')


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint such as ` Did you mean "rounds"?`, or an empty string when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""


def in_range(name: str, value: float, low: float, high: float = float("inf"), *, closed: bool = False) -> None:
    """Refuse a hyperparameter outside low < value < high; `closed` admits low itself.

    Raises:
        ConfigError: It is outside.
    """
    if not (low <= value if closed else low < value) or not value < high:
        least = f"at least {low:g}" if closed else f"above {low:g}"
        most = "" if high == float("inf") else f" and below {high:g}"
        raise ConfigError(f"{name} must be {least}{most}, got {value}.")
