"""What `plan` and `run` say of levels that are not as the file asks, and keys that help: each named key is tried."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.verbs import run_verb

from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.config.assembly import Assembly

GROUPED = {"name": "plain_models:Grouped", "derive": {"axes": {"stages.*.conv": "inner"}}}
POOLED = GROUPED | {"pools": True}
TWO = {"cost": "multiply_adds", "groups": [{"budget": 0.22}, {"budget": 1.0}]}
KEYS = re.compile(r"Set (fleet[.].+?)(?:, which is within their tolerance| for levels with early exits)[.]$")


def plan(model: dict[str, Any], shape: tuple[int, ...], fleet: dict[str, Any], method: str = "fleetfit") -> Assembly:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(80, *shape, generator=generator), torch.arange(80) % 4)
    partition = {"kind": "iid", "clients": 8}
    table = {"model": model, "method": {"name": method}, "data": {"name": data, "partition": partition}}
    return assemble(load_experiment(table | {"fleet": fleet}))


def find_named_keys(assembly: Assembly) -> list[dict[str, Any]]:
    """Return the keys of [fleet] that each note names."""
    matches = filter(None, map(KEYS.search, assembly.notes))
    return [tomllib.loads(match[1].replace(" and ", "\n"))["fleet"] for match in matches]


def has_early_exits(assembly: Assembly) -> bool:
    return len(assembly.federation.problem.exits) > 1


def find_note(assembly: Assembly, *words: str) -> str:
    [note] = [note for note in assembly.notes if all(word in note for word in words)]
    return note


def test_levels_that_miss_their_budgets_are_named() -> None:
    def count(n: int) -> int:
        """Convolutions with biases, norms, and the classifier of four classes."""
        return 9 * n + n + 3 * (9 * n * n + n) + 4 * 2 * n + 4 * n + 4

    assembly = plan(GROUPED, (1, 8, 8), {"scaling": "auto"}, "fleetfit")
    parameters = [count(n) for n in (6, 6, 12, 24)]
    assert [level.parameters for level in assembly.plan.levels] == parameters
    shares = [n / count(24) for n in parameters]
    words = [f"{share:.3g} for a budget of {budget}" for share, budget in zip(shares, (0.125, 0.25, 0.5), strict=False)]
    assert "1 and 2" in find_note(assembly, *words)


def test_levels_within_their_tolerance_are_not_named() -> None:
    assembly = plan({"name": "cnn"}, (1, 8, 8), {})
    assert all(abs(level.share / level.target - 1) <= level.tolerance for level in assembly.plan.levels)
    assert not any("budget" in note for note in assembly.notes) and not find_named_keys(assembly)


@pytest.mark.parametrize(
    ("model", "shape", "fleet", "key"),
    [
        ({"name": "cnn"}, (3, 48, 64), {}, "scaling"),
        (POOLED, (3, 16, 16), {}, "cost"),
        (POOLED, (3, 16, 16), {"groups": [{"budget": 2000}, {"budget": 1.0}]}, ""),
        (GROUPED, (1, 8, 8), {}, ""),
        (GROUPED, (1, 8, 8), TWO | {"scaling": "both"}, "tolerance"),
        (GROUPED, (1, 8, 8), TWO, "tolerance scaling"),
    ],
)
def test_keys_that_are_named_for_early_exits_give_them(
    model: dict[str, Any], shape: tuple[int, ...], fleet: dict[str, Any], key: str
) -> None:
    assembly = plan(model, shape, fleet)
    assert not has_early_exits(assembly)
    named = find_named_keys(assembly)
    assert {name for keys in named for name in keys} == set(key.split())
    for keys in named[:1]:
        changed = plan(model, shape, fleet | keys)
        assert has_early_exits(changed)
        assert not find_named_keys(changed)


def write_run_file(folder: Path, text: str = "") -> Path:
    file = folder / "run.toml"
    file.write_text(f"""
        data.name = "tiny:tiny_data"
        data.partition = {{ kind = "iid", clients = 4 }}
        model.name = "plain_models:Residual"
        model.width = 8
        fleet.groups = [{{ budget = 0.3 }}, {{ budget = 0.31 }}, {{ budget = 1.0 }}]
        fleet.tolerance = 0.001
        fleet.scaling = "depth"
        {text}
    """)
    return file


@pytest.mark.parametrize("text", ["", '[[compare.row]]\nmethod.name = "fleetfit"'], ids=["run", "comparison"])
def test_plan_prints_the_notes_of_a_run(tmp_path: Path, text: str) -> None:
    notes = assemble(load_experiment(write_run_file(tmp_path))).notes
    assert any('"depth"' in note for note in notes)
    printed = " ".join(run_verb("plan", write_run_file(tmp_path, text), code=0).out.split())
    assert all(" ".join(note.split()) in printed for note in notes)


def test_named_groups_have_their_levels_in_a_note() -> None:
    groups = [{"budget": budget, "name": name} for budget, name in ((0.25, "watch"), (0.26, "phone"), (1.0, "pc"))]
    table = {"data": {"name": "digits"}, "fleet": {"groups": groups}}
    assembly = assemble(load_experiment(table))
    level_of, group = assembly.federation.level_of, assembly.fleet.group
    expected = "; ".join(f"{one['name']} {int(level_of[group == i][0]) + 1}" for i, one in enumerate(groups))
    assert expected in find_note(assembly, "watch")
    unnamed = assemble(load_experiment(table | {"fleet": {"groups": [*groups[:2], {"budget": 1.0}]}}))
    assert not any("watch" in note for note in unnamed.notes)


def test_plan_of_a_model_names_levels_that_miss() -> None:
    """One block of twelve is 0.109 of deit_ti, and two are more than the tolerance allows."""
    printed = " ".join(run_verb("plan", "--model", "deit_ti", code=0).out.split())
    assert re.search(r"0\.109 \D+0\.125", printed) and not re.search(r"0\.271 \D+0\.25\b", printed)
