"""Fixed numbers of groups and heads: where a model has them, and how an architecture says it."""

import re
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType

from torch import nn
from torch.nn.modules.conv import _ConvNd

from fleetfit.layout.layout import Layout

_DIVISION = re.compile(r"divisible|not a multiple|multiple of", re.IGNORECASE)
_COUNTS = {"groups": "groups", "num_groups": "groups", "num_heads": "heads", "heads": "heads", "nhead": "heads"}


def groups_of(module: nn.Module) -> dict[str, int]:
    """Return how many groups each grouped convolution and each group norm has, by the module's name; only above one."""
    found: dict[str, int] = {}
    for name, part in module.named_modules():
        n = part.groups if isinstance(part, _ConvNd) else part.num_groups if isinstance(part, nn.GroupNorm) else 1
        if isinstance(n, int) and n > 1:
            found[name] = n
    return found


def if_fixed(n: int | None, axis: str | None, what: str = "groups", size: int | None = None) -> str:
    """Return what to do where a model has a fixed number of groups or heads: they need no word of their own.

    Args:
        n: How many; None where that is not known.
        axis: The axis that they divide; None where that is not known.
        what: Groups or heads.
        size: The axis's size, where it is known.
    """
    one, many, called = what.removesuffix("s"), "4" if n is None else str(n), axis or "mid"
    shown = f"Axis({size // n})" if n and size and size % n == 0 else "its size"
    return (
        f'If its {what} are fixed, make axis "{called}" the channels of one {one} ({shown} in the full model), build '
        f'{many} * axes["{called}"] where there are {many} of them, and declare blocked({many}) there. If {what} come '
        f"and go whole, build size // granule of them, with the channels of one {one} as the axis's granule."
    )


def same_number(layout: Layout, large: nn.Module, small: nn.Module, axes: Collection[str]) -> str:
    """Return which modules have as many groups or heads in a small model as in the large one, and what to do; or "".

    Args:
        layout: The layout of the large model.
        large: A module of it.
        small: A module in which some axes are smaller.
        axes: Those axes; others do not matter.
    """
    here, there = _counts(large), _counts(small)
    for name, n in here.items():
        dims = [dim for t in layout.tensors if t.rpartition(".")[0] == name for dim in layout.tensors[t].dims]
        cut = [dim for dim in dims if len(dim) % n and any(axis in axes for s in dim for axis in s.axes)]
        if there.get(name) == n and cut:
            axis = next(axis for s in cut[0] for axis in s.axes if axis in axes)
            what = "heads" if isinstance(large.get_submodule(name), nn.MultiheadAttention) else "groups"
            kind = type(large.get_submodule(name)).__name__
            said = if_fixed(n, axis, what, layout.axes[axis].size)
            return f' "{name}", a {kind}, has {n} {what} at every size of axis "{axis}". {said}'
    return ""


def _counts(module: nn.Module) -> dict[str, int]:
    parts = ((name, part) for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention))
    return groups_of(module) | {name: part.num_heads for name, part in parts if part.num_heads > 1}


def indivisible(error: BaseException, axis: str | None) -> str:
    """Return what to do where building failed since a size cannot be divided; "" where it failed for something else."""
    if not _DIVISION.search(str(error)):
        return ""
    kind, n, what, where = _failed_at(error)
    return f" It is {kind}{where}. {if_fixed(n, axis, what)}" if kind else f" {if_fixed(n, axis, what)}"


def _failed_at(error: BaseException) -> tuple[str, int | None, str, str]:
    """Return the kind of the module that could not be made, its groups, what they are called, and who made it."""
    kind, n, what, where = "", None, "groups", ""
    outside: FrameType | None = None
    at = 0
    for frame, line in traceback.walk_tb(error.__traceback__):
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and type(own).__module__.startswith("torch.") and not kind:
            kind = f"the {type(own).__name__}"
            n, what = _counted(frame.f_locals)
            if outside is not None:
                maker = outside.f_locals.get("self")
                inside = f" in {type(maker).__name__}" if isinstance(maker, nn.Module) else ""
                where = f" made{inside} at line {at} of {Path(outside.f_code.co_filename).name}"
        elif not kind:
            outside, at = frame, line
    return kind, n, what, where


def _counted(values: Mapping[str, object]) -> tuple[int | None, str]:
    for key, what in _COUNTS.items():
        n = values.get(key)
        if isinstance(n, int) and not isinstance(n, bool):
            return n, what
    return None, "groups"
