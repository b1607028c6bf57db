"""The device's side: a node answers the server's messages with its own data, budget and memory.

It builds the model and the method from names, and only from built-in ones and those that its own configuration allows:
no message of a server can run other code.

The node's memory stays in its own folder (`NodeFiles`) and is never sent. The folder has the last two versions of a
run's memory: the one that the last job began with, and the one that it left, since the server's next job says which of
them was accepted. Files are `fleetfit.messages` messages, written atomically, so that a loss of power leaves either the
old or the new file.
"""

import contextlib
import functools
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from fleetfit import files, names
from fleetfit.core import Device, Failure, Job, Problem, Update
from fleetfit.core.nodes import parse_node_description
from fleetfit.cost import BATCH_SIZE, Conditions, Piece, compute_cost
from fleetfit.data import Data, class_counts
from fleetfit.data.transform import FILE as TRANSFORM
from fleetfit.engines.secure import make_label_layout
from fleetfit.errors import ConfigError, FleetFitError, RunError, format_exception, one_line
from fleetfit.fleet.node_log import NodeLog
from fleetfit.fleet.policy import PASSING, PolicyCheck
from fleetfit.fleet.protocol import (
    RUN,
    Header,
    check_header,
    compute_digest,
    describe_data,
    iter_texts,
    make_model_key,
    pack_message,
    pack_refusal,
    unpack_transform,
)
from fleetfit.fleet.secure_aggregation import PHASES, Member
from fleetfit.fleet.settings import NodeSettings, load_data, read_settings
from fleetfit.fleet.terms import Terms, check_terms, compute_fingerprint, list_code, parse_terms
from fleetfit.hooks import build, rebuild_problem
from fleetfit.machine import is_out_of_memory
from fleetfit.messages import dump_failure, dump_reply, load_job, pack, unpack
from fleetfit.planner import convert_budgets
from fleetfit.training import resolve_device, run_job
from fleetfit.training.runtime import (
    configure_allocator_to_return,
    keep_freed_memory,
    replace_emulated_bf16,
    trim_heap,
)
from fleetfit.validation import find_job_error

_LOG = logging.getLogger("fleetfit")
Finish = Callable[[Job, Update | Failure], dict[str, Any] | Failure]
"""Returns the answer to a training job's reply."""

# ---- memory on disk --------------------------------------------------------------------------------------------------

_MAX_RUNS = 8
_MAX_BASES = 3
_MAX_TRANSFORMS = 3
_DIGEST = re.compile(r"[0-9a-f]{64}")


class NodeFiles:
    """The files of a node, in a folder that the first of them creates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, run: str, version: int) -> tuple[Any, bool]:
        """Return the memory of a version (-1: none), and whether it is missing."""
        if version < 0:
            return None, False
        versions = self._read_versions(run)
        return versions.get(version), version not in versions

    def keep(self, run: str, before: int, version: int, memory: Any) -> None:
        """Store a new version beside the one that it began with."""
        versions = {v: m for v, m in self._read_versions(run).items() if v == before and v != version}
        versions[version] = memory
        content = pack({"versions": list(versions), "memories": list(versions.values())})
        _write(self._find_file(run), content)
        _keep_newest(self._folder / "runs", _MAX_RUNS)

    def _read_versions(self, run: str) -> dict[int, Any]:
        path = self._find_file(run)
        try:
            table = unpack(files.read_bytes(path))
            return dict(zip(table["versions"], table["memories"], strict=True))
        except FileNotFoundError:
            return {}
        except (RunError, KeyError, TypeError, ValueError, OSError):  # a damaged disk: as if there were no file
            return {}

    def _find_file(self, run: str) -> Path:
        if not RUN.fullmatch(run):
            raise RunError(f'"{run[:40]}" is not the name of a run.', key="run")
        return self._folder / "runs" / f"{run}.ffit"

    # -- what servers were told

    def load_told(self, run: str) -> str:
        """Return the digest of the description that a run's server has of the node; "" where none was sent."""
        try:
            return files.read_bytes(self._folder / "told" / f"{run}.ffit").decode()
        except (OSError, UnicodeDecodeError):
            return ""

    def keep_told(self, run: str, digest: str) -> None:
        """Store the digest of a description."""
        if digest != self.load_told(run):
            _write(self._folder / "told" / f"{run}.ffit", digest.encode())
            _keep_newest(self._folder / "told", _MAX_RUNS)

    # -- tensors that are never trained

    def load_base(self, digest: str) -> bytes | None:
        """Return the packed tensors of a digest, or None where they are missing or damaged."""
        try:
            content = files.read_bytes(self._find_base(digest))
        except OSError:
            return None
        return content if compute_digest(content) == digest else None

    def keep_base(self, digest: str, content: bytes | bytearray) -> None:
        """Store packed tensors.

        Raises:
            RunError: Their digest is another one.
        """
        if compute_digest(content) != digest:
            raise RunError("the tensors that came are not those that were announced.", key="base")
        _write(self._find_base(digest), content)
        _keep_newest(self._folder / "base", _MAX_BASES)

    def _find_base(self, digest: str) -> Path:
        return self._folder / "base" / f"{_check_digest(digest)}.ffit"

    # -- the fleet's transform

    def find_transform(self, digest: str) -> Path | None:
        """Return the folder of a transform, or None where it is missing."""
        folder = self._folder / "transforms" / _check_digest(digest)
        return folder if (folder / TRANSFORM).is_file() else None

    def keep_transform(self, digest: str, content: bytes | bytearray) -> None:
        """Store the files of a transform (see `pack_transform`).

        Raises:
            RunError: They have another digest, or are not those of a transform.
        """
        if compute_digest(content) != digest:
            raise RunError("the transform that came is not the one that was announced.", key="transform")
        texts = unpack_transform(content)
        if self.find_transform(digest) is None:
            (self._folder / "transforms").mkdir(parents=True, exist_ok=True, mode=0o700)
            for name in sorted(texts, key=TRANSFORM.__eq__):  # that one last: it marks a complete folder
                _write(self._folder / "transforms" / digest / name, texts[name].encode())
            _keep_newest(self._folder / "transforms", _MAX_TRANSFORMS, "*")


def _check_digest(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise RunError("a digest has 64 hexadecimal digits.", key="digest")
    return digest


def _keep_newest(folder: Path, count: int, pattern: str = "*.ffit") -> None:
    paths = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths[count:]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _write(path: Path, content: bytes | bytearray) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    with files.atomic_write(path, 0o600) as file:
        file.write(content)


# ---- memory of jobs --------------------------------------------------------------------------------------------------


class MemoryLimit:
    """Limits the memory of a job, beyond that of the process before its first one (Linux).

    The system limits the memory that is allocated. Memory that earlier jobs allocated and never wrote to does not
    count: torch's library allocates a quarter of a MiB and more for each kernel, and uses a few pages of it.
    """

    def __init__(self, limit_bytes: float | None) -> None:
        """Set the limit; None: none.

        Raises:
            ConfigError: This is not Linux.
        """
        if limit_bytes is not None and not sys.platform.startswith("linux"):
            raise ConfigError("memory_limit works on Linux only; leave it out.", key="memory_limit")
        self._limit, self._before = limit_bytes, (0, 0)
        if limit_bytes is not None:
            configure_allocator_to_return()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold a block to the limit: beyond it MemoryError is raised, or torch's RuntimeError."""
        if self._limit is None:
            yield
            return
        import resource

        memory = psutil.Process().memory_info()
        allocated, unused = memory.data, max(0, memory.data - (memory.rss - memory.shared))
        if not self._before[0]:
            self._before = allocated, unused
        bound = self._before[0] + max(0, unused - self._before[1]) + int(self._limit)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


# ---- answers -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def get_node(config: str) -> "Node":
    """Return the node of a configuration file, made once in a process.

    Raises:
        ConfigError: The file is wrong.
    """
    return Node(read_settings(config))


def answer(config: str, parts: Mapping[str, bytes | bytearray]) -> bytes:
    """Return a node's answer to any message; a failure is an answer too.

    It is empty if this process is older than code that the message names: a new one has to answer.
    """
    try:
        return get_node(config).answer(parts)
    except Exception as error:  # its configuration is wrong, or its log cannot be written
        return pack_refusal(_explain(error))


def _explain(error: Exception) -> str:
    """Return the reason of a refusal: of a foreign server's message or of a bug, since the node must survive both."""
    if isinstance(error, FleetFitError):
        return format_exception(error, 500)
    if isinstance(error, MemoryError):
        return "no memory was left on the node"
    _LOG.error("A message could not be answered.", exc_info=error)  # for the node's own log
    return f"it failed unexpectedly: {format_exception(error)}"


class Node:
    """A device of the fleet."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self._memory = NodeFiles(Path(settings.folder))
        self._problems: dict[str, Problem] = {}
        self._memory_limit = MemoryLimit(settings.limit_bytes)
        self._transform = ""
        self._compared: set[str] = set()  # runs whose servers know the data as this process has them
        self._log = NodeLog(Path(settings.folder))
        self._policy = PolicyCheck(settings, self._log)
        self._code = {name: names.compute_file_digest(name)[1] for name in settings.allow}  # as this process imports it

    @cached_property
    def data(self) -> Data:
        """The node's own data, on the device that computes; loaded at the first use."""
        transform = self._memory.find_transform(self._transform) if self._transform else None
        return load_data(self.settings, transform).to(self._accelerator)

    def _use_transform(self, digest: str) -> bool:
        """Have the data prepared by another transform, "" for none; return whether the node has it."""
        if digest != self._transform:
            self.__dict__.pop("data", None)
            self._compared.clear()
            self._transform = digest
        return not digest or "data" in self.__dict__ or self._memory.find_transform(digest) is not None

    @cached_property
    def _accelerator(self) -> torch.device:
        return resolve_device(self.settings.device)

    def answer(self, parts: Mapping[str, bytes | bytearray]) -> bytes:
        """Answer one message; with nothing if its code is newer than this process.

        The log has the message, the owner's decision and what leaves the node, before that leaves.
        """
        received, about = sum(map(len, parts.values())), dict[str, Any](what="unknown")
        try:
            header = check_header(unpack(_get_part(parts, "header"), bounded=True))
            about = _describe_request(header)
            check_names(header, self.settings.allow)
            with _blame_server("run"):
                own_header = use_own_names(header, self.settings.allow)
                check_terms(own_header)
                code = check_code(header["terms"], self.settings.allow)
                spent = self._policy.check(header, received)
        except Exception as error:
            reason, again = _explain(error), isinstance(error, RunError) and error.key in PASSING
            self._log.add("refused", **about, bytes=received, reason=reason)
            return pack_message({"refused": reason, "log": self._log.head, **({"again": True} if again else {})})
        if any(self._code[name] != digest for name, digest in code.items()):
            return b""
        header = {**own_header, "terms": header["terms"]}
        self._log.add("allowed", **about, bytes=received)
        try:
            table = self._make_answer(header, parts)
        except Exception as error:
            table = {"refused": _explain(error)}
        content = pack_message(table)
        about |= {"reason": table["refused"]} if "refused" in table else {}
        about |= {} if spent is None else {"epsilon": round(spent, 4)}
        self._log.add("left", **about, bytes=len(content), sha256=compute_digest(content))
        del content  # the device may lack the memory for both
        return pack_message({**table, "log": self._log.head})

    def _make_answer(self, header: Header, parts: Mapping[str, bytes | bytearray]) -> dict[str, Any]:
        """Return the table of an answer.

        Raises:
            FleetFitError: The message cannot be answered.
        """
        if header["transform"] and (header["what"] == "hello" or "transform" in parts):
            self._memory.keep_transform(header["transform"], _get_part(parts, "transform"))
        if not self._use_transform(header["transform"]):
            return {"lost": True}
        if header["what"] == "hello":
            return self._tell(header)
        if header["what"] == "setup":
            return self._set_up(header) | self._tell(header)
        if header["what"] == "base":
            self._memory.keep_base(header["base"], _get_part(parts, "base"))
            return self._set_up(header)
        if header["job"].get("kind") == "labels" and not self.settings.reports_labels:
            raise RunError(
                "this node does not report how frequent its classes are. Set reports_labels in its configuration.",
                key="reports_labels",
            )
        if header["what"] == "secure":
            return self._run_phase(header, parts)
        if self._member is not None and header["job"].get("kind") != "evaluate":
            raise RunError("this node has a key of a member, and trains in secure rounds only.", key="secure.member")
        return self._run_job(header, parts)

    def format_description(self) -> str:
        """Return what the node is, and what it reports to the server, as a sentence.

        Raises:
            FleetFitError: Its data cannot be loaded.
        """
        node = parse_node_description(self._describe({"asks_budget": True, "asks_labels": True})["hello"])
        budget = "no budget" if node.budget is None else f"its budget ({node.budget}, tolerance {node.tolerance:g})"
        labels = "" if node.labels is None else f", samples by class ({', '.join(map(str, node.labels))})"
        return (
            f"Node {node.name}: {node.facts.name}, {node.num_examples} training samples; {node.facts}. It reports to "
            f"the server these numbers, {budget}{labels}. Its folder is {self.settings.folder}."
        )

    # -- before the first round

    def _describe(self, terms: Terms) -> dict[str, Any]:
        """Return what the server may know: sizes and kind of the data, and the budget if it is to be reported."""
        data, settings = self.data, self.settings
        table: dict[str, Any] = {"name": settings.name, "facts": describe_data(data),
                                 "examples": {name: len(indices) for name, indices in data.splits.items()}}  # fmt: skip
        if terms["asks_budget"] and settings.reports_budget:
            table |= {"budget": 1.0 if settings.budget is None else settings.budget, "tolerance": settings.tolerance}
        if terms["asks_labels"] and settings.reports_labels and data.task == "classification":
            table["labels"] = class_counts(data, [dict(data.splits)])[0].tolist()
        return {"hello": table}

    def _tell(self, header: Header) -> dict[str, Any]:
        table = self._describe(header["terms"])
        self._memory.keep_told(header["run"], _compute_table_digest(table))
        return table

    def _is_as_told(self, header: Header) -> bool:
        """Return whether the run's server knows the node as it is: a process that began later may find other data."""
        run = header["run"]
        if run not in self._compared:
            told = self._memory.load_told(run)
            if told and told != _compute_table_digest(self._describe(header["terms"])):
                return False
            self._compared.add(run)
        return True

    def _set_up(self, header: Header) -> dict[str, Any]:
        """Build the problem, and return whether the node has the tensors that are never trained."""
        with _blame_server("method"):
            build(header["method"])
        has_base = not header["base"] or self._memory.load_base(header["base"]) is not None
        if has_base:
            with self._limit_ram():
                self._build_problem(header)
        return {"ready": has_base}

    @contextlib.contextmanager
    def _limit_ram(self) -> Iterator[None]:
        """Hold a block to the memory limit; the data are loaded before it, and do not count."""
        _ = self.data
        with self._memory_limit.hold():
            yield

    def _build_problem(self, header: Header) -> Problem:
        key = make_model_key(header)
        if key not in self._problems:
            self._forget_problems()
            spec = header["problem"]
            with _blame_server("model that can be built"):
                described = rebuild_problem({**spec, "model": {**spec["model"], **self.settings.model}})
                problem = replace_emulated_bf16(described, self._accelerator)
            if problem is not described:
                _LOG.warning("The run computes in bf16, which this device lacks: it computes in fp32 here.")
            if header["base"]:
                content = self._memory.load_base(header["base"])
                if content is None:
                    raise ConfigError("the tensors that are never trained are not on this node any more.", key="base")
                problem = replace(problem, base=unpack(content))
            self._problems = {key: problem}
        return self._problems[key]

    def _forget_problems(self) -> None:
        """Free what can be built again: on a small device the next job needs its memory."""
        self._problems = {}
        if self.settings.limit_bytes is not None:
            trim_heap()

    # -- secure rounds

    @cached_property
    def _member(self) -> Member | None:
        """The node as a member of secure rounds, where it has a key for them."""
        own = self.settings.secure
        return None if own is None else Member(Path(own.member), own.min_clients, Path(self.settings.folder))

    def _run_phase(self, header: Header, parts: Mapping[str, bytes | bytearray]) -> dict[str, Any]:
        if self._member is None:
            raise RunError(
                "this node has no key of a member: write one with fleetfit flower member, and name it in its "
                "configuration under [secure] member.",
                key="secure.member",
            )
        message = bytes(parts.get("secure", b""))
        if header["secure"].get("phase") == "train":
            return self._run_job(header, parts, self._member.make_finish(header, message))
        if header["secure"].get("phase") not in PHASES:
            raise RunError("the server asks for a phase that secure rounds do not have.", key="phase")
        with self._limit_ram(), _blame_server("model that can be built"):
            layout = self._build_problem(header).layout
            if header["job"].get("kind") == "labels":
                layout = make_label_layout(layout, self.data.classes)
            return self._member.answer(header, message, layout, make_model_key(header))

    # -- jobs

    def _run_job(
        self, header: Header, parts: Mapping[str, bytes | bytearray], finish: Finish | None = None
    ) -> dict[str, Any]:
        key = make_model_key(header)
        has_base = key in self._problems or not header["base"] or self._memory.load_base(header["base"]) is not None
        if not has_base or not self._is_as_told(header):
            return {"lost": True}
        if self.settings.limit_bytes is not None:  # memory of earlier runs must not count against this one
            with contextlib.suppress(_OutOfMemory, MemoryError), self._limit_ram():
                return self._try_job(header, parts, finish)
            self._forget_problems()
        try:
            with self._limit_ram():
                return self._try_job(header, parts, finish)
        except _OutOfMemory as error:
            return {"reply": dump_failure(error.reply)}

    def _try_job(self, header: Header, parts: Mapping[str, bytes | bytearray], finish: Finish | None) -> dict[str, Any]:
        tensors = {
            key: unpack(parts[key], bounded=True) if key in parts else {} for key in ("state", "statistics", "extra")
        }
        problem = self._build_problem(header)
        with _blame_server("model that can be built"):
            layout = problem.layout
        job = load_job({**header["job"], **tensors}, layout)
        fault = find_job_error(job, problem)
        if fault is not None:
            raise RunError(f"the server sent a malformed job: {fault}")
        memory, forgot = self._memory.load(header["run"], job.memory_version)
        with _blame_server("model that can be built"):
            device = self._make_device(problem, job, header["cost"], memory)
        torch.set_num_threads(self.settings.threads)
        if self.settings.limit_bytes is None:
            keep_freed_memory()
        if job.evaluation.own:
            raise RunError("a node does not reveal which model it affords.", key="own")
        try:
            reply, new_memory = run_job(job, device)
        except MemoryError:
            reply, new_memory = Failure.of(job, "no memory was left"), memory
        if isinstance(reply, Failure) and is_out_of_memory(reply.reason):
            raise _OutOfMemory(reply)
        keeps = job.kind == "train" and not isinstance(reply, Failure) and new_memory is not None
        if keeps:
            self._memory.keep(header["run"], job.memory_version, job.round, new_memory)
        outcome = reply if finish is None else finish(job, reply)
        table = {"reply": dump_reply(outcome, layout)} if isinstance(outcome, Update | Failure) else outcome
        return {**table, "keeps": keeps, "forgot": forgot}

    def _make_device(self, problem: Problem, job: Job, cost: str, memory: Any) -> Device:
        settings, data = self.settings, self.data
        size = job.local.count_batch(len(data.split("train"))) or BATCH_SIZE
        conditions = Conditions(size, moments=job.local.moments)
        return Device(problem, data, job.client, _compute_budgets(settings, problem, cost, conditions),
                      settings.tolerance, conditions, memory, self._accelerator)  # fmt: skip


def _compute_table_digest(table: Mapping[str, Any]) -> str:
    return compute_digest(json.dumps(table, sort_keys=True).encode())


def _describe_request(header: Header) -> dict[str, Any]:
    """Return what the log has of a message."""
    job, terms = header.get("job", {}), header["terms"]
    about = {"what": header["what"], "run": header["run"], "name": one_line(terms.get("name"), 60),
             "fingerprint": compute_fingerprint(terms)}  # fmt: skip
    if "problem" in header:
        about["model"] = compute_digest(make_model_key(header).encode())
    about |= {"kind": one_line(job["kind"], 20)} if "kind" in job else {}
    about |= {"round": job["round"]} if type(job.get("round")) is int and 0 <= job["round"] < 1 << 31 else {}
    return about | ({"phase": one_line(header["secure"].get("phase"), 20)} if "secure" in header else {})


def _get_part(parts: Mapping[str, bytes | bytearray], name: str) -> bytes | bytearray:
    if name not in parts:
        raise RunError(f'a message has no part "{name}".', key=name)
    return parts[name]


@contextlib.contextmanager
def _blame_server(what: str) -> Iterator[None]:
    """Raise a ConfigError in place of what a server's wrong description of a model or method raises."""
    try:
        yield
    except FleetFitError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(f"the server describes no {what}: {format_exception(error)}.") from error


def _compute_budgets(settings: NodeSettings, problem: Problem, cost: str, conditions: Conditions) -> dict[str, float]:
    """Return what the device affords by cost, as fractions of the full model's."""
    budget = settings.budget
    if budget is None:
        return {}
    if isinstance(budget, Mapping) and cost not in budget:
        cost = next(iter(budget))
    whole: Piece = ({}, (problem.architecture.blocks,))
    architecture, shape = problem.architecture, problem.input_shape
    fractions = convert_budgets([budget], cost, lambda name: compute_cost(architecture, whole, shape, name, conditions))
    return {name: float(values[0]) for name, values in fractions.items()}


def find_own_name(name: str, allow: list[str]) -> str | None:
    """Return the name in `allow` that a server's name of code means, or None.

    The path of a file is another one on the server: the file's own name and the function's decide, if one entry has
    them, and `check_code` compares the contents.
    """
    absolute = names.make_absolute(name, Path.cwd())
    if absolute in allow:
        return absolute
    own = [one for one in allow if ".py:" in one and names.drop_folders(one) == names.drop_folders(name)]
    return own[0] if len(own) == 1 else None


def use_own_names(header: Header, allow: list[str]) -> Header:
    """Return a header with the user's code by the names that it has here."""
    own = {name: find_own_name(name, allow) or name for name in list_code(parse_terms(header["terms"]))}

    def rename(value: Any) -> Any:
        if isinstance(value, str):
            return own.get(value, value)
        if isinstance(value, Mapping):
            return {key: rename(inner) for key, inner in value.items()}
        return type(value)(map(rename, value)) if isinstance(value, list | tuple) else value

    return rename(header) if any(name != here for name, here in own.items()) else header


def check_names(header: Header, allow: list[str]) -> None:
    """Refuse names of code that is neither built in nor allowed here.

    Raises:
        ConfigError: The configuration does not allow a name.
    """
    job = header.get("job", {})
    evaluation = job.get("evaluation")  # `load_job` checks it
    metrics = evaluation.get("metrics") if isinstance(evaluation, Mapping) else None
    problem = header.get("problem")
    if isinstance(problem, Mapping):  # names of tensors and axes are compared with the model's
        problem = {key: value for key, value in problem.items() if key not in ("derived", "levels")}
    for text in iter_texts([problem, header.get("method"), job.get("method"), metrics]):
        if ":" in text and find_own_name(text, allow) is None:
            raise ConfigError(
                f'the server names "{text[:200]}", which is not built in. If this node is to run it, add '
                f'"{names.drop_folders(text)[:200]}" to allow in the node\'s configuration, and a file beside that.',
                key="allow",
            )


def check_code(terms: Terms, allow: list[str]) -> dict[str, str]:
    """Refuse a run whose code is another one than that of the same name here; of names that are allowed.

    Returns:
        The SHA-256 of the files here, by the names of `allow`.

    Raises:
        RunError: It is.
    """
    code = {}
    for name in list_code(terms):
        allowed = find_own_name(name, allow)
        if allowed is None:
            continue
        file, code[allowed] = names.compute_file_digest(allowed)
        digest, own = terms["code"].get(name, ""), code[allowed]
        if own != digest:
            raise RunError(
                f'the code of "{name}" is another one here: {file} has SHA-256 {own or "none"}, and the server has '
                f"{one_line(digest, 64) or 'none'}. Use the same file on both sides.",
                key="code",
            )
    return code


class _OutOfMemory(Exception):
    """A job failed since there was no memory; the reply says so."""

    def __init__(self, reply: Failure) -> None:
        super().__init__(reply.reason)
        self.reply = reply
