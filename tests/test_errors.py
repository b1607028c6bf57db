"""The exceptions and what they carry."""

import copy
import traceback
from pathlib import Path

import pytest
from support import raises

from fleetfit import errors
from fleetfit.errors import ConfigError, DataError, FleetFitError, MissingExtra, PlanError, check_range, join_some


@pytest.mark.parametrize("kind", [FleetFitError, ConfigError, DataError, PlanError, errors.ModelError, errors.RunError])
def test_an_error_carries_key_and_path(kind: type[FleetFitError]) -> None:
    error = kind("message", key="local.lr", path="runs/a")
    assert (str(error), error.key, error.path) == ("message", "local.lr", Path("runs/a"))
    assert (kind("message").key, kind("message").path) == (None, None)


def test_attributes_survive_a_copy_between_processes() -> None:
    error = DataError("message", path="a.csv", row=3, column="age")
    twin = copy.copy(error)  # by the same protocol as Ray, which copies what a worker raised
    assert (twin.path, twin.row, twin.column) == (Path("a.csv"), 3, "age")


def test_the_tree_in_the_docstring_is_the_tree_of_the_module() -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if line.startswith("    ")]
    drawn = {line[4:].replace("|", " ").replace("-", " ").split()[0] for line in lines}
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert drawn == classes


def test_a_traceback_leaves_out_what_was_handled_before() -> None:
    """But it shows a cause that is named, such as an error of a user's own code."""

    def refuse(cause: Exception | None) -> str:
        try:
            try:
                raise KeyError("inner")
            except KeyError:
                if cause is not None:
                    raise DataError("outer") from cause
                raise DataError("outer")  # noqa: B904 - as a function does that is called here
        except DataError as error:
            return "".join(traceback.format_exception(error))

    assert "inner" not in refuse(None) and "outer" in refuse(None)
    assert "inner" not in refuse(ValueError("mine")) and "mine" in refuse(ValueError("mine"))


def test_a_range_names_its_parameter() -> None:
    with raises(ConfigError, 0.5, 1.5, key="alpha"):
        check_range("alpha", 1.5, 0.0, 0.5)
    check_range("alpha", 0.0, 0.0, closed=True)


@pytest.mark.parametrize(
    ("count", "expected"), [(0, ""), (1, "a"), (2, "a; b"), (3, "a; b and 1 more"), (5, "a; b and 3 more")]
)
def test_a_long_list_is_cut_and_counted(count: int, expected: str) -> None:
    assert join_some(list("abcde"[:count]), 2, "; ") == expected


def test_a_missing_extra_names_it() -> None:
    with raises(MissingExtra, "fleetfit[nothing]", extra="nothing"):
        errors.import_optional("fleetfit_has_no_such_module", "nothing", "Reading")
