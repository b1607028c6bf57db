"""Which norms of an instance keep their running statistics, as parts of a pretrained model that is not trained."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fleetfit.anatomy.copies import copy_all_but_parameters

STATISTICS = ("running_mean", "running_var")


def find_kept_norms(net: nn.Module, trains: Callable[[str], bool]) -> frozenset[str]:
    """Return the norms that keep their statistics.

    They are those that the module itself holds in evaluation mode, and those that have trained statistics and are not
    trained.

    Args:
        net: The instance.
        trains: Whether a parameter is trained, by its name.
    """
    modes = {name: part.training for name, part in copy_all_but_parameters(net).train().named_modules()}
    return frozenset(
        name
        for name, norm in iter_norms(net)
        if not modes[name] or (is_trained(norm) and not _has_trained_parameter(net, name, trains))
    )


def iter_norms(net: nn.Module) -> Iterator[tuple[str, _NormBase]]:
    """Yield the norms with running statistics, by name."""
    for name, part in net.named_modules():
        if isinstance(part, _NormBase) and all(isinstance(getattr(part, key), Tensor) for key in STATISTICS):
            yield name, part


def is_trained(norm: _NormBase) -> bool:
    """Return whether a norm's statistics differ from those of a new one."""
    mean, var = norm.running_mean, norm.running_var
    return mean is not None and var is not None and bool((mean != 0).any() or (var != 1).any())


def _has_trained_parameter(net: nn.Module, name: str, trains: Callable[[str], bool]) -> bool:
    """Return whether a parameter of a norm is trained; of one without parameters, of the module around it."""
    while name and next(net.get_submodule(name).parameters(), None) is None:
        name = name.rpartition(".")[0]
    return any(trains(f"{name}.{leaf}".lstrip(".")) for leaf, _ in net.get_submodule(name).named_parameters())
