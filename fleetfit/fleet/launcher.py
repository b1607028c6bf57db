"""Starts a device's node: Flower's SuperNode, and a process for each message, which has Flower imported already.

`fleetfit flower node` calls `run_node`. All processes that it starts end with it, also when it is killed.
"""

import contextlib
import importlib.util
import ipaddress
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from fleetfit.errors import ConfigError, MissingExtra, RunError, make_printable, refuse_on_windows
from fleetfit.fleet.connection import (
    CLOCK_REFUSED,
    SIGNATURE_REFUSED,
    Connection,
    Fault,
    FaultReporter,
    check_root_certificates,
    check_superlink,
    find_fault,
    find_in_thread,
    split_address,
)
from fleetfit.fleet.warm_start import find_warm_start

_LOG = logging.getLogger("fleetfit")

# ---- processes that end together -----------------------------------------------------------------------------------

# It kills its process group once the process at the other end of its input has ended.
_KEEPER = "trap '' HUP INT TERM; read _; kill -KILL 0"
_JOIN_S = 10.0
_FLOWER_FORMAT = re.compile(r"(\t|\x1b\[[\d;]*m)")


class ProcessGroup:
    """Processes that end together: with this block, or when this process is killed."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0
        )
        self._members: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        command: Sequence[str],
        descriptors: Sequence[int] = (),
        output: IO[bytes] | None = None,
        has_input: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a process.

        Args:
            command: The command.
            descriptors: File descriptors that it inherits.
            output: For its stdout and stderr; those of this process by default.
            has_input: Whether it reads from a pipe, its `stdin`.
        """
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            env=self._environment,
            umask=0o077,
            process_group=self._keeper.pid,
        )
        self._members.append(process)
        return process

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._keeper.pid, signal.SIGKILL)
        for process in (*self._members, self._keeper):
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


class OutputReader(threading.Thread):
    """Prints what processes write to `file`, keeps the last lines of it, and passes each to `listen`."""

    def __init__(self, listen: Callable[[bytes], None]) -> None:
        super().__init__(daemon=True)
        self._listen = listen
        ours, theirs = os.pipe()
        self.file = os.fdopen(theirs, "wb")
        self._source = os.fdopen(ours, "rb")
        self._lines: deque[bytes] = deque(maxlen=50)

    @property
    def last_lines(self) -> str:
        """The last lines."""
        return b"".join(self._lines).decode(errors="replace")

    def run(self) -> None:
        """Read until all processes have closed `file`."""
        with self._source:
            for line in self._source:
                self._lines.append(line)
                self._listen(line)
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.buffer.write(_make_printable(line))
                    sys.stderr.buffer.flush()

    def __enter__(self) -> "OutputReader":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.join(_JOIN_S)


def _make_printable(line: bytes) -> bytes:
    """Return a line of Flower's log without control characters, but with its colors and tabs."""
    parts = _FLOWER_FORMAT.split(line.decode(errors="backslashreplace"))
    parts[::2] = map(make_printable, parts[::2])
    return "".join(parts).encode()


class _Terminated(BaseException):
    """A signal asks this process to end."""


@contextlib.contextmanager
def leave_on_signal() -> Iterator[None]:
    """Leave the block at the first signal that asks this process to end; later ones are ignored while it cleans up."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    signals = [each for each in signals if signal.getsignal(each) is not signal.SIG_IGN]  # nohup stays nohup

    def leave(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise _Terminated

    before = {each: signal.signal(each, leave) for each in signals}
    try:
        yield
    except _Terminated:
        pass
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# ---- the node ------------------------------------------------------------------------------------------------------

CLIENT_APP = "fleetfit.fleet.client_app:app"

_REFUSED = "[code: 2004]"
_NO_KEY = "[code: 2001]"
_TERMINATED = "terminated gracefully"  # the SuperNode's last line after a signal
_NO_CONNECTION = "Failed to initialize the connection"
_TRY_FAILED, _TRY_WORKED = b"Connection attempt failed", (b"Connection successful", b"SuperNode ID:")
_RETRY_S = 120.0
_PAUSE_S = 5.0
_MAX_PAUSE_S = 300.0
_GRACE_S = 10.0
_FAULT = 2  # exit code: an argument is wrong
# Libraries that start threads when they are imported make forking unsafe; a job sets its own number of threads.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_RUN = (sys.executable, "-P", "-m")


@dataclass(frozen=True)
class _SuperNode:
    """How the SuperNode is started.

    Attributes:
        arguments: Of `flower-supernode`.
        address: Of its Runtime API.
    """

    arguments: list[str]
    address: str


def run_node(
    config: Path,
    connection: Connection,
    warm: bool = True,
    *,
    app: str = CLIENT_APP,
    preload: Sequence[str] | None = None,
) -> int:
    """Run a node until a signal ends it, such as Ctrl-C or SIGTERM. Call it from the main thread.

    Args:
        config: The node's own configuration, which its client app reads.
        connection: How it reaches its SuperLink.
        warm: Fork a process that has Flower imported for every message, and run no app but FleetFit's. Otherwise, and
            where the installed Flower does not allow it, Flower starts a process for every message: each takes seconds
            longer, and the node runs any app that the server sends.
        app: The client app; another one in tests only.
        preload: Modules to import before forking; others than the usual ones in tests only.

    Returns:
        The exit code: 0 after a graceful end, 2 where clock, certificate or key keep the node from joining.

    Raises:
        ConfigError: A file is missing or malformed, or an address is wrong.
        MissingExtra: Flower is not installed.
        RunError: FleetFit's own part of the node cannot be imported.
    """
    refuse_on_windows("A fleet's node", "Under Windows, run it in WSL 2, which is Linux.")
    supernode = _check_arguments(config, connection)
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtra("flower", "A fleet's node")
    if connection.key is not None:
        from fleetfit.fleet.certificates import load_node_key

        load_node_key(connection.key.expanduser())
    environment = _make_environment()

    def find() -> Fault | None:
        return find_fault(connection)

    reporter = FaultReporter(find, lambda cause: _LOG.warning("%s The node keeps trying.", cause))
    with leave_on_signal(), contextlib.ExitStack() as stack:
        zygote = None
        if warm:
            group = stack.enter_context(ProcessGroup({**environment, **_ONE_THREAD}))
            zygote = _start_zygote(group, app, preload)
        return _keep_running(lambda: _run_supernode(supernode, environment, zygote, reporter), find)
    return 0


# ---- arguments -----------------------------------------------------------------------------------------------------


def _check_arguments(config: Path, connection: Connection) -> _SuperNode:
    """Return how the SuperNode is started.

    Raises:
        ConfigError: A file is missing, or an address is wrong.
    """
    for what, path in (
        ("node's configuration", config),
        ("root certificates", connection.root_certificates),
        ("private key", connection.key),
    ):
        if path is not None and not path.expanduser().is_file():
            raise ConfigError(f"{path}: no such file (the {what}).", path=path)
    absolute = str(config.expanduser().resolve())
    if set(absolute) & set("\"\\'\n"):
        raise ConfigError(f"{absolute}: Flower takes no path with quotes, backslashes or line ends.", path=absolute)
    if connection.insecure and (connection.root_certificates or connection.key):
        raise ConfigError(
            "insecure means no TLS: leave out the root certificates and the key, or insecure.", key="insecure"
        )
    check_superlink(connection.superlink)
    if connection.root_certificates is not None:
        check_root_certificates(connection.root_certificates)
    address = _find_free_address(connection.listen)
    host, _, port = address.rpartition(":")
    arguments = ["--superlink", connection.superlink, "--host", host.strip("[]"), "--port", port]
    arguments += ["--node-config", f'config="{absolute}"']
    arguments += ["--insecure"] if connection.insecure else []
    for flag, path in (
        ("--root-certificates", connection.root_certificates),
        ("--auth-supernode-private-key", connection.key),
    ):
        arguments += [flag, str(path.expanduser().resolve())] if path is not None else []
    return _SuperNode(arguments, address)


def _find_free_address(listen: str) -> str:
    """Return the address with a free port.

    Raises:
        ConfigError: It is not this machine's own, or its port is taken.
    """
    host, port = split_address(listen, "listen")
    with contextlib.suppress(ValueError):
        host = "127.0.0.1" if host == "localhost" else str(ipaddress.ip_address(host))
    if not host.startswith("127.") and host != "::1":
        raise ConfigError(
            f'listen: only the node\'s own processes use it, so the host is 127.0.0.1, got "{listen}".', key="listen"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise ConfigError(f"listen: {listen} cannot be bound: {error}.", key="listen") from None
        free_port = trial.getsockname()[1]
    return f"[{host}]:{free_port}" if family == socket.AF_INET6 else f"{host}:{free_port}"


def _make_environment() -> dict[str, str]:
    """Return the environment of the node's processes; variables that the user has set stay."""
    environment = dict(os.environ)
    environment.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    environment.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    environment.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.05")
    # Flower starts its programs by bare name.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return environment


# ---- the SuperNode -----------------------------------------------------------------------------------------------


def _keep_running(run_supernode: Callable[[], tuple[int, str]], find: Callable[[], Fault | None]) -> int:
    """Run the SuperNode, again where that may help, and return the exit code.

    It is started again for a while if the SuperLink refuses its key, and for as long as the SuperLink cannot be
    reached. It is also started again if it ends without a signal, as Flower's does with code 0 at an error of the
    SuperLink.

    Args:
        run_supernode: Returns the exit code and the last lines of the output.
        find: Returns why the SuperLink cannot be reached.
    """
    until, pause, failures = 0.0, _PAUSE_S, 0
    while True:
        start = time.monotonic()
        code, output = run_supernode()
        now = time.monotonic()
        if CLOCK_REFUSED in output:  # the SuperNode has said by how much
            return _FAULT
        if code == 0:
            if _TERMINATED in output and SIGNATURE_REFUSED not in output:
                return 0
            _LOG.warning("The SuperNode has ended by itself. Next try in %.0f s.", _PAUSE_S)
            time.sleep(_PAUSE_S)
        elif _REFUSED in output:
            until = now + _RETRY_S if not until or now - start > _RETRY_S else until
            reason = "The SuperLink refuses the key: it is not registered, or its node counts as online, as one that "
            reason += "was killed does for half a minute. Register it: flwr supernode register KEY.pub SUPERLINK."
            if now + _PAUSE_S > until:
                _LOG.error("%s No further try.", reason)
                return _FAULT
            _LOG.warning("%s Next try in %.0f s, the last one in %.0f s.", reason, _PAUSE_S, until - now)
            time.sleep(_PAUSE_S)
        elif _NO_KEY in output:
            _LOG.error("The SuperLink admits registered nodes only: give the private key of one, --key FILE.")
            return _FAULT
        else:
            fault = find_in_thread(find) if _NO_CONNECTION in output else None
            if fault is not None and fault.lasting:
                _LOG.error("%s", fault.cause)
                return _FAULT
            pause, failures = (_PAUSE_S, 0) if now - start > _MAX_PAUSE_S else (pause, failures)
            failures += fault is None
            if failures > 1 or _NO_CONNECTION not in output:
                return code if code >= 0 else 128 - code
            cause = "The connection to the SuperLink has failed." if fault is None else fault.cause
            _LOG.warning("%s Next try in %.0f s.", cause, pause)
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)


def _run_supernode(
    supernode: _SuperNode, environment: dict[str, str], zygote: subprocess.Popen[bytes] | None, reporter: FaultReporter
) -> tuple[int, str]:
    """Run the SuperNode until it ends; return its exit code and the last lines of its output."""

    def listen(line: bytes) -> None:
        if _TRY_FAILED in line:
            reporter.note_failure()
        elif any(sign in line for sign in _TRY_WORKED):
            reporter.note_success()

    warm = find_warm_start()
    with (
        OutputReader(listen) as output,
        ProcessGroup(environment) as group,
        tempfile.TemporaryFile() as secret,
    ):
        others: dict[str, subprocess.Popen[bytes]] = {}
        if warm is None:
            process = group.start(["flower-supernode", *supernode.arguments], output=output.file)
        elif zygote is None or zygote.stdin is None:
            process = group.start([*_RUN, warm.SUPERNODE, "plain", *supernode.arguments], output=output.file)
        else:
            # Without it, any user of this machine could ask the Runtime API for the messages, and answer them.
            secret.write(secrets.token_bytes(32))
            secret.flush()
            shared, jobs = secret.fileno(), zygote.stdin.fileno()
            flags = ["--isolation", "process", "--superexec-auth-secret-file", f"/proc/self/fd/{shared}"]
            listener, bell = os.pipe()
            command = [*_RUN, warm.SUPERNODE, "supernode", str(bell), *supernode.arguments, *flags]
            process = group.start(command, (bell, shared), output.file)
            command = [*_RUN, warm.SUPERNODE, "superexec", supernode.address, str(listener), str(jobs), str(shared)]
            others = {"zygote": zygote, "superexec": group.start(command, (listener, jobs, shared))}
            os.close(listener)
            os.close(bell)
        output.file.close()
        try:
            code = _wait(process, others)
        finally:
            if process.poll() is None:  # let it sign off from the SuperLink
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
    return code, output.last_lines


def _wait(supernode: subprocess.Popen[bytes], others: dict[str, subprocess.Popen[bytes]]) -> int:
    """Wait until the SuperNode ends, or one of the processes that it needs; return the exit code."""
    while True:
        code = supernode.poll()
        if code is not None:
            return code
        for name, process in others.items():
            if process.poll() is not None:
                _LOG.error(
                    "The node's %s ended unexpectedly (code %d), and so does the node.", name, process.returncode
                )
                return 1
        time.sleep(0.2)


def _start_zygote(group: ProcessGroup, app: str, preload: Sequence[str] | None) -> subprocess.Popen[bytes] | None:
    """Start the zygote and wait until it has imported everything; None if forking is not possible here.

    Raises:
        RunError: A module cannot be imported.
    """
    warm, report = find_warm_start(), dict[str, str]()
    if warm is None:
        report = {"unfit": "the warm start is not installed"}
    elif sys.platform != "linux":
        report = {"unfit": f"it is safe on Linux only, and this is {sys.platform}"}
    else:
        ours, theirs = os.pipe()
        with os.fdopen(ours) as pipe:
            modules = warm.PRELOAD if preload is None else preload
            process = group.start([*_RUN, warm.ZYGOTE, str(theirs), app, *modules], (theirs,), has_input=True)
            os.close(theirs)
            report = json.loads(pipe.readline() or "{}")
        if "ready" in report:
            return process
    if "unfit" not in report:
        raise RunError(f"the node cannot start: {report.get('failed', 'the process that is to be forked has ended')}")
    _LOG.warning(
        "No forking: %s. The node runs the ordinary way: each message takes seconds longer, and it runs whatever app "
        "the server sends.",
        report["unfit"],
    )
    return None
