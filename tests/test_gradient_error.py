"""`experiments.gradient_error`: noise and bias of gradients are told apart."""

from pathlib import Path

import pytest
import torch

import fleetfit as ff
from experiments.gradient_error import compared, main


def test_constant_errors_are_bias() -> None:
    torch.manual_seed(0)
    plain = torch.ones(64, 50) + torch.randn(64, 50)
    error, bias, chance, batches = compared(plain, plain + 0.1)
    length = float(plain.mean(0).norm())
    assert bias == pytest.approx(0.1 * 50**0.5 / length, rel=1e-4) and chance == pytest.approx(bias / 8, rel=1e-4)
    assert error == pytest.approx(0.1 * 50**0.5 / float(plain.square().sum(1).mean().sqrt()), rel=1e-4)
    _, bias, chance, _ = compared(plain, plain + 0.1 * torch.randn(64, 50))
    assert bias == pytest.approx(chance, rel=0.3)
    assert batches == pytest.approx(0.5**0.5, rel=0.05)


def test_every_level_of_a_run_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = {"rounds": 1, "data": {"name": "digits", "partition": {"kind": "iid", "clients": 8}},
             "model": {"name": "cnn"}, "method": {"name": "scalefl"}, "local": {"epochs": 1, "lr": 0.05},
             "fleet": {"tolerance": 0.2, "groups": [{"budget": 0.25}, {"budget": 1.0}]},
             "evaluate": {"every": 0}}  # fmt: skip
    ff.run(table, out=tmp_path / "run")
    main([str(tmp_path / "run"), "--batches", "3"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.lstrip()[:1].isdigit()]
    assert {line[0] for line in lines} == {"1", "2"}
    for line in lines:
        assert 0 < float(line[-1]) < 1 and float(line[-4]) < 1e-3, "all of it in fp32"
