"""The folder that `flwr run` takes: names, and the run file; all code is in the installed package."""

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fleetfit import files
from fleetfit.config.toml import parse_toml
from fleetfit.errors import ConfigError
from fleetfit.fleet.protocol import iter_texts

FLOWER = "flwr>=1.41,<1.43"
"""The versions of Flower that FleetFit is tested with."""
_TARGET = "1.41.0"
_LAST = "pyproject.toml"  # written last: a folder with it is complete

_RUN_FILE = """\
# The training. On a fleet the data and the budgets are the nodes' own: [data] and [fleet] groups have no effect.
# With [engine] name = "local", a [data] and [fleet] groups the same file runs as a simulation: fleetfit run run.toml
rounds = 10
[model]
name = "cnn"
[method]
name = "scalefl"            # or "adaptivefl", which needs no budgets
[local]
epochs = 1
lr = 0.05
[cohort]
fraction = 1.0              # of the enrolled nodes, each round
quorum = 1.0                # below 1, a round does not wait for the slowest
over_selection = 0.0        # 0.2: ask a fifth more nodes than the cohort has
[engine]
name = "flower"
nodes = 2                   # enrolled before the first round
deadline_s = 600            # a node without an answer by then is left out of the round
[evaluate]
every = 1
"""

_NODE_FILE = """\
# A device of the fleet: fleetfit flower node node.toml --superlink HOST:PORT --ca ca.crt --key KEY
name = "kitchen-pi"
budget = 0.25               # of the full model; or { parameters = 0.25, memory_bytes = "200 MB" }; or "budget.toml"
reports_budget = true       # false: the server never learns it, and runs AdaptiveFL
# memory_limit = "300 MB"   # a job that needs more fails, instead of the device
# policy = { approval = true, hours = "22:00-06:00", jobs_a_day = 200 }   # what you allow: docs/fleet.md
[data]
name = "digits"             # or your own: "my_data.py:load", a function that returns a fleetfit.Data
partition = { kind = "dirichlet", alpha = 1.0, clients = 4 }   # for a trial: one part of it only
client = 0
"""

_LICENSE = "This folder only configures runs of FleetFit. Put the license of your own additions here.\n"


def write_app(
    folder: Path, run_file: Path | None = None, config: Mapping[str, str] | None = None, name: str = ""
) -> None:
    """Write an app's folder, each file atomically; complete a folder whose call was killed.

    Args:
        folder: New, empty, or left by a call with the same arguments that was killed.
        run_file: Becomes `run.toml`, and files beside it that it names come with it: code as "file.py:name", and
            `fleet.levels`. An example by default.
        config: Defaults for `flwr run --run-config` (`run-file`, `out`, `resume`, `set`).
        name: The app's name; that of the folder by default.

    Raises:
        ConfigError: The folder is not empty, or cannot be written; or the run file is not TOML, or names a folder by a
            path that only this machine understands.
    """
    text, named = _RUN_FILE, dict[str, str]()
    if run_file is not None:
        text = files.read_text(run_file, ConfigError)
        named = _read_named_files(parse_toml(text, str(run_file)), run_file)
    name = re.sub(r"[^a-z0-9]+", "-", (name or folder.resolve().name).lower()).strip("-") or "fleet"
    texts = {**named, "LICENSE": _LICENSE, "run.toml": text, "node.example.toml": _NODE_FILE,
             _LAST: tomli_w.dumps(_make_pyproject(name, config or {}))}  # fmt: skip
    try:
        files.make_folder(folder)
        if not _is_free(folder, texts):
            raise ConfigError(f"{folder} is not empty; choose another folder.", path=folder)
        for file, content in texts.items():
            files.write_text(folder / file, content)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {files.format_os_error(error)}.", path=folder) from None


def _read_named_files(table: Mapping[str, Any], run_file: Path) -> dict[str, str]:
    """Return the texts of files beside a run file that it names: the server unpacks the app in a folder of its own."""
    for section, key in (("data", "transform"), ("model", "checkpoint")):
        path = table[section].get(key) if isinstance(table.get(section), dict) else None
        if isinstance(path, str) and not Path(path).expanduser().is_absolute():
            raise ConfigError(
                f'[{section}] {key} = "{path}" is read on the machine of the SuperLink: write an absolute path.',
                key=f"{section}.{key}",
                path=run_file,
            )
    texts = {text.rpartition(":")[0] for text in iter_texts(table) if ".py:" in text}
    texts |= {text for text in iter_texts(table.get("fleet", {})) if text.endswith(".toml")}
    own = {name for name in texts if Path(name).name == name and (run_file.parent / name).is_file()}
    return {name: files.read_text(run_file.parent / name, ConfigError) for name in sorted(own)}


def _is_free(folder: Path, texts: Mapping[str, str]) -> bool:
    """Return whether a folder has only files of a call that was killed: the same ones, or parts of them."""
    parts = {f".{name}.part" for name in texts}
    return all(
        path.name in parts
        or (path.name in texts and path.name != _LAST and files.read_bytes(path) == texts[path.name].encode())
        for path in folder.iterdir()
    )


def _make_pyproject(name: str, config: Mapping[str, str]) -> dict[str, object]:
    settings = {"run-file": "run.toml", "out": "", "resume": "", "set": "", **config}
    requirement = f"fleetfit[flower]>={importlib.metadata.version('fleetfit')}"
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name, "version": "1.0.0", "description": "Runs of FleetFit on a fleet.",
            "license": {"file": "LICENSE"}, "dependencies": [FLOWER, requirement],
        },
        "tool": {"flwr": {"app": {
            "publisher": "fleetfit", "fab-format-version": 1, "flwr-version-target": _TARGET,
            "components": {"serverapp": "fleetfit.fleet.server_app:app",
                           "clientapp": "fleetfit.fleet.client_app:app"},
            "config": settings,
        }}},
    }  # fmt: skip
