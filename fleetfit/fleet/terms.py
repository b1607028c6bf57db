"""The terms of a run: what it asks of a node, as one table that the node's owner can read and approve.

The server sends them with each message, and a node refuses a message that does not keep to them (`check_terms`). So a
fingerprint that an owner approved holds for the whole run: model and fine-tuning, method, local training in each round,
metrics, what the node reports, the SHA-256 of the user's code, and of `[secure]` and `[privacy]` what a node can hold
the server to. The levels are not among them: they are planned from the nodes that enroll. `open` names the keys that
the run file leaves to the data and the model: their values are those that FleetFit chooses by itself.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fleetfit import names
from fleetfit.config import Experiment
from fleetfit.config.assemble.local import list_open_keys, list_recipes
from fleetfit.config.assemble.method import build_method_spec
from fleetfit.config.dump import make_plain, to_table
from fleetfit.core import Local
from fleetfit.engines.secure import LABEL_GRID
from fleetfit.errors import RunError, truncate
from fleetfit.fleet.protocol import Header, compute_digest, iter_texts
from fleetfit.hooks import build

Terms = Mapping[str, Any]
_ENTRIES: Mapping[str, type] = {
    "name": str, "rounds": int, "model": dict, "peft": dict, "method": dict, "local": dict, "open": list,
    "cost": str, "metrics": list, "personal": bool, "split": str, "samples": int, "asks_budget": bool,
    "asks_labels": bool, "asks_frequencies": bool, "transform": str, "secure": dict, "privacy": dict, "code": dict,
}  # fmt: skip
_OF_MODELS = {"classes", "channels", "input_shape", "vocabulary", "padding"}  # what data say to a model
_SECURE, _PRIVACY = ("min_clients", "clipping_range", "bits"), ("clipping_norm", "noise_multiplier")
_MIN_SAMPLES = 10
_MAX_CHARACTERS = 1 << 16


def make_terms(experiment: Experiment, transform: str) -> Terms:
    """Return the terms of a run, before its nodes are known.

    Args:
        experiment: The run.
        transform: The digest of the nodes' transform, or "".
    """
    table, evaluate = to_table(experiment), experiment.evaluate
    spec = build_method_spec(experiment)
    method, decided = build(spec), experiment.request.decided
    of_tasks = {f"method.{key}" for defaults in method.task_defaults.values() for key in defaults}
    of_modules = {f"local.{key}" for key in list_open_keys(experiment)} if ":" in str(experiment.model.name) else set()
    cohort = {"deadline_s": experiment.cohort.deadline_s, "late": experiment.cohort.on_deadline}
    model = {key: value for key, value in table["model"].items() if key != "derive"}
    terms = {
        "name": experiment.name,
        "rounds": experiment.rounds,
        "model": model,
        "peft": table["peft"],
        "method": spec,
        "local": make_plain({**table["local"], **cohort}),
        "open": sorted((of_tasks | of_modules) - {key for key in of_tasks if key in decided}),
        "cost": experiment.fleet.cost,
        "metrics": list(evaluate.metrics),
        "personal": evaluate.personal,
        "split": evaluate.split,
        "samples": min(_MIN_SAMPLES, evaluate.samples or _MIN_SAMPLES, evaluate.statistics_samples),
        "asks_budget": method.needs_budgets,
        "asks_labels": experiment.fleet.reports_labels,
        "asks_frequencies": method.needs_prior or evaluate.personal,
        "transform": transform,
        "secure": {key: value for key, value in table.get("secure", {}).items() if key in _SECURE},
        "privacy": {key: value for key, value in table.get("privacy", {}).items() if key in _PRIVACY},
    }
    return {**terms, "code": compute_code(terms)}


def compute_code(terms: Terms) -> dict[str, str]:
    """Return the SHA-256 of the files of the user's code that terms name, by name; of names with a file."""
    digests = {name: names.compute_file_digest(name)[1] for name in list_code(terms)}
    return {name: digest for name, digest in digests.items() if digest}


def list_code(terms: Terms) -> list[str]:
    """Return the names of the user's code in terms, sorted."""
    tables = [terms[key] for key in ("model", "peft", "method", "metrics")]
    return sorted({text for text in iter_texts(tables) if ":" in text})


def compute_fingerprint(terms: Terms) -> str:
    """Return the SHA-256 of terms, as 64 hexadecimal digits."""
    return compute_digest(_dump(terms).encode())


def is_current(table: Any) -> bool:
    """Return whether terms have the entries of this version."""
    return isinstance(table, Mapping) and table.keys() == _ENTRIES.keys()


def parse_terms(table: Any) -> Terms:
    """Return terms with all entries, each of the right type.

    Raises:
        RunError: They are malformed.
    """
    if not is_current(table):
        raise RunError("the server does not send the terms of its run.", key="terms")
    for key, kind in _ENTRIES.items():
        if type(table[key]) is not kind:
            raise RunError(f'"{key}" in the terms of the run is of a wrong type.', key=f"terms.{key}")
    if len(_dump(table)) > _MAX_CHARACTERS:
        raise RunError(f"the terms of the run have more than {_MAX_CHARACTERS} characters.", key="terms")
    return table


# ---- holding a message to its terms ----------------------------------------------------------------------------------


def check_terms(header: Header) -> None:
    """Refuse a message that does not keep to its terms.

    Raises:
        RunError: It does not; its key is the entry of the terms.
    """
    terms = parse_terms(header["terms"])
    _require("transform", header["transform"], terms["transform"])
    if header["what"] == "hello":
        return
    problem, method = header["problem"], header["method"]
    given = problem.get("given", {})
    _require("cost", header["cost"], terms["cost"])
    _require("model", _drop_unset(problem.get("model")), terms["model"])
    _require("model", sorted(given) if isinstance(given, Mapping) else given, sorted(_OF_MODELS & set(given)))
    _require("peft", problem.get("peft", {"name": "full"}), terms["peft"])
    _require("method", method, *_list_methods(terms, method, problem))
    _require("method", problem.get("method", method), method)  # where it has changed the model
    if "noise_multiplier" in terms["privacy"]:
        noise = header["privacy"].get("noise_multiplier")
        _require("privacy.noise_multiplier", noise, terms["privacy"]["noise_multiplier"])
    if "job" in header:
        _check_job(header, terms)
    if header["what"] == "secure":
        _check_sum(header, terms)


def _require(key: str, value: Any, *allowed: Any) -> None:
    """Refuse a message whose value is none of those that the terms allow.

    Raises:
        RunError: It is none of them.
    """
    texts = [_dump(one) for one in allowed]
    if _dump(value) not in texts:
        raise RunError(
            f'the server asks for "{key}" = {truncate(_dump(value), 100)}, and the terms of its run have '
            f"{truncate(' or '.join(texts), 100)}.",
            key=f"terms.{key}",
        )


def _list_methods(terms: Terms, asked: Mapping[str, Any], problem: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the methods that the terms allow: theirs, also with the defaults for the task."""
    named = terms["method"]
    yield named
    if all(_dump(named.get(key)) == _dump(asked.get(key)) for key in ("name", "hooks", "options")):
        for task in (problem.get("task"), "tokens"):
            defaults = build(asked).task_defaults.get(task, {}) if isinstance(task, str) else {}
            yield {**named, **{key: value for key, value in defaults.items() if f"method.{key}" in terms["open"]}}


def _check_job(header: Header, terms: Terms) -> None:
    job, is_secure, is_private = header["job"], bool(terms["secure"]), bool(terms["privacy"])
    kind, evaluation = job.get("kind"), job.get("evaluation")
    evaluation = evaluation if isinstance(evaluation, Mapping) else {}
    _require("method", job.get("method"), header["method"])
    is_allowed = {"train": True, "evaluate": not is_private, "statistics": not is_private and not is_secure,
                  "labels": not is_private and terms["asks_frequencies"]}  # fmt: skip
    _require("kind", kind, *(key for key, value in is_allowed.items() if value))
    if kind in ("train", "labels"):
        _require("secure", header["what"] == "secure", is_secure)
    if kind == "train":
        rounds, round, most = job.get("rounds"), job.get("round"), terms["rounds"]
        if type(rounds) is not int or type(round) is not int or not 0 <= round < rounds <= most:
            _require("rounds", [round, rounds], f"{most} rounds, counted from 0")
        _require("local", make_plain(job.get("local")), *_list_training(terms, rounds, round))
    if kind == "evaluate":
        _require("metrics", list(evaluation.get("metrics", ())), terms["metrics"])
        _require("personal", bool(evaluation.get("personal")), False, terms["personal"])
        _require("split", evaluation.get("split"), "test", "validation", terms["split"])
    samples = evaluation.get("samples")
    if kind in ("evaluate", "statistics") and not (
        samples is None or (type(samples) is int and samples >= terms["samples"])
    ):
        _require("samples", samples, f"at least {terms['samples']}")


def _list_training(terms: Terms, rounds: int, round: int) -> Iterator[dict[str, Any]]:
    """Yield the settings of local training that the terms allow in a round."""
    local = terms["local"]
    open_keys = {str(key).removeprefix("local.") for key in terms["open"] if str(key).startswith("local.")}
    for recipe in ({}, *list_recipes(open_keys, local.get("optimizer"))):
        gone = open_keys if "optimizer" in recipe else ()
        settings = {key: value for key, value in local.items() if key not in gone} | recipe
        yield make_plain(Local.load(settings).at_round(rounds, round).dump())


def _check_sum(header: Header, terms: Terms) -> None:
    asked, secure, clip = header["secure"], terms["secure"], terms["privacy"].get("clipping_norm")
    reach, bits = secure.get("clipping_range"), secure.get("bits")
    if header["job"].get("kind") == "labels":
        reach, bits, clip = LABEL_GRID.range, LABEL_GRID.bits, None
    _require("secure.clipping_range", asked.get("range"), reach)
    _require("secure.bits", asked.get("bits"), bits)
    _require("privacy.clipping_norm", asked.get("clip"), clip)


def _drop_unset(table: Any) -> Any:
    return {k: v for k, v in table.items() if v is not None} if isinstance(table, Mapping) else table


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
