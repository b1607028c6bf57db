"""Batch norm: static statistics for a while, and sums over the inputs of its layers."""

import contextlib
from collections.abc import Iterator
from functools import partial
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from fleetfit.anatomy import State, batch_norms, outputs


def set_statistics(module: nn.Module, statistics: State) -> None:
    """Give a module's batch-norm layers static statistics: `layer.mean` and `layer.var` [C] by layer name."""
    if not statistics:
        return
    norms, values = batch_norms(module), {}
    for name, norm in norms.items():  # a missing value changes no layer
        device = norm.weight.device if isinstance(norm.weight, Tensor) else None
        values[name] = [statistics[f"{name}.{key}"].to(device, torch.float32) for key in ("mean", "var")]
    for name, norm in norms.items():
        norm.track_running_stats = True
        norm.running_mean, norm.running_var = values[name]


@contextlib.contextmanager
def use_statistics(module: nn.Module, statistics: State) -> Iterator[None]:
    """Give a module's batch-norm layers static statistics inside; without statistics each batch uses its own."""
    try:
        set_statistics(module, statistics)
        yield
    finally:
        for norm in batch_norms(module).values():
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = None


class _LastNormReached(Exception):
    """Ends a pass at its last batch norm."""


class BatchNormSums:
    """Sums over the inputs of a module's batch-norm layers: of the values, of their squares, and their number.

    A pass ends with the input of the last layer, since what comes after it changes no sum. The first pass is whole: it
    shows the order of the layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms, self._module = batch_norms(module), ref(module)
        self._sums: dict[str, tuple[Tensor, Tensor, int]] = {}
        self._order: list[str] = []
        self._last_order: list[str] | None = None

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Sum the inputs of the layers in the passes inside."""
        with contextlib.ExitStack() as hooks:
            hooks.callback(self._sums.clear)
            for name, norm in self._norms.items():
                hooks.enter_context(norm.register_forward_pre_hook(partial(self._add, name)))
            yield

    def run(self, x: Tensor) -> None:
        """Pass one batch."""
        self._order.clear()
        module = self._module()
        assert module is not None
        with contextlib.suppress(_LastNormReached):
            outputs(module, x)
        if set(self._order) == self._norms.keys():  # else another batch may reach more
            self._last_order = list(self._order)

    def _add(self, name: str, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float().transpose(0, 1).flatten(1)  # [C, B * positions]
        total, squares, count = x.sum(1, dtype=torch.float64), (x * x).sum(1, dtype=torch.float64), x.shape[1]
        if name in self._sums:
            before = self._sums[name]
            total, squares, count = before[0] + total, before[1] + squares, before[2] + count
        self._sums[name] = total, squares, count
        self._order.append(name)
        if self._order == self._last_order:
            raise _LastNormReached

    def take(self) -> dict[str, Tensor]:
        """Return the sums on the host as the state of a job, and start again at zero."""
        state = {}
        for name, (total, squares, count) in self._sums.items():
            state[f"{name}.sum"], state[f"{name}.squares"] = total.cpu(), squares.cpu()
            state[f"{name}.count"] = torch.tensor([count], dtype=torch.float64)
        self._sums.clear()
        return state


_sums: WeakKeyDictionary[nn.Module, BatchNormSums] = WeakKeyDictionary()


def get_batch_norm_sums(module: nn.Module) -> BatchNormSums:
    """Return the sums of a module, made once."""
    if module not in _sums:
        _sums[module] = BatchNormSums(module)
    return _sums[module]
