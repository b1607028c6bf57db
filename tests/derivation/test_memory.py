"""What a derivation with its proof takes of memory, measured in a process of its own."""

import subprocess
import sys

import pytest

MEASURED = """
import re
from pathlib import Path
import torch, transformers
from fleetfit.anatomy.derive import derive_architecture

torch.set_num_threads(1)
net = transformers.GPT2LMHeadModel(transformers.GPT2Config(
    vocab_size=12000, n_positions=32, n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=0)).eval()
weights = sum(p.numel() * p.element_size() for p in net.parameters())
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
derived = derive_architecture(net, torch.randint(1, 12000, (2, 16)))
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(len(derived.plan.exits), (peak - before) * 1024 / weights)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_language_model_is_proved_in_few_times_its_weights() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MEASURED], capture_output=True, text=True, check=True)
    exits, times = done.stdout.split()[-2:]
    assert int(exits) > 1
    assert float(times) < 7.5, times  # a larger model takes fewer: 61 MB of weights are little beside labels and logits
