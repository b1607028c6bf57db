"""One thread: two change the last bits, and wait for each other on a busy machine."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
# No test cuts the power, and a small run would wait for the disk some thirty times.
os.fsync = lambda handle: None


# ---- the plots of runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def _runs_draw_nothing() -> Iterator[None]:
    """Let runs and comparisons end without plots, in which most of a small run's time would go."""
    import fleetfit.api.comparison.results
    import fleetfit.api.run
    from fleetfit.errors import MissingExtra

    def draw(*_: Any) -> Any:
        raise MissingExtra("plots", "Drawing plots")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleetfit.api.run, "figures", SimpleNamespace(draw_run=draw))
        patch.setattr(fleetfit.api.comparison.results, "figures", SimpleNamespace(draw_comparison=draw))
        yield


@pytest.fixture
def runs_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs and comparisons draw their plots, for a test that looks at them."""
    import fleetfit.api.comparison.results
    import fleetfit.api.run
    from fleetfit.report import figures

    monkeypatch.setattr(fleetfit.api.run, "figures", figures)
    monkeypatch.setattr(fleetfit.api.comparison.results, "figures", figures)


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing, as without the extra `plots`."""
    from fleetfit.report import drawing

    monkeypatch.setattr(drawing, "is_available", lambda: False)


# ---- collection ----------------------------------------------------------------------------------------------------


def pytest_collection_finish() -> None:
    """Leave what lasts as long as the session (PyTorch, thousands of tests) out of garbage collection."""
    gc.collect()
    gc.freeze()


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
