"""A run's final numbers, and what the files of its folder must say so that tables and plots can be made of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fleetfit.errors import RunError
from fleetfit.planner import Plan
from fleetfit.records import RunFolder
from fleetfit.records.schema import FleetRecord, InvalidRecord, SummaryRecord

FORMAT = 1
"""Version of `summary.json`."""


# ---- what is written -------------------------------------------------------------------------------------------------


def summary_of(
    description: Mapping[str, Any], plan: Plan, metrics: Sequence[Mapping[str, Any]], notes: Sequence[str]
) -> dict[str, Any]:
    """Return the final numbers of a run.

    Args:
        description: What was run: name, method, model, data, seed, norm (the headline's batch-norm policy), and
            score (what the task's accuracy is called).
        plan: The levels.
        metrics: The reports of all rounds.
        notes: What the user must know, such as who did not take part.
    """
    columns: Mapping[str, Any] = next((m["evaluate"] for m in reversed(metrics) if "evaluate" in m), {})
    headline: Mapping[str, Any] = columns.get(description["norm"], {})
    private = _withheld(metrics)
    found = headline.get("levels", {})
    levels = [
        {
            "level": level.name,
            "width": level.width,
            "depth": level.depth,
            "blocks": plan.blocks,
            "exits": list(level.exits),
            "parameters": level.parameters,
            "multiply_adds": level.multiply_adds,
            "clients": level.clients,
            "local": found.get(level.name, {}).get("local"),
        }
        for level in plan.levels
    ]
    return {
        "format": FORMAT,
        **description,
        "rounds": metrics[-1]["round"] if metrics else 0,
        "levels": levels,
        "global": headline.get("global"),
        "local": headline.get("local"),
        "evaluate": {key: _without_clients(value) for key, value in columns.items()},
        "bytes_down": _total(metrics, "bytes_down"),
        "waste": None if private else sum(m.get("waste", 0.0) for m in metrics) / max(1, len(metrics)),
        "bytes_up": _total(metrics, "bytes_up"),
        "failures": None if private else _failures(metrics),
        "empty_rounds": None if private else sum(not m["train"]["clients"] for m in metrics),
        "seconds": sum(m["seconds"] for m in metrics),
        "seconds_of": seconds_of(metrics),
        "multiply_adds": _total(metrics, "multiply_adds"),
        "simulated_s": simulated(metrics),
        "left_out": list(plan.left_out),
        "notes": list(notes),
        **excluded(metrics),
        **({"privacy": metrics[-1]["privacy"]} if metrics and "privacy" in metrics[-1] else {}),
    }


def _total(metrics: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """Return the sum over all rounds; None where a round withholds its part."""
    return None if _withheld(metrics) else sum(report.get(key, 0) for report in metrics)


def _failures(metrics: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(m["failures"]) + len(m.get("evaluate", {}).get("failures", ())) for m in metrics)


def _withheld(metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether rounds say nothing of who took part (see `fleetfit.privacy`)."""
    return any("privacy" in report for report in metrics)


def excluded(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return which share of the updates that hostile and honest clients sent a defence left out, over all rounds.

    Returns:
        "hostile_excluded", "honest_excluded", and by level "honest_excluded_1"; nothing where nobody is hostile
        and no method leaves anybody out.
    """
    counted: dict[str, Counter[str]] = {"sent": Counter(), "left_out": Counter()}
    for report in metrics:
        for key, found in report.get("received", {}).items():
            counted[key].update({"hostile": found["hostile"], **found["honest"]})
    sent, left_out = counted["sent"], counted["left_out"]
    if not sent:
        return {}
    levels = sorted(sent.keys() - {"hostile"}, key=int)
    honest = sum(sent[level] for level in levels)
    return {
        "hostile_excluded": left_out["hostile"] / sent["hostile"] if sent["hostile"] else None,
        "honest_excluded": sum(left_out[level] for level in levels) / honest if honest else None,
        **{f"honest_excluded_{level}": left_out[level] / sent[level] for level in levels},
    }


def seconds_of(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of all rounds by what they went into; folders of earlier versions have none."""
    found: Counter[str] = Counter()
    for report in metrics:
        found.update(report.get("seconds_of", {}))
    return dict(found)


def with_seconds(report: Mapping[str, Any], further: Mapping[str, float]) -> dict[str, Any]:
    """Return a round's report, or a summary, with the seconds of what was done since it was made."""
    of = Counter(report["seconds_of"])
    of.update(further)
    return {**report, "seconds": report["seconds"] + sum(further.values()), "seconds_of": dict(of)}


def simulated(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the simulated seconds of all rounds; None where no round has any."""
    known = [m["simulated_s"] for m in metrics if m.get("simulated_s") is not None]
    return sum(known) if known else None


def _without_clients(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "per_client"} if isinstance(value, Mapping) else value


# ---- what is read ----------------------------------------------------------------------------------------------------


def summary_in(folder: RunFolder) -> dict[str, Any]:
    """Return the final numbers of a run.

    Raises:
        RunError: They are damaged, or of a version that this one does not know.
    """
    found, path = folder.json("summary.json"), folder.path / "summary.json"
    if isinstance(found, dict) and type(found.get("format")) is int and found["format"] > FORMAT:
        raise RunError(
            f"{path} has format {found['format']}; this version of FleetFit reads format {FORMAT}.", path=path
        )
    try:
        SummaryRecord.load(found)
    except InvalidRecord as error:
        raise RunError(
            f'{path} is damaged: {error}. Remove it, and "fleetfit resume {folder.path}" writes it again.',
            key=error.key,
            path=path,
        ) from None
    return dict(found)


def class_counts_in(folder: RunFolder) -> list[list[int]]:
    """Return training samples [clients, classes] of the first clients; [] where there are no classes.

    Raises:
        RunError: `fleet.json` is damaged.
    """
    if not folder.has("fleet.json"):
        return []
    remedy = "Only the plot of the partition uses it; remove it to go without."
    return folder.json("fleet.json", FleetRecord, remedy)["first"]["class_counts"] or []
