"""A method that gives everybody one model smaller than the full one says so, with what it is; nobody else does."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from support import run_verb

import fleetfit as ff
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.report.text import format_count

SMALL: dict[str, Any] = {
    "rounds": 1,
    "data": {"partition": {"kind": "iid", "clients": 4}},
    "local": {"epochs": 1},
    "evaluate": {"every": 0},
}


def notes(method: str, **fleet: Any) -> list[str]:
    assembly = assemble(load_experiment({**SMALL, "fleet": fleet, "method": {"name": method}}))
    return [note for note in assembly.notes if "all_large" in note]


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_its_size_is_the_plan_s(method: str) -> None:
    (level,) = ff.plan({**SMALL, "method": {"name": method}}).levels
    (whole,) = ff.plan({**SMALL, "method": {"name": "all_large"}}).levels
    assert level.parameters < whole.parameters / 5
    (note,) = notes(method)
    assert note.startswith(method)
    assert f"{format_count(level.parameters)} of {format_count(whole.parameters)}" in note


def test_full_clients_need_no_note() -> None:
    assert notes("fedavg", groups=[{"budget": 1.0}]) == []


@pytest.mark.parametrize("method", ["all_large", "exclusivefl", "scalefl", "adaptivefl", "decoupled"])
def test_other_methods_say_nothing(method: str) -> None:
    assert notes(method) == []


def test_a_comparison_has_the_note_once(tmp_path: Path) -> None:
    rows = [{"label": name, "method": {"name": name}} for name in ("fedavg", "scalefl")]
    tiny = {"data": {"name": "tiny:tiny_data", **SMALL["data"]}, "model": {"name": "tiny:tiny"},
            "fleet": {"groups": [{"budget": 0.34}, {"budget": 1.0}]}}  # fmt: skip
    file = tmp_path / "rows.toml"
    file.write_text(tomli_w.dumps({**SMALL, **tiny, "compare": {"row": rows, "grid": {"seed": [0, 1]}}}))
    _, *streams = run_verb("compare", file, "--out", tmp_path / "out", code=0)
    output = " ".join("".join(streams).split())
    assert output.count("all_large") == 1
