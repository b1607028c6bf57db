"""Flower's SuperNode, and the SuperExec that hands its messages to the zygote.

Run as `python -m fleetfit.fleet.warm.supernode ROLE ...` by `fleetfit.fleet.launcher`.
"""

import contextlib
import importlib
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleetfit.fleet.connection import CLOCK_REFUSED, SIGNATURE_REFUSED, find_clock_fault
from fleetfit.fleet.logs import log_to_stderr
from fleetfit.fleet.warm.private_names import (
    CONNECTION,
    EXECUTOR,
    SUPEREXEC,
    SUPERNODE,
    find_missing_names,
    poll_often,
)

_LOG = logging.getLogger("fleetfit")


def _run_warm(bell: str, *arguments: str) -> None:
    """Run Flower's SuperNode with shorter sleeps, until a signal ends it.

    Args:
        bell: Descriptor of the pipe to the SuperExec.
        arguments: Of `flower-supernode`.
    """
    module, pace = importlib.import_module(SUPERNODE), _Pace(int(bell))
    push = _take_turns()

    def push_and_ring(**arguments: Any) -> None:
        pace.ring()
        push(**arguments)

    module._push_messages, module.time = push_and_ring, pace  # type: ignore[attr-defined]
    poll_often(SUPERNODE, "pull_objects")
    _run(arguments)


def _run_plain(*arguments: str) -> None:
    """Run Flower's SuperNode with a process for each message, but so that it never stops to receive messages."""
    missing = ", ".join(find_missing_names())
    if missing:
        _LOG.warning(
            "the installed Flower lacks %s. After a run that was stopped the node may receive no messages.", missing
        )
    else:
        _take_turns()
    _run(arguments)


def _take_turns() -> Callable[..., None]:
    """Put `Turns` into the SuperNode's loop; return the function that sends replies."""
    from fleetfit.fleet.warm.turns import Turns, keep_heartbeat

    module = importlib.import_module(SUPERNODE)
    turns = Turns(module._pull_and_store_message, module._push_messages, module._insert_message)
    module._pull_and_store_message, module._push_messages = turns.pull, turns.push  # type: ignore[attr-defined]
    keep_heartbeat()
    _explain_refusals()
    return turns.push


def _explain_refusals() -> None:
    """Have the SuperNode log why the SuperLink refuses its signature: otherwise it ends with code 0 and no message."""
    connection, constants = importlib.import_module(CONNECTION), importlib.import_module("flwr.common.constant")
    ahead_s = constants.SYSTEM_TIME_TOLERANCE
    behind_s = constants.TIMESTAMP_TOLERANCE + ahead_s
    refused = threading.Event()

    class Explaining(connection.NodeAuthHttpInterceptor):  # type: ignore[name-defined,misc]
        """Logs the reason of the first refusal."""

        def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
            """Sign a request and send it."""
            answer = super().intercept(context, call_next)
            if answer.status_code == 401 and not refused.is_set():
                refused.set()
                fault = find_clock_fault(answer.headers, ahead_s, behind_s)
                _LOG.error("%s", f"{CLOCK_REFUSED}{fault}" if fault else f"{SIGNATURE_REFUSED}. Is its key registered?")
            return answer

    connection.NodeAuthHttpInterceptor = Explaining  # type: ignore[attr-defined]


def _run(arguments: Sequence[str]) -> None:
    sys.argv = ["flower-supernode", *arguments]
    importlib.import_module("flwr.supernode.cli").flower_supernode()


class _Pace:
    """Replaces the module `time` in the SuperNode's loop, which sleeps 3 s whenever there is no message.

    Here it sleeps a quarter of the time that it has been idle: soon after a message it polls often, and a node that has
    waited for long polls the server no more often than Flower's own. When a message has come, it rings the bell. So the
    SuperExec need not poll, which would take a tenth of a core's time at the pace that a quick answer needs.
    """

    _MIN_S = 0.1
    _RING_AGAIN_S = 1.0

    def __init__(self, bell: int) -> None:
        self._bell = bell
        self._rang_at = 0.0
        self._idle_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def ring(self) -> None:
        """Signal the SuperExec that a message has come."""
        self._idle_s, self._rang_at = 0.0, time.monotonic()
        with contextlib.suppress(OSError):
            os.write(self._bell, b"!")

    def sleep(self, seconds: float) -> None:
        """Sleep for some seconds at most."""
        pause = self._MIN_S
        if seconds >= 1:
            pause = max(pause, self._idle_s / 4)
            self._idle_s += pause
        elif time.monotonic() - self._rang_at >= self._RING_AGAIN_S:  # no answer yet: the SuperExec may have missed it
            self.ring()
        time.sleep(min(seconds, pause))


def _run_superexec(address: str, bell: str, jobs: str, secret: str) -> None:
    """Run Flower's SuperExec with our executor, until it is killed.

    Args:
        address: Of the SuperNode's Runtime API.
        bell: Descriptor of the pipe from the SuperNode.
        jobs: Descriptor of the pipe to the zygote.
        secret: Descriptor of the file with the secret that the SuperNode and this process share.
    """
    module = importlib.import_module(SUPEREXEC)
    executor = Executor(int(bell), int(jobs))
    module.get_executor = lambda *_, **__: executor  # type: ignore[attr-defined]
    shared = Path(f"/proc/self/fd/{secret}").read_bytes()
    host, _, port = address.rpartition(":")
    while True:  # until the SuperNode listens
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            break
        time.sleep(0.1)
    module.run_superexec(runtime_api_address=address, insecure=True, superexec_auth_secret=shared)


class Executor:
    """Flower's executor: hands client apps to the zygote, and refuses other tasks."""

    _PATIENCE_S = 10.0

    def __init__(self, bell: int, jobs: int) -> None:
        self._bell, self._jobs = bell, jobs
        self._kind = importlib.import_module("flwr.supercore.constant").TaskType.CLIENT_APP
        self._result = importlib.import_module(EXECUTOR).LaunchResult

    def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[Any], set[str]]:
        """Wait for the bell; the capacity is unbounded."""
        if select.select([self._bell], [], [], self._PATIENCE_S)[0]:
            os.read(self._bell, 4096)
        return {self._kind}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """Do nothing: the capacity is unbounded."""

    def launch(self, spec: Any) -> Any:
        """Hand a task to the zygote."""
        if spec.task_type != self._kind:  # another kind of task would load the server's code
            return self._result.failed(f"this node runs client apps only, not {spec.task_type}")
        task = {"runtime_api_address": spec.runtime_api_address, "token": spec.token, "parent_pid": spec.parent_pid}
        os.write(self._jobs, json.dumps(task).encode() + b"\n")
        return self._result.accepted()

    def reconcile(self) -> None:
        """Do nothing: this executor has no state."""

    def close(self) -> None:
        """Do nothing."""


if __name__ == "__main__":
    log_to_stderr()
    _role, *_arguments = sys.argv[1:]
    _roles: dict[str, Callable[..., None]] = {"supernode": _run_warm, "plain": _run_plain, "superexec": _run_superexec}
    _roles[_role](*_arguments)
