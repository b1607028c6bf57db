"""Kernels of torch's convolutions are kept for more shapes than the library does by itself, unless somebody says."""

import os
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import torch
import torch.nn.functional as F
from fleetfit.training.runtime import keep_freed_memory
keep_freed_memory()
torch.set_num_threads(1)
w = torch.randn(4, 2, 3, 3)
for _ in range(2):
    print("turn", flush=True)
    for n in range(2, 750):
        F.conv2d(torch.randn(n, 2, 4, 4), w)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
def test_kernels_are_compiled_once() -> None:
    """748 batch sizes take some 1,500 kernels: convolutions, and what puts their inputs or outputs in order."""
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    environment |= {"ONEDNN_VERBOSE": "profile_create"}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr
    _, first, second = process.stdout.split("turn\n")
    assert first.count("create:cache_miss") > 1024
    assert second.count("create:cache_miss") == 0
