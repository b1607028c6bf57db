"""The bed's modules train in a run, in the memory format that it chooses, and no job fails."""

from pathlib import Path

import numpy as np
import pytest
import torch
from bed import ENTRIES
from support import raises

import fleetfit as ff
from fleetfit.errors import ModelError

REFUSED = {"auxiliary_classifier", "data_branch", "scripted_part", "gated_conv_lm"}  # with their reasons in test_bed.py
NOT_SENT = {"multi_query"}  # a buffer has -inf
QUICK = ("lenet", "literal_view", "capsules", "spectral_norm", "gpt_list_of_heads", "embedding_bag", "mlp_batch_norm")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in sorted(ENTRIES.keys() - REFUSED - NOT_SENT)
    ],
)
def test_a_module_trains_without_failed_jobs(tmp_path: Path, name: str) -> None:
    entry = ENTRIES[name]
    torch.manual_seed(0)
    net, example = entry.make(), entry.example()
    with torch.no_grad():
        logits = net.eval()(example)
    logits = logits["logits"] if isinstance(logits, dict) else getattr(logits, "logits", logits)
    logits = logits[-1] if isinstance(logits, list | tuple) else logits
    if logits.dim() != 2 and not entry.next_tokens:
        pytest.skip("no classifier")
    shape, rng = (64, *example.shape[1:]), torch.Generator().manual_seed(0)
    x = torch.randint(1, entry.tokens, shape, generator=rng) if entry.tokens else torch.randn(shape, generator=rng)
    y = torch.roll(x, -1, 1) if entry.next_tokens else torch.arange(64) % logits.shape[1]
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    task = {"task": "next_token"} if entry.next_tokens else {}
    data = {"name": "arrays", "file": str(tmp_path / "data.npz"), "vocabulary": entry.tokens, **task}
    run = ff.run(
        model=net.train(), data={**data, "partition": {"kind": "iid", "clients": 2}}, rounds=1,
        fleet={"groups": [{"budget": 0.5}, {"budget": 1.0}], "tolerance": 0.4}, cohort={"count": 2},
        local={"epochs": 1, "max_steps": 1, "lr": 0.001}, out=tmp_path / "run",
    )  # fmt: skip
    assert run.summary["failures"] == 0 and run.accuracy("global") is not None


def test_a_buffer_that_is_not_finite_is_named(tmp_path: Path) -> None:
    net, tokens = ENTRIES["multi_query"].make(), np.random.default_rng(0).integers(1, 40, (64, 12))
    np.savez(tmp_path / "data.npz", x=tokens, y=tokens)
    data = {"name": "arrays", "file": str(tmp_path / "data.npz"), "vocabulary": 40, "task": "next_token",
            "partition": {"kind": "iid", "clients": 2}}  # fmt: skip
    with raises(ModelError, "alibi", "persistent=False", key="init_from"):
        ff.run(model=net, data=data, out=tmp_path / "run")
