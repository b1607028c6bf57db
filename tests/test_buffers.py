"""Large buffers: used again when nobody looks at them any more, never before; small ones are torch's own."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetfit.submodel.buffers import empty_like, release

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere all buffers are torch's own")

LARGE = 9 * 1024 * 1024  # elements: 36 MiB
MADE = torch.empty(1)


def test_released_buffer_is_reused() -> None:
    release()
    first = empty_like(MADE, LARGE)
    place = first.data_ptr()
    del first
    assert empty_like(MADE, LARGE).data_ptr() == place


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda buffer: buffer[5:8].view(3, 1),
    "storage": lambda buffer: buffer.untyped_storage(),
    "array": lambda buffer: buffer[:9].numpy(),
    "detached": lambda buffer: torch.nn.Parameter(buffer).detach(),
}


@pytest.mark.parametrize("held", sorted(LOOKS))
def test_views_hold_buffer(held: str) -> None:
    """Each keeps its numbers though the buffer itself is gone, and new buffers are written to."""
    release()
    buffer = empty_like(MADE, LARGE).fill_(7)
    view = LOOKS[held](buffer)
    place = buffer.data_ptr()
    del buffer
    others = [empty_like(MADE, LARGE).fill_(1) for _ in range(3)]
    assert place not in {other.data_ptr() for other in others}
    seen = torch.tensor([], dtype=torch.float32).set_(view) if held == "storage" else torch.as_tensor(view)
    assert bool((seen == 7).all())
    del view, seen
    assert empty_like(MADE, LARGE).data_ptr() == place


def test_few_buffers_are_kept() -> None:
    """Ten buffers of 10 different sizes are written to and let go: three of them stay, and none after `release`."""
    release()
    before = resident()
    many = [empty_like(MADE, LARGE + (i << 21)).fill_(1) for i in range(10)]
    filled = resident() - before
    del many
    assert resident() - before < 0.45 * filled
    release()
    assert resident() - before < 0.1 * filled


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_small_buffers() -> None:
    tensor = empty_like(torch.empty(3, dtype=torch.float64))
    assert tensor.shape == (3,) and tensor.dtype == torch.float64
    assert empty_like(torch.empty(1, dtype=torch.float64), LARGE).dtype == torch.float64
