"""The two references in plain PyTorch give the same bits as FleetFit, so what they say is what it computes."""

import ast
import contextlib
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fleetfit as ff
from fleetfit.config import Assembly, load_experiment
from fleetfit.config.assemble.run import assemble

EXAMPLES = Path(__file__).parents[1] / "examples"
PLAIN = sorted(EXAMPLES.glob("*_plain.py"))
SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "digits", "partition": {"kind": "dirichlet", "alpha": 1.0, "clients": 8}},
    "local": {"epochs": 2, "batch_size": 16, "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4},
    "cohort": {"count": 4},
    "engine": {"name": "local"},
    "model": {"name": "mlp_2nn", "hidden": [32, 32]},
    "fleet": {"groups": [{"budget": 1.0}]},
    "method": {"name": "fedavg"},
}
TWO_LEVELS: dict[str, Any] = {
    "model": {"name": "mlp_2nn", "hidden": [32, 32, 32, 32]},
    "fleet": {"groups": [{"budget": 0.35}, {"budget": 1.0}]},
    "method": {"name": "scalefl"},
}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As in every job of FleetFit; sums of several threads have other last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plain(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def ran(settings: dict[str, Any], folder: Path) -> tuple[Assembly, list[Tensor]]:
    """Return who has which samples and level in a run of FleetFit, and the full model's parameters after it."""
    run = ff.run(**settings, out=folder / "run")
    assembly = assemble(load_experiment(settings))
    model = run.model(level=len(assembly.federation.levels))
    return assembly, [p.detach() for p in model.parameters()]


def dealt(assembly: Assembly) -> list[Tensor]:
    assert assembly.simulation is not None
    return [part["train"] for part in assembly.simulation.parts]


def equal(actual: dict[str, Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual.values(), expected, strict=True))


@pytest.mark.parametrize("seed", [0, 3])
def test_fedavg_in_plain_pytorch_has_the_same_bits(seed: int, tmp_path: Path) -> None:
    """Unequal shares of data, so that weights by samples are not weights by count."""
    assembly, expected = ran({**SETTINGS, "seed": seed}, tmp_path)
    clients, example = dealt(assembly), plain("fedavg_plain.py")
    assert len({len(indices) for indices in clients}) > 3
    x, y = example["digits"]()
    with one_thread():
        result = example["fedavg"](x, y, clients, seed=seed)
        other = example["fedavg"](x, y, clients, seed=seed, rounds=2)
    assert equal(result, expected)
    assert not equal(other, expected)


@pytest.mark.parametrize("seed", [0, 3])
def test_scalefl_in_plain_pytorch_has_the_same_bits(seed: int, tmp_path: Path) -> None:
    """Both levels take part, and the smaller one is narrower and shallower; its width is no multiple of anything."""
    assembly, expected = ran({**SETTINGS, **TWO_LEVELS, "seed": seed}, tmp_path)
    federation, example = assembly.federation, plain("scalefl_plain.py")
    levels = [(level.submodel.sizes["fc1"], level.submodel.exits) for level in federation.levels]
    assert levels == [(19, (2,)), (32, (2, 4))]
    level_of = [int(level) for level in federation.level_of]
    assert 1 < sum(level_of) < 7
    x, y = example["digits"]()
    with one_thread():
        result = example["scalefl"](x, y, dealt(assembly), level_of, levels, seed=seed)
        all_small = example["scalefl"](x, y, dealt(assembly), [0] * 8, levels, seed=seed)
    assert equal(result, expected)
    assert not equal(all_small, expected)


def test_what_nobody_trains_stays_as_it_is() -> None:
    """With clients of level 1 only, the rest of the full model keeps its first values, bit for bit."""
    example = plain("scalefl_plain.py")
    x, y = example["digits"]()
    levels, clients = [(19, (2,)), (32, (2, 4))], list(torch.arange(200).split(50))
    before = example["scalefl"](x, y, clients, [0] * 4, levels, rounds=0)
    after = example["scalefl"](x, y, clients, [0] * 4, levels, rounds=1)
    for name, tensor in after.items():
        if name.startswith(("blocks.2", "blocks.3", "heads.4")):
            assert torch.equal(tensor, before[name])
        else:
            assert torch.equal(tensor[19:], before[name][19:]) and not torch.equal(tensor, before[name])


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_they_are_plain_pytorch(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    roots = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else a.name for node in imports for a in node.names
    }
    assert {root.partition(".")[0] for root in roots} == {"hashlib", "numpy", "torch", "sklearn"}


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_they_learn_the_digits(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    accuracies = [float(word.strip(",")) for line in capsys.readouterr().out.splitlines() for word in line.split()
             if word.startswith("0.")]  # fmt: skip
    assert len(accuracies) == {"fedavg_plain.py": 1, "scalefl_plain.py": 3}[path.name]
    assert min(accuracies) > 0.9
