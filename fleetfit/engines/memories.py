"""Clients' memories as an engine keeps them: pending until their round stands, versioned by the round."""

from collections.abc import Mapping
from typing import Any

from fleetfit.values import Update


class Memories:
    """What each client remembers, and what it will remember if its update is accepted."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, Any]] = {}
        self._pending: dict[tuple[int, int], Any] = {}

    def of(self, client: int | None) -> tuple[int, Any]:
        """Return (version, memory) of a client; (-1, None) when it has none."""
        return (-1, None) if client is None else self._kept.get(client, (-1, None))

    def offer(self, round: int, index: int, memory: Any) -> None:
        """Note what a job's client would remember, until its round stands; what other rounds left is dropped."""
        self._pending = {key: kept for key, kept in self._pending.items() if key[0] == round and key[1] != index}
        if memory is not None:
            self._pending[(round, index)] = memory

    def accept(self, update: Update) -> None:
        """Make the memory of an update whose round stands the client's."""
        memory = self._pending.pop((update.round, update.index), None)
        if memory is not None and update.client is not None:
            self._kept[update.client] = (update.round, memory)

    def forget_pending(self) -> None:
        """Drop what was never accepted."""
        self._pending.clear()

    def save(self) -> dict[str, Any]:
        """Return all memories as a nest."""
        return {str(client): {"version": v, "memory": m} for client, (v, m) in sorted(self._kept.items())}

    def load(self, memories: Mapping[str, Any]) -> None:
        """Take back what `save` returned."""
        self._kept = {int(c): (int(kept["version"]), kept["memory"]) for c, kept in memories.items()}
        self._pending.clear()


class KeepsMemories:
    """What an engine does with memories that lie in this process: those of simulated clients."""

    def __init__(self) -> None:
        """Begin without any."""
        self._memories = Memories()

    def accept(self, update: Update) -> None:
        """Keep what the client remembers of this update."""
        self._memories.accept(update)

    def save(self) -> dict[str, Any]:
        """Return the clients' memories."""
        return self._memories.save()

    def load(self, memories: Mapping[str, Any]) -> None:
        """Take back what `save` returned."""
        self._memories.load(memories)
