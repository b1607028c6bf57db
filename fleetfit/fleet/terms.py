"""The terms of a run: what it asks of a node, as one table that the node's owner can read and approve.

The server sends them with each message. A node refuses a message that asks for anything else (`check_terms`), so a
fingerprint that an owner approved covers every message of the run: model, method, local training, metrics, what the
node reports, and the settings of `[secure]` and `[privacy]`. Two things follow from the nodes that enroll, and are not
in the terms: the levels, of which the terms have what they are planned by, and the optimizer of a plain module, where
the run file leaves it open.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fleetfit.config import Experiment
from fleetfit.config.assemble.local import RECIPE, list_open_keys
from fleetfit.config.assemble.method import build_method_spec
from fleetfit.config.assemble.rounds import build_settings
from fleetfit.config.dump import make_plain, to_table
from fleetfit.errors import RunError, truncate
from fleetfit.fleet.protocol import Header, compute_digest
from fleetfit.hooks import build

Terms = Mapping[str, Any]
ENTRIES: Mapping[str, type] = {
    "name": str, "rounds": int, "model": dict, "peft": dict, "method": dict, "local": dict, "metrics": list,
    "personal": bool, "fleet": dict, "asks_budget": bool, "asks_labels": bool, "asks_frequencies": bool,
    "transform": str, "secure": dict, "privacy": dict,
}  # fmt: skip
_OF_NODES = ("groups", "clients", "reports_budget", "reports_labels")  # keys of [fleet] that a fleet's nodes decide
_MAX_CHARACTERS = 1 << 16


def make_terms(experiment: Experiment, transform: str) -> Terms:
    """Return the terms of a run, before its nodes are known.

    Args:
        experiment: The run.
        transform: The digest of the nodes' transform, or "".
    """
    table, local = to_table(experiment), make_plain(build_settings(experiment).local.dump())
    method = build(build_method_spec(experiment))
    open_keys = list_open_keys(experiment) if ":" in str(experiment.model.name) else set[str]()
    return {
        "name": experiment.name,
        "rounds": experiment.rounds,
        "model": {key: value for key, value in table["model"].items() if key != "derive"},
        "peft": table["peft"],
        "method": build_method_spec(experiment),
        "local": {key: value for key, value in local.items() if key not in open_keys},
        "metrics": list(experiment.evaluate.metrics),
        "personal": experiment.evaluate.personal,
        "fleet": {key: value for key, value in table["fleet"].items() if key not in _OF_NODES},
        "asks_budget": method.needs_budgets,
        "asks_labels": experiment.fleet.reports_labels,
        "asks_frequencies": method.needs_prior or experiment.evaluate.personal,
        "transform": transform,
        "secure": table.get("secure", {}),
        "privacy": {key: value for key, value in table.get("privacy", {}).items() if key != "key_file"},
    }


def compute_fingerprint(terms: Terms) -> str:
    """Return the SHA-256 of terms, as 64 hexadecimal digits."""
    return compute_digest(_dump(terms).encode())


def parse_terms(table: Any) -> Terms:
    """Return terms with all entries, each of the right type.

    Raises:
        RunError: They are malformed.
    """
    if not isinstance(table, Mapping) or table.keys() != ENTRIES.keys():
        raise RunError("the server does not send the terms of its run.", key="terms")
    for key, kind in ENTRIES.items():
        if type(table[key]) is not kind:
            raise RunError(f'"{key}" in the terms of the run is of a wrong type.', key=f"terms.{key}")
    if len(_dump(table)) > _MAX_CHARACTERS:
        raise RunError(f"the terms of the run have more than {_MAX_CHARACTERS} characters.", key="terms")
    return table


def check_terms(header: Header) -> None:
    """Refuse a message that asks for anything but its terms.

    Raises:
        RunError: It does; its key is the entry of the terms.
    """
    terms = parse_terms(header["terms"])
    for key, expected, got in _iter_pairs(header, terms):
        if _dump(expected) != _dump(got):
            raise RunError(
                f'the server asks for "{key}" = {truncate(_dump(got), 100)}, and the terms of its run have '
                f"{truncate(_dump(expected), 100)}.",
                key=f"terms.{key}",
            )


def _iter_pairs(header: Header, terms: Terms) -> Iterator[tuple[str, Any, Any]]:
    """Yield entries of the terms, each with the value that a message has."""
    yield "transform", terms["transform"], header["transform"]
    if header["what"] == "hello":
        return
    problem = header["problem"]
    yield "fleet.cost", terms["fleet"].get("cost"), header["cost"]
    yield "model", terms["model"], _drop_unset(problem.get("model"))
    yield "peft", terms["peft"], problem.get("peft", {"name": "full"})
    yield "method", _resolve_method(terms["method"], header["method"]), header["method"]
    if "method" in problem:  # it has changed the model
        yield "method", header["method"], problem["method"]
    if "noise_multiplier" in terms["privacy"]:
        noise = header["privacy"].get("noise_multiplier")
        yield "privacy.noise_multiplier", terms["privacy"]["noise_multiplier"], noise
    job = header.get("job")
    if job is not None:
        yield from _iter_pairs_of_job(job, header, terms)
    if header["what"] == "secure":
        asked, bound = header["secure"], terms["privacy"].get("clipping_norm")
        yield "secure.clipping_range", terms["secure"].get("clipping_range"), asked.get("range")
        yield "secure.bits", terms["secure"].get("bits"), asked.get("bits")
        yield "privacy.clipping_norm", bound, asked.get("clip")


def _iter_pairs_of_job(job: Mapping[str, Any], header: Header, terms: Terms) -> Iterator[tuple[str, Any, Any]]:
    kind, local, evaluation = job.get("kind"), job.get("local"), job.get("evaluation")
    yield "method", header["method"], job.get("method")
    if kind == "train":
        yield "secure", bool(terms["secure"]), header["what"] == "secure"
        rounds, round = terms["rounds"], job.get("round")
        yield "rounds", True, type(round) is int and 0 <= round < rounds
        table, named = make_plain(local) if isinstance(local, Mapping) else {}, terms["local"]
        if "lr" in named:
            yield "local.lr", True, isinstance(rate := table.get("lr"), float) and 0 <= rate <= named["lr"]
        asked = {key: value for key, value in table.items() if key in named or key not in RECIPE}
        yield "local", {**named, "lr": 0}, {**asked, "lr": 0}
    elif kind == "labels":
        yield "asks_frequencies", terms["asks_frequencies"], True
        yield "secure", bool(terms["secure"]), header["what"] == "secure"
    if isinstance(evaluation, Mapping) and kind == "evaluate":
        yield "metrics", terms["metrics"], list(evaluation.get("metrics", ()))
        if evaluation.get("personal"):
            yield "personal", terms["personal"], True


def _resolve_method(named: Mapping[str, Any], asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the method of the terms with the defaults for a task, where a message has them."""
    if any(_dump(named.get(key)) != _dump(asked.get(key)) for key in ("name", "hooks", "options")):
        return named
    defaults = build(asked).task_defaults.values()
    return {
        key: asked[key] if key in asked and any(_dump(asked[key]) == _dump(d[key]) for d in defaults if key in d) else v
        for key, v in named.items()
    }


def _drop_unset(table: Any) -> Any:
    return {k: v for k, v in table.items() if v is not None} if isinstance(table, Mapping) else table


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
