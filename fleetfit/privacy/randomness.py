"""The randomness of private rounds: a key of 256 bits in a file of its own, and a counter-based generator.

A run's seed is in its folder, and with it others could subtract the noise. So noise and cohorts are drawn from Philox
with key and counter from BLAKE2b of the key file, the run folder's salt, the purpose and the round: a repeated round
has the same noise, and no two runs share any.

It is neither a generator of cryptographic strength nor a sampler that is safe against the gaps of floating-point
Gaussians (Mironov, CCS 2012).
"""

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fleetfit import files
from fleetfit.errors import ConfigError, RunError

KEY_BYTES = 32


@dataclass(frozen=True)
class Randomness:
    """The random numbers of one run.

    Attributes:
        key: The secret.
        salt: The run's, public.
    """

    key: bytes
    salt: bytes

    def make_generator(self, purpose: str, index: int) -> np.random.Generator:
        """Return the generator for a purpose in a round."""
        text = b"\0".join([self.salt, purpose.encode(), str(index).encode()])
        words = np.frombuffer(hashlib.blake2b(text, key=self.key, digest_size=32).digest(), dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=words[:2], counter=[0, 0, int(words[2]), int(words[3])]))

    def __repr__(self) -> str:
        """Hide the key in messages."""
        return "Randomness(...)"


def fingerprint(key: bytes) -> str:
    """Return a digest by which keys are compared, and which reveals nothing of them."""
    return hashlib.blake2b(b"which key", key=key, digest_size=8).hexdigest()


def load_or_create_key(path: str | Path) -> bytes:
    """Return the key in a file; create the file if it does not exist.

    Raises:
        ConfigError: It cannot be created, is not a key, or others can read it.
    """
    path = files.parse_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return load_key(path)
    except OSError as error:
        raise ConfigError(
            f"[privacy] key_file: {path} cannot be created: {error.strerror}.", key="privacy.key_file", path=path
        ) from None
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return load_key(path)


def load_key(path: str | Path) -> bytes:
    """Return the key in a file.

    Raises:
        RunError: The file does not exist.
        ConfigError: It is not a key, or others can read it.
    """
    path = files.parse_path(path)
    try:
        text, mode = files.read_text(path), path.stat().st_mode
    except FileNotFoundError:
        raise RunError(
            f"[privacy] key_file: {path} does not exist, and the run cannot continue without the key: another key "
            "would draw other noise for rounds that are known. Its privacy.json has what was spent. Put the file "
            "back, or begin a new run, whose budget adds to that.",
            key="privacy.key_file",
            path=path,
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"[privacy] key_file: {path} cannot be read: {error}.", key="privacy.key_file", path=path
        ) from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"[privacy] key_file: other users can read {path}, and with the key the noise can be removed. Make a "
            f"new one, or if it was not read: chmod 600 {path}",
            key="privacy.key_file",
            path=path,
        )
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"[privacy] key_file: {path} is not a key of {KEY_BYTES} bytes in hexadecimal digits. Name a new file "
            "to have a key made.",
            key="privacy.key_file",
            path=path,
        )
    return key


def check_key_place(path: str | Path, folder: Path) -> None:
    """Check that a key is not in a run folder, which users share.

    Raises:
        ConfigError: It is.
    """
    if files.parse_path(path).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"[privacy] key_file: {path} is inside the run folder {folder}. With the folder, others could remove the "
            "noise; choose a place outside of it.",
            key="privacy.key_file",
            path=path,
        )
