"""Mutated messages: no traceback, no hang, no harmed state, on the server's side and on the node's.

What once failed lies in `tests/corpus/messages`, and is sent again each time.
"""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

pytest.importorskip("flwr", reason="the extra flower is not installed")

from fuzz.checking import UNPARSED, hear, hello, introduced, lives, many, one, past_parsing, take
from fuzz.mutations import answer_to, by_name, make_parts, parent, real

from fleetfit.messages import pack, unpack

CORPUS = sorted((Path(__file__).parents[1] / "corpus" / "messages").glob("*.json"))


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_messages_harm_no_one_else(data: st.DataObject) -> None:
    one(lambda most: data.draw(st.integers(0, most)))


def test_half_of_hundreds_of_messages_are_parsed() -> None:
    tally = many(300, seed=7)
    assert past_parsing(tally) >= 0.5, tally
    assert min(tally[what] for what in (UNPARSED, "refused", "admitted", "a failure")) > 0, tally


@pytest.mark.slow
def test_ten_thousand_messages() -> None:
    """With the memory that they took: no message, and not all of them, may fill it."""
    many(200)  # what is made once, is made
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tally = many(10_000)
    assert sum(tally.values()) == 10_000 and past_parsing(tally) >= 0.5, tally
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB


def content_of(entry: dict[str, Any], honest: bytes) -> bytes:
    """Return the message that an entry of the corpus describes."""
    if "header" in entry:  # texts, or [text, how often]
        parts = [part if isinstance(part, str) else part[0] * part[1] for part in entry["header"]]
        text = f"[{{}},{''.join(parts)}]".encode()
        return b"FFIT" + bytes([2, 0, 0, 0]) + len(text).to_bytes(8, "little") + text
    payload = by_name(unpack(honest))
    for *at, value in entry["set"]:
        parent(payload, tuple(at))[at[-1]] = special(value)
    for at in entry.get("remove", []):
        del parent(payload, tuple(at))[at[-1]]
    return pack(payload)


def special(value: Any) -> Any:
    """Return a value, or the tensor that {"full": number, "shape": [...]} stands for."""
    import torch

    if isinstance(value, dict) and "full" in value:
        return torch.full(value["shape"], float(value["full"]), dtype=getattr(torch, value.get("dtype", "float32")))
    return value


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_stored_failures_pass(path: Path) -> None:
    entry = json.loads(path.read_text())
    kind, part = entry["kind"], entry.get("part", "header")
    if entry["side"] == "node":
        before, parts = lives(), make_parts(kind, 0)
        assert hear({**parts, part: content_of(entry, parts[part])}) == entry["becomes"]
        assert lives() == before
    elif kind == "hello":
        assert introduced(content_of(entry, hello())) == entry["becomes"]
    else:
        honest = answer_to(real().replies[kind][0][1])
        assert take(kind, 0, content_of(entry, honest)) == entry["becomes"]


def test_the_corpus_is_there() -> None:
    assert len(CORPUS) >= 15


def test_a_check_that_sees_nothing_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything pass validation: the harness must notice."""
    monkeypatch.setattr("fleetfit.validation.validate_reply", lambda reply, job, federation, norms: reply)
    with pytest.raises(Exception):  # noqa: B017, PT011 -- an assertion, or what the state makes somebody raise
        many(300, seed=7)
