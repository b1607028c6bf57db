"""What must hold of a server and a node, whatever message they get.

`PYTHONPATH=tests python -m fuzz.checking 10000` sends so many mutated messages, and prints what became of them and
which lines of `validation` and `messages` they reached.
"""

import math
import random
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
import torch
from fuzz.mutations import KINDS, SETTINGS, WANTED, Draw, Reply, answer_to, failed, make_parts, mutated, real
from own_terms import add_terms, drop_head
from support.bits import assert_same_bits

from fleetfit.aggregate import Mean, apply_mean
from fleetfit.core import Failure, Job, Server, Update
from fleetfit.core.nodes import parse_node_description
from fleetfit.errors import FleetFitError
from fleetfit.evaluation import evaluate
from fleetfit.fleet.node import answer
from fleetfit.fleet.protocol import read_answer
from fleetfit.layout import Layout, State
from fleetfit.messages import load_job, load_reply, pack, unpack
from fleetfit.rounds import run_round
from fleetfit.validation import find_job_error, validate_and_measure

ASKED = ("hello", "setup", "train", "train", "evaluate", "statistics")
UNPARSED = "not parsed"


def layout() -> Layout:
    return real().federation.problem.layout


class Given:
    """An engine that has all its replies already, by kind and index of the job."""

    def __init__(self, replies: Mapping[tuple[str, int], Reply]) -> None:
        self.replies = replies

    def run(self, jobs: Iterator[Job]) -> Iterator[Reply]:
        for job in jobs:
            yield self.replies[(job.kind, job.index)]

    def commit_memory(self, update: Update) -> None:
        """Nobody remembers anything."""


def after_round(place: int, reply: Reply) -> tuple[Server, dict[str, Any]]:
    replies = {(job.kind, job.index): honest for job, honest in real().round}
    job = real().round[place][0]
    engine: Any = Given({**replies, (job.kind, job.index): reply})
    return run_round(real().federation, engine, SETTINGS, real().server)


def after_evaluation(job: Job, reply: Reply) -> tuple[dict[str, Any], dict[int, State]]:
    replies = {(j.kind, j.index): honest for j, honest in real().evaluation}
    server = replace(real().server, round=1)
    return evaluate(real().federation, Given({**replies, (job.kind, job.index): reply}), server, WANTED)


@cache
def without(kind: str, place: int) -> Any:
    job = real().replies[kind][place][0]
    return (
        after_evaluation(job, failed(job)) if kind in ("evaluate", "statistics") else after_round(place, failed(job))[0]
    )


def take(kind: str, place: int, content: bytes) -> str:
    """Let the server have a reply among honest ones; return what became of it.

    Whatever it is, the server ends as without this client, or as with the reply if that is admitted.
    """
    job = real().replies[kind][place][0]
    try:
        payload = read_answer(content).get("reply")
        reply = load_reply(payload if isinstance(payload, Mapping) else {}, layout())
    except FleetFitError as error:
        return check_readable(error, UNPARSED)
    result = validate_and_measure(reply, job, real().federation)
    assert (result.round, result.index, result.client, result.level) == (job.round, job.index, job.client, job.level)
    if isinstance(result, Failure):
        assert readable(result.reason), result.reason
    if job.kind == "train":
        harmless_round(kind, place, reply, result)
    else:
        harmless_evaluation(kind, place, reply, result)
    if isinstance(result, Update):
        return "admitted"
    return "malformed" if "malformed" in result.reason else "refused" if isinstance(reply, Update) else "a failure"


def check_readable(error: Exception, outcome: str) -> str:
    assert readable(str(error)), error
    return outcome


def readable(text: str) -> bool:
    return text.isprintable() and len(text) <= 700 and "Traceback" not in text


def harmless_round(kind: str, place: int, reply: Reply, result: Reply) -> None:
    after, report = after_round(place, reply)
    assert after.round == 1 and "undone" not in report
    if isinstance(result, Failure):
        assert_same_bits(after.state, without(kind, place).state)
        assert [f["client"] for f in report["failures"]] == [result.client]
        return
    mean = Mean(real().federation.problem.layout)
    for at, (_, honest) in enumerate(real().round):
        update = result if at == place else honest
        assert isinstance(update, Update)
        mean.add(update.submodel, update.state, real().federation.method.weigh(update), update.untrained)
    assert_same_bits(after.state, apply_mean(real().server.state, mean.result()))
    assert all(bool(torch.isfinite(t).all()) for t in after.state.values())


def harmless_evaluation(kind: str, place: int, reply: Reply, result: Reply) -> None:
    job = real().replies[kind][place][0]
    columns, moments = after_evaluation(job, reply)
    if isinstance(result, Failure):
        expected = without(kind, place)
        assert {n: c for n, c in columns.items() if n != "failures"} == {
            n: c for n, c in expected[0].items() if n != "failures"
        }
    for norm in WANTED.norms:
        values = [columns[norm][name] for name in ("global", "local", "ensemble", "mean_over_exits")]
        values += [*columns[norm]["exits"], *columns[norm]["per_client"]["local"].values()]
        assert all(value is None or 0 <= value <= 1 for value in values), values
    for found_moments in moments.values():
        assert all(bool(torch.isfinite(t).all()) for t in found_moments.values())
        assert all(bool((t >= 0).all()) for name, t in found_moments.items() if name.endswith(".var"))


def introduced(content: bytes) -> str:
    """Let the server have an answer to its hello; return what became of it."""
    try:
        payload = read_answer(content)
    except FleetFitError as error:
        return check_readable(error, UNPARSED)
    try:
        description = parse_node_description(payload.get("hello"))
    except FleetFitError as error:
        return check_readable(error, "refused")
    assert (
        readable(description.name)
        and readable(str(description.facts))
        and readable(description.facts.name)
        and description.num_examples >= 0
    )
    assert readable(str(description.budget)) and math.isfinite(description.tolerance)
    return "admitted"


# ---- the node's side ---------------------------------------------------------------------------------------------


@cache
def node_config() -> str:
    folder = Path(tempfile.mkdtemp(prefix="fleetfit-fuzz-"))
    data = {"name": "tiny:tiny_data", "client": 0, "partition": {"kind": "iid", "clients": 6}}
    settings = {"name": "pi", "budget": 1.0, "allow": ["tiny:tiny"], "folder": str(folder / "kept"), "data": data}
    (folder / "node.toml").write_text(tomli_w.dumps(settings))
    return str(folder / "node.toml")


def hear(parts: Mapping[str, bytes]) -> str:
    """Let a node have a message; return what became of it. It has an answer to whatever comes."""
    if much_work(parts):
        return "not done: more work than a test has time for"
    reply_payload = read_answer(answer(node_config(), follow(parts)))
    if "refused" in reply_payload:
        assert readable(reply_payload["refused"]), reply_payload["refused"]
        assert "unexpectedly" not in reply_payload["refused"], reply_payload["refused"]
        return UNPARSED if "a message" in reply_payload["refused"] else "refused"
    if "reply" not in reply_payload:
        return "admitted"
    reply = load_reply(reply_payload["reply"], layout())
    return "admitted" if isinstance(reply, Update) else "a failure"


@cache
def honest_terms() -> list[Any]:
    return [unpack(make_parts(kind, 0)["header"])["terms"] for kind in KINDS]


def follow(parts: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return a message whose terms follow what it asks, so that it is not refused for them alone."""
    try:
        header = unpack(parts["header"], bounded=True)
        if header["terms"] not in honest_terms():
            return parts
        return {**parts, "header": pack(add_terms({key: value for key, value in header.items() if key != "terms"}))}
    except (FleetFitError, KeyError, TypeError, ValueError, RuntimeError):  # of tensors in place of terms
        return parts


def much_work(parts: Mapping[str, bytes]) -> bool:
    """Tell whether a job asks for more passes than a test has time for, as a server may; look at it all the same."""
    try:
        header = unpack(parts["header"], bounded=True)
        shared = {name: unpack(parts[name], bounded=True) for name in ("state", "statistics", "extra") if name in parts}
        job = load_job({"state": {}, "statistics": {}, "extra": {}, **header["job"], **shared}, layout())
    except (FleetFitError, KeyError, TypeError, RuntimeError):
        return False
    find_job_error(job, real().federation.problem)
    return job.kind == "train" and isinstance(job.local.epochs, int) and job.local.epochs > 4


def lives() -> bytes:
    """Return a node's answer to an honest message."""
    return drop_head(answer(node_config(), make_parts("train", 0)))


# ---- many of them ------------------------------------------------------------------------------------------------


def one(draw: Draw) -> str:
    """Make, spoil and deliver one message; return what became of it."""
    if draw(2) < 2:
        kind = (*KINDS, "hello")[draw(len(KINDS))]
        if kind == "hello":
            return introduced(mutated(hello(), draw))
        place = draw(len(real().replies[kind]) - 1)
        return take(kind, place, mutated(answer_to(real().replies[kind][place][1]), draw))
    parts = make_parts(ASKED[draw(len(ASKED) - 1)], draw(5))
    names = sorted(parts)
    name = "header" if draw(2) else names[draw(len(names) - 1)]
    return hear({**parts, name: mutated(parts[name], draw)})


@cache
def hello() -> bytes:
    return answer(node_config(), make_parts("hello", 0))


def drawing(rng: random.Random) -> Draw:
    return lambda most: rng.randint(0, most)


def many(count: int, seed: int = 0) -> Counter[str]:
    """Deliver many messages, each reproducible by its number; return how many became what."""
    before, tally = lives(), Counter[str]()
    for number in range(count):
        try:
            tally[one(drawing(random.Random(f"{seed}/{number}")))] += 1
        except BaseException as error:
            error.add_note(f"message {number} of seed {seed}")
            raise
        if number % 500 == 499:
            assert lives() == before, f"the node answers otherwise after message {number}"
    return tally


def past_parsing(tally: Counter[str]) -> float:
    """Return the share of messages that were parsed."""
    return 1 - tally[UNPARSED] / max(1, sum(tally.values()))


def lines_reached(
    modules: tuple[types.ModuleType, ...], work: Callable[[], Any]
) -> dict[str, tuple[int, int, list[int]]]:
    """Do some work; return by module the lines inside functions that it reached, of how many, and which it did not."""
    files = {str(module.__file__): module.__name__ for module in modules}
    visited: dict[str, set[int]] = {file: set() for file in files}

    def local_trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            visited[frame.f_code.co_filename].add(frame.f_lineno)
        return local_trace

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        return local_trace if frame.f_code.co_filename in visited else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    report = {}
    for file, name in files.items():
        all_lines = lines_in_functions(compile(Path(file).read_text(), file, "exec"))
        reached = visited[file] & all_lines
        report[name] = (len(reached), len(all_lines), sorted(all_lines - reached))
    return report


def lines_in_functions(code: types.CodeType) -> set[int]:
    numbers: set[int] = set()
    for inner in (c for c in code.co_consts if isinstance(c, types.CodeType)):
        if (
            inner.co_flags & 0x02 == 0
            or not inner.co_name.startswith("<")
            or inner.co_name in ("<genexpr>", "<lambda>")
        ):
            numbers |= {line for _, _, line in inner.co_lines() if line is not None and line != inner.co_firstlineno}
        numbers |= lines_in_functions(inner)
    return numbers


if __name__ == "__main__":
    from fleetfit import messages, validation

    number = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    totals: Counter[str] = Counter()
    reached = lines_reached((validation, messages), lambda: totals.update(many(number)))
    print(dict(totals), f"{100 * past_parsing(totals):.1f}% past parsing")
    for module, (hit, total, missed) in reached.items():
        print(f"{module}: {hit} of {total} lines in functions ({100 * hit / total:.0f}%); not reached: {missed}")
