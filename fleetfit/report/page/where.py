"""What was run and where, and links to the files that say it in numbers."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fleetfit.errors import truncate
from fleetfit.report.page.parts import FactList, Fold, Link, Listing, PageSection, Part
from fleetfit.report.page.reading import ComparisonRecord, RunRecord

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
    rows: list[Row] = [
        ("method", _with_keys(record.said("method", default={}), record.method)),
        ("model", _with_keys(record.said("model", default={}), str(record.final.get("model", "")))),
        ("data", _with_keys(record.said("data", default={}), str(record.final.get("data", "")))),
        ("clients", _clients(record)),
        ("each round", _round(record)),
        ("seed", str(record.seed)),
        *machine_of(record.environment),
        ("files", links(record.folder, page)),
    ]
    parts: list[Part] = [FactList([(name, value) for name, value in rows if value])]
    if record.text:
        parts.append(Listing("config.toml, every default visible", record.text))
    return PageSection("what", "What was run, and where", parts)


def machine_of(found: Mapping[str, Any]) -> list[Row]:
    """Return what `environment.json` says; folders of earlier versions say less."""
    commit = found.get("fleetfit_commit")
    versions = [f"{name} {found[name]}" for name in ("fleetfit", "torch", "numpy", "python") if found.get(name)]
    cores = found.get("processors")
    rows = [
        ("command", command_of(found.get("command"))),
        ("begun", when(found.get("time"))),
        ("gone on", _resumed(found.get("resumed"))),
        ("machine", ", ".join(filter(None, [
            str(found.get("processor") or ""),
            f"{cores} cores" if cores else "",
            f"{found['threads']} thread{'s' if found['threads'] != 1 else ''}" if found.get("threads") else "",
            str(found.get("cuda") or ""),
            str(found.get("platform") or ""),
        ]))),
        ("versions", ", ".join(versions)),
        ("commit of FleetFit", str(commit or "")),
        ("commit of the working folder", _commit(found)),
    ]  # fmt: skip
    return [(name, truncate(value, _LONG)) for name, value in rows if value]


def command_of(found: Any) -> str:
    """Return what was typed; "" where it is not known."""
    if not isinstance(found, list) or not found or not all(isinstance(part, str) for part in found):
        return ""
    place = Path(found[0])
    if place.name == "__main__.py":
        return shlex.join(["python", "-m", place.parent.name, *found[1:]])
    return shlex.join([place.name, *found[1:]])


def when(found: Any) -> str:
    """Return a time of `environment.json` as a person writes it."""
    return str(found or "").replace("T", " ").replace("+00:00", " UTC")


def _commit(found: Mapping[str, Any]) -> str:
    commit = found.get("git_commit")
    return f"{commit}{', with changes' if found.get('git_changes') else ''}" if commit else ""


def _resumed(found: Any) -> str:
    times = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
    return ", ".join(f"after round {one.get('round')} ({when(one.get('time'))})" for one in times)


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
    count, groups = record.fleet.get("clients"), record.fleet.get("groups")
    said = [f"{name} ({_number(n)})" for name, n in groups.items()] if isinstance(groups, Mapping) else []
    if not count:
        return ""
    return truncate(_number(count) + (f", in groups {', '.join(said)}" if 1 < len(said) <= 12 else ""), _LONG)


def _number(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def _round(record: RunRecord) -> str:
    local = record.said("local", default={})
    known = [f"{key} = {_value(value)}" for key, value in local.items()] if isinstance(local, Mapping) else []
    cohort = record.said("cohort", default={})
    known = [f"cohort.{k} = {_value(v)}" for k, v in cohort.items()] + known if isinstance(cohort, Mapping) else known
    return truncate(", ".join(known), _LONG)


def of_comparison(record: ComparisonRecord, page: Path) -> PageSection:
    """Return what was compared, and where."""
    found = record.results
    first = record.groups[0].runs[0][1].environment if record.groups else {}
    rows: list[Row] = [
        ("run file", found.file),
        ("rows", ", ".join(dict.fromkeys(one.row for one in found.runs))),
        ("settings", ", ".join(filter(None, dict.fromkeys(one.setting for one in found.runs)))),
        ("seeds", ", ".join(str(seed) for seed in dict.fromkeys(one.seed for one in found.runs))),
        ("command", typed if " compare " in (typed := command_of(first.get("command"))) else ""),
        ("begun", when(first.get("time"))),
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
