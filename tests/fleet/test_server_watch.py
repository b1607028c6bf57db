"""A server app that is killed: somebody tells the SuperLink, here a small server of HTTP, and nobody does otherwise."""

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import waiting

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.proto.runtime_pb2 import PushTaskOutputRequest

# A server app with a grid like Flower's: says that it is at work, and ends as it is told to.
APP = """
import os, signal, sys
from types import SimpleNamespace
from fleetfit.fleet.server_watch import report_server_death

grid = SimpleNamespace(_addr=sys.argv[1], _token="secret", _insecure=True, _cert=None)
with report_server_death(grid):
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "error":
        raise SystemExit(3)
"""


class _SuperLink(http.server.ThreadingHTTPServer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.told: list[tuple[str, str, bytes]] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _SuperLink

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.told.append((self.path, str(self.headers.values()), content))
        self.send_response(200)
        self.send_header("Content-Type", "application/protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def superlink() -> Iterator[_SuperLink]:
    with _SuperLink() as link:
        thread = threading.Thread(target=link.serve_forever, args=(0.05,))
        thread.start()
        yield link
        link.shutdown()
        thread.join()


def _run(superlink: _SuperLink, end: str) -> int:
    address = f"127.0.0.1:{superlink.server_port}"
    return subprocess.run([sys.executable, "-c", APP, address, end], check=False, timeout=waiting.LIMIT_S).returncode


def test_a_server_app_that_is_killed_has_failed_at_once(superlink: _SuperLink) -> None:
    assert _run(superlink, "killed") == -9
    waiting.wait_until(lambda: superlink.told)
    [(path, headers, content)] = superlink.told
    assert path.endswith("/push-task-output") and "secret" in headers
    request = PushTaskOutputRequest.FromString(content)
    assert request.sub_status == "failed" and "killed" in request.details


@pytest.mark.parametrize(("end", "code"), [("well", 0), ("error", 3)])
def test_a_server_app_that_ends_is_not_reported(end: str, code: int, superlink: _SuperLink) -> None:
    assert _run(superlink, end) == code  # which waits for the process beside it
    assert not superlink.told
