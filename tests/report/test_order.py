"""Sentences about exits and levels in the wrong order: when they are said, of which numbers."""

from typing import Any

import pytest

from fleetfit.report.order import BEHIND, explain_order, explain_row_order, is_behind
from fleetfit.report.tables import make_total_table
from fleetfit.runs.schema import EvaluationRecord, LevelAccuracy, PrivacyRecord, SummaryRecord

LEVELS = [{"level": "S1", "local": 0.6}, {"level": "M1", "local": 0.5}]


def summary(levels: Any = LEVELS, split: str = "", **accuracies: Any) -> SummaryRecord:
    """Return final numbers with the accuracies of one evaluation; of levels only names and accuracies matter."""
    shape = {
        "width": 1.0, "depth": 1, "blocks": 1, "exits": [1], "parameters": 1, "multiply_adds": 1, "clients": 1
    }  # fmt: skip
    columns = {"global": None, "local": None, "levels": {}, **accuracies}
    return SummaryRecord.load({
        "method": "scalefl", "model": "cnn", "data": "digits", "norm": "static", "rounds": 8, "global": 0.6,
        "local": 0.6, "levels": [{**shape, **level} for level in levels], "bytes_down": 1, "bytes_up": 1, "waste": 0.0,
        "failures": 0, "seconds": 1.0, "notes": [], "evaluate": {"split": split, "static": columns},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("accuracies", "behind"),
    [
        ([], False),
        ([0.5], False),
        ([0.4, 0.5, 0.6], False),
        ([0.5, 0.5 - BEHIND + 1e-6], False),
        ([0.5, 0.5 - BEHIND - 1e-6], True),
        ([0.5, 0.9, 0.6], True),  # above the first, and yet behind the second
        ([0.5, 0.4, 0.9], True),
        ([0.50, 0.49, 0.48, 0.47], True),  # a slow decline adds up
    ],
)
def test_a_larger_piece_is_behind_any_smaller_one(accuracies: list[float], behind: bool) -> None:
    assert is_behind(accuracies) == behind


def test_the_same_data_are_taken_where_there_are_some() -> None:
    """The server's test set goes before the clients' data; without it the levels have each their own."""
    (both,) = explain_order([summary(test_exits=[0.7, 0.6], exits=[0.1, 0.9], test_levels={"1": 0.4, "2": 0.5})])
    assert "8 rounds" in both and "exit 1 70.0%, exit 2 60.0%, on the server's" in both
    exits, levels = explain_order([summary(exits=[0.7, 0.6])])
    assert "exit 1 70.0%, exit 2 60.0%, on all clients'" in exits
    assert "level S1 60.0%, level M1 50.0%, each " in levels
    assert [sentence.count("reason") for sentence in (exits, levels)] == [0, 1], "said once"
    assert not explain_order([summary(exits=[0.6, 0.7], test_levels={"1": 0.4, "2": 0.5})])


@pytest.mark.parametrize(("split", "words"), [("validation", "validation data"), ("train", "training data")])
def test_an_explanation_names_the_data_of_the_exits(split: str, words: str) -> None:
    exits, _ = explain_order([summary(exits=[0.7, 0.6], split=split)])
    assert f" {words}." in exits


def test_of_several_seeds_the_means_count() -> None:
    right, wrong = summary(test_exits=[0.5, 0.9]), summary(test_exits=[0.5, 0.3])
    assert not any("exit" in sentence for sentence in explain_order([right, wrong]))
    assert any("exit 1 50.0%, exit 2 36.7%" in s for s in explain_order([wrong, wrong, summary(test_exits=[0.5, 0.5])]))
    apart = [wrong, wrong, summary(test_exits=[0.5, 0.7])]
    assert not any("exit" in sentence for sentence in explain_order(apart)), "less than the seeds are apart"


@pytest.mark.parametrize(("samples", "significant"), [(36, False), (900, True), (None, True)])
def test_what_chance_would_do_is_not_said(samples: int | None, significant: bool) -> None:
    """Ten points between 0.7 and 0.6: a standard error is 0.112 with 36 samples, 0.022 with 900."""
    sizes = {} if samples is None else {"test_samples": samples, "global_samples": samples}
    on_test = summary(test_exits=[0.7, 0.6], test_levels={"1": 0.7, "2": 0.6}, **sizes)
    of_clients = summary(exits=[0.7, 0.6], test_levels={"1": 0.5, "2": 0.6}, **sizes)
    assert len(explain_order([on_test])) == 2 * significant and len(explain_order([of_clients])) == significant
    assert len(explain_row_order({"a": [on_test]})) == 2 * significant


@pytest.mark.parametrize(("clients", "significant"), [(20, False), (600, True)])
def test_of_clients_that_differ_the_clients_count(clients: int, significant: bool) -> None:
    record = summary(global_samples=100_000)
    levels = {name: LevelAccuracy(local=None, clients=clients) for name in ("S1", "M1")}
    headline = record.headline.model_copy(update={"levels": levels})
    evaluate = record.evaluate.model_copy(update={"static": headline})
    assert bool(explain_order([record.model_copy(update={"evaluate": evaluate})])) == significant


def test_no_cause_is_named_where_the_largest_is_best() -> None:
    record = summary(test_exits=[0.5, 0.4, 0.9], test_levels={"1": 0.1, "2": 0.2}, test_samples=10_000)
    (only,) = explain_order([record])
    assert "exit 1 50.0%, exit 2 40.0%, exit 3 90.0%" in only and "reason" not in only
    behind = summary(test_exits=[0.5, 0.4], test_levels={"1": 0.1, "2": 0.2})
    first, second = explain_row_order({"a": [record], "b": [behind]})
    assert " b." in first and "reason" in first and " a." in second and "reason" not in second


def test_noise_may_be_the_cause_with_privacy() -> None:
    privacy = PrivacyRecord(epsilon=1.0, delta=1e-3, noise_multiplier=1.0, clipping_norm=1.0, rate=0.1)
    noisy = summary(test_exits=[0.7, 0.6], test_levels={"1": 0.4, "2": 0.3}, test_samples=9_000)
    private = noisy.model_copy(update={"privacy": privacy})
    for explanations in (explain_order([private]), explain_row_order({"a": [private]})):
        assert len(explanations) == 2 and not any("caught up" in one or "rounds, or" in one for one in explanations)


def test_only_parts_that_are_behind_are_named() -> None:
    levels = {"1": 0.3, "2": 0.5, "3": 0.9, "4": 0.6}
    shapes = [{"level": name, "local": None} for name in levels]
    (only,) = explain_order([summary(shapes, test_levels=levels, test_samples=10_000)])
    subject, _, numbers = only.partition(":")
    assert "level 4" in subject and not any(f"level {name}" in subject for name in "123")
    assert all(f"level {name} {100 * accuracy:.1f}%" in numbers for name, accuracy in levels.items())


def test_what_was_not_measured_is_in_no_order() -> None:
    nothing = summary(levels=[{"level": "1", "local": 0.6}, {"level": "2", "local": None}])
    assert explain_order([nothing]) == []
    assert explain_order([nothing.model_copy(update={"evaluate": EvaluationRecord()})]) == []


def test_rows_are_named_together() -> None:
    wrong, right = summary(test_exits=[0.7, 0.6]), summary(test_exits=[0.6, 0.7], test_levels={"1": 0.1, "2": 0.2})
    exits, levels = explain_row_order({"a": [wrong], "b, alpha = 1": [wrong], "c": [right]})
    assert "exits" in exits and " a; b, alpha = 1." in exits and "levels" in levels and " a; b, alpha = 1." in levels
    assert explain_row_order({"c": [right]}) == []


def test_it_is_printed_below_the_result() -> None:
    record = summary(test_exits=[0.7, 0.6], test_levels={"1": 0.4, "2": 0.5})
    whole = record.model_copy(update={"notes": ["A note."]})
    assert make_total_table(whole).notes == ("A note.", *explain_order([record]))
