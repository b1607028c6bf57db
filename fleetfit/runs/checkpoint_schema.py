"""Pydantic models of the structure of a checkpoint. They are separate because they import PyTorch."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag
from torch import Tensor

from fleetfit.runs.schema import Count, Digits, List, Record, Share

State = dict[str, Tensor]
Version = Annotated[int, Field(ge=-1, lt=2**63 - 1)]
Index = Annotated[int, Field(ge=0)]


class ServerRecord(Record):
    """The server after a round, with the largest level that each client has trained, and the class frequencies."""

    state: State
    round: Count
    memory: Any
    trained: dict[Index, Index] = Field({})
    prior: List[Share] = Field([])


class ClientRecord(Record):
    """The memory of a client."""

    version: Version
    memory: Any


class VersionsRecord(Record):
    """Versions of memories that the clients of a real fleet store."""

    versions: dict[Digits, Version]


class CheckpointRecord(Record):
    """A checkpoint. Its tensors are not compared with the model here."""

    server: ServerRecord
    clients: Annotated[
        Annotated[dict[Digits, ClientRecord], Tag("is:table")] | Annotated[VersionsRecord, Tag("is:versions")],
        Discriminator(lambda value: "is:versions" if isinstance(value, dict) and "versions" in value else "is:table"),
    ]
    statistics: dict[Index, State] | None
