"""A comparison from the text of its run file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fleetfit as ff
from fleetfit.api.comparison import plan_comparison


def compare_text(
    folder: Path, text: str, file: str = "file.toml", out: str = "out", overrides: Sequence[str] = (), **more: Any
) -> ff.Comparison:
    """Write a run file into a folder, and compare into another folder there."""
    (folder / file).write_text(text)
    return ff.compare(plan_comparison(folder / file, overrides), out=folder / out, **more)
