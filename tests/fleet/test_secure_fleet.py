"""A fleet of processes with `[secure]`: the simulation's state; what database, logs and folder of the server hold."""

from pathlib import Path

import pytest
import torch
from demo import secure, simulated

import fleetfit as ff
from fleetfit.privacy import compute_epsilon
from fleetfit.submodel import concat_state

pytestmark = [pytest.mark.fleet, pytest.mark.slow]


@pytest.mark.parametrize("masks", [True, False])
def test_a_server_has_no_single_update(masks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same search finds every node's update where masks are off, in the database that carries them."""
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "fleet").mkdir()
    search = secure(tmp_path / "fleet", masks)
    run = ff.load(tmp_path / "fleet" / "run")
    base = ff.run(simulated(), out=tmp_path / "local")
    assert torch.equal(concat_state(run.server.state), concat_state(base.server.state)), "sums are right either way"
    assert all(report["failures"] == [] and report["train"]["clients"] == 4 for report in run.metrics)
    assert search.bytes > 1e6 and len(search.wanted) == 4
    assert search.found.keys() == (set() if masks else {0, 1, 2, 3})
    assert masks or all(any(name.startswith("state.db") for name in places) for places in search.found.values())


@pytest.mark.parametrize("masks", [True, False])
def test_a_private_server_has_no_update_and_no_key(
    masks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes clip themselves: where masks are off, the search finds what they have clipped and quantized."""
    pytest.importorskip("opacus", reason="the accountant is an extra: fleetfit[privacy]")
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "fleet").mkdir()
    privacy = {"clipping_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01, "key_file": str(tmp_path / "run.key")}
    search = secure(tmp_path / "fleet", masks, {"privacy": privacy, "evaluate": {"every": 0}})
    run = ff.load(tmp_path / "fleet" / "run")
    epsilon = [compute_epsilon(1.0, 1.0, number, 0.01, known_cohorts=True) for number in (1, 2)]
    assert [report["privacy"]["epsilon"] for report in run.metrics] == epsilon
    assert all("undone" not in report and report["train"]["clients"] is None for report in run.metrics)
    assert search.bytes > 1e6 and len(search.wanted) == 4
    assert search.found.keys() == (set() if masks else {0, 1, 2, 3})
    secret = (tmp_path / "run.key").read_text().strip()
    files = [file for file in (tmp_path / "fleet").rglob("*") if file.is_file() and not file.is_symlink()]
    for text in (secret.encode(), bytes.fromhex(secret)):
        assert not any(text in file.read_bytes() for file in files)
