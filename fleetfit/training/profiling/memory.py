"""Memory: what is free on this machine, and the peak that some work takes in this process.

On Linux the peak is VmHWM, set back before the work: `ru_maxrss` is no use there, since a process inherits it from the
one that started it. Freed memory must go back to the system at once for the peak to be what was alive, so the process
is started with `ENVIRONMENT`. On a CUDA device it is the peak of torch's allocator.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

ENVIRONMENT: Mapping[str, str] = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Peak:
    """What some work took.

    Attributes:
        taken_bytes: Beyond what the process had before.
        process_bytes: All that the process had at the peak, libraries and the interpreter included; None on a GPU.
    """

    taken_bytes: int
    process_bytes: int | None


def free_memory(accelerator: torch.device, root: Path = Path("/")) -> int | None:
    """Return the bytes that are free now, where the platform tells: of the machine, of the container, of the GPU.

    Args:
        accelerator: Whose memory.
        root: Where the kernel's files are.
    """
    if accelerator.type == "cuda":
        return int(torch.cuda.mem_get_info(accelerator)[0])
    found = [_available(root / "proc/meminfo")]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        found.append(_left(root / "sys/fs/cgroup" / limit, root / "sys/fs/cgroup" / used))
    known = [n for n in found if n is not None]
    return max(0, min(known)) if known else None


def _available(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return _kilobytes(path, "MemAvailable")
    return None


def _left(limit: Path, used: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        return int(limit.read_text()) - int(used.read_text())
    return None


def _kilobytes(path: Path, name: str) -> int | None:
    """Return a line of a file such as `VmHWM:  2144 kB`, in bytes."""
    lines = [line for line in path.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(lines[0].split()[1]) * 1024 if lines else None


def peak_of(work: Callable[[], None], accelerator: torch.device) -> Peak | None:
    """Do some work and return what it took at its peak; None where the platform does not tell."""
    gc.collect()
    if accelerator.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(accelerator)
        torch.cuda.reset_peak_memory_stats(accelerator)
        work()
        torch.cuda.synchronize(accelerator)
        return Peak(torch.cuda.max_memory_allocated(accelerator) - before, None)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at what there is now
    held = _now("VmRSS")
    work()
    peak = _now("VmHWM")
    return None if held is None or peak is None else Peak(max(0, peak - held), peak)


def _now(name: str) -> int | None:
    """Return VmRSS or VmHWM in bytes, or the largest so far where the kernel has other words for it."""
    if _STATUS.exists():
        return _kilobytes(_STATUS, name)
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def hold_to(more_bytes: int | None) -> None:
    """Let this process take no more than so much beyond what it has, and be the first to go where memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if more_bytes is not None and _STATUS.exists():
        import resource

        has = _kilobytes(_STATUS, "VmData") or 0
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (has + more_bytes, hard))
