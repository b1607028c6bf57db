"""The switch of the warm start: the only module that imports `fleetfit.fleet.warm`.

Without that package a node runs `flower-supernode`, and the server app gets its replies at Flower's own pace.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def find_warm_start() -> ModuleType | None:
    """Return the package of the warm start, or None where it is not installed."""
    try:
        from fleetfit.fleet import warm
    except ImportError:
        return None
    return warm


@contextlib.contextmanager
def speed_up(grid: Any) -> Iterator[None]:
    """Run a block of the server app with the warm start, if it is installed.

    Args:
        grid: Flower's grid of the server app.
    """
    warm = find_warm_start()
    with contextlib.nullcontext() if warm is None else warm.speed_up_server_app(grid):
        yield
