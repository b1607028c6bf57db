"""The log of a node: each message, the owner's decision, and what left the node, as a chain of hashes.

Each line is a JSON table with the SHA-256 of the line before it. The hash of the last line is the head of the log: it
goes with each answer, and the server keeps it. So neither side alone can change or remove a line that the other one
has a later head of.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import ConfigError, RunError, make_printable

FILE = "log.jsonl"
HEADS = "node_logs.jsonl"
"""The file of a run folder with the heads of its nodes' logs."""
NO_LINE = "0" * 64
"""What the first line has in place of the hash of the line before."""


class NodeLog:
    """The log of one node, which one process writes."""

    def __init__(self, folder: Path) -> None:
        """Find the head. A line that a loss of power cut off does not count, since its answer was not sent.

        Raises:
            ConfigError: The last line is damaged.
        """
        self._path, self._entries, self._head = folder / FILE, 0, NO_LINE
        self._trained: dict[str, int] = {}
        self._day, self._jobs, self._bytes = "", 0, 0
        self._cut_off: bytes | None = None  # the lines before one that was cut off
        if not self._path.is_file():
            return
        content = files.read_bytes(self._path)
        whole = content[: content.rfind(b"\n") + 1]
        self._cut_off = whole if whole != content else None
        for line in whole.splitlines():
            self._count(line)

    @property
    def head(self) -> dict[str, Any]:
        """The number of lines, and the hash of the last one."""
        return {"entries": self._entries, "hash": self._head}

    def add(self, event: str, **entry: Any) -> None:
        """Append a line, and flush it to disk.

        Args:
            event: "allowed", "refused" or "left".
            entry: Its further values.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._cut_off is not None:
            with files.atomic_write(self._path, 0o600) as file:
                file.write(self._cut_off)
            self._cut_off = None
        table = {"number": self._entries + 1, "time": datetime.now().astimezone().isoformat(timespec="seconds"),
                 "event": event, **entry, "before": self._head}  # fmt: skip
        line = json.dumps(table).encode()
        files.append_line(self._path, line + b"\n")
        self._count(line)

    def count_today(self) -> tuple[int, int]:
        """Return the jobs that were allowed today, and the bytes of all messages, both ways."""
        return (self._jobs, self._bytes) if self._day == _today() else (0, 0)

    def count_trained(self, run: str) -> int:
        """Return the training jobs of a run that were answered."""
        return self._trained.get(run, 0)

    def _count(self, line: bytes) -> None:
        entry = _parse(line, self._path, self._entries + 1)
        self._entries, self._head = self._entries + 1, hash_line(line)
        day = str(entry.get("time", ""))[:10]
        if day != self._day:
            self._day, self._jobs, self._bytes = day, 0, 0
        self._bytes += entry.get("bytes", 0)
        self._jobs += entry["event"] == "allowed" and count_jobs(entry)
        if entry["event"] == "left" and entry.get("kind") == "train":
            self._trained[entry["run"]] = self._trained.get(entry["run"], 0) + 1


def count_jobs(entry: Mapping[str, Any]) -> int:
    """Return 1 for a message, or its line in a log, that is a job; a secure round is one job of five messages."""
    if entry["what"] == "secure":
        phase = entry.get("phase") or entry.get("secure", {}).get("phase")
        return int(phase == "train")
    return int(entry["what"] == "job")


def hash_line(line: bytes) -> str:
    """Return the SHA-256 of a line, as 64 hexadecimal digits."""
    return hashlib.sha256(line).hexdigest()


def read_log(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the lines of a log, whose chain holds, and its head.

    Raises:
        RunError: A line was changed, removed or added.
        ConfigError: The file cannot be read.
    """
    entries, before = list[dict[str, Any]](), NO_LINE
    for number, line in enumerate(_read_lines(path), 1):
        entry = _parse(line, path, number)
        if entry.get("before") != before or entry.get("number") != number:
            raise RunError(
                f"{path}, line {number}: it does not follow from the line before. One of them was changed, or lines "
                "between them are missing.",
                path=path,
            )
        entries.append(entry)
        before = hash_line(line)
    return entries, before


def read_heads(path: Path, node: str) -> list[Mapping[str, Any]]:
    """Return the heads of a node's log that a server has kept in a file.

    Raises:
        ConfigError: The file has no heads of this node, or is damaged.
    """
    try:
        tables = [files.parse_json(line.decode())["heads"] for line in _read_lines(path)]
        heads = [table[node] for table in tables if node in table]
        if all(type(head["entries"]) is int and isinstance(head["hash"], str) for head in heads) and heads:
            return heads
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{path} has no heads of the log of {node}.", path=path)


def find_wrong_heads(path: Path, heads: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each head that a server has kept and that is not the log's.

    Args:
        path: The log.
        heads: As `NodeLog.head` has them.
    """
    hashes = [NO_LINE, *map(hash_line, _read_lines(path))]
    wrong = []
    for head in heads:
        number = head["entries"]
        if not 0 <= number < len(hashes):
            wrong.append(f"The server has the head of {number} lines, and the log has {len(hashes) - 1}.")
        elif hashes[number] != head["hash"]:
            wrong.append(f"The server has another hash of line {number}: that line or one before it was changed.")
    return wrong


def format_entry(entry: Mapping[str, Any]) -> str:
    """Return a line of a log as a person reads it."""
    what = entry.get("kind") or entry.get("what", "")
    words = [str(entry.get("time", "")), f"{entry['event']:8}", f"{what:10}"]
    words += [f"run {entry['run'][:8]}"] if entry.get("run") else []
    words += [f"round {entry['round'] + 1}"] if type(entry.get("round")) is int else []
    words += [f"{entry.get('bytes', 0):,} bytes"]
    words += [f"epsilon {entry['epsilon']:g}"] if "epsilon" in entry else []
    words += [f"sha256 {entry['sha256'][:12]}"] if "sha256" in entry else []
    return make_printable("  ".join([*words, *([entry["reason"]] if "reason" in entry else [])]))


def _read_lines(path: Path) -> list[bytes]:
    return files.read_bytes(path, ConfigError).splitlines()


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        entry = files.parse_json(line.decode())
        if isinstance(entry, dict) and isinstance(entry.get("event"), str) and type(entry.get("bytes", 0)) is int:
            return entry
    except ValueError:
        pass
    raise ConfigError(
        f"{path}, line {number} is damaged. Move the file away to begin another log; keep it, since the server has its "
        "head.",
        path=path,
    )


def _today() -> str:
    return datetime.now().astimezone().isoformat()[:10]
