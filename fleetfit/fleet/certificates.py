"""Keys and certificates of a fleet: an authority, the SuperLink's certificate, and a key pair for each node.

A private key is written before what is made of it, and nothing is written over: of a call that was killed the next one
takes the key that is there, and makes the rest.
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
from fleetfit.secure import Signer, certified

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise MissingExtra("flower", "Making certificates") from None

FILES = ("ca.crt", "ca.key", "server.pem", "server.key")
_THERE = "it is there already"


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Write an authority (`ca.crt`, `ca.key`) and a server's certificate of it (`server.pem`, `server.key`).

    Args:
        folder: Where to; made if it is not there. An authority that is there is used again, and so is a key that has no
            certificate yet.
        hosts: Names and addresses under which nodes reach the server.
        days: Until the server's certificate expires; the authority's lasts ten times as long.

    Raises:
        ConfigError: No host, a server's certificate is there already, or the folder cannot be written.
    """
    if not hosts or any(not host or "/" in host or (":" in host and not _is_address(host)) for host in hosts):
        raise ConfigError(
            "a certificate needs the names or addresses by which nodes reach the server, without port or path.",
            key="hosts",
        )
    if (folder / "server.pem").exists():
        raise ConfigError(
            f"{folder / 'server.pem'} exists already; remove it to make a new one.", path=folder / "server.pem"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        authority, key = _authority(folder, 10 * days)
        own = _key(folder / "server.key")
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        signed = (
            _builder(hosts[0], authority.subject, own, days)
            .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=False)
            .sign(key, hashes.SHA256())
        )
        _write_new(folder / "server.pem", signed.public_bytes(serialization.Encoding.PEM))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {files.format_os_error(error)}.", path=folder) from None
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"no certificate for {', '.join(hosts)} and {days} days: {error}", key="hosts") from None


def make_node_key(path: Path) -> None:
    """Write a node's private key, which stays on the node, and `path.pub`, which is registered with the SuperLink.

    A private key that is there without its public half gets it.

    Raises:
        ConfigError: A file is there already, or cannot be written.
    """
    public = path.with_name(f"{path.name}.pub")
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    try:
        if public.exists():
            raise FileExistsError(errno.EEXIST, _THERE, str(public))
        if path.exists():
            try:
                key = load_node_key(path)
            except ConfigError:
                raise FileExistsError(errno.EEXIST, _THERE, str(path)) from None
        else:
            key = ec.generate_private_key(ec.SECP384R1())
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
        path: The file of the node: its private key, the signature, and the authority's public key.
        folder: Of the authority, whose key for members (`members.key`) is made with the first of them.

    Raises:
        ConfigError: The file is there already, or one cannot be written or read.
    """
    own = folder / "members.key"
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, _THERE, str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        if not own.exists():
            _write_new(own, Signer.new().private.hex().encode() + b"\n", 0o600)
        authority = Signer.of(bytes.fromhex(files.read_bytes(own).decode()))
        identity = certified(authority)
        told = {"private": identity.signer.private, "certificate": identity.certificate, "authority": authority.public}
        _write_new(path, json.dumps({k: v.hex() for k, v in told.items()}).encode() + b"\n", 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} exists already and is not overwritten.", path=error.filename) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {files.format_os_error(error)}.", path=path) from None
    except ValueError:
        raise ConfigError(
            f"{own} is not the key of an authority of members; remove it to make a new one.", path=own
        ) from None


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key of a node in a file.

    Raises:
        ConfigError: The file cannot be read or holds something else, or the key needs a password.
    """
    try:
        key = serialization.load_ssh_private_key(files.read_bytes(path), None)
    except OSError as error:
        raise ConfigError(
            f"{path} (the private key) cannot be read: {files.format_os_error(error)}.", path=path
        ) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):  # something else, or it needs a password
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"{path} (the private key) should be a node's, as `fleetfit flower key FILE` writes it: ECDSA, in OpenSSH "
            "form, without a password. Make one, and register its .pub.",
            path=path,
        )
    return key


def _authority(folder: Path, days: int) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if (folder / "ca.crt").exists():
        try:
            found = x509.load_pem_x509_certificate(files.read_bytes(folder / "ca.crt"))
            return found, _read_key(folder / "ca.key")
        except (OSError, ValueError, TypeError):
            raise ConfigError(
                f"{folder} has an authority that cannot be read; remove ca.crt and ca.key.", path=folder
            ) from None
    key = _key(folder / "ca.key")
    name = _name("FleetFit authority")
    found = (
        _builder("FleetFit authority", name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_new(folder / "ca.crt", found.public_bytes(serialization.Encoding.PEM))
    return found, key


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key in a file; where there is none, a new one is written."""
    if path.exists():
        try:
            return _read_key(path)
        except (OSError, ValueError, TypeError):
            raise ConfigError(f"{path} is there, and cannot be read; remove it to make a new one.", path=path) from None
    key = ec.generate_private_key(ec.SECP256R1())
    _write_new(path, _pem(key), 0o600)
    return key


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(files.read_bytes(path), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is a key of another kind.", path=path)
    return key


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


def _write_new(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file where there is none, whole or not at all; with 0o600 only its owner can read it."""
    with files.atomic_write(path, mode) as file:
        if path.exists():  # two calls at once: the second waits here for the first
            raise FileExistsError(errno.EEXIST, _THERE, str(path))
        file.write(content)
