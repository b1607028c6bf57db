"""Several SuperLinks over one database: a client of Flower's goes on with the next one, here small servers of HTTP."""

import http.server
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

import httpx
from deployment import free_port
from flwr.proto.runtime_pb2 import GetNodesRequest
from flwr.superlink.grid.http_grid import HttpGrid

from fleetfit.errors import ConfigError
from fleetfit.fleet import failover
from fleetfit.fleet.connection import Connection, FaultReporter, find_fault
from fleetfit.fleet.failover import Failover, list_superlinks, use_superlinks
from fleetfit.fleet.superlink import SuperLink


class _Server(http.server.ThreadingHTTPServer):
    """Answers each request with a status, and notes its headers."""

    allow_reuse_address = True

    def __init__(self, port: int = 0, status: int = 200) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.status, self.got = status, list[Any]()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(self.headers)
        self._answer()

    def _answer(self) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(port: int = 0, status: int = 200) -> Iterator[_Server]:
    with _Server(port, status) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def absent() -> str:
    return f"127.0.0.1:{free_port()}"


def link_to(addresses: Sequence[str]) -> SuperLink:
    connection = Connection(addresses[0], insecure=True, further=tuple(addresses[1:]))
    return SuperLink(connection, FaultReporter(lambda: None, lambda _: None))


def test_a_node_goes_on_with_the_next_superlink_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as second, serving(status=503) as gateway:
        link = link_to([absent(), gateway.address, second.address])
        with caplog.at_level(logging.WARNING, "fleetfit"):
            for _ in range(3):
                assert link.receive() is None
        assert (len(second.got), len(gateway.got), len(caplog.records)) == (3, 1, 1)
        assert link.address == second.address
    signatures = [headers["flwr-signature"] for headers in (*gateway.got, *second.got)]
    assert len(set(signatures)) == 4, "each try is signed anew"
    assert second.got[0]["host"] == second.address


def test_a_node_comes_back_when_the_other_one_dies(caplog: pytest.LogCaptureFixture) -> None:
    first = absent()
    with serving() as second:
        link = link_to([first, second.address])
        assert link.receive() is None
    with serving(int(first.rpartition(":")[2])) as again:
        assert link.receive() is None and len(again.got) == 1
    assert link.address == first


def test_what_fails_everywhere_fails() -> None:
    failing, tried = Failover(["one:1", "two:2"]), list[str]()
    context = SimpleNamespace(request=httpx.Request("POST", "http://one:1/path", content=b"x"))

    def send(context: Any) -> httpx.Response:
        tried.append(str(context.request.url))
        raise httpx.ConnectError("refused")

    with pytest.raises(httpx.ConnectError):
        failing.intercept(context, send)
    assert tried == ["http://one:1/path", "http://two:2/path"] and failing.address == "one:1"


def test_it_stays_where_no_superlink_answers(caplog: pytest.LogCaptureFixture) -> None:
    with serving(status=503) as first, serving(status=502) as second, caplog.at_level(logging.WARNING, "fleetfit"):
        failing = Failover([first.address, second.address])
        client = httpx.Client()
        context = SimpleNamespace(request=httpx.Request("POST", f"http://{first.address}/", content=b"x"))
        response = failing.intercept(context, lambda context: client.send(context.request))
    assert response.status_code == 502 and failing.address == first.address and not caplog.records


def test_a_fault_is_one_of_all_superlinks() -> None:
    """A lasting one ends a node, so one that may pass comes first."""
    with serving() as good, serving(status=404) as other:
        assert find_fault(Connection(absent(), insecure=True, further=(good.address,))) is None
        away = find_fault(Connection(other.address, insecure=True, further=(absent(),)))
        wrong = find_fault(Connection(other.address, insecure=True, further=(other.address,)))
    assert away is not None and not away.lasting
    assert wrong is not None and wrong.lasting


def test_a_server_app_goes_on_with_another_superlink(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its requests: its grid, its heartbeats and its log have one client."""
    with serving() as second:
        first = absent()
        monkeypatch.setenv(failover.VARIABLE, f"{first}, {second.address}")
        grid = HttpGrid(first, insecure=True, token="secret")
        client = grid._runtime_client
        grid._retry_invoker.max_tries = 1  # it would try for ever
        use_superlinks(grid)
        assert not client.GetNodes(GetNodesRequest()).nodes
        assert "secret" in str(second.got[0].values())
        grid.close()


def test_the_addresses_of_a_server_app(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_superlinks("a:1") == ["a:1"]
    monkeypatch.setenv(failover.VARIABLE, "b:2, a:1,c:3,")
    assert list_superlinks("a:1") == ["a:1", "b:2", "c:3"]
    monkeypatch.setenv(failover.VARIABLE, "b")
    with pytest.raises(ConfigError) as error:
        list_superlinks("a:1")
    assert error.value.key == failover.VARIABLE
