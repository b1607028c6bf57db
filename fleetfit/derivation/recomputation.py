"""Forward passes that keep what `torch.utils.checkpoint` would compute again.

Exits are read by hooks inside of the blocks that it runs, without gradients in the first pass and without the hooks in
the second. So the functions are called as they are; PyTorch's own code decides no numbers here.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

_here = threading.local()


@contextlib.contextmanager
def skip_recomputation() -> Iterator[None]:
    """Call the functions that are given to `torch.utils.checkpoint` in this thread, and keep all activations."""
    _install()
    before, _here.is_plain = getattr(_here, "is_plain", False), True
    try:
        yield
    finally:
        _here.is_plain = before


@functools.cache
def _install() -> None:
    """Give both variants of `checkpoint`, with their names in PyTorch 2.10 to 2.13, a way around themselves."""
    reentrant: Callable[..., Any] = checkpoint.CheckpointFunction.apply
    generate = checkpoint._checkpoint_without_reentrant_generator

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        is_plain = getattr(_here, "is_plain", False)
        return function(*args) if is_plain else reentrant(function, preserve, *args)

    @functools.wraps(generate)
    def run(*args: Any, **kwargs: Any) -> Iterator[None]:
        if getattr(_here, "is_plain", False):
            yield
        else:
            yield from generate(*args, **kwargs)

    checkpoint.CheckpointFunction.apply = apply  # type: ignore[method-assign]
    checkpoint._checkpoint_without_reentrant_generator = run
