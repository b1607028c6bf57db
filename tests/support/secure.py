"""Secure runs, and engines that see what clients send before it is masked."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetfit.aggregate import SummedBlock
from fleetfit.core import Failure, Job, Update
from fleetfit.engines import secure as secure_engine
from fleetfit.secure import SecureClient

HERE = Path(__file__).parents[1]

TINY: dict[str, Any] = {
    "seed": 3,
    "rounds": 3,
    "data": {"name": f"{HERE}/tiny.py:tiny_data", "partition": {"kind": "iid", "clients": 12}},
    "model": {"name": f"{HERE}/tiny.py:tiny", "norm": False},
    "fleet": {
        "levels": [0.3, 0.55, 1.0], "tolerance": 0.25, "groups": [{"budget": 0.3}, {"budget": 0.55}, {"budget": 1.0}]
    },
    "method": {"name": "scalefl"},
    "local": {"epochs": 1, "batch_size": 8, "lr": 0.05},
    "cohort": {"fraction": 1.0},
    "evaluate": {"every": 1, "batch_size": 32},
}  # fmt: skip


def merge_tables(*tables: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = merge_tables(merged[key], value) if both else value
    return merged


class WatchedEngine:
    """An engine that keeps what came back, before it is masked."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.replies = engine, list[tuple[Job, Update | Failure]]()

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        requests = list(jobs)
        for job, reply in zip(requests, self.engine.run(iter(requests)), strict=True):
            self.replies.append((job, reply))
            yield reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Stopped(BaseException):
    """A process that is killed."""


def stop_in_second_round(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> list[int]:
    """Start a run that is killed as its second round trains; return the rounds asked of clients, then and later."""
    calls: list[int] = []
    begin, train = SecureClient.begin, secure_engine.SimulatedParties._train

    def begun(self: SecureClient, run: str, round: int, piece: str) -> Any:
        calls.append(round)
        return begin(self, run, round, piece)

    def stops(self: Any, calls: Any) -> Any:
        if next(iter(calls.values()))[0].round == 1:
            raise Stopped
        return train(self, calls)

    monkeypatch.setattr(SecureClient, "begin", begun)
    with monkeypatch.context() as patch:
        patch.setattr(secure_engine.SimulatedParties, "_train", stops)
        with pytest.raises(Stopped):
            run()
    return calls


def make_block(places: list[int], sums: list[int], counts: list[int], clients: int = 4) -> SummedBlock:
    return SummedBlock(*(torch.tensor(part, dtype=torch.int64) for part in (places, sums, counts)), clients)
