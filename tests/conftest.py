"""One thread: two change the last bits, and wait for each other on a busy machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
