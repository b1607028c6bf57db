"""The tables of `make mutants` name what exists: a test that moved, or a line that changed, is no silent gap."""

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DRIVER: dict[str, Any] = runpy.run_path(str(HERE / "mutants.py"))
ACCEPTED = tomllib.loads((HERE / "accepted.toml").read_text())["mutant"]


def test_all_parts_of_the_core_have_tests() -> None:
    modules = DRIVER["modules"]()
    assert {module.split("/")[0] for module in modules} == set(DRIVER["TESTS"])
    assert set(DRIVER["MORE"]) <= set(modules)
    for names in (*DRIVER["TESTS"].values(), *DRIVER["MORE"].values()):
        assert [name for name in names if not DRIVER["place_of"](name).is_file()] == []


@pytest.mark.parametrize("row", ACCEPTED, ids=lambda row: row["module"])
def test_accepted_mutants_exist_and_have_reasons(row: dict[str, str]) -> None:
    lines = [line.strip() for line in (DRIVER["ROOT"] / "fleetfit" / row["module"]).read_text().splitlines()]
    assert row["was"] != row["becomes"] and row["why"]
    assert row["was"] in "\n".join(lines)
