"""Names are verbs or nouns of the field, and prose is plain; exceptions are listed and only shrink (ADR 0021)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import words

REASONS = {
    "fleetfit/errors.py Unexpected": "a public name; an adjective for an exception, as in `asyncio.CancelledError`",
    "fleetfit/core/resources.py Speed": "a noun; it only looks like a participle",
}
"""Names that stay although the rules refuse them, and why."""


def test_no_name_of_a_refused_kind_is_new() -> None:
    new = words.find_names() - words.read_names() - REASONS.keys()
    assert not new, f"name these by a verb or a noun of the field (CONTRIBUTING.md, Words): {sorted(new)}"


@pytest.mark.parametrize(
    ("find", "baseline", "remedy"),
    [
        (words.find_phrases, words.PROSE, "say these in plain words (CONTRIBUTING.md, Words)"),
        (words.find_matches, words.WORDING, "assert on class, key, path and values (support.raises), not on words"),
    ],
)
def test_no_line_of_a_refused_kind_is_new(
    find: Callable[[], dict[str, list[int]]], baseline: Path, remedy: str
) -> None:
    allowed = words.read_counts(baseline)
    new = {place: lines for place, lines in find().items() if len(lines) > allowed.get(place, 0)}
    assert not new, f"{remedy}; file and lines: {new}"


def test_no_test_has_a_variable_of_a_refused_name() -> None:
    lines = words.find_locals()
    assert not lines, f"use the noun of the field, not {sorted(words.WORDS['locals'])}; file and lines: {lines}"


def test_the_baselines_hold_nothing_that_is_gone() -> None:
    gone = (words.read_names() | REASONS.keys()) - words.find_names()
    high = {
        place: count
        for path, lines in ((words.PROSE, words.find_phrases()), (words.WORDING, words.find_matches()))
        for place, count in words.read_counts(path).items()
        if count > len(lines.get(place, []))
    }
    assert not gone, f"remove these lines: python tests/words.py shrink: {sorted(gone)}"
    assert not high, f"lower these numbers: python tests/words.py shrink: {high}"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("opened", "participle"), ("told_apart", "participle"), ("what_raised", "preposition"),
        ("shape_of", "x_of"), ("with_values", "preposition"), ("make_shape_of", "x_of"), ("drawn", "participle"),
        ("open_file", ""), ("is_held", ""), ("message_size", ""), ("to_toml", ""), ("LossyLinks", ""),
    ],
)  # fmt: skip
def test_a_name_is_judged_by_its_form(name: str, kind: str) -> None:
    assert words.explain_refusal(name) == kind


def test_a_method_may_be_called_as_the_paper_calls_it() -> None:
    assert words.explain_refusal("decoupled", "methods") == ""
    assert words.explain_refusal("decoupled", "training") == "participle"


def test_all_kinds_are_found(tmp_path: Path) -> None:
    (tmp_path / "fleetfit/room").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "fleetfit/room/a.py").write_text(
        'def taken(): ...\ndef _taken(): ...\ndef take(): """Nobody reads."""\n'
    )
    (tmp_path / "README.md").write_text("Fine.\nIt goes on with the next one.\n")
    assert words.find_names(tmp_path) == {"fleetfit/room/a.py taken"}
    assert words.find_phrases(tmp_path) == {"fleetfit/room/a.py": [3], "README.md": [2]}
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text(
        'with raises(E, key="a"): ...\nwith pytest.raises(E, match="a"): ...\nassert "this is a sentence" in err\n'
    )
    (tmp_path / "tests/test_b.py").write_text("found = 1\ndef by_hand(told): ...\nrun(found=found)\n")
    assert words.find_matches(tmp_path) == {"tests/test_a.py": [2, 3]}
    assert words.find_locals(tmp_path) == {"tests/test_b.py": [1, 2]}
