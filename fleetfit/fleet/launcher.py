"""Runs a device's node: it joins a fleet, again where it is refused, and leaves at a signal.

`fleetfit flower node` calls `run_node`. The node is this process and its worker (`fleetfit.fleet.worker`), which ends
with it, also when it is killed.
"""

import contextlib
import importlib.util
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from fleetfit.errors import ConfigError, MissingExtra, format_exception, make_printable, refuse_on_windows
from fleetfit.fleet.connection import (
    Connection,
    FaultReporter,
    check_root_certificates,
    check_superlink,
    find_fault,
)
from fleetfit.fleet.worker import NodeWorker

_LOG = logging.getLogger("fleetfit")

# ---- signals -------------------------------------------------------------------------------------------------------


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


def _run_in_thread(function: Callable[[], int], seconds: float | None = None) -> int:
    """Return the result of a function, or 0 where it takes too long.

    A signal can end the wait for it, which a look-up of a name would delay.
    """
    results: list[int] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else 0


# ---- the node ------------------------------------------------------------------------------------------------------

_RETRY_S = 120.0  # for which a refused node tries again
_PAUSE_S = 5.0
_GRACE_S = 10.0
_FAULT = 2  # exit code: an argument is wrong


def run_node(config: Path, connection: Connection) -> int:
    """Run a node until a signal ends it, such as Ctrl-C or SIGTERM. Call it from the main thread.

    Args:
        config: The node's own configuration.
        connection: How it reaches its SuperLink.

    Returns:
        The exit code: 0 after a graceful end, 2 where clock, certificate or key keep the node from joining.

    Raises:
        ConfigError: A file is missing or malformed, or an address is wrong.
        MissingExtra: Flower is not installed.
    """
    refuse_on_windows("A fleet's node", "Under Windows, run it in WSL 2, which is Linux.")
    _check_arguments(config, connection)
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtra("flower", "A fleet's node")
    if connection.key is not None:
        from fleetfit.fleet.certificates import load_node_key

        load_node_key(connection.key.expanduser())
    node = _Node(str(config.expanduser().resolve()), connection)
    with leave_on_signal():
        try:
            return _run_in_thread(node.run)
        finally:
            _run_in_thread(node.leave, _GRACE_S)
            node.worker.end()
    return 0


def _check_arguments(config: Path, connection: Connection) -> None:
    """Refuse arguments with which no node can join.

    Raises:
        ConfigError: A file is missing or malformed, or an address is wrong.
    """
    for what, path in (
        ("node's configuration", config),
        ("root certificates", connection.root_certificates),
        ("private key", connection.key),
    ):
        if path is not None and not path.expanduser().is_file():
            raise ConfigError(f"{path}: no such file (the {what}).", path=path)
    if connection.insecure and (connection.root_certificates or connection.key):
        raise ConfigError(
            "insecure means no TLS: leave out the root certificates and the key, or insecure.", key="insecure"
        )
    for address in connection.superlinks:
        check_superlink(address)
    if connection.root_certificates is not None:
        check_root_certificates(connection.root_certificates)


class _Node:
    """This device's node: its worker, and its connection, which is made anew after a refusal."""

    def __init__(self, config: str, connection: Connection) -> None:
        from fleetfit.fleet.superlink import SuperLink

        self.worker = NodeWorker(config)
        self._connection = connection
        self._reporter = FaultReporter(
            lambda: find_fault(connection), lambda cause: _LOG.warning("%s The node keeps trying.", cause)
        )
        self._link: SuperLink | None = SuperLink(connection, self._reporter)

    def run(self) -> int:
        """Join and answer messages, again for a while where the SuperLink refuses the node; return the exit code."""
        from fleetfit.fleet.node_loop import answer_messages
        from fleetfit.fleet.superlink import Refusal, SuperLink

        until = 0.0
        while True:
            began = time.monotonic()
            try:
                link = self._link = self._link or SuperLink(self._connection, self._reporter)
                node = link.join()
                until = 0.0
                with contextlib.suppress(OSError, ValueError):  # the terminal is gone
                    sys.stderr.write(make_printable(f"Joined {link.address}. SuperNode ID: {node}\n"))
                    sys.stderr.flush()
                answer_messages(link, self.worker)
            except Refusal as refusal:
                now = time.monotonic()
                until = now + _RETRY_S if not until or now - began > _RETRY_S else until
                if refusal.fault.lasting or now + _PAUSE_S > until:
                    _LOG.error("%s%s", refusal, "" if refusal.fault.lasting else " No further try.")
                    return _FAULT
                _LOG.warning("%s Next try in %.0f s, the last one in %.0f s.", refusal, _PAUSE_S, until - now)
            except Exception as error:  # of the SuperLink while joining, or a bug: a device comes back by itself
                fault = find_fault(self._connection)
                if fault is not None and fault.lasting:
                    _LOG.error("%s", fault.cause)
                    return _FAULT
                _LOG.warning("The node fails (%s). Next try in %.0f s.", format_exception(error), _PAUSE_S)
            self.leave()
            self._link = None
            time.sleep(_PAUSE_S)

    def leave(self) -> int:
        """Sign off from the SuperLink."""
        if (link := self._link) is not None:
            link.leave()
        return 0
