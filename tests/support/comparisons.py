"""A comparison from the text of its run file."""

from pathlib import Path
from typing import Any

import fleetfit as ff


def compare_text(folder: Path, text: str, file: str = "file.toml", out: str = "out", **more: Any) -> ff.Comparison:
    """Write a run file into a folder, and compare into another folder there."""
    (folder / file).write_text(text)
    return ff.compare(folder / file, out=folder / out, **more)
