"""`RunFolder`: read and write the files of a run folder, safe against kills and untrusted files."""

import contextlib
import datetime
import errno
import hashlib
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fleetfit import files
from fleetfit.errors import COMMAND, RunError
from fleetfit.runs.checkpoints import CheckpointError, read_checkpoint, write_checkpoint
from fleetfit.runs.environment import describe_environment

if TYPE_CHECKING:  # imports pydantic
    from fleetfit.runs.schema import InvalidRecord, Record, RoundRecord, SummaryRecord

R = TypeVar("R", bound="Record")

_CHECKPOINT = re.compile(r"round-(\d{6,12})\.safetensors")
_BASE = "base.safetensors"
_SUMMED = ("config.toml",)
_logger = logging.getLogger("fleetfit")

CheckpointCheck = Callable[[Any, int], Any]
"""Raises `CheckpointError` if a checkpoint from the file of a round cannot be used."""


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


def compute_checksums(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the checksums of a new folder's files that determine results, for `environment.json`."""
    return {name: _compute_checksum(texts[name]) for name in _SUMMED if name in texts}


def _compute_checksum(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@contextlib.contextmanager
def _run_errors(path: Path, state: str) -> Iterator[None]:
    """Raise OSErrors of the block as RunErrors: `<path> <state>: <reason>`."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} {state}: {files.format_os_error(error)}.", path=path) from None


@dataclass(frozen=True)
class RunFolder:
    """A run folder on disk."""

    path: Path

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
                    "longer, set more rounds in its config.toml and continue it (second line):"
                    f"{COMMAND}{open_command}{COMMAND}{resume_command}",
                    path=path,
                )
            advice = f", or continue its run:{COMMAND}{resume_command}" if files.is_file(config) else "."
            raise RunError(f"{path} is not empty. Choose another folder{advice}", path=path)

    @staticmethod
    def open(path: str | Path) -> "RunFolder":
        """Return an existing run folder.

        Raises:
            RunError: The folder is missing, or is not a run folder.
        """
        path = files.parse_path(path)
        with _run_errors(path, "cannot be read"):
            if not path.is_dir():
                raise RunError(f"no such run folder: {path}.{files.suggest_neighbour(path)}", path=path)
            if not files.is_file(path / "config.toml"):
                hint = ""
                if any(files.is_file(path / name) for name in ("results.json", "runs.json")):
                    hint = (
                        " It is a comparison: name the folder of one of its runs, or use load_comparison in Python. "
                        "The command that started it continues it."
                    )
                raise RunError(f"{path} is not a run folder: it has no config.toml.{hint}", path=path)
        return RunFolder(path)

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

    def read_summary(self) -> "SummaryRecord":
        """Return the final numbers of a finished run.

        Raises:
            RunError: The file is missing or damaged, or a later version of FleetFit wrote it.
        """
        from fleetfit.runs.schema import SummaryRecord  # imports pydantic

        return self.read(
            "summary.json", SummaryRecord, f'Remove it, and "fleetfit resume {self.path}" writes it again.'
        )

    def read_class_counts(self) -> list[list[int]]:
        """Return training samples [clients, classes] of the first clients; [] without classes.

        Raises:
            RunError: `fleet.json` is damaged.
        """
        from fleetfit.runs.schema import FleetRecord  # imports pydantic

        if not self.has("fleet.json"):
            return []
        remedy = "Only the plot of the partition uses it. Remove it to skip the plot."
        return self.read("fleet.json", FleetRecord, remedy).first.class_counts or []

    def write(self, name: str, text: str) -> None:
        """Write a file atomically.

        Raises:
            RunError: The file cannot be written, or a folder between is a link.
        """
        with _run_errors(self.path / name, "cannot be written"):
            files.write_text(files.safe_join(self.path, name), text)

    def find_edited_files(self) -> list[str]:
        """Return the files that differ from their checksums in `environment.json`; empty without checksums."""
        sums = self._read_environment().get("sha256")
        if not isinstance(sums, dict):
            return []
        return [name for name in _SUMMED if name in sums and sums[name] != _compute_checksum(self.text(name))]

    def record_resumption(self, round: int) -> None:
        """Record a resumption after a round, with its environment, in `environment.json`. Failures are ignored."""
        environment = self._read_environment()
        before = environment.get("resumed")
        environment["resumed"] = [
            *(before if isinstance(before, list) else []), {"round": round, **describe_environment()}
        ]  # fmt: skip
        with contextlib.suppress(RunError, ValueError, RecursionError):
            self.write("environment.json", json.dumps(environment, indent=2) + "\n")

    def _read_environment(self) -> dict[str, Any]:
        """Return `environment.json`; empty if damaged, because it only documents the run."""
        try:
            environment = self.json("environment.json")
        except RunError:
            return {}
        return environment if isinstance(environment, dict) else {}

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

    def metrics(self) -> list[dict[str, Any]]:
        """Return the reports of the rounds as tables. An incomplete last line does not count.

        Raises:
            RunError: A line is damaged, or belongs to another round.
        """
        return [report for report, _ in self._read_reports()]

    def read_rounds(self) -> "list[RoundRecord]":
        """Return the reports of the rounds. An incomplete last line does not count.

        Raises:
            RunError: A line is damaged, or belongs to another round.
        """
        return [record for _, record in self._read_reports()]

    def _read_reports(self) -> "list[tuple[dict[str, Any], RoundRecord]]":
        path = self.path / "metrics.jsonl"
        lines, reason = self._read_lines()
        if reason:
            raise RunError(
                f"{path}, line {len(lines) + 1}, is damaged: {reason}. Remove this line and those after it.", path=path
            )
        records, error = self._validate_reports(lines)
        if error is not None:
            raise RunError(f"{path}, line {len(records) + 1}, is damaged: {error}.", key=error.key, path=path)
        return [(report, record) for (_, report), record in zip(lines, records, strict=True)]

    def count_reports(self) -> int:
        """Return the number of rounds before the first damaged line.

        Raises:
            RunError: The file cannot be read.
        """
        return len(self._validate_reports(self._read_lines()[0])[0])

    def find_damaged_end(self) -> str:
        """Describe the damage of the last line of `metrics.jsonl`, which `metrics` leaves out; "" if intact.

        A line without a line end is still being written, and not damaged.
        """
        good = len(self._read_lines()[0])
        is_damaged = self.has("metrics.jsonl") and self._read_metrics().count(b"\n") > good
        return f"line {good + 1}, the last one, is damaged" if is_damaged else ""

    def _read_metrics(self) -> bytes:
        return files.read_bytes(self.path / "metrics.jsonl", RunError)

    def _read_lines(self) -> tuple[list[tuple[str, dict[str, Any]]], str]:
        """Return the intact lines of `metrics.jsonl` as text and report, and the damage of the next line."""
        if not self.has("metrics.jsonl"):
            return [], ""
        *lines, remainder = self._read_metrics().split(b"\n")
        reports: list[tuple[str, dict[str, Any]]] = []
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode()
                report = files.parse_json(text)
                if not isinstance(report, dict) or type(report.get("round")) is not int or report["round"] != number:
                    raise ValueError(f"it is not of round {number}")
            except ValueError as error:
                return reports, "" if number == len(lines) and not remainder else str(error)
            reports.append((text, report))
        return reports, ""

    @staticmethod
    def _validate_reports(
        lines: list[tuple[str, dict[str, Any]]],
    ) -> "tuple[list[RoundRecord], InvalidRecord | None]":
        """Return the reports before the first invalid one, and its error."""
        from fleetfit.runs.schema import InvalidRecord, RoundRecord  # imports pydantic

        records: list[RoundRecord] = []
        for _, report in lines:
            try:
                records.append(RoundRecord.load(report))
            except InvalidRecord as error:
                return records, error
        return records, None

    def has_rounds(self) -> bool:
        """Return whether a round was written, completely or partly."""
        return self.has("metrics.jsonl") or bool(self.checkpoints())

    def rewind(self, round: int) -> None:
        """Remove files and lines of later rounds, and temporary files of killed processes.

        Raises:
            RunError: The folder cannot be written, or a folder in it is a link.
        """
        lines = self._read_lines()[0][:round]
        with _run_errors(self.path, "cannot be written into"):
            checkpoints = files.safe_join(self.path, "checkpoints/any").parent
            for part in (*self.path.glob(".*.part"), *checkpoints.glob(".*.part")):
                shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink(missing_ok=True)
            for path in self.checkpoints():
                if _parse_round(path) > round:
                    path.unlink(missing_ok=True)
        self.write("metrics.jsonl", "".join(f"{text}\n" for text, _ in lines))

    # -- tensors

    def load_base(self) -> dict[str, Any]:
        """Return the frozen tensors of the model; empty if there are none.

        Raises:
            RunError: The file is damaged or has an unknown format.
        """
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
        return sorted((path for path in paths if _CHECKPOINT.fullmatch(path.name)), key=_parse_round)

    def save_checkpoint(self, round: int, payload: Mapping[str, Any], keep: int = 2) -> None:
        """Write a checkpoint, and remove all but the newest `keep`.

        Raises:
            RunError: The file cannot be written, or the folder of checkpoints is a link.
        """
        name = _format_checkpoint(round)
        with _run_errors(self.path / name, "cannot be written"):
            path = files.safe_join(self.path, name)
        write_checkpoint(path, payload)
        for old in self.checkpoints()[:-keep]:
            old.unlink(missing_ok=True)

    def load_checkpoint(
        self, check: CheckpointCheck = lambda payload, round: None, due: int = 0
    ) -> dict[str, Any] | None:
        """Return the newest usable checkpoint, or None without checkpoints. Skipped checkpoints are logged.

        Args:
            check: Further check of a checkpoint.
            due: The expected round of the newest checkpoint. A missing one is logged, too.

        Raises:
            RunError: A checkpoint has an unknown format, or none is usable.
        """
        paths = self.checkpoints()
        skipped: list[tuple[Path, Exception | str]] = []
        if paths and _parse_round(paths[-1]) < due:
            skipped.append((self.path / _format_checkpoint(due), "it is missing"))
        for path in reversed(paths):
            round = _parse_round(path)
            try:
                payload: dict[str, Any] = read_checkpoint(path)
                check(payload, round)
            except CheckpointError as error:
                skipped.append((path, error))
                continue
            for other, reason in skipped:
                _logger.warning("Skipped %s: %s. Using the state after round %d.", other, reason, round)
            return payload
        if skipped:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
            raise RunError(
                f"every checkpoint in {self.path} is damaged, or does not fit its config.toml: {reasons}.",
                path=self.path / "checkpoints",
            )
        return None


def _format_checkpoint(round: int) -> str:
    return f"checkpoints/round-{round:06d}.safetensors"


def _parse_round(path: Path) -> int:
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else 0
