"""The zygote: a process that has imported Flower and forks itself for every message.

Flower starts a Python for every message. Here Flower's SuperExec hands the message to the zygote, whose fork runs
FleetFit's client app, and no other one, whatever app the server names. The app hands the work to the node's worker,
which keeps torch, data and models (`fleetfit.fleet.worker`): a fork would have to make them for each message. The
zygote uses names inside Flower: see `fleetfit.fleet.warm.private_names`.

Run as `python -m fleetfit.fleet.warm.zygote ...` by `fleetfit.fleet.launcher`.
"""

import contextlib
import gc
import importlib
import io
import json
import logging
import os
import signal
import sys
import tomllib
import traceback
import zipfile
from collections.abc import Callable, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

from fleetfit.errors import ConfigError
from fleetfit.fleet.logs import log_to_stderr
from fleetfit.fleet.warm.private_names import (
    CLIENT,
    find_missing_names,
    poll_often,
    report_failed_task,
    set_heartbeat,
)

_LOG = logging.getLogger("fleetfit")

_HEARTBEAT_S = 10.0  # a fork ends within half of it when its message has been given up
_tasks: dict[int, Mapping[str, Any]] = {}  # of the running forks, by process


def _run(report: str, app: str, *preload: str) -> None:
    """Import everything, then fork for every task that comes through stdin, until it closes.

    Args:
        report: Descriptor of the pipe for one line of JSON: `{"ready": ""}`, or the reason why it is not ready.
        app: The client app of the forks, as "package.module:object".
        preload: Modules to import.
    """
    with os.fdopen(int(report), "w") as pipe:
        try:
            missing = ", ".join(find_missing_names())
            status = {"unfit": f"the installed Flower lacks {missing}"} if missing else _prepare(app, preload)
        except Exception:
            traceback.print_exc()
            status = {"failed": traceback.format_exc(limit=0).strip()}
        pipe.write(json.dumps(status) + "\n")
    if "ready" in status:
        run_client_app = importlib.import_module(CLIENT).run_clientapp
        for line in sys.stdin.buffer:
            task = json.loads(line)
            # No child may be collected before it is in the table.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            try:
                process = _fork(partial(run_client_app, insecure=True, runtime_dependency_install=False, **task))
                if process:
                    _tasks[process] = task
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _prepare(app: str, preload: tuple[str, ...]) -> dict[str, str]:
    """Import the modules, replace Flower's loader, and return the status."""
    for name in preload:
        importlib.import_module(name)
    _allow_only(app)
    poll_often(CLIENT, "pull_and_inflate_object_from_tree")
    set_heartbeat(_HEARTBEAT_S)
    signal.signal(signal.SIGCHLD, _reap)
    gc.collect()
    gc.freeze()  # forks share these pages until they write to them
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:  # a fork has one thread: locks of the others would stay locked for ever
        return {"unfit": f"{threads} threads run after importing {', '.join(preload)}"}
    return {"ready": ""}


def _allow_only(app: str) -> None:
    """Have Flower's client process load one app; the app that the server sends is not unpacked."""
    client_module, _, name = app.partition(":")
    module = importlib.import_module(CLIENT)

    def check(fab_file: bytes, skip_prompt: bool = False) -> None:
        component = _find_component(fab_file)
        if component != app:
            raise ConfigError(f'this node runs the client app "{app}" only; the app that was sent names "{component}".')

    def load(**_: Any) -> Callable[..., Any]:
        return lambda *_: reduce(getattr, name.split("."), importlib.import_module(client_module))

    module.install_from_fab = check  # type: ignore[attr-defined]
    module.get_load_client_app_fn = load  # type: ignore[attr-defined]


def _find_component(fab: bytes) -> str:
    """Return the client app that a Flower app bundle names.

    Raises:
        ConfigError: It names none.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as files:
            table = tomllib.loads(files.read("pyproject.toml").decode())
        return str(table["tool"]["flwr"]["app"]["components"]["clientapp"])
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError("the app that was sent names no client app.") from error


def _fork(work: Callable[[], None]) -> int:
    """Fork; the child does the work and ends. Return the child's number, or 0 after an error."""
    try:
        process = os.fork()
    except OSError as error:
        _LOG.error("no process for a message: %s", error)
        return 0
    if process:
        return process
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        with open(os.devnull, "rb") as null:  # noqa: PTH123
            os.dup2(null.fileno(), 0)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)  # never back into the zygote's loop


def _reap(*_: Any) -> None:
    """Collect the children that have ended, and report tasks whose process was killed.

    The SuperNode itself would notice after a minute.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            task = _tasks.pop(process, None)
            if os.WIFSIGNALED(status) and task is not None:
                reason = f"the process of a message was ended by signal {os.WTERMSIG(status)}"
                _LOG.warning("%s.", reason)
                address, token = task["runtime_api_address"], task["token"]
                _fork(partial(report_failed_task, address, token, insecure=True, certificates=None, details=reason))


if __name__ == "__main__":
    log_to_stderr()
    _run(*sys.argv[1:])
