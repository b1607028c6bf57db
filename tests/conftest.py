"""One thread: two change the last bits, and wait for each other on a busy machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing, as without the extra `plots`: most of a small run's time would go into its plots."""
    from fleetfit.report import drawing

    monkeypatch.setattr(drawing, "is_available", lambda: False)


@pytest.fixture(scope="module")
def without_plots_in_module() -> Iterator[None]:
    """Draw nothing in all tests of a module, and in its fixtures."""
    from fleetfit.report import drawing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "is_available", lambda: False)
        yield


# ---- the tree after the tests --------------------------------------------------------------------------------------

_NOT_LOOKED_INTO = {".git", ".venv", "__pycache__", "runs", "build", "dist", "htmlcov"}  # and hidden caches
_BEFORE = pytest.StashKey[set[str]]()
_LEFT = pytest.StashKey[list[str]]()


def tree_of(root: Path) -> set[str]:
    """Return the files of the working tree; below its root without what people write while tests run."""
    found = set()
    for place, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _NOT_LOOKED_INTO and not f.endswith(("_cache", ".egg-info"))]
        folders[:] = [f for f in folders if f != ".hypothesis"]
        below = Path(place) != root
        found |= {str(Path(place) / name) for name in files if not (below and name.endswith((".py", ".md")))}
        found |= {str(Path(place) / name) + os.sep for name in folders}
    return found


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
