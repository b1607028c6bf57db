"""The protocol of engines, and the base of one that stands in front of another."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from fleetfit.core import Failure, Job, Update


class Engine(Protocol):
    """Where jobs run, as they are drawn, and who keeps the clients' memories; it knows nothing of methods."""

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run jobs and yield their replies in the jobs' order."""
        ...

    def commit_memory(self, update: Update) -> None:
        """Keep the client's memory of an update that the server accepted."""
        ...

    def dump_memories(self) -> dict[str, Any]:
        """Return the clients' memories as plain values and tensors."""
        ...

    def load_memories(self, memories: Mapping[str, Any]) -> None:
        """Replace the clients' memories by those that `dump_memories` returned."""
        ...

    def close(self) -> None:
        """End what the engine started."""
        ...


class WrappedEngine:
    """An engine that changes jobs or replies of another one, which keeps the clients' memories."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.close = engine, engine.close
        self.commit_memory = engine.commit_memory
        self.dump_memories, self.load_memories = engine.dump_memories, engine.load_memories
