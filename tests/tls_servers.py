"""Servers on this machine for tests of connections: with a certificate of any kind, or none, and any answer."""

import contextlib
import datetime
import http.server
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """An authority, and certificates of it."""

    def __init__(self, folder: Path, name: str = "authority", since: datetime.timedelta = -DAY) -> None:
        self.folder, self.name, self.since = folder, name, since
        self.key = ec.generate_private_key(ec.SECP256R1())
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "ca.crt"
        self.file.write_bytes(self._sign(name, self.key, since, 900 * DAY, []).public_bytes(serialization.Encoding.PEM))

    def _sign(
        self, subject: str, key: Any, since: datetime.timedelta, until: datetime.timedelta, hosts: list[Any]
    ) -> x509.Certificate:
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (subject, self.name)]
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(names[1], names[0], key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now + since).not_valid_after(now + until)
        builder = builder.add_extension(x509.BasicConstraints(ca=not hosts, path_length=None), critical=True)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def server(self, *hosts: str, since: datetime.timedelta = -DAY, until: datetime.timedelta = DAY) -> ssl.SSLContext:
        """Return what a server with a certificate of this authority speaks TLS with."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[Any] = []
        for host in hosts:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        signed = self._sign("server", key, since, until, names)
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file = self.folder / "both.pem"
        file.write_bytes(signed.public_bytes(serialization.Encoding.PEM) + text)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context


@contextlib.contextmanager
def serving(context: ssl.SSLContext | None = None, status: int = 200) -> Iterator[int]:
    """Answer every request with a status; the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        do_CONNECT = do_GET

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    class Server(http.server.ThreadingHTTPServer):
        def get_request(self) -> tuple[Any, Any]:
            connected, address = super().get_request()
            if context is not None:
                connected.settimeout(10)
                connected = context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
            return connected, address

        def handle_error(self, *_: Any) -> None:
            """A client that breaks off is what is tested."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
