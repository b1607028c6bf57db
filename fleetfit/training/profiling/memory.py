"""The peak memory of some work in this process, and a limit for it.

On Linux the peak is VmHWM, reset before the work. psutil has no peak there, and `ru_maxrss` is inherited from the
parent process. The peak counts live memory only if freed memory returns to the system at once, so the process is
started with `ENVIRONMENT`. On a CUDA device it is the peak of torch's allocator.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import torch

ENVIRONMENT: Mapping[str, str] = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_PROCESS = Path("/proc/self")


def measure_peak(work: Callable[[], None], accelerator: torch.device) -> dict[str, int]:
    """Do some work and return its peak memory, as `Measurement` has it; empty on a platform that does not report it.

    Returns:
        "memory_bytes": beyond what the process had before. "process_bytes", but on a GPU: of the whole process,
        libraries and the interpreter included.
    """
    gc.collect()
    if accelerator.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(accelerator)
        torch.cuda.reset_peak_memory_stats(accelerator)
        work()
        torch.cuda.synchronize(accelerator)
        return {"memory_bytes": torch.cuda.max_memory_allocated(accelerator) - before}
    with contextlib.suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")  # resets VmHWM
    before = psutil.Process().memory_info().rss
    work()
    peak = _read_peak()
    return {} if peak is None else {"memory_bytes": max(0, peak - before), "process_bytes": peak}


def _read_peak() -> int | None:
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(OSError):
        for line in (_PROCESS / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def limit_memory(more_bytes: int | None) -> None:
    """Limit this process to some bytes beyond what it has, and let the system kill it first if memory runs out."""
    with contextlib.suppress(OSError):
        (_PROCESS / "oom_score_adj").write_text("1000")
    if more_bytes is not None and sys.platform == "linux":
        import resource

        used = psutil.Process().memory_info().data
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (used + more_bytes, hard))
