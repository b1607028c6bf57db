"""docs/trust.md lists the fields that a device sends beside tensors: those of all methods' messages."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.engines import RecordingEngine
from tiny import plain, spec_of, tiny_federation

from fleetfit import names
from fleetfit.core import Evaluation, Federation, Update
from fleetfit.evaluation import EvaluationScope
from fleetfit.messages import dump_reply
from fleetfit.rounds import Settings, run, start

PAGE = Path(__file__).parent.parent / "docs" / "trust.md"
TENSORS = {"kind", "state"}


def read_table() -> dict[str, set[str]]:
    """Return the fields of each answer in the page's table: the words in code of its second column."""
    section = re.split(r"^# ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith("What leaves a device")]
    fields: dict[str, set[str]] = {}
    answer = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3:
            answer = cells[0] or answer
            fields.setdefault(answer, set()).update(re.findall(r"`([\w.]+)`", cells[1]))
    return fields


def read_fields(reply: Update, federation: Federation) -> set[str]:
    packed: dict[str, Any] = dump_reply(reply, federation.problem.layout)
    return packed.keys() - {*TENSORS, "metrics"} | {f"metrics.{key}" for key in packed["metrics"]}


SPECS: list[dict[str, Any]] = [
    *(spec_of(name) for name in names.list_names("methods")),
    *({"name": "scalefl", "options": {option: {}}} for option in ("class_prior", "feddyn", "fedprox", "outliers")),
    {"name": "heterofl", "masked": True},
    {"name": "fedavg", "cohort": {"name": "diversity"}},
    {"name": "fedavg", "cohort": {"name": "loss"}},
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_message_has_a_field_that_the_page_does_not_list(spec: dict[str, Any]) -> None:
    listed = read_table()
    answers = {"train": "training", "evaluate": "evaluation", "labels": "class frequencies", "statistics": "statistics"}
    federation, simulation = tiny_federation(spec)
    engine = RecordingEngine(simulation)
    scope = EvaluationScope(Evaluation(personal=True))
    settings = Settings(2, plain(lr=0.1, batch_size=8, compress="int8"), scope=scope)
    list(run(federation, engine, settings, start(federation)))
    kinds: dict[str, set[str]] = {}
    for job, reply in zip(engine.jobs, engine.replies, strict=True):
        if isinstance(reply, Update):
            kinds.setdefault(job.kind, set()).update(read_fields(reply, federation))
    assert {"train", "evaluate", "labels"} <= kinds.keys() <= answers.keys()
    for kind, fields in kinds.items():
        assert fields <= listed["any job"] | listed[answers[kind]], (kind, fields)
    needed = {"metrics.loss", "metrics.steps", "compressed", "scales"}
    assert needed <= kinds["train"] and {"metrics.n", "metrics.correct", "metrics.personal"} <= kinds["evaluate"]
    sends_part = spec["name"] in ("adaptivefl", "reefl") or "masked" in spec
    assert ("submodel" in kinds["train"]) <= sends_part
