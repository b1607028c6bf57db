"""The device's side: a node answers the server's messages with its own data, budget and memory.

It builds what it is asked to train from names, and only from built-in ones and those that its own configuration allows:
whatever a server sends, no other code runs.

What it remembers stays in its own folder (`NodeMemory`) and is never sent. Of a run's memory the last two versions are
there: the one that the last job began with, and the one that it left, since the server's next job says which of them
was accepted. Files are `fleetfit.messages` messages, written beside their place and renamed (`fleetfit.files`), so that
a loss of power leaves one or the other.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fleetfit import files, names
from fleetfit.cost import BATCH_SIZE, Conditions, Piece, compute_cost
from fleetfit.data import Data, class_counts
from fleetfit.errors import ConfigError, FleetFitError, RunError, format_exception
from fleetfit.fleet.member import TOLD, Membership
from fleetfit.fleet.memory_limit import MemoryLimit
from fleetfit.fleet.protocol import (
    Header,
    checked_header,
    digest_of,
    facts_of,
    hello_of,
    key_of,
    packed,
    refusal,
)
from fleetfit.fleet.settings import NodeSettings, own_data, read_settings, told_budget
from fleetfit.machine import is_out_of_memory
from fleetfit.messages import dump_failure, dump_reply, load_job, pack, unpack
from fleetfit.method import build, rebuild_problem
from fleetfit.planner import convert_budgets
from fleetfit.training import resolve_device, run_job
from fleetfit.training.runtime import keep_freed_memory, release_freed_memory, replace_emulated_bf16
from fleetfit.validation import find_job_error
from fleetfit.values import Device, Failure, Job, Problem, Update

_LOG = logging.getLogger("fleetfit")
PHASES = {"keys", *TOLD}
"""Of a secure round."""
Finish = Callable[[Job, Update | Failure], dict[str, Any] | Failure]
"""Makes of a training job's reply what is answered instead."""

# ---- what is kept on disk ------------------------------------------------------------------------------------------

_RUNS = 8  # whose memory is kept
_BASES = 3
_RUN = re.compile(r"[0-9a-f]{8,64}")


class NodeMemory:
    """The files of a node."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, which is made when something is kept."""
        self._folder = folder

    def memory(self, run: str, version: int) -> tuple[Any, bool]:
        """Return what was kept under a version (-1: nothing was), and whether it is missing."""
        if version < 0:
            return None, False
        found = self._versions(run)
        return found.get(version), version not in found

    def keep(self, run: str, before: int, version: int, memory: Any) -> None:
        """Keep a new version beside the one that it began with."""
        kept = {v: m for v, m in self._versions(run).items() if v == before and v != version}
        self._write(self._file(run), {"versions": list(kept), "memories": list(kept.values())}, version, memory)
        _keep_newest(self._folder / "runs", _RUNS)

    def _write(self, path: Path, nest: dict[str, Any], version: int, memory: Any) -> None:
        _written(path, pack({"versions": [*nest["versions"], version], "memories": [*nest["memories"], memory]}))

    def _versions(self, run: str) -> dict[int, Any]:
        path = self._file(run)
        try:
            nest = unpack(files.read_bytes(path))
            return dict(zip(nest["versions"], nest["memories"], strict=True))
        except FileNotFoundError:
            return {}
        except (RunError, KeyError, TypeError, ValueError, OSError):  # a damaged disk: as good as nothing
            return {}

    def _file(self, run: str) -> Path:
        if not _RUN.fullmatch(run):
            raise RunError(f'"{run[:40]}" is not the name of a run.', key="run")
        return self._folder / "runs" / f"{run}.ffit"

    # -- tensors that are never trained

    def base(self, digest: str) -> bytes | None:
        """Return the packed tensors of a digest, or None where they are not there, or damaged."""
        try:
            content = files.read_bytes(self._folder / "base" / f"{_digest_checked(digest)}.ffit")
        except OSError:
            return None
        return content if digest_of(content) == digest else None

    def keep_base(self, digest: str, content: bytes | bytearray) -> None:
        """Keep packed tensors.

        Raises:
            RunError: They are others than the digest says.
        """
        if digest_of(content) != digest:
            raise RunError("the tensors that came are not those that were announced.", key="base")
        _written(self._folder / "base" / f"{_digest_checked(digest)}.ffit", content)
        _keep_newest(self._folder / "base", _BASES)


def _digest_checked(digest: str) -> str:
    if not _RUN.fullmatch(digest):
        raise RunError("a digest has 64 hexadecimal digits.", key="digest")
    return digest


def _keep_newest(folder: Path, count: int) -> None:
    kept = sorted(folder.glob("*.ffit"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[count:]:
        path.unlink(missing_ok=True)


def _written(path: Path, content: bytes | bytearray) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    with files.atomic_write(path, 0o600) as file:
        file.write(content)


# ---- answers -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def node_of(config: str) -> "Node":
    """Return the node of a configuration file, made once in a process.

    Raises:
        ConfigError: The file is wrong.
    """
    return Node(read_settings(config))


def answer(config: str, parts: Mapping[str, bytes | bytearray]) -> bytes:
    """Return a node's answer to a message, whatever the message is."""
    try:
        return node_of(config).answer(parts)
    except FleetFitError as error:
        return refusal(format_exception(error, 500))
    except MemoryError:
        return packed({"refused": "no memory was left on the node"})
    except Exception as error:  # no message of a server of ours, or a bug: say which, and go on with the next one
        _LOG.exception("A message could not be answered.")  # for who runs the node
        return packed({"refused": f"it failed unexpectedly: {format_exception(error)}"})


class Node:
    """A device of the fleet."""

    def __init__(self, settings: NodeSettings) -> None:
        """Take the configuration; data are loaded when they are asked for."""
        self.settings = settings
        self._memory = NodeMemory(Path(settings.folder))
        self._problems: dict[str, Problem] = {}
        self._memory_limit = MemoryLimit(settings.limit_bytes)

    @cached_property
    def data(self) -> Data:
        """The node's own data, where it computes."""
        return own_data(self.settings).to(self._accelerator)

    @cached_property
    def _accelerator(self) -> torch.device:
        return resolve_device(self.settings.device)

    def answer(self, parts: Mapping[str, bytes | bytearray]) -> bytes:
        """Answer one message.

        Raises:
            FleetFitError: It cannot be done; the message says why.
        """
        header = checked_header(unpack(_part(parts, "header"), bounded=True))
        if header["what"] == "hello":
            return packed(self._hello(header))
        if header["what"] == "base":
            self._memory.keep_base(header["base"], _part(parts, "base"))
        if header["what"] in ("setup", "base"):
            return packed(self._setup(header))
        if header["what"] == "secure":
            return self._secure(header, parts)
        if self._member is not None and header["job"].get("kind") != "evaluate":
            raise RunError("this node has a key of a member, and trains in secure rounds only.", key="secure.member")
        return self._job(header, parts)

    def introduced(self) -> str:
        """Say what the node is, and what it tells the server.

        Raises:
            FleetFitError: Its data cannot be had.
        """
        told = hello_of(self._hello({"asks_budget": True, "asks_labels": True})["hello"])
        budget = "no budget" if told.budget is None else f"its budget ({told.budget}, tolerance {told.tolerance:g})"
        labels = "" if told.labels is None else f", samples by class ({', '.join(map(str, told.labels))})"
        return (
            f"Node {told.name}: {told.facts.name}, {told.num_examples} training samples; {told.facts}. It tells the "
            f"server these numbers, {budget}{labels}. It keeps {self.settings.folder}."
        )

    # -- before the first round

    def _hello(self, header: Header) -> dict[str, Any]:
        """Tell what the server may know: sizes and kind of the data, and the budget if it is to be told."""
        data, settings = self.data, self.settings
        told: dict[str, Any] = {"name": settings.name, "facts": facts_of(data),
                                "examples": {name: len(indices) for name, indices in data.splits.items()}}  # fmt: skip
        if header["asks_budget"] and settings.reports_budget:
            told |= {"budget": told_budget(settings), "tolerance": settings.tolerance}
        if header["asks_labels"] and settings.reports_labels and data.task == "classification":
            told["labels"] = class_counts(data, [dict(data.splits)])[0].tolist()
        return {"hello": told}

    def _setup(self, header: Header) -> dict[str, Any]:
        """Build the problem, and say whether what is never trained is there."""
        _check_names(header, self.settings.allow)
        with _described("method"):
            build(header["method"])
        there = not header["base"] or self._memory.base(header["base"]) is not None
        if there:
            with self._limited():
                self._problem(header)
        return {"ready": there}

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Hold what is done to the memory limit; the data are loaded before, and belong to the node."""
        _ = self.data
        with self._memory_limit.held():
            yield

    def _problem(self, header: Header) -> Problem:
        key = key_of(header)
        if key not in self._problems:
            self._forget()
            spec = header["problem"]
            with _described("model that can be built"):
                asked = rebuild_problem({**spec, "model": {**spec["model"], **self.settings.model}})
                found = replace_emulated_bf16(asked, self._accelerator)
            if found is not asked:
                _LOG.warning("The run computes in bf16, which this device lacks: it computes in fp32 here.")
            if header["base"]:
                content = self._memory.base(header["base"])
                if content is None:
                    raise ConfigError("the tensors that are never trained are not on this node any more.", key="base")
                found = replace(found, base=unpack(content))
            self._problems = {key: found}
        return self._problems[key]

    def _forget(self) -> None:
        """Let go of what can be built again: on a small device it must not stand in the way of the next job."""
        self._problems = {}
        if self.settings.limit_bytes is not None:
            release_freed_memory()

    # -- secure rounds

    @cached_property
    def _member(self) -> Membership | None:
        """The node as a member of secure rounds, where it has a key for them."""
        own = self.settings.secure
        return None if own is None else Membership(Path(own.member), own.minimum, Path(self.settings.folder))

    def _secure(self, header: Header, parts: Mapping[str, bytes | bytearray]) -> bytes:
        if self._member is None:
            raise RunError(
                "this node has no key of a member: write one with fleetfit flower member, and name it in its "
                "configuration under [secure] member.",
                key="secure.member",
            )
        _check_names(header, self.settings.allow)
        message = bytes(parts.get("secure", b""))
        if header["secure"].get("phase") == "train":
            return self._job(header, parts, self._member.trained(header, message))
        if header["secure"].get("phase") not in PHASES:
            raise RunError("the server asks for a phase that secure rounds do not have.", key="phase")
        with self._limited(), _described("model that can be built"):
            return packed(self._member.answer(header, message, self._problem(header).layout, key_of(header)))

    # -- jobs

    def _job(self, header: Header, parts: Mapping[str, bytes | bytearray], finish: Finish | None = None) -> bytes:
        _check_names(header, self.settings.allow)
        key = key_of(header)
        if key not in self._problems and header["base"] and self._memory.base(header["base"]) is None:
            return packed({"lost": True})
        if self.settings.limit_bytes is not None:  # what earlier runs left behind must not count against this one
            with contextlib.suppress(_OutOfMemory, MemoryError), self._limited():
                return self._done(header, parts, finish)
            self._forget()
        try:
            with self._limited():
                return self._done(header, parts, finish)
        except _OutOfMemory as error:
            return packed({"reply": dump_failure(error.reply)})

    def _done(self, header: Header, parts: Mapping[str, bytes | bytearray], finish: Finish | None) -> bytes:
        names = ("state", "statistics")
        shared = {name: unpack(parts[name], bounded=True) if name in parts else {} for name in names}
        problem = self._problem(header)
        with _described("model that can be built"):
            layout = problem.layout
        job = load_job({**header["job"], **shared}, layout)
        wrong = find_job_error(job, problem)
        if wrong is not None:
            raise RunError(f"the server sent a malformed job: {wrong}")
        memory, forgot = self._memory.memory(header["run"], job.memory_version)
        with _described("model that can be built"):
            device = self._device(problem, job, header["cost"], memory)
        torch.set_num_threads(self.settings.threads)
        if self.settings.limit_bytes is None:
            keep_freed_memory()
        if job.evaluation.own:
            return packed({"refused": "which model it affords is what a node does not tell."})
        try:
            reply, remembers = run_job(job, device)
        except MemoryError:
            reply, remembers = _failed(job, "no memory was left"), memory
        if isinstance(reply, Failure) and is_out_of_memory(reply.reason):
            raise _OutOfMemory(reply)
        keeps = job.kind == "train" and not isinstance(reply, Failure) and remembers is not None
        if keeps:
            self._memory.keep(header["run"], job.memory_version, job.round, remembers)
        found = reply if finish is None else finish(job, reply)
        if isinstance(found, Update | Failure):
            found = {"reply": dump_reply(found, layout)}
        return packed({**found, "keeps": keeps, "forgot": forgot})

    def _device(self, problem: Problem, job: Job, cost: str, memory: Any) -> Device:
        settings, data = self.settings, self.data
        size = job.local.batch_size or len(data.split("train")) or BATCH_SIZE
        conditions = Conditions(size, moments=job.local.moments)
        return Device(problem, data, job.client, _fractions(settings, problem, cost, conditions), settings.tolerance,
                      conditions, memory, self._accelerator)  # fmt: skip


def _part(parts: Mapping[str, bytes | bytearray], name: str) -> bytes | bytearray:
    if name not in parts:
        raise RunError(f'a message has no part "{name}".', key=name)
    return parts[name]


@contextlib.contextmanager
def _described(what: str) -> Iterator[None]:
    """Turn what is raised while a server's description is followed into a sentence."""
    try:
        yield
    except FleetFitError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(f"the server describes no {what}: {format_exception(error)}.") from error


def _failed(job: Job, reason: str) -> Failure:
    return Failure.of(job, reason)


def _fractions(settings: NodeSettings, problem: Problem, cost: str, conditions: Conditions) -> dict[str, float]:
    """Return what the device affords by cost, as fractions of the full model's."""
    budget = settings.budget
    if budget is None:
        return {}
    if isinstance(budget, Mapping) and cost not in budget:
        cost = next(iter(budget))
    whole: Piece = ({}, (problem.architecture.blocks,))
    architecture, shape = problem.architecture, problem.input_shape
    found = convert_budgets([budget], cost, lambda name: compute_cost(architecture, whole, shape, name, conditions))
    return {name: float(values[0]) for name, values in found.items()}


def _check_names(header: Header, allow: list[str]) -> None:
    """Refuse whatever would run code that is neither built in nor allowed here.

    Raises:
        ConfigError: Something is named that the configuration does not allow.
    """
    job = header.get("job", {})
    evaluation = job.get("evaluation")  # what is wrong with it is said when the job is made
    metrics = evaluation.get("metrics") if isinstance(evaluation, Mapping) else None
    for text in _texts([header["problem"], header["method"], job.get("method"), metrics]):
        if ":" in text and text not in allow and names.make_absolute(text, Path.cwd()) not in allow:
            raise ConfigError(
                f'the server names "{text[:200]}", which is not built in. If this node is to run it, add it to '
                "allow in the node's configuration.",
                key="allow",
            )


def _texts(nest: Any) -> Iterator[str]:
    if isinstance(nest, str):
        yield nest
    elif isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from _texts(value)


class _OutOfMemory(Exception):
    """A job failed since there was no memory; the reply says so."""

    def __init__(self, reply: Failure) -> None:
        super().__init__(reply.reason)
        self.reply = reply
