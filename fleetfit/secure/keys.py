"""Keys, signatures, seals and streams, all by the library `cryptography`.

X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869), ChaCha20 and ChaCha20-Poly1305 (RFC 8439), Ed25519 (RFC 8032).
`fleetfit.secure.encoding` writes all bytes that are signed, bound to a seal, or from which a key is derived: two
different lists never give the same bytes.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetfit.errors import RunError, import_optional
from fleetfit.secure.encoding import Plain, encode

KEY = 32
"""Bytes of a key, a seed and a digest."""
_CHUNK = 1 << 18  # words of a stream that are made in one step
_ZEROS = bytes(4 * _CHUNK)


def digest(*values: Plain) -> bytes:
    """Return the SHA-256 of values."""
    return hashlib.sha256(encode(*values)).digest()


@cache
def _library(name: str) -> Any:
    return import_optional(f"cryptography.hazmat.primitives.{name}", "secure", "Secure aggregation")


def check_installed() -> None:
    """Check that the library is installed.

    Raises:
        MissingExtra: It is not installed.
    """
    _library("asymmetric.x25519")


# ---- membership: signatures -----------------------------------------------------------------------------------


class Signer:
    """A key pair that signs: of the fleet's authority, or of one client for all rounds.

    Attributes:
        private: The half that is kept secret.
        public: The half that verifies.
        sign: Returns the signature of bytes.
    """

    def __init__(self, private: bytes | None = None) -> None:
        """Take the pair of a private half, or draw one."""
        kind = _library("asymmetric.ed25519").Ed25519PrivateKey
        key = kind.generate() if private is None else kind.from_private_bytes(private)
        self.private: bytes = key.private_bytes_raw()
        self.public: bytes = key.public_key().public_bytes_raw()
        self.sign: Callable[[bytes], bytes] = key.sign


def verify_signature(public: bytes, signature: bytes, message: bytes) -> bool:
    """Return whether a message was signed with the other half of a key."""
    invalid = import_optional("cryptography.exceptions", "secure", "Secure aggregation").InvalidSignature
    try:
        _library("asymmetric.ed25519").Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (invalid, ValueError):
        return False
    return True


@dataclass(frozen=True, eq=False)
class Identity:
    """A member's key pair, and proof of its membership.

    Attributes:
        signer: The key pair.
        certificate: The authority's signature of the public key.
    """

    signer: Signer
    certificate: bytes


def make_identity(authority: Signer) -> Identity:
    """Return a new member's identity, signed by the authority of its fleet."""
    signer = Signer()
    return Identity(signer, authority.sign(encode_membership(signer.public)))


def encode_membership(public: bytes) -> bytes:
    """Return the bytes by which the authority signs that a key is a member's. A roster has each key once."""
    return encode("fleetfit secure member", public)


# ---- pairs: agreement, seals, streams ------------------------------------------------------------------------------


class Agreement:
    """A key pair with which two members agree on a secret.

    Attributes:
        private: The half that is kept secret.
        public: The half that is sent.
    """

    def __init__(self, private: bytes | None = None) -> None:
        """Take the pair of a private half, or draw one."""
        kind = _library("asymmetric.x25519").X25519PrivateKey
        self._key = kind.generate() if private is None else kind.from_private_bytes(private)
        self.private: bytes = self._key.private_bytes_raw()
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def secret(self, other: bytes) -> bytes:
        """Return the secret that both agree on.

        Raises:
            RunError: The other half is malformed.
        """
        try:
            return self._key.exchange(_library("asymmetric.x25519").X25519PublicKey.from_public_bytes(other))
        except ValueError:
            raise RunError("a public key is malformed: no secret can be derived from it.", key="public_key") from None


def derive_key(secret: bytes, *purpose: Plain) -> bytes:
    """Return a key for one purpose."""
    hkdf = _library("kdf.hkdf").HKDF(_library("hashes").SHA256(), KEY, None, encode(*purpose))
    return hkdf.derive(secret)


def seal(key: bytes, text: bytes, bound: bytes) -> bytes:
    """Encrypt a text, bound to other bytes; the key must be used once."""
    return _library("ciphers.aead").ChaCha20Poly1305(key).encrypt(bytes(12), text, bound)


def unseal(key: bytes, text: bytes, bound: bytes) -> bytes | None:
    """Decrypt a text; return None where it, or the bytes that it was bound to, were changed."""
    invalid = import_optional("cryptography.exceptions", "secure", "Secure aggregation").InvalidTag
    try:
        return _library("ciphers.aead").ChaCha20Poly1305(key).decrypt(bytes(12), text, bound)
    except (invalid, ValueError):
        return None


def add_mask(words: NDArray[np.uint32], key: bytes, sign: int) -> None:
    """Add a key's stream to words, or subtract it (sign -1), in place; the key must have no other use."""
    cipher = _library("ciphers.algorithms").ChaCha20(key, bytes(16))
    encryptor = _library("ciphers").Cipher(cipher, mode=None).encryptor()
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        stream = np.frombuffer(encryptor.update(memoryview(_ZEROS)[: part.nbytes]), dtype="<u4")
        (np.add if sign > 0 else np.subtract)(part, stream, out=part)
