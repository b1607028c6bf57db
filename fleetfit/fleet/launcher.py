"""Starts a device's node: Flower's SuperNode, and for every message a process that has Flower imported already.

`run_node` is what `fleetfit flower node` does. Everything that it starts ends with it, also when it is killed.
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
from fleetfit.fleet.warm.zygote import PRELOAD

_LOG = logging.getLogger("fleetfit")

# ---- processes that end together -----------------------------------------------------------------------------------

# It ends its process group once the process that holds the other end of its input is gone.
_KEEPER = "trap '' HUP INT TERM; read _; kill -KILL 0"
_JOIN_S = 10.0
_OF_FLOWER = re.compile(r"(\t|\x1b\[[\d;]*m)")


class Group:
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
        read: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a process.

        Args:
            command: The command.
            descriptors: What it inherits.
            output: Where it writes; by default where this process does.
            read: Whether it reads from a pipe, its `stdin`.
        """
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if read else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            env=self._environment,
            umask=0o077,
            process_group=self._keeper.pid,
        )
        self._members.append(process)
        return process

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._keeper.pid, signal.SIGKILL)
        for process in (*self._members, self._keeper):
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


class Output(threading.Thread):
    """Passes on what is written to `file`, keeps the last lines of it, and hands each to `listen`."""

    def __init__(self, listen: Callable[[bytes], None]) -> None:
        super().__init__(daemon=True)
        self._listen = listen
        ours, theirs = os.pipe()
        self.file = os.fdopen(theirs, "wb")
        self._source = os.fdopen(ours, "rb")
        self._lines: deque[bytes] = deque(maxlen=50)

    @property
    def last(self) -> str:
        """The last lines."""
        return b"".join(self._lines).decode(errors="replace")

    def run(self) -> None:
        """Read until nobody holds `file` any more."""
        with self._source:
            for line in self._source:
                self._lines.append(line)
                self._listen(line)
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.buffer.write(_make_printable(line))
                    sys.stderr.buffer.flush()

    def __enter__(self) -> "Output":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.join(_JOIN_S)


def _make_printable(line: bytes) -> bytes:
    """Return a line of Flower's log: its colours and tabs stay."""
    parts = _OF_FLOWER.split(line.decode(errors="backslashreplace"))
    parts[::2] = map(make_printable, parts[::2])
    return "".join(parts).encode()


class _Told(BaseException):
    """Somebody wants this process to end."""


@contextlib.contextmanager
def told_to_end() -> Iterator[None]:
    """Leave the block when this process is told to end, once: what is done then is not interrupted."""
    asked = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    heard = [each for each in asked if signal.getsignal(each) is not signal.SIG_IGN]  # nohup stays nohup

    def told(number: int, frame: FrameType | None) -> None:
        for each in heard:
            signal.signal(each, signal.SIG_IGN)
        raise _Told

    before = {each: signal.signal(each, told) for each in heard}
    try:
        yield
    except _Told:
        pass
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# ---- the node ------------------------------------------------------------------------------------------------------

CLIENT_APP = "fleetfit.fleet.client_app:app"

_SUPERNODE = "fleetfit.fleet.warm.supernode"
_ZYGOTE = "fleetfit.fleet.warm.zygote"
_REFUSED = "[code: 2004]"
_NO_KEY = "[code: 2001]"
_TOLD = "terminated gracefully"  # what the SuperNode says when somebody has told it to end
_NO_CONNECTION = "Failed to initialize the connection"
_TRY_FAILED, _TRY_WORKED = b"Connection attempt failed", (b"Connection successful", b"SuperNode ID:")
_RETRY_S = 120.0
_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
_GRACE_S = 10.0
_FAULT = 2  # exit code: something given is wrong
# Libraries that start threads when they are imported make forking unsafe; a job sets its own number of threads.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_RUN = (sys.executable, "-P", "-m")


@dataclass(frozen=True)
class _Node:
    """What the SuperNode is started with.

    Attributes:
        arguments: Of `flower-supernode`.
        address: Of its Runtime API.
    """

    arguments: list[str]
    address: str


def run_node(
    config: Path, connection: Connection, warm: bool = True, *, app: str = CLIENT_APP, preload: Sequence[str] = PRELOAD
) -> int:
    """Run a node until it is told to end, by Ctrl-C or SIGTERM. To be called from the main thread.

    Args:
        config: The node's own configuration, which its client app reads.
        connection: How it reaches its SuperLink.
        warm: Fork a process that has Flower imported for every message, and run no app but FleetFit's. Otherwise, and
            where the installed Flower does not allow it, a process is started for every message: each takes seconds
            longer, and the node runs whatever app the server sends.
        app: The client app; another one in tests only.
        preload: What is imported before forking; other modules in tests only.

    Returns:
        The exit code: 0 after a graceful end, 2 where clock, certificate or key keep the node from joining.

    Raises:
        ConfigError: A file is not there or not of its kind, or an address is wrong.
        MissingExtra: Flower is not installed.
        RunError: FleetFit's own part of the node cannot be imported.
    """
    refuse_on_windows("A fleet's node", "Under Windows, run it in WSL 2, which is Linux.")
    node = _checked(config, connection)
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtra("flower", "A fleet's node")
    if connection.key is not None:
        from fleetfit.fleet.certificates import load_node_key

        load_node_key(connection.key.expanduser())
    environment = _environment()

    def find() -> Fault | None:
        return find_fault(connection)

    reporter = FaultReporter(find, lambda cause: _LOG.warning("%s The node goes on trying.", cause))
    with told_to_end(), contextlib.ExitStack() as stack:
        zygote = None
        if warm:
            zygote = _zygote(stack.enter_context(Group({**environment, **_ONE_THREAD})), app, preload)
        return _accepted(lambda: _attempt(node, environment, zygote, reporter), find)
    return 0


# ---- what is asked for -------------------------------------------------------------------------------------------


def _checked(config: Path, connection: Connection) -> _Node:
    """Return the SuperNode's arguments.

    Raises:
        ConfigError: A file is not there, or an address is wrong.
    """
    for what, path in (
        ("node's configuration", config),
        ("root certificates", connection.root_certificates),
        ("private key", connection.key),
    ):
        if path is not None and not path.expanduser().is_file():
            raise ConfigError(f"{path}: no such file (the {what}).", path=path)
    place = str(config.expanduser().resolve())
    if set(place) & set("\"\\'\n"):
        raise ConfigError(f"{place}: Flower takes no path with quotes, backslashes or line ends.", path=place)
    if connection.insecure and (connection.root_certificates or connection.key):
        raise ConfigError(
            "insecure means no TLS: leave out the root certificates and the key, or insecure.", key="insecure"
        )
    check_superlink(connection.superlink)
    if connection.root_certificates is not None:
        check_root_certificates(connection.root_certificates)
    address = _listening(connection.listen)
    host, _, port = address.rpartition(":")
    arguments = ["--superlink", connection.superlink, "--host", host.strip("[]"), "--port", port]
    arguments += ["--node-config", f'config="{place}"']
    arguments += ["--insecure"] if connection.insecure else []
    for flag, path in (
        ("--root-certificates", connection.root_certificates),
        ("--auth-supernode-private-key", connection.key),
    ):
        arguments += [flag, str(path.expanduser().resolve())] if path is not None else []
    return _Node(arguments, address)


def _listening(listen: str) -> str:
    """Return the address with a port that is free.

    Raises:
        ConfigError: It is not this machine's own, or taken.
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
        found = trial.getsockname()[1]
    return f"[{host}]:{found}" if family == socket.AF_INET6 else f"{host}:{found}"


def _environment() -> dict[str, str]:
    """Return the environment of what is started; what the person has set stays."""
    given = dict(os.environ)
    given.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    given.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    given.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.05")
    # Flower starts its programs by bare name.
    given["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), given.get("PATH", os.defpath)])
    return given


# ---- the SuperNode -----------------------------------------------------------------------------------------------


def _accepted(attempt: Callable[[], tuple[int, str]], find: Callable[[], Fault | None]) -> int:
    """Start the SuperNode, again where that may help, and return the exit code.

    It is started again for a while if the SuperLink refuses its key, and for as long as the SuperLink cannot be
    reached. One that ends by itself, as Flower's does with code 0 at an error of the SuperLink, is started again too.

    Args:
        attempt: Run the SuperNode; returns its exit code and its last words.
        find: Returns why the SuperLink cannot be reached.
    """
    until, pause, failures = 0.0, _PAUSE_S, 0
    while True:
        began = time.monotonic()
        code, said = attempt()
        now = time.monotonic()
        if CLOCK_REFUSED in said:  # the SuperNode has said by how much
            return _FAULT
        if code == 0:
            if _TOLD in said and SIGNATURE_REFUSED not in said:
                return 0
            _LOG.warning("The SuperNode has ended by itself. Next try in %.0f s.", _PAUSE_S)
            time.sleep(_PAUSE_S)
        elif _REFUSED in said:
            until = now + _RETRY_S if not until or now - began > _RETRY_S else until
            refused = "The SuperLink refuses the key: it is not registered, or its node counts as online, as one that "
            refused += "was killed does for half a minute. Register it: flwr supernode register KEY.pub SUPERLINK."
            if now + _PAUSE_S > until:
                _LOG.error("%s No further try.", refused)
                return _FAULT
            _LOG.warning("%s Next try in %.0f s, the last one in %.0f s.", refused, _PAUSE_S, until - now)
            time.sleep(_PAUSE_S)
        elif _NO_KEY in said:
            _LOG.error("The SuperLink admits registered nodes only: give the private key of one, --key FILE.")
            return _FAULT
        else:
            fault = find_in_thread(find) if _NO_CONNECTION in said else None
            if fault is not None and fault.lasting:
                _LOG.error("%s", fault.cause)
                return _FAULT
            pause, failures = (_PAUSE_S, 0) if now - began > _LONGEST_PAUSE_S else (pause, failures)
            failures += fault is None
            if failures > 1 or _NO_CONNECTION not in said:
                return code if code >= 0 else 128 - code
            cause = "The connection to the SuperLink has failed." if fault is None else fault.cause
            _LOG.warning("%s Next try in %.0f s.", cause, pause)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _attempt(
    node: _Node, environment: dict[str, str], zygote: subprocess.Popen[bytes] | None, reporter: FaultReporter
) -> tuple[int, str]:
    """Run the SuperNode until it ends; return its exit code and the last lines of its output."""

    def listen(line: bytes) -> None:
        if _TRY_FAILED in line:
            reporter.note_failure()
        elif any(sign in line for sign in _TRY_WORKED):
            reporter.note_success()

    with Output(listen) as output, Group(environment) as group, tempfile.TemporaryFile() as secret:
        others: dict[str, subprocess.Popen[bytes]] = {}
        if zygote is None or zygote.stdin is None:
            supernode = group.start([*_RUN, _SUPERNODE, "plain", *node.arguments], output=output.file)
        else:
            # Without it, any user of this machine could ask the Runtime API for the messages, and answer them.
            secret.write(secrets.token_bytes(32))
            secret.flush()
            shared, jobs = secret.fileno(), zygote.stdin.fileno()
            flags = ["--isolation", "process", "--superexec-auth-secret-file", f"/proc/self/fd/{shared}"]
            heard, bell = os.pipe()
            command = [*_RUN, _SUPERNODE, "supernode", str(bell), *node.arguments, *flags]
            supernode = group.start(command, (bell, shared), output.file)
            command = [*_RUN, _SUPERNODE, "superexec", node.address, str(heard), str(jobs), str(shared)]
            others = {"zygote": zygote, "superexec": group.start(command, (heard, jobs, shared))}
            os.close(heard)
            os.close(bell)
        output.file.close()
        try:
            code = _watched(supernode, others)
        finally:
            _end(supernode)
    return code, output.last


def _watched(supernode: subprocess.Popen[bytes], others: dict[str, subprocess.Popen[bytes]]) -> int:
    """Wait until the SuperNode ends, or one of the others does, which it cannot do without."""
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


def _end(supernode: subprocess.Popen[bytes]) -> None:
    """Have the SuperNode sign off from the SuperLink, if there is time for it."""
    if supernode.poll() is None:
        supernode.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            supernode.wait(_GRACE_S)


def _zygote(group: Group, app: str, preload: Sequence[str]) -> subprocess.Popen[bytes] | None:
    """Start the zygote and wait until it has imported everything; None if forking is not possible here.

    Raises:
        RunError: Something cannot be imported.
    """
    said: dict[str, str] = {"unfit": f"it is safe on Linux only, and this is {sys.platform}"}
    if sys.platform == "linux":
        ours, theirs = os.pipe()
        with os.fdopen(ours) as told:
            process = group.start([*_RUN, _ZYGOTE, str(theirs), app, *preload], (theirs,), read=True)
            os.close(theirs)
            said = json.loads(told.readline() or "{}")
        if "ready" in said:
            return process
    if "unfit" not in said:
        raise RunError(f"the node cannot start: {said.get('failed', 'the process that is to be forked has ended')}")
    _LOG.warning(
        "No forking: %s. The node runs the ordinary way: each message takes seconds longer, and it runs whatever app "
        "the server sends.",
        said["unfit"],
    )
    return None
