"""The log of a node: each message, the owner's decision, and what left the node, as a chain of hashes.

Each line is a JSON table with the SHA-256 of the line before it. The hash of the last line is the head of the log: it
goes with each answer, and the server keeps it. So neither side alone can change or remove a line that the other one
has a later head of.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import ConfigError, RunError, make_printable
from fleetfit.fleet.protocol import compute_digest

FILE = "log.jsonl"
HEADS = "node_logs.jsonl"
"""The file of a run folder with the heads of its nodes' logs."""
NO_LINE = "0" * 64
"""What the first line has in place of the hash of the line before."""


class NodeLog:
    """The log of one node. Several processes may write it, one line after the other."""

    def __init__(self, folder: Path) -> None:
        """Read the log.

        Raises:
            ConfigError: A line is damaged.
        """
        self._path = folder / FILE
        self._begin()
        if self._path.is_file():
            with files.open_file(self._path) as file:
                self._read(file)

    def _begin(self) -> None:
        """Count from an empty log."""
        self._entries, self._head, self._size = 0, NO_LINE, 0
        self._trained: dict[str, int] = {}
        self._day, self._jobs, self._bytes = "", 0, 0

    @property
    def head(self) -> dict[str, Any]:
        """The number of lines, and the hash of the last one."""
        return {"entries": self._entries, "hash": self._head}

    def add(self, event: str, **entry: Any) -> None:
        """Append a line, and flush it to disk.

        A line that a full disk or a loss of power cut off goes: its answer was not sent.

        Args:
            event: "allowed", "refused" or "left".
            entry: Its further values.

        Raises:
            OSError: It cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with files.open_in_folder(self._path, os.O_RDWR | os.O_CREAT, 0o600) as file:
            files.lock(file)
            if file.seek(0, os.SEEK_END) < self._size:  # the owner moved the log away
                self._begin()
            file.seek(self._size)
            self._read(file)  # what another process wrote
            table = {"number": self._entries + 1, "time": format_now(), "event": event, **entry, "before": self._head}
            line = json.dumps(table).encode() + b"\n"
            file.seek(self._size)
            file.truncate()
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._read([line])

    def count_today(self) -> tuple[int, int]:
        """Return the jobs that were allowed today, and the bytes of allowed messages and of answers."""
        return (self._jobs, self._bytes) if self._day == format_now()[:10] else (0, 0)

    def count_trained(self, fingerprint: str) -> int:
        """Return the training jobs of runs with these terms that were answered."""
        return self._trained.get(fingerprint, 0)

    def _read(self, lines: Iterable[bytes]) -> None:
        """Count the whole lines of what follows in the log."""
        for line in _iter_whole_lines(lines):
            entry = _parse(line, self._path, self._entries + 1)
            self._entries, self._head = self._entries + 1, compute_digest(line)
            self._size += len(line) + 1
            self._count(entry)

    def _count(self, entry: Mapping[str, Any]) -> None:
        day, is_job = str(entry.get("time", ""))[:10], is_whole_job(entry.get("what"), entry.get("phase"))
        if day != self._day:
            self._day, self._jobs, self._bytes = day, 0, 0
        self._bytes += 0 if entry["event"] == "refused" else entry.get("bytes", 0)
        self._jobs += entry["event"] == "allowed" and is_job
        if entry["event"] == "left" and is_job and entry.get("kind") == "train":
            terms = str(entry.get("fingerprint"))
            self._trained[terms] = self._trained.get(terms, 0) + 1


def is_whole_job(what: Any, phase: Any) -> bool:
    """Return whether a message counts as a job: of the five messages of a secure round the one that trains."""
    return what == "job" or (what == "secure" and phase == "train")


def read_log(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the lines of a log, whose chain is whole, and the hash of each after `NO_LINE`.

    Raises:
        RunError: A line was changed, removed or added.
        ConfigError: The file cannot be read.
    """
    entries, hashes = list[dict[str, Any]](), [NO_LINE]
    for number, line in enumerate(_read_lines(path), 1):
        entry = _parse(line, path, number)
        if entry.get("before") != hashes[-1] or entry.get("number") != number:
            raise RunError(
                f"{path}, line {number}: it does not follow from the line before. One of them was changed, or lines "
                "between them are missing.",
                path=path,
            )
        entries.append(entry)
        hashes.append(compute_digest(line))
    return entries, hashes


def read_heads(path: Path, node: str) -> list[list[Mapping[str, Any]]]:
    """Return the heads that a server has kept of the nodes of a name, of each node by itself.

    Raises:
        ConfigError: The file has no heads of this node.
    """
    heads: dict[str, list[Mapping[str, Any]]] = {}
    for line in _read_lines(path):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # a line that was cut off
            for key, head in files.parse_json(line.decode())["heads"].items():
                if head["name"] == node and type(head["entries"]) is int and isinstance(head["hash"], str):
                    heads.setdefault(key, []).append(head)
    if not heads:
        raise ConfigError(f"{path} has no heads of the log of {node}.", path=path)
    return list(heads.values())


def find_wrong_heads(hashes: Sequence[str], heads: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each head that a server has kept and that is not the log's.

    Args:
        hashes: Those of the log's lines, as `read_log` has them.
        heads: As `NodeLog.head` has them.
    """
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
    is_trained = entry.get("kind") in ("evaluate", "statistics")  # the round counts those before it
    words += [f"round {entry['round'] + (not is_trained)}"] if type(entry.get("round")) is int else []
    words += [f"{entry.get('bytes', 0):,} bytes"]
    words += [f"epsilon {entry['epsilon']:g}"] if "epsilon" in entry else []
    words += [f"sha256 {entry['sha256'][:12]}"] if "sha256" in entry else []
    return make_printable("  ".join([*words, *([entry["reason"]] if "reason" in entry else [])]))


def _read_lines(path: Path) -> Iterator[bytes]:
    """Yield the whole lines of a file, one by one: a log of years is larger than a device's memory."""
    with files.open_file(path, ConfigError) as file:
        yield from _iter_whole_lines(file)


def _iter_whole_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines without their end, up to one that may just be written."""
    return (line[:-1] for line in lines if line.endswith(b"\n"))


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


def format_now() -> str:
    """Return the device's local time, in ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
