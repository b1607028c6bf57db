"""What a run has spent of its privacy: a small file in its folder, written before each round begins."""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleetfit.errors import RunError
from fleetfit.privacy.randomness import Randomness, fingerprint

FILE = "privacy.json"
FORMAT = 1


@dataclass
class Ledger:
    """The rounds that were begun.

    Attributes:
        salt: Of the run's random numbers, hexadecimal.
        key: The fingerprint of its key; "" until the run has begun.
        begun: Draws of clients so far, each of which has been paid for whatever came of it.
        again: Whether a round that is begun again costs again. It does where it may come out otherwise, as on a fleet,
            whose clients come and go; a simulation does it again to the bit.
    """

    salt: str = field(default_factory=lambda: secrets.token_hex(16))
    key: str = ""
    begun: int = 0
    again: bool = False

    @staticmethod
    def of(nest: Any) -> "Ledger":
        """Return the ledger that a file holds.

        Raises:
            ValueError: It holds none.
        """
        if not isinstance(nest, dict) or nest.get("format") != FORMAT:
            raise ValueError(f"it is no privacy ledger of format {FORMAT}")
        found = Ledger(nest.get("salt", ""), nest.get("key", ""), nest.get("begun", -1), nest.get("again", False))
        if not (isinstance(found.salt, str) and len(found.salt) == 32 and isinstance(found.key, str)):
            raise ValueError("it has no salt of 16 bytes")
        bytes.fromhex(found.salt)
        if type(found.begun) is not int or found.begun < 0 or type(found.again) is not bool:
            raise ValueError("begun is no number of rounds")
        return found

    def text(self, **further: Any) -> str:
        """Return the file's text, with what was promised and what is spent."""
        nest = {"format": FORMAT, "salt": self.salt, "key": self.key, "begun": self.begun, "again": self.again}
        return json.dumps({**nest, **further}, indent=2) + "\n"

    def index(self, round: int) -> int:
        """Return the number of the draw that a round, which has begun, goes by."""
        return self.begun - 1 if self.again else round

    def begin(self, round: int, write: Callable[[], None]) -> None:
        """Note that a round begins, before anything of it is drawn."""
        before = self.begun
        self.begun = before + 1 if self.again else max(before, round + 1)
        if self.begun != before:
            write()

    def randomness(self, key: bytes) -> Randomness:
        """Return the run's random numbers.

        Raises:
            RunError: The run began with another key.
        """
        if self.key and self.key != fingerprint(key):
            raise RunError(
                "[privacy] key_file: this is another key than the one that the run began with, and would draw other "
                "noise for rounds that are known. Put that file back, or begin a new run, whose budget adds to this "
                "one's.",
                key="privacy.key_file",
            )
        self.key = fingerprint(key)
        return Randomness(key, bytes.fromhex(self.salt))
