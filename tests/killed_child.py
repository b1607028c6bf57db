"""A process that calls commands in forks of itself and kills one at its n-th write; packages are imported once for all.

A line of JSON on stdin is a call: [at which write, 0 for never; folder to stand in; Python code, or the command's
words]. A line on stdout is what became of it: [exit code, -9 where it was killed; how many writes there were].
"""

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORTED = [
    "torch._dynamo", "torch.export", "fleetfit.cli.run", "fleetfit.api.run",
    "fleetfit.api.comparison", "fleetfit.inference.export.folder",
    "fleetfit.report.figures", "fleetfit.fleet.app_folder", "fleetfit.fleet.certificates", "fleetfit.fleet.node",
    "matplotlib.pyplot", "matplotlib.backends.backend_agg",
]  # fmt: skip
WRITES = ("fsync", "replace", "rename")


def hooked(at: int, count: list[int]) -> None:
    """Count flushes to disk and renamings, and kill this process in front of the n-th."""

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return call

    for name in WRITES:
        setattr(os, name, counted(getattr(os, name)))


def called(at: int, folder: str, what: list[str] | str, tell: int) -> None:
    """Be the fork: call, tell how many writes there were, and end."""
    os.chdir(folder)
    count, code = [0], 1
    hooked(at, count)
    try:
        if isinstance(what, str):
            exec(what, {})
            code = 0
        else:
            from fleetfit.cli import main

            main(what)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        os.write(tell, str(count[0]).encode())
        sys.stderr.flush()
        os._exit(code)


def serve(answers: int) -> None:
    for line in sys.stdin:
        at, folder, what = json.loads(line)
        read_end, tell = os.pipe()
        child = os.fork()
        if not child:
            called(at, folder, what, tell)
        os.close(tell)
        with os.fdopen(read_end, "rb") as pipe:
            message = pipe.read()
        _, status = os.waitpid(child, 0)
        os.write(answers, json.dumps([os.waitstatus_to_exitcode(status), int(message or 0)]).encode() + b"\n")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    os.environ["MPLBACKEND"] = "agg"
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except ImportError:  # an extra that is not installed; its tests are skipped
            continue
    answers = os.dup(1)
    os.dup2(os.open(Path(sys.argv[1]) / "said", os.O_CREAT | os.O_RDWR | os.O_APPEND), 1)
    os.dup2(1, 2)
    serve(answers)
