"""Keys and certificates of a fleet: an authority, the SuperLink's certificate, and a key pair for each node."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from fleetfit.errors import ConfigError, MissingExtra

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise MissingExtra("flower", "Making certificates") from None

FILES = ("ca.crt", "ca.key", "server.pem", "server.key")


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Write an authority (`ca.crt`, `ca.key`) and a server's certificate of it (`server.pem`, `server.key`).

    Args:
        folder: Where to; made if it is not there. An authority that is there is used again.
        hosts: Names and addresses under which nodes reach the server.
        days: Until the server's certificate expires; the authority's lasts ten times as long.

    Raises:
        ConfigError: No host, a server's certificate is there already, or the folder cannot be written.
    """
    if not hosts or any(not host or "/" in host or (":" in host and not _is_address(host)) for host in hosts):
        raise ConfigError(
            "a certificate needs the names or addresses by which nodes reach the server, without port or path."
        )
    for name in ("server.pem", "server.key"):
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} is there already; remove it to make a new one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        authority, key = _authority(folder, 10 * days)
        own = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        signed = (
            _builder(hosts[0], authority.subject, own, days)
            .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=False)
            .sign(key, hashes.SHA256())
        )
        (folder / "server.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        _secret(folder / "server.key", _pem(own))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}.") from None
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"no certificate for {', '.join(hosts)} and {days} days: {error}") from None


def make_node_key(path: Path) -> None:
    """Write a node's private key, which stays on the node, and `path.pub`, which is registered with the SuperLink.

    Raises:
        ConfigError: A file is there already, or cannot be written.
    """
    public = path.with_name(f"{path.name}.pub")
    for file in (path, public):
        if file.exists():
            raise ConfigError(f"{file} is there already; it is not written over.")
    key = ec.generate_private_key(ec.SECP384R1())
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _secret(path, private)
        public.write_bytes(key.public_key().public_bytes(encoding, form) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def _authority(folder: Path, days: int) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if (folder / "ca.crt").exists():
        try:
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
            found = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        except (OSError, ValueError, TypeError):
            raise ConfigError(f"{folder} has an authority that cannot be read; remove ca.crt and ca.key.") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{folder / 'ca.key'} is a key of another kind.")
        return found, key
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("FleetFit authority")
    found = (
        _builder("FleetFit authority", name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    _secret(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(found.public_bytes(serialization.Encoding.PEM))
    return found, key


def _builder(name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    public = key.public_key()
    return (
        x509.CertificateBuilder(issuer, _name(name), public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # a device's clock may be behind
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
