"""How much memory the jobs of a node may take."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fleetfit.errors import ConfigError
from fleetfit.training.runtime import return_freed_memory


class MemoryLimit:
    """Lets a job take no more than so much memory beyond what the process had before the first one (Linux).

    The system limits what is asked for. What earlier jobs asked for and never wrote to is no memory: torch's library
    takes a quarter of a MiB and more for each kernel that it compiles, of which a few pages are used.
    """

    def __init__(self, limit_bytes: float | None) -> None:
        """Have a limit, or none.

        Raises:
            ConfigError: Not known on this system.
        """
        if limit_bytes is not None and not Path("/proc/self/status").exists():
            raise ConfigError("memory_limit is known on Linux only; leave it out.", key="memory_limit")
        self._limit, self._before = limit_bytes, (0, 0)
        if limit_bytes is not None:
            return_freed_memory()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold what is done inside to it: MemoryError, or torch's RuntimeError, where that needs more."""
        if self._limit is None:
            yield
            return
        import resource

        asked, unused = _asked_and_unused_bytes()
        if not self._before[0]:
            self._before = asked, unused
        most = self._before[0] + max(0, unused - self._before[1]) + int(self._limit)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _asked_and_unused_bytes() -> tuple[int, int]:
    """Return the private memory that this process may write to, and how much of it was never written to."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmData", "RssAnon"))}
    asked, used = found["VmData:"], found.get("RssAnon:", 0)
    return asked, max(0, asked - used)
