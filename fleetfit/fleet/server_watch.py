"""A process beside the server app reports at once if it was killed.

A server app reports its task's result when it ends. If it is killed (no memory was left, say), Flower notices after a
minute, for which all nodes work for a server app that has ended. So `report_server_death` starts a small process beside
it: `python -m fleetfit.fleet.server_watch`. It uses names inside Flower, and does nothing where these have changed.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

_TRY_S = 60.0  # to reach a SuperLink that is away; by then Flower has noticed
_PAUSE_S = 2.0
_OVER = b"over\n"


@contextlib.contextmanager
def report_server_death(grid: Any) -> Iterator[None]:
    """Have a process beside this one report to the SuperLink if this one is killed during the block.

    Args:
        grid: Flower's grid of the server app; nothing is reported where it is not as expected.
    """
    from fleetfit.fleet.failover import list_superlinks  # not for the process beside it, which stays small

    address, token, certificates = (getattr(grid, name, None) for name in ("_addr", "_token", "_cert"))
    if not isinstance(address, str) or not isinstance(token, str) or not isinstance(certificates, bytes | None):
        yield
        return
    task = {"addresses": list_superlinks(address), "token": token, "insecure": bool(getattr(grid, "_insecure", False)),
            "certificates": certificates and certificates.decode("ascii", "replace")}  # fmt: skip
    command = [sys.executable, "-P", "-m", "fleetfit.fleet.server_watch"]
    quiet = subprocess.DEVNULL
    # A session of its own: a signal to the server app's group must not end this process first.
    reporter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
    assert reporter.stdin is not None
    with contextlib.suppress(OSError):
        reporter.stdin.write(json.dumps(task).encode() + b"\n")
        reporter.stdin.flush()
    try:
        yield
    finally:  # from here on Flower itself reports the result
        with contextlib.suppress(OSError):
            reporter.stdin.write(_OVER)
        with contextlib.suppress(OSError):
            reporter.stdin.close()
        reporter.wait()


def _report_failed_task(addresses: list[str], token: str, insecure: bool, certificates: str | None) -> None:
    """Report that a task has failed. The token of a task that has ended is not valid any more: nothing happens.

    Raises:
        httpx.HTTPError: The report did not arrive.
    """
    from flwr.common.constant import SubStatus
    from flwr.proto.runtime_pb2 import PushTaskOutputRequest
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    from fleetfit.fleet.failover import Failover

    details = "The server app's process was killed."
    with RuntimeHttpClient.from_server_address(
        server_address=addresses[0],
        insecure=insecure,
        root_certificates=None if certificates is None else certificates.encode(),
        interceptors=[
            Failover(addresses),
            RuntimeVersionHttpInterceptor(component_name="fleetfit"),
            RuntimeTokenHttpInterceptor(token),
        ],
    ) as client:
        client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=details))


def _main() -> None:
    """Read a task from stdin; report that it has failed if stdin is closed without another line."""
    line = sys.stdin.buffer.readline()
    if not line or sys.stdin.buffer.read() == _OVER:
        return
    import httpx

    until = time.monotonic() + _TRY_S
    while time.monotonic() < until:
        try:
            _report_failed_task(**json.loads(line))
        except httpx.HTTPStatusError:  # the SuperLink knows already
            return
        except httpx.HTTPError:
            time.sleep(_PAUSE_S)
        else:
            return


if __name__ == "__main__":
    _main()
