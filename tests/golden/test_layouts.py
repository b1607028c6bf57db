"""Layouts of models of many kinds, equal segment by segment to those that their authors once wrote down.

`layouts.json` has a digest of each, made when dimensions and ties were declared in the models. Rewrite it with
`python tests/golden/test_layouts.py` after a deliberate change of a model.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import foreign
import zoo
from foreign_models import FOREIGN
from small_models import SMALL, architecture_of

from fleetfit.anatomy import Architecture, infer_layout
from fleetfit.anatomy.proof import select_exits
from fleetfit.core.problem import apply_peft
from fleetfit.models.ree import recurrent

DIGESTS = Path(__file__).with_name("layouts.json")
FIXED: dict[str, Any] = {"heads": "fixed"}
MODES = ("lora", "ssf", "serial_adapter", "parallel_adapter", "frozen")


def tuned(name: str, mode: str, **keys: Any) -> Architecture:
    return apply_peft(architecture_of(name, **keys), {"name": mode})


def ree(name: str, **keys: Any) -> Architecture:
    return recurrent(architecture_of(name, **keys), SMALL[name].shape, heads=2, bottleneck=4)


def variants() -> dict[str, tuple[Callable[[], Architecture], tuple[int, ...]]]:
    """Each model's family and the shape of a sample."""
    cases: dict[str, tuple[Callable[[], Architecture], tuple[int, ...]]] = {}
    for name, small in SMALL.items():
        if small.family:  # a size of another one
            continue
        cases[name] = (lambda name=name: architecture_of(name)), small.shape  # type: ignore[misc]
    for name in ("bert", "vit"):
        shape = SMALL[name].shape
        cases[f"{name} fixed"] = (lambda name=name: architecture_of(name, **FIXED)), shape  # type: ignore[misc]
        cases[f"{name} ree"] = (lambda name=name: ree(name, **FIXED)), shape  # type: ignore[misc]
        for mode in MODES:
            make: Any = lambda name=name, mode=mode: tuned(name, mode, **FIXED)  # noqa: E731
            cases[f"{name} fixed {mode}"] = make, shape
    cases["vim ree"], cases["vim ssf"] = ((lambda: ree("vim")), (3, 8, 8)), ((lambda: tuned("vim", "ssf")), (3, 8, 8))
    for make in (zoo.attention, zoo.heads, zoo.two_axes, zoo.lstm, zoo.concatenation, zoo.flattened, zoo.shared,
                 foreign.fused, foreign.multihead, foreign.experts, foreign.temporal):  # fmt: skip
        cases[make.__name__] = make, make().input_shape
    for name, one in FOREIGN.items():
        if name not in ("Fixed", "Fused"):  # an order that is free, and a block that no name tells
            cases[name] = one.build_architecture, one.input_shape
    return cases


def digest(family: Architecture, shape: tuple[int, ...]) -> str:
    layout = infer_layout(family, select_exits(family), input_shape=shape)
    return hashlib.sha256(json.dumps(layout.to_payload(), sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", variants())
def test_layouts_are_those_that_authors_wrote(name: str) -> None:
    make, shape = variants()[name]
    assert digest(make(), shape) == json.loads(DIGESTS.read_text())[name]


if __name__ == "__main__":
    digests = {name: digest(make(), shape) for name, (make, shape) in variants().items()}
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")
