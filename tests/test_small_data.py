"""Notes on data that are too small for what is measured, each once."""

from typing import Any

import pytest
import torch

from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.config.dump import to_table
from fleetfit.config.records import restore_records
from fleetfit.data import Data


def make_data(samples: int, tested: int, clients: int, classes_of: list[int] | None = None) -> Data:
    """Clients with equal parts of the data; the classes of a client's training samples, or all of three."""
    total = samples + tested
    groups = torch.arange(clients).repeat_interleave(total // clients)
    y = torch.arange(total) % 3
    if classes_of is not None:
        y = torch.tensor(classes_of).repeat_interleave(total // clients)
    inside = torch.arange(total) % (total // clients)
    is_test = inside < tested // clients
    splits = {"train": torch.nonzero(~is_test).flatten(), "test": torch.nonzero(is_test).flatten()}
    return Data("small", torch.randn(total, 5), y, splits, 3, groups=groups)


def list_notes(data: Data, **sections: Any) -> tuple[str, ...]:
    table = {"data": {"name": data, "partition": {"kind": "natural"}}, **sections}
    return assemble(load_experiment(table)).notes


@pytest.mark.parametrize(
    ("tested", "clients", "is_said"), [(36, 4, True), (40, 4, False), (45, 5, True), (70, 7, False)]
)
def test_fewer_than_ten_test_samples_a_client_are_said_once(tested: int, clients: int, is_said: bool) -> None:
    notes = list_notes(make_data(clients * 20, tested, clients), cohort={"count": 3})
    few_notes = [note for note in notes if f"{tested / clients:.2g} test" in note]
    assert len(few_notes) == is_said and "partition" not in "".join(few_notes)  # devices stay apart


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards"])
def test_fewer_clients_are_suggested_where_their_number_is_free(kind: str) -> None:
    partition = {"kind": kind, "clients": 6}
    notes = assemble(load_experiment({"data": {"name": make_data(120, 30, 6), "partition": partition}})).notes
    assert len([note for note in notes if "test" in note and "[data] partition.clients" in note]) == 1


@pytest.mark.parametrize("kind", ["natural", "iid"])
@pytest.mark.parametrize(
    ("clients", "cohort", "size"),
    [(8, {}, 4), (3, {}, 3), (39, {}, 4), (40, {}, 4), (60, {}, 6), (8, {"fraction": 0.1}, 1), (8, {"count": 2}, 2)],
)
def test_few_clients_have_a_cohort_of_four_that_a_run_keeps(
    kind: str, clients: int, cohort: dict[str, Any], size: int
) -> None:
    data = make_data(clients * 6, clients * 2, clients)
    partition = {"kind": kind} if kind == "natural" else {"kind": kind, "clients": clients}
    table = {"data": {"name": data, "partition": partition}, "cohort": cohort}
    run = assemble(load_experiment(table))
    assert run.federation.cohort == size
    recorded = to_table(run.experiment)
    share = {"fraction": 0.1 if clients >= 40 else size / clients, **cohort}
    share = {"count": 2} if "count" in cohort else share
    assert {key: recorded["cohort"][key] for key in ("fraction", "count") if key in recorded["cohort"]} == share
    again = assemble(load_experiment({"data": table["data"], "cohort": share}))
    assert again.federation.cohort == size
    begun = load_experiment({**table, "cohort": {"fraction": 0.1}})  # a folder of an earlier version
    assert assemble(restore_records(load_experiment(table), begun)).federation.cohort == (
        size if cohort else max(1, round(clients / 10))
    )


@pytest.mark.parametrize(("count", "clients", "is_said"), [(2, 6, True), (1, 4, True), (3, 6, False), (2, 2, False)])
def test_a_cohort_of_two_is_said_once(count: int, clients: int, is_said: bool) -> None:
    notes = list_notes(make_data(clients * 20, clients * 12, clients), cohort={"count": count})
    assert len([note for note in notes if f"{count} of {clients}" in note and "[cohort]" in note]) == is_said


@pytest.mark.parametrize("single", [[0], [1], [0, 1], []])
def test_levels_whose_clients_hold_one_class_are_said(single: list[int]) -> None:
    """Clients of a level in `single` have the class of its index only, others two classes and more in all."""
    sections: dict[str, Any] = {
        "fleet": {"groups": [{"budget": 0.5}, {"budget": 1.0}]}, "method": {"name": "heterofl"}, "cohort": {"count": 4},
    }  # fmt: skip
    table = {"data": {"name": make_data(120, 72, 6), "partition": {"kind": "natural"}}, **sections}
    federation = assemble(load_experiment(table)).federation
    level_of = federation.level_of.tolist()
    assert len(federation.levels) == len({*level_of}) == 2 and min(map(level_of.count, (0, 1))) > 1
    classes_of = [
        level if level in single else (level_of[:client].count(level) + level) % 3
        for client, level in enumerate(level_of)
    ]
    assert [len({c for c, own in zip(classes_of, level_of, strict=True) if own == k}) == 1 for k in (0, 1)] == [
        k in single for k in (0, 1)
    ]
    notes = list_notes(make_data(120, 72, 6, classes_of), **sections)
    class_notes = [note for note in notes if "one class" in note]
    assert [f'("{level}")' in note for level, note in zip(single, class_notes, strict=True)] == [True] * len(single)
