"""A comparison from the text of its file."""

from pathlib import Path
from typing import Any

import fleetfit as ff


def compared(place: Path, text: str, file: str = "file.toml", out: str = "out", **more: Any) -> ff.Comparison:
    """Write a file into a folder, and compare what it says in another folder there."""
    (place / file).write_text(text)
    return ff.compare(place / file, out=place / out, **more)
