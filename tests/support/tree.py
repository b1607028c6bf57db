"""Hooks of pytest: a run that leaves files in the working tree fails."""

import os
from pathlib import Path
from typing import Any

import pytest

_NOT_LOOKED_INTO = {".git", ".venv", "__pycache__", "runs", "build", "dist", "htmlcov"}  # and hidden caches
_BEFORE = pytest.StashKey[set[str]]()
_LEFT = pytest.StashKey[list[str]]()


def tree_of(root: Path) -> set[str]:
    """Return the files of the working tree; below its root without what people write while tests run."""
    paths = set()
    for place, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _NOT_LOOKED_INTO and not f.endswith(("_cache", ".egg-info"))]
        folders[:] = [f for f in folders if f != ".hypothesis"]
        below = Path(place) != root
        paths |= {str(Path(place) / name) for name in files if not (below and name.endswith((".py", ".md")))}
        paths |= {str(Path(place) / name) + os.sep for name in folders}
    return paths


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.stash[_BEFORE] = tree_of(session.config.rootpath)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that leaves files in the working tree fails, whatever its tests say."""
    before = session.config.stash.get(_BEFORE, None)
    if before is None:
        return
    left = sorted(tree_of(session.config.rootpath) - before)
    session.config.stash[_LEFT] = left
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left = config.stash.get(_LEFT, [])
    if left:
        terminalreporter.section("left behind in the working tree: the run has failed", red=True)
        for name in left:
            terminalreporter.write_line(name)
