"""`RunFolder`: read and write the files of a run folder, safe against kills and untrusted files."""

import contextlib
import datetime
import errno
import hashlib
import json
import logging
import math
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from fleetfit import files
from fleetfit.errors import COMMAND, ConfigError, FleetFitError, RunError
from fleetfit.names import get_short_name
from fleetfit.runs import InvalidRecord

if TYPE_CHECKING:  # listing run folders imports neither PyTorch nor pydantic
    from fleetfit.core import NodeDescription
    from fleetfit.planner import Plan
    from fleetfit.runs.schema import (
        AccuracyRecord,
        EnvironmentRecord,
        FleetRecord,
        NodesRecord,  # noqa: F401 - in a text
        Record,
        RoundRecord,
        SummaryRecord,
    )
    from fleetfit.runs.summary import Best

R = TypeVar("R", bound="Record")
T = TypeVar("T")
N = TypeVar("N", bound="RoundReport")


class RoundReport(Protocol):
    """A round's report, as far as it is read."""

    @property
    def round(self) -> int:
        """Its number, from 1."""
        ...


_CHECKPOINT = re.compile(r"round-(\d{6,12})\.safetensors")
_BASE = "base.safetensors"
_CONFIG, _METRICS, _SUMMARY = "config.toml", "metrics.jsonl", "summary.json"
NODES = "nodes.json"
"""The nodes of a fleet's run."""
_logger = logging.getLogger("fleetfit")

CheckpointCheck = Callable[[Any, int], Any]
"""Returns a checkpoint from the file of a round as it is used; raises `CheckpointError` if it cannot be."""


def to_json_value(value: Any) -> Any:
    """Return JSON values. NaN and infinity, which JSON lacks, become None."""
    if isinstance(value, Mapping):
        return {str(key): to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(inner) for inner in value]
    if hasattr(value, "item"):  # a scalar of NumPy
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def choose_path(root: Path, name: str, config: str) -> Path:
    """Return an unused path `root/<time>-<name>-<short hash of the configuration>`."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    slug = re.sub(r"[^\w.]+", "-", name).strip("-") or "run"
    base = root / f"{stamp}-{slug}-{hashlib.sha256(config.encode()).hexdigest()[:6]}"
    path, count = base, 2
    while path.exists():
        path, count = base.with_name(f"{base.name}-{count}"), count + 1
    return path


def compute_checksum(config: str) -> str:
    """Return the checksum of a text of `config.toml`, for `environment.json`."""
    return hashlib.sha256(config.encode(errors="surrogatepass")).hexdigest()


@contextlib.contextmanager
def _run_errors(path: Path, state: str) -> Iterator[None]:
    """Raise OSErrors of the block as RunErrors: `<path> <state>: <reason>`."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} {state}: {files.format_os_error(error)}.", path=path) from None


class StoredFile(Generic[T]):
    """A file of a run folder as an attribute, read when it is first used.

    A missing file reads as the default, and so does a damaged one, which `RunFolder.find_problems` names.
    """

    def __init__(self, name: str, read: "Callable[[RunFolder], T]", make_default: Callable[[], T]) -> None:
        self.name, self._read, self._make_default = name, read, make_default

    def __get__(self, folder: "RunFolder", owner: type) -> T:
        """Return the content."""
        return self.load(folder)[0]

    def load(self, folder: "RunFolder") -> tuple[T, str]:
        """Return the content, and its damage as a sentence."""
        if self.name not in folder._contents:
            folder._contents[self.name] = self._load(folder)
        content: tuple[T, str] = folder._contents[self.name]
        return content

    def _load(self, folder: "RunFolder") -> tuple[T, str]:
        try:
            return self._read(folder) if self.name == _CONFIG or folder.has(self.name) else self._make_default(), ""
        except (FleetFitError, ValueError, RecursionError) as error:
            reason = str(error).replace(str(folder.path / self.name), self.name)
            reason = reason if reason.startswith(self.name) else f"{self.name} cannot be read: {reason}"
            return self._make_default(), reason


@dataclass(frozen=True)
class RunFolder:
    """A run folder on disk.

    Methods read a file anew, and raise an error if it is missing or damaged. The attributes `config`, `rounds`,
    `summary` and others are for pages and lists: each file is read once, as far as it can be read.
    """

    path: Path
    _contents: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def create(path: Path, texts: Mapping[str, str], base: Mapping[str, Any] | None = None) -> "RunFolder":
        """Create a run folder with its first files, atomically.

        Args:
            path: The folder.
            texts: The first files by name.
            base: Frozen tensors of the model, for `base.safetensors`.

        Raises:
            RunError: The folder exists and is not empty, or cannot be created.
        """
        path = files.parse_path(path)
        try:
            target = files.follow_links(path)
            RunFolder.check_unused(path, f"fleetfit resume {path}", f"fleetfit report {path}")
            with files.atomic_folder(target) as part:
                (part / "checkpoints").mkdir()
                for name, text in texts.items():
                    (part / name).write_bytes(text.encode())
                    files.flush_to_disk(part / name)
                if base:
                    from fleetfit.runs.checkpoints import write_checkpoint  # imports PyTorch

                    write_checkpoint(part / _BASE, base)
                if target.exists():
                    target.rmdir()
                files.flush_to_disk(part)
                part.replace(target)
                files.flush_to_disk(target.parent)
        except OSError as error:
            raise RunError(f"cannot create the run folder {path}: {files.format_os_error(error)}.", path=path) from None
        except UnicodeEncodeError:
            raise RunError(
                f"cannot create the run folder {path}: a name or path in its configuration is not UTF-8 text.",
                path=path,
            ) from None
        return RunFolder(path)

    @staticmethod
    def check_unused(path: Path, resume_command: str, open_command: str) -> None:
        """Check that a path has nothing, or an empty folder.

        Args:
            path: The path.
            resume_command: What continues the run in a folder that has one.
            open_command: What opens it, if it is finished.

        Raises:
            RunError: It has something else.
            OSError: It cannot be read.
        """
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file. Choose another folder.", path=path)
        if path.exists() and any(path.iterdir()):
            config = path / "config.toml"
            if files.is_file(config) and files.is_file(path / "summary.json"):
                raise RunError(
                    f"{path} has a finished run. Choose another folder, or open the run (first line). To train it "
                    "longer, continue it (second line) with more rounds: --set rounds=20, or rounds=20 in Python:"
                    f"{COMMAND}{open_command}{COMMAND}{resume_command}",
                    path=path,
                )
            advice = f", or continue its run:{COMMAND}{resume_command}" if files.is_file(config) else "."
            raise RunError(f"{path} is not empty. Choose another folder{advice}", path=path)

    @staticmethod
    def open(path: str | Path, advice: str = "") -> "RunFolder":
        """Return an existing run folder.

        Args:
            path: The folder.
            advice: A sentence for the error if it is the folder of a comparison.

        Raises:
            RunError: The folder is missing, or is not a run folder.
        """
        path = files.parse_path(path)
        with _run_errors(path, "cannot be read"):
            if not path.is_dir():
                raise RunError(f"no such run folder: {path}.{files.suggest_neighbor(path)}", path=path)
            if not files.is_file(path / "config.toml"):
                hint = ""
                if any(files.is_file(path / name) for name in ("results.json", "runs.json")):
                    hint = f" It is a comparison; load_comparison in Python opens it.{advice}"
                    if configs := sorted(path.glob("*/**/config.toml")):
                        hint += f" Name the folder of one of its runs:{COMMAND}{shlex.quote(str(configs[0].parent))}"
                raise RunError(f"{path} is not a run folder: it has no config.toml.{hint}", path=path)
        return RunFolder(path)

    @staticmethod
    def open_fleet(path: str | Path) -> "RunFolder":
        """Return the folder of a fleet's run, which may be continued.

        Raises:
            RunError: The folder is missing, or is not of a fleet's run.
        """
        folder = RunFolder.open(path)
        if not folder.has(NODES):
            raise RunError(
                f"{folder.path} is not a fleet's run; continue it with: fleetfit resume {folder.path}.",
                path=folder.path,
            )
        return folder

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Lock the folder for other processes during the block. The lock ends with the process.

        Raises:
            RunError: Another process holds the lock, or the folder cannot be written.
        """
        with contextlib.ExitStack() as stack:
            with _run_errors(self.path, "cannot be written into"):
                try:
                    stack.enter_context(files.hold_lock(self.path / ".lock"))
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        raise
                    raise RunError(
                        f"another process is writing to {self.path}. Wait for it, or stop it.", path=self.path
                    ) from None
            yield

    # -- single files

    def has(self, name: str) -> bool:
        """Return whether the folder has a file.

        Raises:
            RunError: The path is not a regular file.
        """
        with _run_errors(self.path / name, "cannot be read"):
            return files.is_file(self.path / name)

    def text(self, name: str) -> str:
        """Return the text of a file.

        Raises:
            RunError: The file is missing or cannot be read.
        """
        return files.read_text(self.path / name, RunError)

    def json(self, name: str) -> Any:
        """Return the value of a JSON file. The caller validates it.

        Raises:
            RunError: The file is missing or damaged.
        """
        path = self.path / name
        try:
            return files.parse_json(self.text(name))
        except ValueError as error:
            raise RunError(f"{path} is damaged: {error}.", path=path) from None

    def read(self, name: str, model: type[R], remedy: str = "") -> R:
        """Return a JSON file as a record.

        Args:
            name: The file.
            model: The model of its content.
            remedy: Remedy for a damaged file, as a sentence.

        Raises:
            RunError: The file is missing or damaged, or a later version of FleetFit wrote it.
        """
        return model.read(self.path / name, remedy)

    def read_config(self) -> dict[str, Any]:
        """Return the tables of `config.toml`, without validation.

        Raises:
            RunError: The file is missing or damaged.
        """
        path = self.path / _CONFIG
        try:
            return tomllib.loads(self.text(_CONFIG))
        except ValueError as error:  # a number with too many digits raises another error than TOMLDecodeError
            raise RunError(f"{path} is damaged: {error}.", path=path) from None
        except RecursionError:
            raise RunError(f"{path} is damaged: it is nested too deeply.", path=path) from None

    def read_plan(self) -> "Plan":
        """Return the levels with their sizes and costs.

        Raises:
            RunError: The file is missing or damaged.
        """
        from fleetfit.planner import Plan  # imports PyTorch

        path = self.path / "plan.toml"
        try:
            return Plan.from_toml(self.text("plan.toml"))
        except ConfigError as error:
            raise RunError(f"{path} is damaged: {error}", key=error.key, path=path) from None

    def _read_environment(self) -> "EnvironmentRecord":
        """Return the environment, without a change that was stopped before `config.toml` was written."""
        record = self.read("environment.json", _import_schema().EnvironmentRecord)
        if record.changed and record.changed[-1].before == compute_checksum(self.text(_CONFIG)):
            record.changed.pop()
        return record

    def read_fleet(self) -> "FleetRecord":
        """Return the clients of the run.

        Raises:
            RunError: The file is missing or damaged.
        """
        from fleetfit.runs.schema import FleetRecord  # imports pydantic

        return self.read("fleet.json", FleetRecord)

    def read_nodes(self, kind: Literal["planned", "members"] = "planned") -> "list[NodeDescription]":
        """Return the nodes of a fleet's run: those that its levels were planned for, or its members.

        Raises:
            RunError: The file is damaged.
        """
        from fleetfit.core.nodes import parse_node_description  # imports PyTorch

        try:
            return [parse_node_description(node) for node in self.json(NODES)[kind]]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self.path / NODES} is damaged: {error}.", path=self.path / NODES) from None

    def read_summary(self) -> "SummaryRecord":
        """Return the final numbers of a finished run.

        Raises:
            RunError: The file is missing or damaged, or a later version of FleetFit wrote it.
        """
        from fleetfit.runs.schema import SummaryRecord  # imports pydantic

        path, remedy = self.path / _SUMMARY, f'Remove it, and "fleetfit resume {self.path}" writes it again.'
        summary = self.read(_SUMMARY, SummaryRecord, remedy)
        if not summary.levels:
            raise RunError(f"{path} is damaged: it has no levels. {remedy}", key="levels", path=path)
        return summary

    def write(self, name: str, text: str) -> None:
        """Write a file atomically.

        Raises:
            RunError: The file cannot be written, or a folder between is a link.
        """
        with _run_errors(self.path / name, "cannot be written"):
            files.write_text(files.safe_join(self.path, name), text)

    def is_edited(self) -> bool:
        """Return whether `config.toml` differs from its checksums in `environment.json`."""
        written, now = self.environment.sha256.get(_CONFIG), compute_checksum(self.text(_CONFIG))
        return written is not None and now not in (written, *(one.after for one in self.environment.changed))

    def record_resumption(self, round: int) -> None:
        """Record a resumption after a round, with its environment, in `environment.json`. Failures are ignored."""
        from fleetfit.runs.environment import describe_environment  # its imports are slow

        environment = RunFolder(self.path).environment.dump()
        environment["resumed"] = [*environment.get("resumed", ()), {"round": round, **describe_environment()}]
        with contextlib.suppress(RunError):
            self.write("environment.json", json.dumps(environment, indent=2) + "\n")

    # -- metrics

    def append(self, report: Mapping[str, Any]) -> None:
        """Append the report of a round to `metrics.jsonl`.

        Raises:
            RunError: The disk is full, or the file cannot be written.
        """
        path = self.path / "metrics.jsonl"
        try:
            files.append_line(path, (json.dumps(to_json_value(report), allow_nan=False) + "\n").encode())
        except OSError as error:
            raise RunError(
                f"{path} cannot be written: {files.format_os_error(error)}. The last checkpoint is intact.", path=path
            ) from None

    def metrics(self, after: int = 0) -> list[dict[str, Any]]:
        """Return the reports of the rounds as tables. An incomplete last line does not count.

        Args:
            after: The number of rounds to leave out at the beginning.

        Raises:
            RunError: A line is damaged, or belongs to another round.
        """
        return [files.parse_json(text) for text, _ in self._read_intact_lines(_load_round, after)]

    def read_rounds(self) -> "list[RoundRecord]":
        """Return the reports of the rounds. An incomplete last line does not count.

        Raises:
            RunError: A line is damaged, or belongs to another round.
        """
        return self.read_reports(_load_round)

    def read_reports(self, load: Callable[[Any], N]) -> list[N]:
        """Return the reports of the rounds as `load` returns them. An incomplete last line does not count.

        Raises:
            RunError: A line is damaged, or belongs to another round.
        """
        return [report for _, report in self._read_intact_lines(load)]

    def count_reports(self) -> int:
        """Return the number of rounds before the first damaged line.

        Raises:
            RunError: The file cannot be read.
        """
        return len(self._read_lines(_load_round)[0])

    def _read_intact_lines(self, load: Callable[[Any], N], after: int = 0) -> list[tuple[str, N]]:
        lines, error, is_incomplete = self._read_lines(load, after)
        if error is None or is_incomplete:
            return lines
        path, number = self.path / _METRICS, after + len(lines) + 1
        key = error.key if isinstance(error, InvalidRecord) else None
        remedy = "" if key else " Remove this line and those after it."
        raise RunError(f"{path}, line {number}, is damaged: {error}.{remedy}", key=key, path=path)

    def _read_lines(
        self, load: Callable[[Any], N], after: int = 0
    ) -> tuple[list[tuple[str, N]], ValueError | None, bool]:
        """Return the lines of `metrics.jsonl` before the first damaged one, its damage, and whether it is the last.

        The first `after` lines are neither checked nor returned.
        """
        if not self.has(_METRICS):
            return [], None, False
        *texts, remainder = files.read_bytes(self.path / _METRICS, RunError).split(b"\n")
        lines: list[tuple[str, N]] = []
        for number, line in enumerate(texts[after:], after + 1):
            try:
                text = line.decode()
                report = load(files.parse_json(text))
                if report.round != number:
                    raise ValueError(f"it is not of round {number}")
            except ValueError as error:
                is_last = number == len(texts) and not remainder
                return lines, error, is_last and not isinstance(error, InvalidRecord)
            lines.append((text, report))
        return lines, None, False

    def has_rounds(self) -> bool:
        """Return whether a round was written, completely or partly."""
        return self.has("metrics.jsonl") or bool(self.checkpoints())

    def rewind(self, round: int) -> None:
        """Remove files and lines of later rounds, and temporary files of killed processes.

        Raises:
            RunError: The folder cannot be written, or a folder in it is a link.
        """
        lines = self._read_lines(_load_round)[0][:round]
        with _run_errors(self.path, "cannot be written into"):
            checkpoints = files.safe_join(self.path, "checkpoints/any").parent
            for part in (*self.path.glob(".*.part"), *checkpoints.glob(".*.part")):
                shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink(missing_ok=True)
            for path in self.checkpoints():
                if parse_round(path) > round:
                    path.unlink(missing_ok=True)
        self.write("metrics.jsonl", "".join(f"{text}\n" for text, _ in lines))

    # -- tensors

    def load_base(self) -> dict[str, Any]:
        """Return the frozen tensors of the model; empty if there are none.

        Raises:
            RunError: The file is damaged or has an unknown format.
        """
        from fleetfit.runs.checkpoints import CheckpointError, read_checkpoint  # imports PyTorch

        path = self.path / _BASE
        if not self.has(_BASE):
            return {}
        try:
            base = read_checkpoint(path)
            if not isinstance(base, dict):
                raise CheckpointError("it is not a table of tensors")
        except CheckpointError as error:
            raise RunError(f"{path} is damaged: {error}.", path=path) from None
        return base

    def checkpoints(self) -> list[Path]:
        """Return the checkpoint files, oldest first."""
        paths = (self.path / "checkpoints").glob("round-*.safetensors")
        return sorted((path for path in paths if _CHECKPOINT.fullmatch(path.name)), key=parse_round)

    def save_checkpoint(self, round: int, payload: Mapping[str, Any], keep: int = 2, best: int = 0) -> None:
        """Write a checkpoint, and remove all but the newest `keep` and the one of the best round.

        Raises:
            RunError: The file cannot be written, or the folder of checkpoints is a link.
        """
        from fleetfit.runs.checkpoints import write_checkpoint  # imports PyTorch

        name = _format_checkpoint(round)
        with _run_errors(self.path / name, "cannot be written"):
            path = files.safe_join(self.path, name)
        write_checkpoint(path, payload)
        for old in self.checkpoints()[:-keep]:
            if parse_round(old) != best:
                old.unlink(missing_ok=True)

    def find_best(self) -> "Best | None":
        """Return the best round on validation data, up to the newest checkpoint; None without one.

        Raises:
            RunError: The reports are damaged.
        """
        from fleetfit.runs.summary import find_best  # imports pydantic

        newest = max(map(parse_round, self.checkpoints()), default=0)
        return find_best(self.read_rounds()[:newest], self.norm)

    def load_checkpoint(
        self, check: CheckpointCheck = lambda payload, round: payload, due: int = 0, only: int | None = None
    ) -> dict[str, Any] | None:
        """Return the newest usable checkpoint, or None without checkpoints. Skipped checkpoints are logged.

        Args:
            check: Further check of a checkpoint.
            due: The expected round of the newest checkpoint. A missing one is logged, too.
            only: The round of the only checkpoint that is wanted.

        Raises:
            RunError: A checkpoint has an unknown format, or none is usable.
        """
        from fleetfit.runs.checkpoints import CheckpointError, read_checkpoint  # imports PyTorch

        paths = [path for path in self.checkpoints() if only in (None, parse_round(path))]
        skipped: list[tuple[Path, Exception | str]] = []
        if paths and parse_round(paths[-1]) < due:
            skipped.append((self.path / _format_checkpoint(due), "it is missing"))
        for path in reversed(paths):
            round = parse_round(path)
            try:
                payload: dict[str, Any] = check(read_checkpoint(path), round)
            except CheckpointError as error:
                skipped.append((path, error))
                continue
            for other, reason in skipped:
                _logger.warning("Skipped %s: %s. Using the state after round %d.", other, reason, round)
            return payload
        if skipped:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
            what = "every checkpoint" if only is None else "the best checkpoint"
            raise RunError(
                f"{what} in {self.path} is damaged, or does not fit its config.toml: {reasons}.",
                path=self.path / "checkpoints",
            )
        return None

    # -- for pages and lists: files as far as they can be read

    config = StoredFile[Mapping[str, Any]](_CONFIG, read_config, dict)
    environment = StoredFile["EnvironmentRecord"](
        "environment.json",
        lambda self: self._read_environment(),
        lambda: _import_schema().EnvironmentRecord(),
    )
    fleet = StoredFile["FleetRecord | None"]("fleet.json", read_fleet, lambda: None)
    nodes = StoredFile["NodesRecord"](
        NODES, lambda self: self.read(NODES, _import_schema().NodesRecord), lambda: _import_schema().NodesRecord()
    )
    rounds = StoredFile["Sequence[RoundRecord]"](_METRICS, read_rounds, list)
    plan = StoredFile["Plan | None"]("plan.toml", read_plan, lambda: None)
    stored_summary = StoredFile["SummaryRecord | None"](_SUMMARY, read_summary, lambda: None)

    def find_problems(self, *names: str) -> tuple[str, ...]:
        """Return sentences on files that cannot be read: all of the attributes, or those that are named."""
        stored = [file for file in vars(RunFolder).values() if isinstance(file, StoredFile)]
        problems = [file.load(self)[1] for file in stored if not names or file.name in names]
        if not names and not any(one.startswith(_METRICS) for one in problems):
            lines, _, is_incomplete = self._read_lines(_load_round)
            if is_incomplete:
                problems.append(f"{_METRICS}: line {len(lines) + 1}, the last one, is damaged and left out.")
        return tuple(filter(None, problems))

    def replace_contents(self, **contents: Any) -> "RunFolder":
        """Return the folder with other contents of attributes, such as a summary that is not written yet."""
        names = {key: vars(RunFolder)[key].name for key in contents}
        return RunFolder(self.path, {**self._contents, **{names[key]: (value, "") for key, value in contents.items()}})

    @property
    def is_finished(self) -> bool:
        """Whether the run has its final numbers."""
        return self.stored_summary is not None

    @cached_property
    def is_private(self) -> bool:
        """Whether the run withholds participation, as with `[privacy]`."""
        reported = any(record.privacy is not None for record in self.rounds)
        return reported or "privacy" in self.config or bool(self.stored_summary and self.stored_summary.privacy)

    @property
    def is_secure(self) -> bool:
        """Whether the run withholds the clients' losses, as with `[secure]`."""
        return "secure" in self.config or any(record.secure is not None for record in self.rounds)

    @cached_property
    def norm(self) -> str:
        """The main batch-norm policy: "static" or "batch"."""
        if self.stored_summary is not None:
            return self.stored_summary.norm
        norms = self.get_setting("evaluate", "batch_norm", default=())
        evaluations = [record.evaluate for record in self.rounds if record.evaluate is not None]
        for norm in norms if isinstance(norms, list) else ("static", "batch"):
            if isinstance(norm, str) and any(one.accuracies(norm) for one in evaluations):
                return norm
        return "static"

    @cached_property
    def evaluations(self) -> "list[tuple[int, AccuracyRecord]]":
        """The evaluated rounds, with accuracies by the main batch-norm policy."""
        pairs = [(one.round, one.evaluate.accuracies(self.norm)) for one in self.rounds if one.evaluate is not None]
        return [(number, accuracies) for number, accuracies in pairs if accuracies is not None]

    @property
    def last(self) -> "AccuracyRecord":
        """The accuracies of the last evaluation; empty if there is none."""
        from fleetfit.runs.schema import NO_ACCURACIES  # imports pydantic

        return self.evaluations[-1][1] if self.evaluations else NO_ACCURACIES

    @property
    def class_counts(self) -> Sequence[Sequence[int]]:
        """Training samples [clients, classes] of the first clients; empty without classes."""
        return (self.fleet.first.class_counts or []) if self.fleet is not None else []

    @property
    def class_names(self) -> Sequence[str]:
        """A name for each class of `class_counts`; its number where the run has no names."""
        classes = len(self.class_counts[0]) if self.class_counts else 0
        names = self.fleet.first.class_names if self.fleet is not None else []
        return names if len(names) == classes else [str(c) for c in range(classes)]

    def get_setting(self, *keys: str, default: Any = "") -> Any:
        """Return a value of the configuration by its keys."""
        value: Any = self.config
        for key in keys:
            value = value.get(key, default) if isinstance(value, Mapping) else default
        return value

    @property
    def name(self) -> str:
        """The name of the run, or of its folder."""
        return self.summary.name or self.path.resolve().name

    @property
    def method(self) -> str:
        """The method's name."""
        return self.summary.method or "a method"

    @property
    def seed(self) -> int:
        """The run's seed; 0 if unknown."""
        return self.summary.seed or 0

    @cached_property
    def summary(self) -> "SummaryRecord":
        """The final numbers, or those of the rounds so far."""
        from fleetfit.runs.schema import SummaryRecord  # imports pydantic, and so does summary
        from fleetfit.runs.summary import make_summary

        if self.stored_summary is not None:
            return self.stored_summary
        seed = self.get_setting("seed", default=0)
        description = {
            "name": str(self.get_setting("name")),
            **self.describe(),
            "seed": seed if type(seed) is int else 0,
            "norm": self.norm,
            "score": self.environment.score,
        }
        try:
            return SummaryRecord.load(make_summary(description, self.plan, [one.dump() for one in self.rounds], []))
        except InvalidRecord:  # the sums of an untrusted file are too large
            return SummaryRecord.load(make_summary(description, None, [], []))

    def describe(self) -> dict[str, str]:
        """Return the method, the model and the data by the names that a summary has."""
        return {
            "method": get_short_name(str(self.get_setting("method", "name"))),
            "model": get_short_name(str(self.get_setting("model", "name"))),
            "data": self._name_data(),
        }

    def _name_data(self) -> str:
        """Return the name of the data as a summary has it: for data from files, the name of the file or folder."""
        name = str(self.get_setting("data", "name"))
        path = self.get_setting("data", "file") or self.get_setting("data", "folder")
        if name not in ("table", "images", "sounds", "arrays", "text") or not isinstance(path, str):
            return get_short_name(name)
        is_folder = name == "images" or (name != "arrays" and Path(path).is_dir())
        return Path(path).name if is_folder else Path(path).stem


def _import_schema() -> ModuleType:
    from fleetfit.runs import schema  # imports pydantic

    return schema


def _load_round(value: Any) -> "RoundRecord":
    from fleetfit.runs.schema import RoundRecord  # imports pydantic

    return RoundRecord.load(value)


def _format_checkpoint(round: int) -> str:
    return f"checkpoints/round-{round:06d}.safetensors"


def parse_round(path: Path) -> int:
    """Return the round of a checkpoint's file; 0 for another name."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else 0
