"""Keys and certificates of a fleet: an authority, the SuperLink's certificate, and a key pair for each node.

A private key is written before the files made from it, and no file is overwritten: after a call that was killed, the
next one uses its key and makes the rest.
"""

import datetime
import errno
import ipaddress
import json
import os
from collections.abc import Sequence
from pathlib import Path

from fleetfit import files
from fleetfit.errors import ConfigError, MissingExtra
from fleetfit.secure import Signer, make_identity

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise MissingExtra("flower", "Making certificates") from None

_EXISTS = "it exists already"


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Write an authority (`ca.crt`, `ca.key`) and a server's certificate of it (`server.pem`, `server.key`).

    Args:
        folder: Created if missing. An authority in it is used again, and so is a key without a certificate.
        hosts: Names and addresses under which nodes reach the server.
        days: Until the server's certificate expires; the authority's lasts ten times as long.

    Raises:
        ConfigError: No host, the server's certificate exists already or would outlive its authority, or the folder
            cannot be written.
    """
    if not hosts or any(not host or "/" in host or (":" in host and _parse_address(host) is None) for host in hosts):
        raise ConfigError(
            "a certificate needs the names or addresses by which nodes reach the server, without port or path.",
            key="hosts",
        )
    if (folder / "server.pem").exists():
        raise ConfigError(
            f"{folder / 'server.pem'} exists already; remove it to make a new one.", path=folder / "server.pem"
        )
    try:
        files.make_folder(folder)
        authority, key = _load_or_make_authority(folder, 10 * days)
        left = (authority.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
        if days > left:
            raise ConfigError(
                f"{folder / 'ca.crt'} ends in {left} days, before a certificate of {days} days would. Ask for fewer, "
                "or remove ca.crt and ca.key to make a new authority, whose ca.crt each node then needs.",
                key="days",
                path=folder / "ca.crt",
            )
        server_key = _load_or_make_key(folder / "server.key")
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        certificate = (
            _make_builder(hosts[0], authority.subject, server_key, days)
            .add_extension(x509.SubjectAlternativeName([_make_general_name(host) for host in hosts]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=False)
            .sign(key, hashes.SHA256())
        )
        _write_new(folder / "server.pem", certificate.public_bytes(serialization.Encoding.PEM))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {files.format_os_error(error)}.", path=folder) from None
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"no certificate for {', '.join(hosts)} and {days} days: {error}", key="hosts") from None


def make_node_key(path: Path) -> None:
    """Write a node's private key, which stays on the node, and `path.pub`, which is registered with the SuperLink.

    A private key without its public half gets that.

    Raises:
        ConfigError: A file exists already, or cannot be written.
    """
    public = path.with_name(f"{path.name}.pub")
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    try:
        if public.exists():
            raise FileExistsError(errno.EEXIST, _EXISTS, str(public))
        if path.exists():
            try:
                key = load_node_key(path)
            except ConfigError:
                raise FileExistsError(errno.EEXIST, _EXISTS, str(path)) from None
        else:
            key = ec.generate_private_key(ec.SECP256R1())
            path.parent.mkdir(parents=True, exist_ok=True)
            private = key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
            )
            _write_new(path, private, 0o600)
        _write_new(public, key.public_key().public_bytes(encoding, form) + b"\n")
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} exists already and is not overwritten.", path=error.filename) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {files.format_os_error(error)}.", path=path) from None


def make_member(path: Path, folder: Path) -> None:
    """Write a node's key for secure rounds, signed by the fleet's authority of members.

    Args:
        path: The node's file: its private key, the signature, and the authority's public key.
        folder: Of the authority, whose key for members (`members.key`) is made with the first of them.

    Raises:
        ConfigError: The file exists already, or one cannot be written or read.
    """
    authority_key = folder / "members.key"
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, _EXISTS, str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        if not authority_key.exists():
            _write_new(authority_key, Signer().private.hex().encode() + b"\n", 0o600)
        authority = Signer(bytes.fromhex(files.read_bytes(authority_key).decode()))
        identity = make_identity(authority)
        table = {"private": identity.signer.private, "certificate": identity.certificate, "authority": authority.public}
        _write_new(path, json.dumps({k: v.hex() for k, v in table.items()}).encode() + b"\n", 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} exists already and is not overwritten.", path=error.filename) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {files.format_os_error(error)}.", path=path) from None
    except ValueError:
        raise ConfigError(
            f"{authority_key} is not the key of an authority of members; remove it to make a new one.",
            path=authority_key,
        ) from None


def replace_members_authority(folder: Path) -> Path:
    """Set the authority of members aside, so that the next `make_member` makes another one.

    Members of two authorities do not take part in one secure round, so a node with a file of the old one is out.

    Args:
        folder: Of the authority.

    Returns:
        The file that the old key is in now.

    Raises:
        ConfigError: The folder has no authority of members, or cannot be written.
    """
    key = folder / "members.key"
    try:
        return key.replace(key.with_name("members.key.old"))
    except OSError as error:
        raise ConfigError(f"{key} cannot be renamed: {files.format_os_error(error)}.", path=key) from None


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key of a node in a file.

    Raises:
        ConfigError: The file cannot be read, is not a node's key, or needs a password.
    """
    try:
        key = serialization.load_ssh_private_key(files.read_bytes(path), None)
    except OSError as error:
        raise ConfigError(
            f"{path} (the private key) cannot be read: {files.format_os_error(error)}.", path=path
        ) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"{path} (the private key) should be a node's, as `fleetfit flower key FILE` writes it: ECDSA, in OpenSSH "
            "form, without a password. Make one, and register its .pub.",
            path=path,
        )
    return key


def _load_or_make_authority(folder: Path, days: int) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if (folder / "ca.crt").exists():
        if not (folder / "ca.key").exists():
            raise ConfigError(
                f"{folder} has ca.crt without ca.key, which signs certificates. Run this where ca.key is kept.",
                path=folder / "ca.key",
            )
        try:
            certificate = x509.load_pem_x509_certificate(files.read_bytes(folder / "ca.crt"))
            return certificate, _read_key(folder / "ca.key")
        except (OSError, ValueError, TypeError):
            raise ConfigError(
                f"{folder} has an authority that cannot be read; remove ca.crt and ca.key.", path=folder
            ) from None
    key = _load_or_make_key(folder / "ca.key")
    certificate = (
        _make_builder("FleetFit authority", _make_name("FleetFit authority"), key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_new(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))
    return certificate, key


def _load_or_make_key(path: Path) -> ec.EllipticCurvePrivateKey:
    if path.exists():
        try:
            return _read_key(path)
        except (OSError, ValueError, TypeError):
            raise ConfigError(f"{path} cannot be read; remove it to make a new one.", path=path) from None
    key = ec.generate_private_key(ec.SECP256R1())
    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_new(path, content, 0o600)
    return key


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(files.read_bytes(path), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is a key of another kind.", path=path)
    return key


def _make_builder(name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    public = key.public_key()
    return (
        x509.CertificateBuilder(issuer, _make_name(name), public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # a device's clock may be behind
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _make_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _make_general_name(host: str) -> x509.GeneralName:
    address = _parse_address(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _write_new(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file where there is none, whole or not at all; with 0o600 only its owner can read it."""
    with files.atomic_write(path, mode) as file:
        if path.exists():  # two calls at once: the second waits here for the first
            raise FileExistsError(errno.EEXIST, _EXISTS, str(path))
        file.write(content)
