"""Keys, signatures, seals and streams: what is taken from the library `cryptography`, and from nothing else.

X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869), ChaCha20 and ChaCha20-Poly1305 (RFC 8439), Ed25519 (RFC 8032). What is
signed, derived from or bound to a seal is written by `fleetfit.secure.encoding`, in which two different lists never
look the same.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetfit.errors import RunError, import_optional
from fleetfit.secure.encoding import Plain, encoded

KEY = 32
"""Bytes of a key, a seed and a digest."""
_CHUNK = 1 << 18  # words of a stream that are made at once
_ZEROS = bytes(4 * _CHUNK)


def digest(*values: Plain) -> bytes:
    """Return the SHA-256 of values."""
    return hashlib.sha256(encoded(*values)).digest()


@cache
def _library(name: str) -> Any:
    return import_optional(f"cryptography.hazmat.primitives.{name}", "secure", "Secure aggregation")


def check_installed() -> None:
    """Look for the library.

    Raises:
        MissingExtra: It is not installed.
    """
    _library("asymmetric.x25519")


# ---- who is a member: signatures -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Signer:
    """A key pair that signs: the fleet's authority, or what one client is known by in all rounds.

    Attributes:
        public: The key that checks.
        sign: Returns the signature of bytes.
        private: The half that stays.
    """

    public: bytes
    sign: Callable[[bytes], bytes]
    private: bytes

    @staticmethod
    def new() -> "Signer":
        """Draw a key pair."""
        return Signer.of(_library("asymmetric.ed25519").Ed25519PrivateKey.generate().private_bytes_raw())

    @staticmethod
    def of(private: bytes) -> "Signer":
        """Return the pair of a private half."""
        key = _library("asymmetric.ed25519").Ed25519PrivateKey.from_private_bytes(private)
        return Signer(key.public_key().public_bytes_raw(), key.sign, private)


def signed_by(public: bytes, signature: bytes, message: bytes) -> bool:
    """Tell whether whoever has the other half of a key has signed a message."""
    unfit = import_optional("cryptography.exceptions", "secure", "Secure aggregation").InvalidSignature
    try:
        _library("asymmetric.ed25519").Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (unfit, ValueError):
        return False
    return True


@dataclass(frozen=True, eq=False)
class Identity:
    """What a client is known by.

    Attributes:
        signer: Its key pair.
        certificate: The authority's word that the key is a member's.
    """

    signer: Signer
    certificate: bytes


def certified(authority: Signer) -> Identity:
    """Return a new member's identity, signed by the authority of its fleet."""
    signer = Signer.new()
    return Identity(signer, authority.sign(membership(signer.public)))


def membership(public: bytes) -> bytes:
    """Return what the authority signs: that a key is a member's. One key stands on a roster once."""
    return encoded("fleetfit secure member", public)


# ---- pairs: agreement, seals, streams ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Agreement:
    """A key pair with which two agree on a secret.

    Attributes:
        private: The half that stays.
        public: The half that goes out.
    """

    private: bytes
    public: bytes

    @staticmethod
    def new() -> "Agreement":
        """Draw a key pair."""
        return Agreement.of(_library("asymmetric.x25519").X25519PrivateKey.generate().private_bytes_raw())

    @staticmethod
    def of(private: bytes) -> "Agreement":
        """Return the pair of a private half."""
        key = _library("asymmetric.x25519").X25519PrivateKey.from_private_bytes(private)
        return Agreement(private, key.public_key().public_bytes_raw())

    def secret(self, other: bytes) -> bytes:
        """Return what both agree on.

        Raises:
            RunError: The other half is no key.
        """
        library = _library("asymmetric.x25519")
        try:
            mine = library.X25519PrivateKey.from_private_bytes(self.private)
            found: bytes = mine.exchange(library.X25519PublicKey.from_public_bytes(other))
        except ValueError:
            raise RunError("a public key is malformed: no secret can be derived from it.", key="public_key") from None
        return found


def derived(secret: bytes, *purpose: Plain) -> bytes:
    """Return a key for one purpose."""
    hkdf = _library("kdf.hkdf").HKDF(_library("hashes").SHA256(), KEY, None, encoded(*purpose))
    found: bytes = hkdf.derive(secret)
    return found


def sealed(key: bytes, text: bytes, bound: bytes) -> bytes:
    """Encrypt a text that only the holder of the key reads; the key must be used once."""
    found: bytes = _library("ciphers.aead").ChaCha20Poly1305(key).encrypt(bytes(12), text, bound)
    return found


def unsealed(key: bytes, text: bytes, bound: bytes) -> bytes | None:
    """Return what was sealed, or None where it, or what it was bound to, is not as it was."""
    unfit = import_optional("cryptography.exceptions", "secure", "Secure aggregation").InvalidTag
    try:
        found: bytes = _library("ciphers.aead").ChaCha20Poly1305(key).decrypt(bytes(12), text, bound)
    except (unfit, ValueError):
        return None
    return found


def masked(words: NDArray[np.uint32], key: bytes, sign: int) -> None:
    """Add a key's stream to words, or take it away, in place; the key must have no other use."""
    for place, stream in _stream(key, len(words)):
        here = words[place]
        (np.add if sign > 0 else np.subtract)(here, stream, out=here)


def _stream(key: bytes, words: int) -> Iterator[tuple[slice, NDArray[np.uint32]]]:
    cipher = _library("ciphers.algorithms").ChaCha20(key, bytes(16))
    encryptor = _library("ciphers").Cipher(cipher, mode=None).encryptor()
    for start in range(0, words, _CHUNK):
        count = min(_CHUNK, words - start)
        made = encryptor.update(memoryview(_ZEROS)[: 4 * count])
        yield slice(start, start + count), np.frombuffer(made, dtype="<u4")
