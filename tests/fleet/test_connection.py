"""Why a node does not join: each cause by a server on this machine that has it."""

import datetime
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import Expected, raises

pytest.importorskip("flwr", reason="the extra flower is not installed")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from deployment import free_port
from tls_servers import DAY, Authority, serving

from fleetfit.errors import ConfigError
from fleetfit.fleet import connection as module, launcher, superlink
from fleetfit.fleet.certificates import load_node_key, make_certificates, make_node_key
from fleetfit.fleet.connection import (
    Connection,
    Fault,
    FaultReporter,
    check_root_certificates,
    check_superlink,
    find_clock_fault,
    find_fault,
)
from fleetfit.fleet.superlink import Refusal, Trouble

HOUR = datetime.timedelta(hours=1)


@pytest.fixture(autouse=True)
def no_proxy_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def fault(connection: Connection, lasting: bool) -> str:
    result = find_fault(connection)
    assert result is not None and result.lasting == lasting, result
    assert result.cause.isprintable()
    return result.cause


# ---- certificates --------------------------------------------------------------------------------------------------

NOW = datetime.timedelta()


def today(off: datetime.timedelta = NOW) -> str:
    """Return the date, from today on, that a message about the time of a certificate quotes."""
    return f"{datetime.datetime.now(datetime.UTC) + off:%Y-%m-%d}"


CERTIFICATES: dict[str, tuple[Callable[[Authority], ssl.SSLContext], tuple[str, ...]]] = {
    "another name": (lambda a: a.server("fleet.example.org"), ("fleet.example.org,", " 127.0.0.1.")),
    "other names": (lambda a: a.server("a.example", "10.0.0.1"), ("a.example, 10.0.0.1,", " 127.0.0.1.")),
    "another address": (lambda a: a.server("127.0.0.2"), ("127.0.0.2,", " 127.0.0.1.")),
    "many names": (lambda a: a.server(*(f"{c}.example" for c in "abcdefgh")), ("e.example and 3 ",)),
    "a day early": (lambda a: a.server("127.0.0.1", since=DAY, until=2 * DAY), (today(), today(DAY))),
    "years early": (lambda a: a.server("127.0.0.1", since=800 * DAY, until=900 * DAY), (today(), today(800 * DAY))),
    "a minute late": (lambda a: a.server("127.0.0.1", until=-HOUR / 60), (today(),)),
    "years late": (lambda a: a.server("127.0.0.1", since=-900 * DAY, until=-800 * DAY), (today(), today(-800 * DAY))),
    "another authority": (lambda a: Authority(a.folder / "2", "b").server("127.0.0.1"), ("ca.crt (",)),
    "a namesake": (lambda a: Authority(a.folder / "2", a.name).server("127.0.0.1"), ("ca.crt (",)),
    "an early authority": (lambda a: Authority(a.folder, since=HOUR).server("127.0.0.1"), (today(),)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CERTIFICATES)
def test_faults_of_certificates(kind: str, tmp_path: Path) -> None:
    make_server, quotes = CERTIFICATES[kind]
    authority = Authority(tmp_path)
    with serving(make_server(authority)) as port:
        cause = fault(Connection(f"127.0.0.1:{port}", authority.file), lasting=True)
    assert all(quote in cause for quote in (*quotes, f"127.0.0.1:{port}")), cause
    assert ("ca.crt (" in cause) == (quotes == ("ca.crt (",)) and (today() in cause) == (today() in quotes)


def test_a_right_certificate_is_accepted(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "a")
    with serving(authority.server("localhost", "127.0.0.1")) as port:
        for host in ("127.0.0.1", "localhost"):
            assert find_fault(Connection(f"{host}:{port}", authority.file)) is None
        cause = fault(Connection(f"127.0.0.1:{port}"), lasting=True)  # an authority that the system does not know
        assert "--ca" in cause
    own = tmp_path / "own"
    make_certificates(own, ["fleet.example.org"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own / "server.pem", own / "server.key")
    with serving(context) as port:
        assert "fleet.example.org" in fault(Connection(f"127.0.0.1:{port}", own / "ca.crt"), lasting=True)


def test_names_of_a_stranger_do_not_reach_the_terminal(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with serving(authority.server("x\x1b]0;owned\x07.example", f"{'n' * 300}.example")) as port:
        cause = fault(Connection(f"127.0.0.1:{port}", authority.file), lasting=True)
    assert "owned" in cause and "\x1b" not in cause and "n" * 100 not in cause


# ---- servers that are not there ------------------------------------------------------------------------------------


def test_faults_of_unreachable_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, authority = free_port(), Authority(tmp_path)
    for address in (f"127.0.0.1:{port}", f"localhost:{port}"):
        cause = fault(Connection(address, authority.file), lasting=False)
        assert f"{address} " in cause and f" {port}." in cause
    for name in ("no-such-host.invalid", "a.b.c.invalid", "fleet.test.invalid"):
        cause = fault(Connection(f"{name}:8000", authority.file), lasting=False)
        assert f"{name}:8000: {name} " in cause
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        cause = fault(Connection(f"127.0.0.1:{deaf.getsockname()[1]}", authority.file), lasting=False)
    assert " 0 s" in cause


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_address_in_brackets_is_an_address(tmp_path: Path) -> None:
    port = free_port()
    cause = fault(Connection(f"[::1]:{port}", Authority(tmp_path).file), lasting=False)
    assert f"[::1]:{port} " in cause


def test_faults_of_servers_that_are_not_superlinks(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = authority.server("127.0.0.1")
    for status, words, lasting in (
        (503, "answers with HTTP 503", False),
        (502, "answers with HTTP 502", False),
        (404, "HTTP 200, got 404", True),
        (401, "got 401", True),
    ):
        with serving(context, status) as port:
            assert words in fault(Connection(f"127.0.0.1:{port}", authority.file), lasting)
    with serving() as port:
        assert "TLS" in fault(Connection(f"127.0.0.1:{port}", authority.file), lasting=True)
        assert find_fault(Connection(f"127.0.0.1:{port}", insecure=True)) is None
    with serving(context) as port:
        assert "--insecure" in fault(Connection(f"127.0.0.1:{port}", insecure=True), lasting=False)


def test_proxies_are_named_without_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, closed = Authority(tmp_path), free_port()
    with serving(authority.server("127.0.0.1")) as port, serving(status=403) as proxy:
        connection = Connection(f"127.0.0.1:{port}", authority.file)
        for name, value, words in (
            ("https_proxy", f"http://me:secret@127.0.0.1:{closed}", f" 127.0.0.1:{closed} "),
            ("HTTPS_PROXY", f"http://127.0.0.1:{closed}", f" 127.0.0.1:{closed} "),
            ("all_proxy", f"http://127.0.0.1:{proxy}", "(403 Forbidden)"),
            ("https_proxy", "http://proxy.invalid:3128", "proxy.invalid:3128"),
        ):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                cause = fault(connection, lasting=False)
                assert words in cause and name in cause and "secret" not in cause
                assert f"unset {name} " in cause and "no_proxy" in cause
                assert "--superlink" not in cause
                patch.setenv("no_proxy", "127.0.0.1")
                assert find_fault(connection) is None
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed}")  # of connections without TLS
        assert find_fault(connection) is None


# ---- addresses, keys, authorities ----------------------------------------------------------------------------------


def test_ipv6_addresses_need_brackets() -> None:
    for address, better in (
        ("::1:8000", '"[::1]:8000"'),
        ("2001:db8::1:8000", '"[2001:db8::1]:8000"'),
        ("fe80::1%eth0:8000", '"[fe80::1%eth0]:8000"'),
        ("2001:db8:0:0:0:0:0:1", '"[2001:db8:0:0:0:0:0:1]:PORT"'),
    ):
        with raises(ConfigError, better, key="superlink"):
            check_superlink(address)
    for right in ("[::1]:8000", "[2001:db8::1]:8000", "10.0.0.1:8000", "fleet.example.org:1"):
        check_superlink(right)


def test_wrong_key_files_are_refused(tmp_path: Path) -> None:
    make_node_key(tmp_path / "key")
    load_node_key(tmp_path / "key")
    other = rsa.generate_private_key(65537, 2048)
    form = serialization.PrivateFormat.OpenSSH
    (tmp_path / "rsa").write_bytes(other.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    own = ec.generate_private_key(ec.SECP384R1())
    (tmp_path / "pem").write_bytes(own.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (tmp_path / "empty").write_bytes(b"")
    authority = Authority(tmp_path / "a")
    for name in ("rsa", "pem", "empty", "key.pub", "a/ca.crt"):
        with raises(ConfigError, "fleetfit flower key", path=tmp_path / name):
            load_node_key(tmp_path / name)
    check_root_certificates(authority.file)
    for name in ("key", "empty", "key.pub"):
        with raises(ConfigError, "ca.crt", path=tmp_path / name):
            check_root_certificates(tmp_path / name)
    (tmp_path / "latin").write_bytes("-----BEGIN CERTIFICATE----- ä".encode("latin-1"))
    with raises(ConfigError, path="latin"):
        check_root_certificates(tmp_path / "latin")


# ---- clocks --------------------------------------------------------------------------------------------------------


def date(off: float) -> dict[str, str]:
    """Headers of a server whose clock is behind this one by so many seconds."""
    at = datetime.datetime.fromtimestamp(time.time() - off, datetime.UTC)
    return {"date": at.strftime("%a, %d %b %Y %H:%M:%S GMT")}


@pytest.mark.parametrize(
    ("off", "words"),
    [
        (20, "20 s ahead of"), (6, "6 s ahead of"), (3600, "60 min ahead of"), (86400 * 400, "576000 min ahead of"),
        (-3600, "60 min behind"), (-310, "310 s behind"), (0, ""), (3, ""), (-5, ""), (-300, ""),
    ],
)  # fmt: skip
def test_a_clock_that_is_off_by_more_than_is_accepted(off: float, words: str) -> None:
    cause = find_clock_fault(date(off), 5, 305)
    assert (words in cause or words.replace(str(abs(off)), str(abs(off) + 1)) in cause) if words else not cause


def test_servers_without_a_date_have_no_fault() -> None:
    for headers in ({}, {"date": "yesterday"}, {"date": ""}, {"date": "\x1b[31m"}):
        assert not find_clock_fault(headers, 5, 305)


# ---- reports -----------------------------------------------------------------------------------------------------


def test_a_cause_is_reported_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    times: list[float] = []
    reporter = FaultReporter(lambda: Fault("closed"), lambda cause: times.append(now[0] - 1000))

    def at(second: float) -> None:
        now[0] = 1000 + second
        reporter.note_failure(OSError())

    for second in range(2000):
        at(second)
    assert times[:6] == [0, 10, 30, 70, 150, 310] and times[-1] - times[-2] == 600
    reporter.note_success()
    times.clear()
    at(2001)
    assert times == [2001]


def test_an_error_without_a_fault_is_reported_when_it_stays() -> None:
    """As where requests fail and the SuperLink says that it is healthy."""
    causes: list[str] = []
    reporter = FaultReporter(lambda: None, causes.append)
    for _ in range(4):
        reporter.note_failure(OSError("too large"))
    reporter.note_success()
    for _ in range(4):
        reporter.note_failure(OSError("too large"))
    assert not causes
    reporter.note_failure(OSError("too large"))
    assert len(causes) == 1 and "too large" in causes[0]


# ---- the launcher ---------------------------------------------------------------------------------

GONE, WRONG = Fault("nobody listens"), Fault("another authority", lasting=True)
KEY, SIGNATURE = Refusal(Fault("the key")), Refusal(Fault("the signature"))
AT_A_SIGNAL = SystemExit


@pytest.mark.parametrize(
    ("ends", "faults", "code"),
    [
        ([Refusal(Fault("20 s ahead", lasting=True))], [], 2),
        ([None], [], None),
        ([Trouble("500"), None], [GONE], None),
        ([Trouble("404")], [WRONG], 2),
        ([ValueError("a bug"), None], [None], None),
        ([SIGNATURE, None], [], None),
        ([KEY] * 5 + [None], [], None),
        ([KEY] * 25, [], 2),
    ],
)
def test_lasting_faults_end_a_node(
    ends: list[Exception | None], faults: list[Fault | None], code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is not refused (None) is ended by a signal."""
    now, left, causes, links = [1000.0], list(ends), list(faults), []

    class Link:
        def __init__(self, *_: object) -> None:
            links.append("made")

        def join(self) -> int:
            if (end := left.pop(0)) is not None:
                raise end
            raise AT_A_SIGNAL

        def leave(self) -> None:
            links.append("left")

    monkeypatch.setattr(superlink, "SuperLink", Link)
    monkeypatch.setattr(launcher.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(launcher.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(launcher, "find_fault", lambda _: causes.pop(0))
    node = launcher._Node("node.toml", Connection("127.0.0.1:1", insecure=True))
    if code is None:
        with pytest.raises(AT_A_SIGNAL):
            node.run()
    else:
        assert node.run() == code
    assert not left and not causes
    assert links == ["made", *["left", "made"] * (len(ends) - 1)]


REFUSED: dict[str, tuple[str, dict[str, Any], Expected]] = {
    "no certificates": ("127.0.0.1:1", {"root_certificates": "ca"}, Expected(path="ca")),
    "no key": ("127.0.0.1:1", {"key": "key"}, Expected(path="key")),
    "a URL": ("https://127.0.0.1:1", {}, Expected("https://127.0.0.1:1", key="superlink")),
    "no port": ("127.0.0.1", {}, Expected("127.0.0.1", key="superlink")),
    "a key without TLS": ("127.0.0.1:1", {"key": "node.toml", "insecure": True}, Expected(key="insecure")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    superlink, options, expected = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    Path("node.toml").write_text("")
    options = {name: Path(value) if name in ("root_certificates", "key") else value for name, value in options.items()}
    with raises(ConfigError, expected):
        launcher._check_arguments(Path("node.toml"), Connection(superlink, **options))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, path=tmp_path / "none.toml"):
        launcher._check_arguments(tmp_path / "none.toml", Connection("127.0.0.1:1"))
