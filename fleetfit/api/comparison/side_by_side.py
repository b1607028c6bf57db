"""Runs of a comparison side by side: each in a process of its own with one thread, and with the bits of one alone.

A process runs one after the other and keeps the data that they share. What it reports travels as JSON over a socket
pair. It ends with this process, whatever ends that: a run folder goes on after a kill at any moment.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fleetfit import errors
from fleetfit.api.comparison.rehearsed import RowTask, Spared
from fleetfit.api.results import Run, load
from fleetfit.api.runs import OnRound, proceed
from fleetfit.config.naming import sharing_data
from fleetfit.errors import FleetFitError, NoUsableUpdates, RunError, Unexpected
from fleetfit.names import describe_failure, find_plug_in

_PATIENCE_S = 20.0  # for a process that is told to end, before it is killed


Told = Callable[[int, Run], OnRound | None]
"""Called with the number of a task and its run when that begins; what it returns is called with each round's report."""


def run_side_by_side(
    tasks: Sequence[RowTask], jobs: int, told: Told, finished: Callable[[int], None],
    failed: Callable[[int, NoUsableUpdates], None],
) -> None:  # fmt: skip
    """Run tasks, so many at a time.

    An error of one ends all. A process that is killed takes its own run with it alone: the others go on, and then it is
    said. `finished` is called with the number of each task that is done, `failed` with that of each run without usable
    updates.

    Raises:
        FleetFitError: That of a run, or a process has died.
    """
    waiting = deque(enumerate(tasks))
    lost: list[str] = []
    processes: list[_RowProcess] = []
    try:
        while waiting or any(process.task is not None for process in processes):
            for process in processes:
                if process.task is None and waiting:
                    process.give(*waiting.popleft())
            while waiting and len(processes) < jobs:
                processes.append(_RowProcess())
                processes[-1].give(*waiting.popleft())
            for process in _ready(processes):
                assert process.task is not None
                number, _ = process.task
                try:
                    there = process.hear(told)
                except NoUsableUpdates as error:
                    failed(number, error)
                    continue
                if not there:
                    lost.append(process.how_it_ended())
                    processes.remove(process)
                elif process.task is None:
                    finished(number)
    except BaseException:
        _end(processes, signal.SIGTERM)
        raise
    _end(processes)
    if lost:
        raise RunError(f"{'; '.join(lost)}. Its checkpoints are kept, and the same command goes on from them.")


def _ready(processes: "Sequence[_RowProcess]") -> "list[_RowProcess]":
    by_connection = {process.connection: process for process in processes if process.task is not None}
    return [by_connection[found] for found in wait(list(by_connection))]  # type: ignore[index]


def _end(processes: "Sequence[_RowProcess]", how: signal.Signals | None = None) -> None:
    for process in processes:
        process.connection.close()
        if how is not None:
            process.process.send_signal(how)
    for process in processes:
        try:
            process.process.wait(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.process.kill()
            process.process.wait()


class _RowProcess:
    """A process, and the task that it has."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        path = os.pathsep.join([p for p in sys.path if p] + [str(Path.cwd())])
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, **one, "PYTHONPATH": path},
            process_group=0,  # a terminal's Ctrl-C is for this process alone, which ends the others
        )  # fmt: skip
        theirs.close()
        self.connection = Connection(ours.detach())
        self.task: tuple[int, RowTask] | None = None
        self._on_round: OnRound | None = None

    def give(self, number: int, task: RowTask) -> None:
        """Hand it a task; a dead process shows when it is heard."""
        self.task, self._on_round = (number, task), None
        message = {"title": task.title, "table": task.table, "measured": dict(task.measured),
                   "place": str(task.place), "spared": task.spared.nest, "group": task.group}  # fmt: skip
        self._send(message)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps(message).encode())

    def hear(self, told: Told) -> bool:
        """Take what it says; return whether it is still there.

        Raises:
            FleetFitError: Its run's.
        """
        assert self.task is not None
        try:
            said = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return False
        if "error" in said:
            (_, task), self.task = self.task, None
            raise _error_of(said, task.title)
        if "notes" in said:
            number, task = self.task
            found = load(task.place)
            found._known_notes = tuple(said["notes"])
            self._on_round = told(number, found)
            self._send("go on")
        elif "round" in said:
            if self._on_round is not None:
                self._on_round(said["round"])
        else:
            self.task = None
        return True

    def how_it_ended(self) -> str:
        """Return in words how it ended, which it has."""
        assert self.task is not None
        self.connection.close()
        code = self.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the process of {self.task[1].title} ended by {how}"


def _error_of(said: Mapping[str, Any], title: str) -> FleetFitError:
    if said.get("kind") == NoUsableUpdates.__name__:
        return NoUsableUpdates(said["error"])
    sentence = f"{title}: {said['error']}"
    if said.get("details"):
        return Unexpected(sentence, said["details"], bool(said["foreign"]))
    kind = getattr(errors, said["kind"], RunError)
    found: FleetFitError = kind.__new__(kind)  # some take more than the sentence
    found.args = (sentence,)
    return found


# ---- in such a process -------------------------------------------------------------------------------------------


def _work(connection: Connection) -> None:
    """Run tasks until the other end closes, or until told to end by a signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        """Take what is asked; where the other end closes, perhaps in the middle of a run, end this process."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                asked.put(json.loads(connection.recv_bytes()))
        os.kill(os.getpid(), signal.SIGTERM)

    def say(**message: Any) -> None:
        connection.send_bytes(json.dumps(message).encode())

    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError, ConnectionError), sharing_data():
        while True:
            _run(asked, say)


def _stop(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(asked: "queue.SimpleQueue[Any]", say: Callable[..., None]) -> None:
    """Run the next task that is asked for."""
    nest = asked.get()
    place, spared = Path(nest["place"]), Spared.restored(nest["spared"])
    try:
        found = RowTask(nest["title"], nest["table"], nest["measured"], place, spared, nest["group"]).begun()
        say(notes=list(found.notes))
        asked.get()  # until it has been announced
        if not found.finished:
            proceed(found, lambda report: say(round=dict(report)))
        found._let_go()
    except ConnectionError:
        raise
    except Exception as error:
        say(**_said(error))
    else:
        say(done=True)


def _said(error: Exception) -> dict[str, Any]:
    if isinstance(error, Unexpected):
        return {"error": str(error), "details": error.details, "foreign": error.foreign}
    if isinstance(error, FleetFitError):
        return {"error": str(error), "kind": type(error).__name__}
    plug_in = find_plug_in(error)
    sentence = f"{plug_in or 'FleetFit'} {describe_failure(error)}."
    return {"error": sentence, "details": "".join(traceback.format_exception(error)), "foreign": plug_in is not None}


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])))
