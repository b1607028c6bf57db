"""The last words of a process of Flower that was killed: its task has failed, said at once by somebody who outlives it.

Such a process says how its task went when it ends. Of one that was killed (no memory was left, say) Flower hears
nothing, and takes it for alive for a minute: for so long a node waits for an answer, and all nodes work for a server
app that is gone. The zygote speaks for its forks, and a small process beside the server app for that.

Run as `python -m fleetfit.engines.flower.last_words` by `spoken_for`.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

_TRY_S = 60.0  # to reach a SuperLink that is away; by then Flower has noticed by itself
_PAUSE_S = 2.0
_OVER = b"over\n"


def say(address: str, token: str, insecure: bool, certificates: str | None, details: str) -> None:
    """Say that a task has failed. Nothing happens where it has ended otherwise: its token is not valid any more.

    Args:
        address: Of the Runtime API that the task came from.
        token: Of the task.
        insecure: No TLS.
        certificates: The authority of the API's certificate, in PEM; None for those that the system trusts.
        details: What happened.

    Raises:
        httpx.HTTPError: It was not heard.
    """
    from flwr.common.constant import SubStatus
    from flwr.proto.runtime_pb2 import PushTaskOutputRequest
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=insecure,
        root_certificates=None if certificates is None else certificates.encode(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="fleetfit"), RuntimeTokenHttpInterceptor(token)],
    )
    try:
        client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=details))
    finally:
        client.close()


@contextlib.contextmanager
def spoken_for(grid: Any) -> Iterator[None]:
    """Have a process beside this one that tells the SuperLink when this one is killed.

    Args:
        grid: Flower's grid of the server app; where it is not as expected, nobody speaks.
    """
    address, token, certificates = (getattr(grid, name, None) for name in ("_addr", "_token", "_cert"))
    if not isinstance(address, str) or not isinstance(token, str) or not isinstance(certificates, bytes | None):
        yield
        return
    task = {"address": address, "token": token, "insecure": bool(getattr(grid, "_insecure", False)),
            "certificates": certificates and certificates.decode("ascii", "replace")}  # fmt: skip
    command = [sys.executable, "-P", "-m", "fleetfit.engines.flower.last_words"]
    quiet = subprocess.DEVNULL
    # A session of its own: who ends the server app's group with it must not end this one first.
    beside = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
    assert beside.stdin is not None
    with contextlib.suppress(OSError):
        beside.stdin.write(json.dumps(task).encode() + b"\n")
        beside.stdin.flush()
    try:
        yield
    finally:  # from here on Flower itself says how it went
        with contextlib.suppress(OSError):
            beside.stdin.write(_OVER)
        with contextlib.suppress(OSError):
            beside.stdin.close()
        beside.wait()


def _main() -> None:
    """Read a task from the standard input; say that it has failed if that is closed without a word."""
    line = sys.stdin.buffer.readline()
    if not line or sys.stdin.buffer.read() == _OVER:
        return
    import httpx

    until = time.monotonic() + _TRY_S
    while time.monotonic() < until:
        try:
            say(**json.loads(line), details="The server app's process was killed.")
        except httpx.HTTPStatusError:  # heard, and known already
            return
        except httpx.HTTPError:
            time.sleep(_PAUSE_S)
        else:
            return


if __name__ == "__main__":
    _main()
