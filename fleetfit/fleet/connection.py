"""The connection of a node to its SuperLink, and the causes why it fails.

A request that fails does not say why. `find_fault` makes the same connection (httpx, the same certificates, the same
proxies) and explains its error.
"""

import datetime
import email.utils
import os
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fleetfit.errors import ConfigError, format_exception, join_some, one_line

_TIMEOUT_S = 10.0
GATEWAY = range(502, 505)
"""HTTP status of a gateway that cannot reach the SuperLink."""
_WRONG_HOST = (62, 64)  # codes of OpenSSL's X509_V_ERR_...: a name, an address
_NOT_YET, _EXPIRED = 9, 10
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")
_MAX_NAMES = 5


@dataclass(frozen=True)
class Connection:
    """How a node reaches its SuperLink.

    Attributes:
        superlink: Address of the SuperLink, as "host:port".
        root_certificates: The authority of its certificate, a PEM file; None for those that the system trusts.
        key: The node's private key, an OpenSSH file; None if the SuperLink does not authenticate nodes.
        insecure: No TLS; for trials on one machine.
        further: Addresses of further SuperLinks over the same database, for when that one does not answer.
    """

    superlink: str
    root_certificates: Path | None = None
    key: Path | None = None
    insecure: bool = False
    further: tuple[str, ...] = ()

    @property
    def superlinks(self) -> tuple[str, ...]:
        """All addresses."""
        return self.superlink, *self.further


@dataclass(frozen=True)
class Fault:
    """Why a node does not join.

    Attributes:
        cause: Sentences: what is wrong, where, and how to fix it.
        lasting: Whether waiting cannot help; a server that is away may come back.
    """

    cause: str
    lasting: bool = False


# ---- addresses and files ---------------------------------------------------------------------------------------------


def split_address(address: str, what: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        ConfigError: It is not of the form host:port.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f'{what} must be "host:port", without a scheme, got "{address}".', key=what)
    return host.strip("[]"), int(port)


def check_superlink(address: str, what: str = "superlink") -> None:
    """Refuse an address that cannot be a SuperLink's.

    Args:
        address: The address.
        what: What gives it, for the error.

    Raises:
        ConfigError: It is not of the form host:port, or an IPv6 address without brackets.
    """
    host, port = split_address(address, what)
    bare = address.rpartition(":")[0]
    if ":" in host and not (bare.startswith("[") and bare.endswith("]")):
        whole = f"[{host}]:{port}" if _is_ipv6(host) else f"[{address}]:PORT"
        raise ConfigError(f'{what}: an IPv6 address must be in brackets, such as "{whole}", got "{address}".', key=what)


def _is_ipv6(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    except OSError:
        return False
    return True


def check_root_certificates(path: Path) -> None:
    """Check that a file has certificates.

    Raises:
        ConfigError: It has none, or cannot be read.
    """
    try:
        _make_tls_context(path)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = one_line(getattr(error, "reason", None) or str(error))
        raise ConfigError(
            f"{path} (the root certificates) should have certificates in PEM form, and cannot be read: {reason}. "
            "Give the ca.crt that `fleetfit flower certificates` wrote.",
            path=path,
        ) from None


def _make_tls_context(path: Path) -> ssl.SSLContext:
    """Return the context by which Flower verifies the SuperLink's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=path.expanduser().read_bytes().decode("ascii"))
    return context


# ---- causes of faults ------------------------------------------------------------------------------------------------


def find_fault(connection: Connection) -> Fault | None:
    """Connect to the SuperLinks; return why the node cannot reach any, or None if one answers."""
    faults = list[Fault]()
    for address in connection.superlinks:
        fault = _find_fault(replace(connection, superlink=address))
        if fault is None:
            return None
        faults.append(fault)
    return min(faults, key=lambda fault: fault.lasting)


def _find_fault(connection: Connection) -> Fault | None:
    """Connect to the first SuperLink; return why the node cannot reach it, or None if it answers."""
    import httpx

    proxy = _find_proxy(connection)
    through = f" through the proxy {proxy[1]} of the environment variable {proxy[0]}" if proxy else ""
    where = f"{connection.superlink}{through}"
    certificates = connection.root_certificates
    try:
        verify: Any = _make_tls_context(certificates) if certificates else not connection.insecure
        scheme = "http" if connection.insecure else "https"
        with httpx.Client(verify=verify, timeout=_TIMEOUT_S, follow_redirects=True) as client:
            response = client.get(f"{scheme}://{connection.superlink}/health")
    except Exception as error:
        fault = _explain(connection, error, where, proxied=proxy is not None)
        if proxy and not fault.lasting:
            host = split_address(connection.superlink, "superlink")[0]
            hint = f" If the node should connect without the proxy, unset {proxy[0]} or add {host} to no_proxy."
            return Fault(fault.cause + hint)
        return fault
    if response.status_code in GATEWAY:
        return Fault(f"{where} answers with HTTP {response.status_code}: the gateway in front of the SuperLink cannot "
                     "reach it. Start the SuperLink.")  # fmt: skip
    if response.status_code != httpx.codes.OK:
        return Fault(f"{where} is not a SuperLink: GET /health should give HTTP 200, got {response.status_code}. "
                     "Correct the address in --superlink.", lasting=True)  # fmt: skip
    return None


def _explain(connection: Connection, error: Exception, where: str, proxied: bool) -> Fault:
    """Return the fault behind an error of httpx."""
    import httpx

    chain = list(_iter_causes(error))
    host, port = split_address(connection.superlink, "superlink")
    for each in chain:
        if isinstance(each, ssl.SSLCertVerificationError):
            return Fault(_explain_certificate(connection, each, where, proxied), lasting=True)
        if isinstance(each, ssl.SSLError):
            reason = each.reason or one_line(str(each))
            if reason in _NO_TLS:
                return Fault(f"{where} does not speak TLS ({reason}). Start the SuperLink with its certificate, or "
                             "correct the port in --superlink.", lasting=True)  # fmt: skip
            return Fault(f"{where}: no TLS connection comes about ({reason}).")
        if isinstance(each, socket.gaierror):
            name = "the proxy's name" if proxied else host
            remedy = "" if proxied else " Correct the name in --superlink, or this device's DNS."
            return Fault(f"{where}: {name} cannot be resolved ({each.strerror}).{remedy}")
        if isinstance(each, ConnectionRefusedError):
            listener = "the proxy's port" if proxied else f"port {port}"
            remedy = "" if proxied else " Start the SuperLink, or correct the port in --superlink."
            return Fault(f"{where} refuses the connection: no program listens on {listener}.{remedy}")
    if any(isinstance(each, httpx.TimeoutException | TimeoutError) for each in chain):
        return Fault(f"{where} does not answer within {_TIMEOUT_S:.0f} s. Look for a firewall in between, or correct "
                     "the address.")  # fmt: skip
    if isinstance(error, httpx.ProxyError):
        return Fault(f"{where}: the proxy refuses ({one_line(str(error))}).")
    if isinstance(error, httpx.TransportError):
        system = next((each for each in chain if isinstance(each, OSError) and each.strerror), None)
        detail = system.strerror if system else one_line(str(error))
        tls = " With --insecure the SuperLink must run without TLS too." if connection.insecure else ""
        return Fault(f"{where} cannot be reached: {detail}.{tls}")
    return Fault(f"{where} cannot be asked: {type(error).__name__}: {one_line(str(error))}.", lasting=True)


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _explain_certificate(connection: Connection, error: ssl.SSLCertVerificationError, where: str, proxied: bool) -> str:
    """Return the fault of the SuperLink's certificate, and how to fix it."""
    host, port = split_address(connection.superlink, "superlink")
    names, start, end = ("other names", None, None) if proxied else _read_certificate(host, port)
    now = datetime.datetime.now(datetime.UTC)
    clock = f"this device's clock shows {now:%Y-%m-%d %H:%M} UTC"
    subject = f"The certificate of the SuperLink at {where}"
    if error.verify_code in _WRONG_HOST:
        return (f"{subject} is for {names}, not for {host}. Use one of its names in --superlink, or make a certificate "
                f"with --host {host}.")  # fmt: skip
    if error.verify_code == _NOT_YET:
        since = f" It is valid from {start:%Y-%m-%d %H:%M} UTC on." if start and start > now else ""
        return f"{subject}, or its authority's, is not yet valid, and {clock}.{since} Set the clock if it is behind."
    if error.verify_code == _EXPIRED:
        until = f" It was valid until {end:%Y-%m-%d %H:%M} UTC." if end and end < now else ""
        return (f"{subject}, or its authority's, has expired, and {clock}.{until} Renew it with `fleetfit flower "
                "certificates`, or set the clock if it is ahead.")  # fmt: skip
    trusted = connection.root_certificates or "the system's list of authorities"
    reason = one_line(error.verify_message)
    return (f"{subject} is not of an authority in {trusted} ({reason}). Give with --ca the ca.crt that was made "
            "together with the certificate.")  # fmt: skip


def _read_certificate(host: str, port: int) -> tuple[str, datetime.datetime | None, datetime.datetime | None]:
    """Return the names in the certificate at an address, and when it begins and ends; it is not verified."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(
            ssl.get_server_certificate((host, port), timeout=_TIMEOUT_S).encode()
        )
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return "other names", None, None
    names = [str(each.value) for each in alternatives]
    text = join_some([one_line(name, 60) for name in names], _MAX_NAMES) or "no name"
    return text, certificate.not_valid_before_utc, certificate.not_valid_after_utc


def _find_proxy(connection: Connection) -> tuple[str, str] | None:
    """Return the environment variable that names a proxy for the SuperLink, and the proxy without its password."""
    host = split_address(connection.superlink, "superlink")[0]
    if urllib.request.proxy_bypass_environment(host):  # type: ignore[attr-defined]
        return None
    scheme = "http" if connection.insecure else "https"
    for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY"):
        if value := os.environ.get(name):
            try:
                parts = urlsplit(value if "://" in value else f"http://{value}")
                return name, one_line(f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname))
            except ValueError:
                return name, "(not an address)"
    return None


# ---- clocks ----------------------------------------------------------------------------------------------------------


def find_clock_fault(headers: Mapping[str, str], ahead_s: float, behind_s: float) -> str:
    """Return how this device's clock differs from that of a server that refused a signed time; "" within its tolerance.

    Args:
        headers: Of the server's response, which has its time to the second.
        ahead_s: By how much a device may be ahead.
        behind_s: By how much it may be behind.
    """
    try:
        server_time = email.utils.parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return ""
    offset = time.time() - server_time - 0.5
    if -behind_s + 1 < offset < ahead_s - 1:  # half a second of rounding, and the time of the response
        return ""
    size = f"{abs(offset):.0f} s" if abs(offset) < 600 else f"{abs(offset) / 60:.0f} min"
    return (f"is {size} {'ahead of' if offset > 0 else 'behind'} the SuperLink's: at most {ahead_s:.0f} s ahead and "
            f"{behind_s:.0f} s behind are accepted. Set the clock of the one that is wrong, such as with "
            "`timedatectl set-ntp true`.")  # fmt: skip


# ---- reports ---------------------------------------------------------------------------------------------------------


class FaultReporter:
    """Reports why requests fail: at once, then at intervals that double."""

    _MIN_S, _MAX_S = 10.0, 600.0
    _UNEXPLAINED = 5  # failures in a row without a fault, until the error itself is reported

    def __init__(self, find: Callable[[], Fault | None], report: Callable[[str], None]) -> None:
        self._find, self._report = find, report
        self._due, self._pause_s, self._unexplained = 0.0, self._MIN_S, 0

    def note_failure(self, error: Exception) -> Fault | None:
        """Find the fault behind an error, report it and return it, unless the last report was a short while ago."""
        if time.monotonic() < self._due:
            return None
        fault = self._find()
        self._unexplained += fault is None
        if fault is not None or self._unexplained >= self._UNEXPLAINED:
            self._due = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._MAX_S)
            self._report(
                f"A request to the SuperLink fails ({format_exception(error)})." if fault is None else fault.cause
            )
        return fault

    def note_success(self) -> None:
        """Report the next failure at once."""
        self._due, self._pause_s, self._unexplained = 0.0, self._MIN_S, 0
