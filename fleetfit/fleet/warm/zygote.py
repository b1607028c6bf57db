"""The process behind `fleetfit flower node` that has imported Flower and forks itself for every message.

Flower starts a Python for every message. Here Flower's SuperExec hands the message to a process that has imported
everything already (the zygote); its fork runs FleetFit's client app, and no other one, whatever app the server names.
The app hands the work to the node's worker, which keeps torch, data and models (`fleetfit.fleet.worker`): in a
fork that did it itself they would have to be made for each message. This leans on names inside Flower: see
`fleetfit.fleet.warm.private_names`.

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
from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

from fleetfit.errors import ConfigError
from fleetfit.fleet.logs import hear
from fleetfit.fleet.warm.private_names import (
    CLIENT,
    beat_every,
    missing_names,
    often,
    say_failed,
)

_LOG = logging.getLogger("fleetfit")

_BEAT_S = 10.0  # a fork ends within half of it when its message has been given up
_tasks: dict[int, Mapping[str, Any]] = {}  # what the forks that run were told, by process

PRELOAD = ("numpy", "flwr.supernode.runtime.run_clientapp", "fleetfit.fleet.client_app")


def _zygote(report: str, app: str, *preload: str) -> None:
    """Import everything, then fork for every job that comes through the standard input, until it closes.

    Args:
        report: Descriptor of the pipe for one line of JSON: `{"ready": ""}`, or why it is not.
        app: The client app that the forks run, as "package.module:object".
        preload: Modules to import.
    """
    with os.fdopen(int(report), "w") as told:
        try:
            missing = ", ".join(missing_names())
            said = {"unfit": f"the installed Flower lacks {missing}"} if missing else _prepared(app, preload)
        except Exception:
            traceback.print_exc()
            said = {"failed": traceback.format_exc(limit=0).strip()}
        told.write(json.dumps(said) + "\n")
    if "ready" in said:
        for line in sys.stdin.buffer:
            job = json.loads(line)
            with _uninterrupted():
                process = _fork(partial(_client_app, job))
                if process:
                    _tasks[process] = job


def _prepared(app: str, preload: tuple[str, ...]) -> dict[str, str]:
    """Import the modules, replace Flower's loader, and return what to report."""
    for name in preload:
        importlib.import_module(name)
    _only(app)
    often(CLIENT, "pull_and_inflate_object_from_tree")
    beat_every(_BEAT_S)
    signal.signal(signal.SIGCHLD, _reap)
    gc.collect()
    gc.freeze()  # forks share these pages until they write to them
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:  # a fork has one thread, and the locks that the others held for ever
        return {"unfit": f"{threads} threads run after importing {', '.join(preload)}"}
    return {"ready": ""}


def _only(app: str) -> None:
    """Have Flower's client process load one app, whatever the server sent; nothing of that is unpacked."""
    module = importlib.import_module(CLIENT)

    def check(fab_file: bytes, skip_prompt: bool = False) -> None:
        named = _component(fab_file)
        if named != app:
            raise ConfigError(f'this node runs the client app "{app}" only; the app that was sent names "{named}".')

    def loader(**_: Any) -> Callable[..., Any]:
        return lambda *_: _loaded(app)

    module.install_from_fab = check  # type: ignore[attr-defined]
    module.get_load_client_app_fn = loader  # type: ignore[attr-defined]


def _component(fab: bytes) -> str:
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


def _loaded(app: str) -> Any:
    module, _, name = app.partition(":")
    return reduce(getattr, name.split("."), importlib.import_module(module))


def _client_app(job: Mapping[str, Any]) -> None:
    """Answer a message."""
    importlib.import_module(CLIENT).run_clientapp(insecure=True, runtime_dependency_install=False, **job)


def _fork(work: Callable[[], None]) -> int:
    """Fork; the child does the work and ends. Return the child's number, or 0 where there is none."""
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
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), 0)
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


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let no child be collected before it is known."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _reap(*_: Any) -> None:
    """Collect the children that have ended; a task whose process was killed has failed."""
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            job = _tasks.pop(process, None)
            if os.WIFSIGNALED(status) and job is not None:
                why = f"the process of a message was ended by signal {os.WTERMSIG(status)}"
                _LOG.warning("%s.", why)
                _fork(partial(_speak, job, why))


def _speak(job: Mapping[str, Any], why: str) -> None:
    """Tell the SuperNode at once; by itself it would notice within a minute."""
    say_failed(job["runtime_api_address"], job["token"], insecure=True, certificates=None, details=why)


if __name__ == "__main__":
    hear()
    _zygote(*sys.argv[1:])
