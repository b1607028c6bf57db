"""A fleet in one process: the real server and nodes, whose messages go through a `LocalGrid`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from local_grid import LocalGrid, node_file

import fleetfit as ff
from fleetfit.fleet import transport
from fleetfit.fleet.server_app import ServerAppConfig, serve

CLIENTS = 5
DIVISION = {"kind": "dirichlet", "alpha": 1.0, "clients": CLIENTS}
ALLOW = ["tiny:tiny", "plugin_method:counting"]


def described(method: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A run file: small, with dropout, momentum and clients of several levels."""
    table: dict[str, Any] = {
        "seed": 3, "rounds": 3,
        "data": {"name": "tiny:tiny_data", "partition": DIVISION, "server": {"name": "tiny:tiny_server_data"}},
        "model": {"name": "tiny:tiny", "dropout": 0.2},
        "fleet": {"tolerance": 0.45, "levels": [0.5, 1.0], "groups": [{"budget": 0.5}, {"budget": 1.0}]},
        "method": dict(method), "local": {"epochs": 1, "lr": 0.05}, "cohort": {"count": 4},
        "evaluate": {"every": 2}, "engine": {"name": "local"},
    }  # fmt: skip
    if method["name"] != "feddf":
        del table["data"]["server"]
    return {**table, **changes}


@dataclass
class Lab:
    """A fleet in this process, and the simulation that it must equal."""

    folder: Path
    table: dict[str, Any]
    budgets: list[float]
    node: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.configs = [self.config(i) for i in range(CLIENTS)]
        self.grid = LocalGrid(self.configs)

    def config(self, client: int, **changes: Any) -> Path:
        data = {"name": "tiny:tiny_data", "client": client, "partition": {**DIVISION, "seed": self.table["seed"]}}
        settings = {
            "budget": self.budgets[client],
            "tolerance": 0.45,
            "allow": ALLOW,
            "data": data,
            **self.node,
            **changes,
        }
        return node_file(self.folder, f"node-{client}", settings)

    def serve(self, out: str = "run", resume: bool = False, **engine: Any) -> ff.Run:
        engine = {"name": "flower", "nodes": CLIENTS, **engine}
        path = self.folder / "run.toml"
        path.write_text(tomli_w.dumps({**self.table, "engine": engine}))
        target = str(self.folder / out)
        config = ServerAppConfig(resume=target) if resume else ServerAppConfig(str(path), target)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport, "_MIN_PAUSE_S", 0.005)  # between questions: nothing travels here
            return serve(self.grid, config, self.lines.append)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)
