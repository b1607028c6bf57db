"""What was run and where, and links to the files that say it in numbers."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fleetfit.errors import truncate
from fleetfit.records.schema import EnvironmentRecord, ResumedRecord
from fleetfit.report.page.parts import FactList, Fold, Link, Listing, PageSection, Part
from fleetfit.report.record import ComparisonRecord, RunRecord

_FILES = ("config.toml", "metrics.jsonl", "summary.json", "plan.toml", "fleet.json", "environment.json", "nodes.json",
          "privacy.json", "secure.json", "plots")  # fmt: skip
_OF_A_COMPARISON = ("results.json", "table.csv", "table.md", "differences.json", "compare.json", "plots")
_LONG = 500

Row = tuple[str, str | Sequence[Link]]


def links(folder: Path, page: Path, names: Sequence[str] = _FILES) -> list[Link]:
    """Return links to the files of a folder that are there, as seen from the page."""
    try:
        at = os.path.relpath(folder.resolve(), page.resolve().parent)
    except ValueError:  # on another drive
        return []
    there = [name for name in names if (folder / name).exists()]
    return [Link(f"{name}/" if (folder / name).is_dir() else name, address(at, name)) for name in there]


def address(folder: str, name: str) -> str:
    """Return a relative address that no browser takes for one of another scheme: "./first/config.toml"."""
    return "./" + quote(Path(folder, name).as_posix())


def of_run(record: RunRecord, page: Path) -> PageSection:
    """Return what was run, and where."""
    summary, is_finished = record.summary, record.is_finished
    rows: list[Row] = [
        ("method", _with_keys(record.get_setting("method", default={}), record.method)),
        (
            "model",
            _with_keys(record.get_setting("model", default={}), summary.model if is_finished else ""),
        ),
        ("data", _with_keys(record.get_setting("data", default={}), summary.data if is_finished else "")),
        ("clients", _clients(record)),
        ("each round", _round(record)),
        ("seed", str(record.seed)),
        *machine_of(record.environment),
        ("files", links(record.folder, page)),
    ]
    parts: list[Part] = [FactList([(name, value) for name, value in rows if value])]
    if record.config_text:
        parts.append(Listing("config.toml, every default visible", record.config_text))
    return PageSection("what", "What was run, and where", parts)


def machine_of(environment: EnvironmentRecord) -> list[Row]:
    """Return what `environment.json` says; folders of earlier versions say less."""
    found = environment
    every = {"fleetfit": found.fleetfit, "torch": found.torch, "numpy": found.numpy, "python": found.python}
    versions = [f"{name} {version}" for name, version in every.items() if version]
    rows = [
        ("command", command_of(found.command)),
        ("begun", when(found.time)),
        ("gone on", _resumed(found.resumed)),
        ("machine", ", ".join(filter(None, [
            found.processor,
            f"{found.processors} cores" if found.processors else "",
            f"{found.threads} thread{'s' if found.threads != 1 else ''}" if found.threads else "",
            found.cuda or "",
            found.platform,
        ]))),
        ("versions", ", ".join(versions)),
        ("commit of FleetFit", found.fleetfit_commit or ""),
        ("commit of the working folder", _commit(found)),
    ]  # fmt: skip
    return [(name, truncate(value, _LONG)) for name, value in rows if value]


def command_of(found: Sequence[str]) -> str:
    """Return what was typed; "" where it is not known."""
    if not found:
        return ""
    place = Path(found[0])
    if place.name == "__main__.py":
        return shlex.join(["python", "-m", place.parent.name, *found[1:]])
    return shlex.join([place.name, *found[1:]])


def when(time: str) -> str:
    """Return a time of `environment.json` as a person writes it."""
    return time.replace("T", " ").replace("+00:00", " UTC")


def _commit(found: EnvironmentRecord) -> str:
    return f"{found.git_commit}{', with changes' if found.git_changes else ''}" if found.git_commit else ""


def _resumed(found: Sequence[ResumedRecord]) -> str:
    return ", ".join(f"after round {one.round} ({when(one.time)})" for one in found)


def _with_keys(table: Any, name: str) -> str:
    """Return a name, and what else its section says that differs from nothing."""
    if not isinstance(table, Mapping):
        return truncate(name or table, _LONG)
    keys = ", ".join(f"{key} = {_value(value)}" for key, value in table.items() if key != "name")
    called = name or str(table.get("name", ""))
    return truncate(f"{called}: {keys}" if keys else called, _LONG)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _clients(record: RunRecord) -> str:
    if record.fleet is None or not record.fleet.clients:
        return ""
    said = [f"{name} ({count:,})" for name, count in record.fleet.groups.items()]
    groups = f", in groups {', '.join(said)}" if 1 < len(said) <= 12 else ""
    return truncate(f"{record.fleet.clients:,}{groups}", _LONG)


def _round(record: RunRecord) -> str:
    local = record.get_setting("local", default={})
    known = [f"{key} = {_value(value)}" for key, value in local.items()] if isinstance(local, Mapping) else []
    cohort = record.get_setting("cohort", default={})
    known = [f"cohort.{k} = {_value(v)}" for k, v in cohort.items()] + known if isinstance(cohort, Mapping) else known
    return truncate(", ".join(known), _LONG)


def of_comparison(record: ComparisonRecord, page: Path) -> PageSection:
    """Return what was compared, and where."""
    found = record.results
    first = record.rows[0].records[0].environment if record.rows else EnvironmentRecord()
    rows: list[Row] = [
        ("run file", found.file),
        ("rows", ", ".join(dict.fromkeys(one.row for one in found.runs))),
        ("settings", ", ".join(filter(None, dict.fromkeys(one.setting for one in found.runs)))),
        ("seeds", ", ".join(str(seed) for seed in dict.fromkeys(one.seed for one in found.runs))),
        ("command", typed if " compare " in (typed := command_of(first.command)) else ""),
        ("begun", when(first.time)),
        ("machine", ", ".join(str(v) + (" cores" if k == "cores" else "") for k, v in found.machine.items() if v)),
        ("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items())),
        ("commit of FleetFit", found.commit or ""),
        ("files", links(record.folder, page, _OF_A_COMPARISON)),
    ]
    parts: list[Part] = [FactList([(n, truncate(v, 2 * _LONG) if isinstance(v, str) else v) for n, v in rows if v])]
    settings = "\n".join(f"{name} = {_value(value)}" for name, value in found.settings.items())
    if settings:
        parts.append(Listing("what all runs have in common, every default visible", settings))
    own = dict.fromkeys((one.row, one.setting, _value(one.overrides)) for one in found.runs if one.overrides)
    if own:
        said = [(", ".join(filter(None, [row, setting])), truncate(keys, _LONG)) for row, setting, keys in own]
        parts.append(Fold("what each row and setting changes", [FactList(said)]))
    return PageSection("what", "What was compared, and where", parts)
