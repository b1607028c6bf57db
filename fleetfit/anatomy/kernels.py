"""How a forward pass runs that a mode sees: by plain operations, module by module, nothing computed twice.

`torch.utils.checkpoint` would compute activations again. Exits are read by hooks inside of the blocks that it runs,
without gradients in the first pass and without the hooks in the second. So the functions are called as they are;
PyTorch's own code decides no numbers here.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
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


@contextlib.contextmanager
def skip_fast_path() -> Iterator[None]:
    """Have PyTorch's encoders compute as with hooks: their fast path for inference has other values at padding."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def use_plain_attention() -> Iterator[None]:
    """Compute attention by plain operations, so that its scale is one of the numbers."""
    with skip_fast_path(), sdpa_kernel(SDPBackend.MATH):
        yield


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Compute by operations that a mode sees: attention and recurrent layers step by step."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with use_plain_attention(), skip_recomputation(), torch.no_grad():
            yield
    finally:
        torch.backends.mkldnn.enabled = before


@contextlib.contextmanager
def track_modules(module: nn.Module) -> Iterator[list[str]]:
    """Keep the name of the running module at the end of a list."""
    stack = [""]
    with contextlib.ExitStack() as hooks:
        for name, part in module.named_modules():
            if not isinstance(part, torch.jit.ScriptModule):
                hooks.enter_context(part.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
                leave = part.register_forward_hook(lambda *_: (stack.pop(), None)[1], always_call=True)
                hooks.enter_context(leave)
        yield stack
