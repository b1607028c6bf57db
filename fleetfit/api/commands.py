"""Commands and calls that continue or open a run, for messages."""

import json
from pathlib import Path

from fleetfit.config.dump import find_object_sections
from fleetfit.runs.folder import RunFolder


def format_resume(folder: Path, is_script: bool = False) -> str:
    """Return the command that continues a run, or the call: in a script, and for a run on objects.

    Args:
        folder: The run folder.
        is_script: Whether the user works in Python.
    """
    return _format_call(folder, "resume", "resume", is_script)


def format_open(folder: Path, is_script: bool = False) -> str:
    """Return the command that writes the page of a run again, or the call that opens it, as `format_resume`."""
    return _format_call(folder, "report", "load", is_script)


def _format_call(folder: Path, verb: str, function: str, is_script: bool) -> str:
    objects = [f"{section}=..." for section in find_object_sections(RunFolder(folder).config)]
    if not objects and not is_script:
        return f"fleetfit {verb} {folder}"
    arguments = ", ".join([json.dumps(folder.as_posix(), ensure_ascii=False), *objects])
    return f"ff.{function}({arguments})"
