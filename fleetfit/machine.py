"""This process and its machine: cores, free memory, and PyTorch's import, threads, defaults and modes."""

import contextlib
import gc
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fleetfit.errors import format_cause

if TYPE_CHECKING:  # verbs that list or print do not load PyTorch
    import torch

_OUT_OF_MEMORY = (  # of FleetFit, PyTorch and the C++ library
    "no memory was left", "allocate memory", "out of memory", "not enough memory", "bad_alloc",
    "could not create a primitive",
)  # fmt: skip

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")

PARENT = "FLEETFIT_PARENT"
"""Environment variable: a descriptor that ends when the process that started this one is gone, or stops it."""


def stop_with_parent() -> None:
    """Interrupt this process as Ctrl-C does when the descriptor in `PARENT` ends, if the variable is set."""
    descriptor = os.environ.pop(PARENT, "")
    if not descriptor:
        return

    def wait() -> None:
        os.read(int(descriptor), 1)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=wait, daemon=True).start()


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(accelerator: "torch.device", cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free bytes of the GPU, or of the machine within its container.

    Args:
        accelerator: Whose memory.
        cgroup: The kernel's files on the container.
    """
    import psutil
    import torch

    if accelerator.type == "cuda":
        return int(torch.cuda.mem_get_info(accelerator)[0])
    free: int = psutil.virtual_memory().available
    for folder, limit, used, cached in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no container, or "max"
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            counted = re.search(rf"^{cached} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            free = min(free, left + int(counted[1] if counted else 0))  # the kernel takes cached files back
    return max(0, free)


def import_torch() -> None:
    """Import PyTorch without garbage collections, and keep what it made out of later ones, unless it is imported.

    These 150,000 objects stay until the process ends. Looking at them takes 0.17 s of the import, and 0.1 s again when
    FleetFit is imported after it.
    """
    if "torch" in sys.modules:
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch")
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def is_out_of_memory(error: BaseException | str) -> bool:
    """Return whether an error, or the message of one, means that no memory was left, on the host or a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is PyTorch's
        return True
    message = error if isinstance(error, str) else format_cause(error)
    return any(words in message for words in _OUT_OF_MEMORY)


@contextlib.contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Compute with a number of threads inside; with one, results have the same bits on every machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def tensor_defaults(device: "torch.device | str | None" = None, dtype: "torch.dtype | None" = None) -> Iterator[None]:
    """Set PyTorch's default device and floating-point type for a block; both are as before afterwards.

    Args:
        device: The default device; None leaves it as it is.
        dtype: The default type, which is the whole process's, other threads' too; None leaves it as it is.
    """
    import torch

    before, target = torch.get_default_dtype(), None if device is None else torch.device(device)
    try:
        if dtype not in (None, before):
            torch.set_default_dtype(dtype)
        with contextlib.nullcontext() if target in (None, torch.get_default_device()) else target:
            yield
    finally:
        if torch.get_default_dtype() != before:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def isolate_torch_state() -> Iterator[None]:
    """Compute in float32 on the host, with gradients and without autocast, whatever the caller's state.

    `torch.set_default_dtype`, `set_default_device`, `no_grad`, `inference_mode` and `autocast` around a call of
    FleetFit change nothing in it.
    """
    import torch

    with contextlib.ExitStack() as stack:
        stack.enter_context(tensor_defaults("cpu", torch.float32))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in _AUTOCAST:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
