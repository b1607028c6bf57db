"""Plain modules on a fleet in one process: the bits of `local`; what a node refuses."""

from pathlib import Path
from typing import Any

import pytest
from support import raises
from support.bits import have_same_state

import fleetfit as ff

pytest.importorskip("flwr", reason="the extra flower is not installed")

from local_fleet import Lab, described

from fleetfit.anatomy.plan import FORMAT
from fleetfit.core import Problem
from fleetfit.errors import ModelError
from fleetfit.fleet import node as nodes_side

MODELS = [{"name": "plain_models:Residual", "width": 8}, {"name": "plain_models:Patches"}]
ALLOW = ["tiny:tiny", *(model["name"] for model in MODELS)]


@pytest.fixture(autouse=True)
def fresh_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_side.get_node.cache_clear()


def lab_of(folder: Path, table: dict[str, Any], **node: Any) -> tuple[Lab, ff.Run]:
    base = ff.run(table, out=folder / "local")
    return Lab(folder, table, [float(b) for b in base.assembly.fleet.budgets], node), base


@pytest.mark.parametrize("model", MODELS, ids=["residual", "patches"])
def test_a_fleet_has_the_bits_of_local(model: dict[str, Any], tmp_path: Path) -> None:
    lab, base = lab_of(tmp_path, described({"name": "scalefl"}, model=model), allow=ALLOW)
    assert have_same_state(base, lab.serve())


def test_a_node_builds_only_what_it_allows(tmp_path: Path) -> None:
    table = described({"name": "scalefl"}, rounds=1, model=MODELS[0], cohort={"fraction": 1.0})
    lab, _ = lab_of(tmp_path, table, allow=ALLOW)
    lab.config(3, allow=["tiny:tiny"])
    run = lab.serve(nodes=4)
    assert MODELS[0]["name"] in lab.output and run.metrics[0]["online"] == 4


def test_a_node_of_another_version_names_both(tmp_path: Path) -> None:
    _, base = lab_of(tmp_path, described({"name": "scalefl"}, model=MODELS[0]))
    spec = base.assembly.federation.problem.spec
    assert spec is not None
    with raises(ModelError, FORMAT, FORMAT + 7, key="derive.format"):
        Problem.from_spec({**spec, "derived": {**spec["derived"], "format": FORMAT + 7}})


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": [["blocks.0", "forward", None, 8, [["blocks.0.qkv", 1]]]]},
        {"numbers": [["absent", "heads", None, 8, [["blocks.0.qkv", 1]]]]},
        {"exits": [["absent", 3, 2, [[None, 32]], False]]},
        {"axes": {}},
        {"segments": [["pos", 9, [[None, 1]]]]},
    ],
)
def test_a_plan_that_does_not_fit_the_module_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """Numbers are set only where the module has these numbers already; a plan sets no other attribute."""
    spec = ff.run(
        described({"name": "scalefl"}, model=MODELS[1]), out=tmp_path / "run"
    ).assembly.federation.problem.spec
    assert spec is not None
    with pytest.raises(ModelError):
        Problem.from_spec({**spec, "derived": {**spec["derived"], **change}})
