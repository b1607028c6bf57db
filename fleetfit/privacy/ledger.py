"""The privacy ledger of a run: a small file in its folder, written before each round begins."""

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
    """The rounds that have begun.

    Attributes:
        salt: The salt of the run's random numbers, hexadecimal.
        key: The fingerprint of its key; "" until the run has begun.
        begun: Draws of clients so far; each is paid for, whatever its outcome.
        charges_repeats: Whether a round that is repeated costs again. It does on a fleet, whose clients come and go; a
            simulation repeats it bit for bit.
    """

    salt: str = field(default_factory=lambda: secrets.token_hex(16))
    key: str = ""
    begun: int = 0
    charges_repeats: bool = False

    @staticmethod
    def parse(table: Any) -> "Ledger":
        """Return the ledger of a file's JSON.

        Raises:
            ValueError: It is not a ledger.
        """
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise ValueError(f"it is not a privacy ledger of format {FORMAT}")
        ledger = Ledger(table.get("salt", ""), table.get("key", ""), table.get("begun", -1), table.get("again", False))
        if not (isinstance(ledger.salt, str) and len(ledger.salt) == 32 and isinstance(ledger.key, str)):
            raise ValueError("it has no salt of 16 bytes")
        bytes.fromhex(ledger.salt)
        if type(ledger.begun) is not int or ledger.begun < 0 or type(ledger.charges_repeats) is not bool:
            raise ValueError("begun is not a number of rounds")
        return ledger

    def to_text(self, **further: Any) -> str:
        """Return the file's text, with further entries."""
        table = {"format": FORMAT, "salt": self.salt, "key": self.key, "begun": self.begun}
        return json.dumps({**table, "again": self.charges_repeats, **further}, indent=2) + "\n"

    def get_draw(self, round: int) -> int:
        """Return the number of the draw of a round that has begun."""
        return self.begun - 1 if self.charges_repeats else round

    def begin_round(self, round: int, write: Callable[[], None]) -> None:
        """Record that a round begins, before anything of it is drawn."""
        before = self.begun
        self.begun = before + 1 if self.charges_repeats else max(before, round + 1)
        if self.begun != before:
            write()

    def make_randomness(self, key: bytes) -> Randomness:
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
