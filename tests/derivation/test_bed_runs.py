"""The bed's classifiers train in a run, in the memory format that it chooses, and no job fails."""

from pathlib import Path

import pytest
import torch
from bed import ENTRIES

import fleetfit as ff

REFUSED = {"auxiliary_classifier", "data_branch", "scripted_part"}  # with their reasons in test_bed.py
QUICK = ("lenet", "literal_view", "vgg", "capsules", "shufflenet", "perceiver", "spectral_norm")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(ENTRIES.keys() - REFUSED)],
)
def test_a_classifier_trains_without_failed_jobs(tmp_path: Path, name: str) -> None:
    entry = ENTRIES[name]
    if entry.tokens or entry.next_tokens:
        pytest.skip("a module of tokens")
    torch.manual_seed(0)
    net, example = entry.make(), entry.example()
    with torch.no_grad():
        logits = net.eval()(example)
    logits = logits["logits"] if isinstance(logits, dict) else getattr(logits, "logits", logits)
    logits = logits[-1] if isinstance(logits, list | tuple) else logits
    if logits.dim() != 2:
        pytest.skip("no classifier")
    x = torch.randn(64, *example.shape[1:], generator=torch.Generator().manual_seed(0)).numpy()
    y = (torch.arange(64) % logits.shape[1]).numpy()
    run = ff.run(
        model=net.train(), data={"name": (x, y), "partition": {"kind": "iid", "clients": 2}}, rounds=1,
        fleet={"groups": [{"budget": 0.5}, {"budget": 1.0}], "tolerance": 0.3}, cohort={"count": 2},
        local={"epochs": 1, "max_steps": 1, "lr": 0.001}, out=tmp_path / "run",
    )  # fmt: skip
    assert run.summary["failures"] == 0 and run.accuracy("global") is not None
