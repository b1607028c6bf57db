"""One thread: two change the last bits, and wait for each other on a busy machine."""

import gc
import importlib
import os
import subprocess

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tree import pytest_sessionfinish, pytest_sessionstart, pytest_terminal_summary

__all__ = ["pytest_sessionfinish", "pytest_sessionstart", "pytest_terminal_summary"]

torch.set_num_threads(1)
gc.disable()  # while tests are collected: what is made then stays
# No test cuts the power, and a small run would wait for the disk some thirty times.
os.fsync = lambda handle: None


# ---- the plots of runs ---------------------------------------------------------------------------------------------

# where a run finds the module that draws when it ends, and a comparison
_DRAWING = ("fleetfit.report", "fleetfit.api.comparison.results")


@pytest.fixture(scope="session", autouse=True)
def _runs_draw_nothing() -> Iterator[None]:
    """Let runs and comparisons end without plots, in which most of a small run's time would go."""
    from fleetfit.errors import MissingExtra

    def draw(*_: Any) -> Any:
        raise MissingExtra("plots", "Drawing plots")

    importlib.import_module("fleetfit.report.figures")
    with pytest.MonkeyPatch.context() as patch:
        for module in map(importlib.import_module, _DRAWING):
            patch.setattr(module, "figures", SimpleNamespace(draw_run=draw, draw_comparison=draw))
        yield


@pytest.fixture
def runs_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs and comparisons draw their plots, for a test that looks at them."""
    figures = importlib.import_module("fleetfit.report.figures")
    for module in map(importlib.import_module, _DRAWING):
        monkeypatch.setattr(module, "figures", figures)


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing, as without the extra `plots`."""
    from fleetfit.report import drawing

    monkeypatch.setattr(drawing, "is_available", lambda: False)


# ---- workers of engine `processes`, and of comparisons side by side ------------------------------------------------

_WITH_WORKERS = ("fleetfit.engines.processes", "fleetfit.api.comparison.execute")


@pytest.fixture(scope="session", autouse=True)
def _workers_are_forks() -> Iterator[None]:
    """Fork workers from a process that has imported FleetFit; `fresh_workers` has them fresh, as users do."""
    from support.zygote import shared_zygote

    def start(command: Any, **how: Any) -> Any:
        return shared_zygote().start(command, **how)

    forks = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    importlib.import_module("fleetfit.report.figures")
    with pytest.MonkeyPatch.context() as patch:
        for module in map(importlib.import_module, _WITH_WORKERS):
            patch.setattr(module, "subprocess", forks)
        yield
    if shared_zygote.cache_info().currsize:
        shared_zygote().close()


@pytest.fixture
def fresh_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers be fresh processes of Python."""
    for module in map(importlib.import_module, _WITH_WORKERS):
        monkeypatch.setattr(module, "subprocess", subprocess)


# ---- collection ----------------------------------------------------------------------------------------------------


def pytest_collection_finish() -> None:
    """Leave what lasts as long as the session (PyTorch, thousands of tests) out of garbage collection."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _garbage_is_seen_at_the_end() -> Iterator[None]:
    """Let Hypothesis look for references, which it does where it is imported last."""
    yield
    gc.unfreeze()
