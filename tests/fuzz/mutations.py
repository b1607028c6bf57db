"""Real messages of a fleet, and ways to spoil them that know how they are made.

Whoever draws (a seeded generator, Hypothesis, a fuzzer that is led by coverage) gives numbers; what is done with them
is the same. Most mutations are made in the nest and packed again, so that they get past parsing.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from own_terms import add_terms
from tiny import plain, tiny_federation

from fleetfit.core import Evaluation, Failure, Federation, Job, Server, Update
from fleetfit.engines.local import local
from fleetfit.errors import RunError
from fleetfit.evaluation import EvaluationScope, evaluate
from fleetfit.fleet.protocol import pack_message
from fleetfit.messages import (
    compress,
    count_scales,
    dump_job,
    dump_reply,
    dump_state,
    pack,
    unpack,
)
from fleetfit.rounds import Settings, run_round, start
from fleetfit.submodel import FlatState

Reply = Update | Failure
SETTINGS = Settings(1, plain(lr=0.1, batch_size=16))
WANTED = EvaluationScope(Evaluation(batch_size=32), statistics_samples=60, whole=False)
METHOD: Mapping[str, Any] = {"name": "scalefl", "options": {"scaffold": {}}}
"""Sends tensors beside the state, in both directions."""
KINDS = ("train", "float16", "int8", "evaluate", "statistics", "failure")


class Draw(Protocol):
    """Where a mutation takes its choices from."""

    def __call__(self, most: int) -> int:
        """Return a whole number from 0 to `most`."""


@dataclass(frozen=True)
class Real:
    """A run's real traffic.

    Attributes:
        federation: The server's view.
        server: Before the round.
        replies: Of the first round of training and of an evaluation after it, with their jobs, by kind.
        round: All jobs of the round of training with their replies.
        evaluation: The same of the evaluation.
    """

    federation: Federation
    server: Server
    replies: Mapping[str, tuple[tuple[Job, Reply], ...]]
    round: tuple[tuple[Job, Reply], ...]
    evaluation: tuple[tuple[Job, Reply], ...]


class Listening:
    """The local engine; notes jobs and replies."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.seen = inner, list[tuple[Job, Reply]]()

    def run(self, jobs: Iterator[Job]) -> Iterator[Reply]:
        waiting: list[Job] = []

        def record() -> Iterator[Job]:
            for job in jobs:
                waiting.append(job)
                yield job

        for reply in self.inner.run(record()):
            self.seen.append((waiting.pop(0), reply))
            yield reply

    def commit_memory(self, update: Update) -> None:
        self.inner.commit_memory(update)


@cache
def real() -> Real:
    """Run a round of a small fleet, and evaluate."""
    federation, simulation = tiny_federation(METHOD, clients=6, cohort=6)
    server, engine = start(federation), Listening(local(simulation))
    after, _ = run_round(federation, engine, SETTINGS, server)  # type: ignore[arg-type]
    trained = tuple(engine.seen)
    engine.seen.clear()
    evaluate(federation, engine, after, WANTED)
    measured = tuple(engine.seen)
    layout = federation.problem.layout
    pairs_by_kind: dict[str, tuple[tuple[Job, Reply], ...]] = {"train": trained}
    for kind in ("float16", "int8"):
        pairs = [(replace(job, local=job.local.replace(compress=kind)), reply) for job, reply in trained]
        pairs_by_kind[kind] = tuple((job, compress(reply, job, layout, kind, None)[0])
                            for job, reply in pairs if isinstance(reply, Update))  # fmt: skip
    for kind in ("evaluate", "statistics"):
        pairs_by_kind[kind] = tuple((job, reply) for job, reply in measured if job.kind == kind)
    pairs_by_kind["failure"] = tuple((job, failed(job)) for job, _ in trained)
    return Real(federation, server, pairs_by_kind, trained, measured)


def failed(job: Job) -> Failure:
    return Failure(job.round, job.index, job.client, job.level, job.submodel, "no memory was left", multiply_adds=9)


def answer_to(reply: Reply) -> bytes:
    """Return a node's answer as it travels."""
    return pack_message({"reply": dump_reply(reply, real().federation.problem.layout), "keeps": True, "forgot": False})


# ---- spoiling ----------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 255, 2**31, 2**53 + 1, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e19, 1e38, 1e300,
    -1e308, math.nan, math.inf, -math.inf, "", "a", "train", "x" * 700, "a\x1b[2J\x07\n", "\ud800", "\u202e", "9" * 30,
    [], {}, (),
    [[[[[[[[[[[[1]]]]]]]]]]]], [0] * 50, {"from": 0, "to": 3}, {"from": 0, "to": 2**30}, {"a": {"b": {"c": 1}}}, {1: 2},
    {2**61 - 1: 1}, {"$": 1}, {"1": 1e300}, {"exit": True},
)  # fmt: skip
VALUES = (math.nan, math.inf, -math.inf, 1e38, -3e38, 1e19, 1e15, 1e-45, 0.0, -1.0, 1.0, 1e6)
TYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool, torch.float32)
Path = tuple[Any, ...]


def paths(payload: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield where everything in a nest stands, and what it is."""
    if at:
        yield at, payload
    inner = payload.items() if isinstance(payload, dict) else enumerate(payload) if isinstance(payload, list) else ()
    for key, value in inner:
        yield from paths(value, (*at, key))


def parent(payload: Any, at: Path) -> Any:
    for key in at[:-1]:
        payload = payload[key]
    return payload


@cache
def shapes_by_size() -> dict[tuple[bool, int], dict[str, tuple[int, ...]]]:
    """Return the shapes of each level's state, and of its scales, by whether they are scales and how many numbers."""
    layout, shapes_by_key = real().federation.problem.layout, {}
    for level in real().federation.levels:
        shapes = layout.shapes(level.submodel.sizes, level.submodel.exits)
        rows: dict[str, tuple[int, ...]] = {name: (count_scales(shape),) for name, shape in shapes.items()}
        for scales, each in ((False, dict(shapes)), (True, rows)):
            shapes_by_key[scales, sum(math.prod(shape) for shape in each.values())] = each
    return shapes_by_key


def by_name(payload: Any, key: Any = None) -> Any:
    """Return a nest that says in full what its reader would know: states by name, and the sub-model once more."""
    if isinstance(payload, torch.Tensor) and payload.ndim == 1:
        shapes = shapes_by_size().get((key == "scales", payload.numel()))
        return payload if shapes is None else dict(FlatState(payload, shapes))
    if isinstance(payload, dict):
        named = {name: by_name(value, name) for name, value in payload.items()}
        if named.get("kind") == "update" and "dispatched" in named:  # said, though it is the same
            named.setdefault("submodel", copy.deepcopy(named["dispatched"]))
        return named
    return payload


def odd_value(draw: Draw) -> Any:
    if not draw(7):
        shape = [draw(4) for _ in range(draw(4))]
        return torch.full(shape, VALUES[draw(len(VALUES) - 1)] if draw(1) else 1.0)
    return copy.deepcopy(ODD[draw(len(ODD) - 1)])


def in_nest(payload: Any, draw: Draw) -> None:
    """Change one place: another value, none, a further one, another name, or two places exchanged."""
    everywhere = [at for at, _ in paths(payload)]
    if draw(2):  # the many tensors of a state must not crowd out the few fields
        everywhere = [at for at in everywhere if "state" not in at[:-1] and "scales" not in at[:-1]] or everywhere
    at = everywhere[draw(len(everywhere) - 1)]
    box, key, how = parent(payload, at), at[-1], draw(9)
    if how == 0:
        del box[key]
    elif how == 1 and isinstance(box, dict):
        box[("x", "\x1b]0;", "state", "$t", "a" * 300)[draw(4)]] = odd_value(draw)
    elif how == 2 and isinstance(box, dict):
        box[f"{key}{'x' * draw(2)}\x07"] = box.pop(key)
    elif how == 3:
        other = everywhere[draw(len(everywhere) - 1)]
        box[key] = copy.deepcopy(parent(payload, other)[other[-1]])
    elif how == 4:
        for _ in range(draw(80)):
            box[key] = [box[key]]
    elif how == 5 and type(box[key]) in (int, float):
        box[key] = box[key] * (-1, 2, 10**6, 0.5)[draw(3)] + draw(2)
    else:
        box[key] = odd_value(draw)


def in_tensor(payload: Any, draw: Draw) -> None:
    """Change one tensor: its numbers, one of them, its shape or its type; where there is none, the nest."""
    places = [at for at, value in paths(payload) if isinstance(value, torch.Tensor)]
    if not places:
        in_nest(payload, draw)
        return
    at = places[draw(len(places) - 1)]
    box, key, how = parent(payload, at), at[-1], draw(9)
    tensor = box[key].clone()
    value = VALUES[draw(len(VALUES) - 1)]
    if how <= 2 and tensor.numel() and tensor.dtype.is_floating_point:
        tensor.view(-1)[draw(tensor.numel() - 1)] = value
    elif how <= 4 and tensor.dtype.is_floating_point:
        tensor = tensor * 0 + value if draw(1) else tensor * value
    elif how == 5:
        tensor = tensor.to(TYPES[draw(len(TYPES) - 1)])
    elif how == 6:
        tensor = reshaped(tensor, draw(4)) if tensor.ndim else tensor[None]
    elif how == 7:
        other = places[draw(len(places) - 1)]
        tensor = parent(payload, other)[other[-1]].clone()
    else:
        tensor = tensor + (draw(200) - 100) / 100 if tensor.dtype.is_floating_point else tensor ^ 1
    box[key] = tensor.contiguous()


def reshaped(tensor: torch.Tensor, how: int) -> torch.Tensor:
    turned = tensor.permute(*reversed(range(tensor.ndim)))
    return (tensor[None], tensor[:1], tensor[..., :-1], tensor.reshape(-1), turned)[how]


def in_bytes(content: bytes, draw: Draw) -> bytes:
    """Change bytes, whatever they are."""
    changed, at = bytearray(content), draw(len(content) - 1)
    how = draw(5)
    if how == 0:
        changed[at] ^= 1 << draw(7)
    elif how == 1:
        del changed[at:]
    elif how == 2:
        changed[at:at] = bytes(draw(40))
    elif how == 3:
        changed[8:16] = draw(2**40).to_bytes(8, "little")
    elif how == 4:
        changed[at : at + draw(30)] = b""
    else:
        changed += bytes(1 + draw(40))
    return bytes(changed)


def in_header(content: bytes, draw: Draw) -> bytes:
    """Change a number, a sign or a word of the header, and leave the tensors' bytes as they are."""
    length = int.from_bytes(content[8:16], "little")
    text, rest = content[16 : 16 + length].decode(), content[16 + length :]
    at = draw(len(text) - 1)
    new = (
        "1e308",
        "-1",
        "99999999999999999999",
        "[" * 70,
        "{",
        "]",
        '"',
        "null",
        "Infinity",
        "1" * 5000,
        '"$t"',
        ",,",
        " ",
        "0",
    )
    text = text[:at] + new[draw(len(new) - 1)] + text[at + draw(3) :]
    header = text.encode()
    header += b" " * (-len(header) % 8)
    return content[:8] + len(header).to_bytes(8, "little") + header + rest


def mutated(content: bytes, draw: Draw) -> bytes:
    """Return a message spoilt in one to three places, mostly so that it can still be parsed."""
    payload, how = unpack(content), draw(19)
    payload = by_name(payload) if draw(2) else payload
    if how == 0:
        return in_bytes(content, draw)
    if how == 1:
        return in_header(content, draw)
    box = [payload]  # a flat state alone has no inner place
    for _ in range(1 + draw(3) // 2):
        target = box[0] if isinstance(box[0], dict | list) and box[0] else box
        (in_nest if how <= 10 else in_tensor)(target, draw)
        box = box or [None]
    try:
        return pack(box[0])
    except (TypeError, ValueError, RuntimeError, RunError):  # a nest that no header can say
        return in_bytes(content, draw)


# ---- what a server sends -----------------------------------------------------------------------------------------

SETUP: dict[str, Any] = {
    "what": "setup", "run": "ab" * 8, "base": "", "cost": "parameters", "transform": "", "method": METHOD,
    "problem": {"model": {"name": "tiny:tiny"}, "given": {"classes": 4, "channels": 1, "input_shape": [1, 4, 4]},
                "task": "classification", "exits": [1, 2, 3]},
}  # fmt: skip


def make_parts(kind: str, place: int) -> dict[str, bytes]:
    """Return the parts of a server's message: kind "hello", "setup", "train", "evaluate" or "statistics"."""
    if kind == "hello":
        return {"header": pack_message(add_terms({"what": "hello", "transform": ""}))}
    if kind == "setup":
        return {"header": pack_message(add_terms(SETUP))}
    pairs = real().replies[kind]
    job = pairs[place % len(pairs)][0]
    layout = real().federation.problem.layout
    bare = dump_job(replace(job, state={}, statistics={}, extra={}, method=METHOD), layout)
    state = dump_state(job.state, layout, job.submodel)
    problem = {**SETUP["problem"], "layout": layout.to_payload()}
    header = add_terms({**SETUP, "what": "job", "problem": problem, "job": bare})
    parts = {"header": pack_message(header), "state": pack(state)}
    if job.statistics:
        parts["statistics"] = pack(dict(job.statistics))
    if job.extra:
        parts["extra"] = pack(dict(job.extra))
    return parts
