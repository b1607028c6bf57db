"""Hand-made messages of a fleet: their terms, and answers that can be compared."""

from collections.abc import Mapping
from typing import Any

from tiny import plain

from fleetfit.config.dump import make_plain
from fleetfit.fleet.terms import compute_code
from fleetfit.messages import pack, unpack


def add_terms(header: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a header with its run's terms, and the other entries that all messages have."""
    header = {"run": "ab" * 8, "privacy": {}, "needs": {}, **header}
    problem, job = header.get("problem"), header.get("job")
    problem, job = problem if isinstance(problem, Mapping) else {}, job if isinstance(job, Mapping) else {}
    model, evaluation = problem.get("model"), job.get("evaluation")
    evaluation = evaluation if isinstance(evaluation, Mapping) else {}
    local = job.get("local") if job.get("kind") == "train" else None
    method, samples = header.get("method", {"name": "fedavg"}), evaluation.get("samples")
    terms = {
        "name": "", "rounds": 1000, "model": dict(model) if isinstance(model, Mapping) else {},
        "peft": problem.get("peft", {"name": "full"}), "method": method if isinstance(method, Mapping) else {},
        "local": make_plain(local if isinstance(local, Mapping) else plain().dump()), "open": [],
        "cost": header.get("cost", "parameters"), "metrics": evaluation.get("metrics", []), "personal": True,
        "split": evaluation.get("split", "test"), "samples": samples if isinstance(samples, int) else 10,
        "asks_budget": True, "asks_labels": True, "asks_frequencies": True,
        "transform": header["transform"] if isinstance(header["transform"], str) else "", "secure": {}, "privacy": {},
        **changes,
    }  # fmt: skip
    if header["what"] == "hello":
        header.pop("privacy")
    return {"terms": {"code": compute_code(terms), **terms}, **header}


def drop_head(content: bytes | bytearray) -> bytes:
    """Return an answer without the head of the node's log, which has the time in it."""
    return pack({key: value for key, value in unpack(content).items() if key != "log"})
