"""The thin folder that `flwr run` takes: names, and the run file; all code is in the installed package."""

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from fleetfit import files
from fleetfit.config.toml import parse_toml
from fleetfit.errors import ConfigError

FLOWER = "flwr>=1.41,<1.42"
"""The versions of Flower that this was tested with."""
_TARGET = "1.41.0"
_LAST = "pyproject.toml"  # without it nothing is an app: who finds it finds the rest

_RUN_FILE = """\
# What is trained. On a fleet the data and the budgets are the nodes' own: [data] and [fleet] groups say nothing here.
# With [engine] name = "local", a [data] and [fleet] groups the same file runs as a simulation: fleetfit run run.toml
rounds = 10
[model]
name = "cnn"
[method]
name = "scalefl"            # or "adaptivefl", to whom nobody tells a budget
[local]
epochs = 1
lr = 0.05
[cohort]
fraction = 1.0              # of the enrolled nodes, each round
quorum = 1.0                # below 1, the slowest are not waited for
over_selection = 0.0        # 0.2: ask a fifth more nodes than the cohort has
[engine]
name = "flower"
nodes = 2                   # wait for so many before the first round
deadline_s = 600            # a node that has not answered by then is left out of the round
[evaluate]
every = 1
"""

_NODE_FILE = """\
# A device of the fleet: fleetfit flower node node.toml --superlink HOST:PORT --ca ca.crt --key KEY
name = "kitchen-pi"
budget = 0.25               # of the full model; or { parameters = 0.25, memory_bytes = "200 MB" }; or "budget.toml"
reports_budget = true       # false: the server never learns it, and runs AdaptiveFL
# memory_limit = "300 MB"   # a job that needs more fails, and not the device
[data]
name = "digits"             # or your own: "my_data.py:load", a function that returns a fleetfit.Data
partition = { kind = "dirichlet", alpha = 1.0, clients = 4 }   # for a trial: one part of it only
client = 0
"""

_LICENSE = "This folder only configures runs of FleetFit. Put the license of your own additions here.\n"


def write_app(
    folder: Path, run_file: Path | None = None, config: Mapping[str, str] | None = None, name: str = ""
) -> None:
    """Write an app's folder, each file whole or not at all; what a killed call has begun is finished.

    Args:
        folder: New, empty, or left by a call with the same arguments that was killed.
        run_file: What `run.toml` will be; an example by default.
        config: What `flwr run` is to ask for (`run-file`, `out`, `resume`, `set`), where it does not say.
        name: The app's name; that of the folder by default.

    Raises:
        ConfigError: The folder is not empty, or cannot be written; or the run file is no TOML.
    """
    text = _RUN_FILE if run_file is None else _read(run_file)
    name = re.sub(r"[^a-z0-9]+", "-", (name or folder.resolve().name).lower()).strip("-") or "fleet"
    texts = {"LICENSE": _LICENSE, "run.toml": text, "node.example.toml": _NODE_FILE,
             _LAST: tomli_w.dumps(_pyproject(name, config or {}))}  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_free(folder, texts):
            raise ConfigError(f"{folder} is not empty; choose another folder.", path=folder)
        for file, content in texts.items():
            files.write_text(folder / file, content)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {files.format_os_error(error)}.", path=folder) from None


def _is_free(folder: Path, texts: Mapping[str, str]) -> bool:
    """Tell whether a folder has nothing but what a call that was killed has left: the same files, or parts of them."""
    begun = {f".{name}.part" for name in texts}
    return all(
        path.name in begun
        or (path.name in texts and path.name != _LAST and files.read_bytes(path) == texts[path.name].encode())
        for path in folder.iterdir()
    )


def _read(path: Path) -> str:
    text = files.read_text(path, ConfigError)
    parse_toml(text, str(path))
    return text


def _pyproject(name: str, config: Mapping[str, str]) -> dict[str, object]:
    settings = {"run-file": "run.toml", "out": "", "resume": "", "set": "", **config}
    ours = f"fleetfit[flower]>={importlib.metadata.version('fleetfit')}"
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name, "version": "1.0.0", "description": "Runs of FleetFit on a fleet.",
            "license": {"file": "LICENSE"}, "dependencies": [FLOWER, ours],
        },
        "tool": {"flwr": {"app": {
            "publisher": "fleetfit", "fab-format-version": 1, "flwr-version-target": _TARGET,
            "components": {"serverapp": "fleetfit.fleet.server_app:app",
                           "clientapp": "fleetfit.fleet.client_app:app"},
            "config": settings,
        }}},
    }  # fmt: skip
