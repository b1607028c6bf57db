"""Where private noise comes from: a key of 256 bits in a file of its own, and a generator that counts.

A run's seed stands in its folder, and whoever knows it could subtract the noise. So noise, and who is drawn, come from
Philox with key and counter from BLAKE2b of the key file, of a salt that each run folder has, of the purpose and of the
round: a round that is done again has the same noise, and no two runs share any.

What it is not: a generator of cryptographic strength, and a sampler that is safe against the gaps of floating-point
Gaussians (Mironov, CCS 2012).
"""

import contextlib
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

    def generator(self, purpose: str, index: int) -> np.random.Generator:
        """Return the generator for a purpose in a round."""
        told = b"\0".join([self.salt, purpose.encode(), str(index).encode()])
        words = np.frombuffer(hashlib.blake2b(told, key=self.key, digest_size=32).digest(), dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=words[:2], counter=[0, 0, int(words[2]), int(words[3])]))

    def __repr__(self) -> str:
        """Show nothing of the key, in whatever message."""
        return "Randomness(...)"


def fingerprint(key: bytes) -> str:
    """Return what tells keys apart and nothing about one."""
    return hashlib.blake2b(b"which key", key=key, digest_size=8).hexdigest()


def made_key(path: str | Path) -> bytes:
    """Return the key in a file, which is made if there is none.

    Raises:
        ConfigError: It cannot be made, is no key, or others can read it.
    """
    place = files.parse_path(path)
    with contextlib.suppress(FileExistsError):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(
                f"[privacy] key_file: {place} cannot be made: {error.strerror}.", key="privacy.key_file", path=place
            ) from None
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
    return key_in(place)


def key_in(path: str | Path) -> bytes:
    """Return the key in a file.

    Raises:
        RunError: There is no such file.
        ConfigError: It is no key, or others can read it.
    """
    place = files.parse_path(path)
    try:
        text, found = files.read_text(place), place.stat()
    except FileNotFoundError:
        raise RunError(
            f"[privacy] key_file: {place} does not exist, and the run cannot continue without the key: another key "
            "would draw other noise for rounds that are known. Its privacy.json has what was spent. Put the file "
            "back, or begin a new run, whose budget adds to that.",
            key="privacy.key_file",
            path=place,
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"[privacy] key_file: {place} cannot be read: {error}.", key="privacy.key_file", path=place
        ) from None
    if os.name == "posix" and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"[privacy] key_file: other users can read {place}, and with the key the noise can be removed. Make a "
            f"new one, or if it was not read: chmod 600 {place}",
            key="privacy.key_file",
            path=place,
        )
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"[privacy] key_file: {place} is not a key of {KEY_BYTES} bytes in hexadecimal digits. Name a new file "
            "to have a key made.",
            key="privacy.key_file",
            path=place,
        )
    return key


def outside(path: str | Path, folder: Path) -> None:
    """Check that a key does not lie in a run folder, which people pass on.

    Raises:
        ConfigError: It does.
    """
    if files.parse_path(path).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"[privacy] key_file: {path} is inside the run folder {folder}. With the folder, others could remove the "
            "noise; choose a place outside of it.",
            key="privacy.key_file",
            path=path,
        )
