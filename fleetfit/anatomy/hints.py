"""Hints in messages: fixed numbers of groups, and why a call of a module failed."""

import contextlib
import re
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from fleetfit.errors import FleetFitError, ModelError, format_cause
from fleetfit.layout import Layout
from fleetfit.machine import tensor_defaults

# ---- fixed numbers of groups and heads -----------------------------------------------------------------------------

_DIVISION = re.compile(r"divisible|not a multiple|multiple of", re.IGNORECASE)
_COUNTS = {"groups": "groups", "num_groups": "groups", "num_heads": "heads", "heads": "heads", "nhead": "heads"}


def count_groups(module: nn.Module) -> dict[str, int]:
    """Return the groups of convolutions and group norms, and the heads of attention, by module; only above one."""
    counts: dict[str, int] = {}
    for name, part in module.named_modules():
        n = part.groups if isinstance(part, _ConvNd) else part.num_groups if isinstance(part, nn.GroupNorm) else 1
        n = part.num_heads if isinstance(part, nn.MultiheadAttention) else n
        if isinstance(n, int) and n > 1:
            counts[name] = n
    return counts


def explain_fixed_groups(n: int | None, axis: str | None, kind: str = "groups", size: int | None = None) -> str:
    """Return how an architecture with a fixed number of groups or heads is written.

    Args:
        n: The number, if it is known.
        axis: The axis that they divide, if it is known.
        kind: "groups" or "heads".
        size: The axis's size, if it is known.
    """
    one, number, name = kind.removesuffix("s"), "4" if n is None else str(n), axis or "mid"
    full = f"Axis({size // n})" if n and size and size % n == 0 else "its size"
    return (
        f'If its {kind} are fixed, make axis "{name}" the channels of one {one} ({full} in the full model), build '
        f'{number} * axes["{name}"] where all {number} are needed. If {kind} come and go whole, build size // granule '
        f"of them, with the channels of one {one} as the axis's granule."
    )


def find_fixed_groups(layout: Layout, full: nn.Module, small: nn.Module, axes: Collection[str]) -> str:
    """Return a sentence on the first module with as many groups or heads in the small model as in the full one; or "".

    Args:
        layout: The layout of the full model.
        full: A module of it.
        small: A module in which some axes are smaller.
        axes: Those axes.
    """
    small_counts = count_groups(small)
    for name, n in count_groups(full).items():
        dims = [dim for t in layout.tensors if t.rpartition(".")[0] == name for dim in layout.tensors[t].dims]
        cut = [axis for dim in dims if len(dim) % n for s in dim for axis in s.axes if axis in axes]
        if small_counts.get(name) == n and cut:
            module, size = full.get_submodule(name), layout.axes[cut[0]].size
            kind = "heads" if isinstance(module, nn.MultiheadAttention) else "groups"
            return (
                f' "{name}", a {type(module).__name__}, has {n} {kind} at every size of axis "{cut[0]}". '
                f"{explain_fixed_groups(n, cut[0], kind, size)}"
            )
    return ""


def explain_division_error(error: BaseException, axis: str | None) -> str:
    """Return what to do where building failed because a size cannot be divided; "" for another error."""
    if not _DIVISION.search(str(error)):
        return ""
    for (caller, line), (frame, _) in pairwise(traceback.walk_tb(error.__traceback__)):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and type(module).__module__.startswith("torch."):
            counts = ((kind, frame.f_locals.get(key)) for key, kind in _COUNTS.items())
            kind, n = next(((kind, n) for kind, n in counts if type(n) is int), ("groups", None))
            owner, file = caller.f_locals.get("self"), Path(caller.f_code.co_filename).name
            place = f" in {type(owner).__name__}" if isinstance(owner, nn.Module) else ""
            return (
                f" It is the {type(module).__name__} made{place} at line {line} of {file}. "
                f"{explain_fixed_groups(n, axis, kind)}"
            )
    return f" {explain_fixed_groups(None, axis)}"


# ---- why a call of a module failed ---------------------------------------------------------------------------------

_MAX_AXES = 3  # listed in an error
_FIXED_SIZE = " The full model is wider: in forward, take sizes from tensors (flatten(1), x.shape), not from numbers."
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[1])
_NO_NUMBERS = re.compile(r"item\(\)|no data|register_meta|meta device type")
_OTHER_DEVICE = re.compile(r"(same|expected) device|dtype|scalar type|should be the same")


@contextlib.contextmanager
def explain_errors(
    architecture: Any,
    input_shape: Sequence[int],
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    sizes: Mapping[str, int] | None = None,
) -> Iterator[None]:
    """Turn an exception of a model's own code into a `ModelError` that names the model, its input and the line.

    Args:
        architecture: The model family, or a module.
        input_shape: Shape of one sample.
        device: Where tensors are made that the module makes itself; None: as without it.
        dtype: Their type.
        sizes: The size of each axis, of a model that may be narrower than the full one.
    """
    try:
        with tensor_defaults(device, dtype):
            yield
    except FleetFitError:
        raise
    except Exception as error:
        who = type(getattr(architecture, "net", architecture)).__name__
        cause = format_cause(error, typed=True).rstrip(".")
        hint = _explain_input_error(architecture, error)
        narrow = [f"{axis} {n}" for axis, n in (sizes or {}).items() if n < architecture.axes[axis].size]
        if not hint:
            hint = _find_own_line(error) + (_FIXED_SIZE if narrow else "")
        who += f" with {', '.join(narrow[:_MAX_AXES])}" if narrow else ""
        raise ModelError(f"{who} does not accept an input of shape {tuple(input_shape)}: {cause}.{hint}") from error


def _explain_input_error(architecture: Any, error: BaseException) -> str:
    """Return why a call of a module failed, if its samples or the tensors that it makes itself are the cause; or ""."""
    text, tokens = str(error), getattr(architecture, "tokens", 0)
    has_integers = "Long" in text or "Int" in text
    if any(frame.f_code.co_name == "grouped_mm" for frame, _ in traceback.walk_tb(error.__traceback__)):
        return (
            f"{_find_own_line(error)} grouped_mm, which multiplies the rows of each expert, takes no float64, in which "
            "FleetFit proves, and not every width. Multiply by batches: in transformers, call "
            'model.set_experts_implementation("batched_mm").'
        )
    if not tokens and "indices" in text and has_integers:
        return (
            " It seems to take tokens, and was given real numbers: take vocabulary as a parameter of the architecture "
            "and set self.tokens = vocabulary (token ids are below it; the data give it)."
        )
    if tokens and "dtype" in text and has_integers:
        return f" It was given tokens below {tokens}, by the architecture's tokens; set it to 0 for real numbers."
    if _NO_NUMBERS.search(text):
        return (
            f"{_find_own_line(error)} FleetFit counts on the meta device, where samples and parameters have shapes and "
            "no numbers: forward must not depend on their numbers, as with .item(), float(x) or if x.sum() > 0."
        )
    if _OTHER_DEVICE.search(text) and not has_integers:
        return (
            f"{_find_own_line(error)} FleetFit counts on the meta device, proves in float64 and trains on the device: "
            "a tensor that forward makes must not name another device or type, and forward must not convert its input "
            "(.float()). Use x.new_zeros(...), or torch.zeros(..., device=x.device, dtype=x.dtype)."
        )
    return ""


def _find_own_line(error: BaseException) -> str:
    """Return a sentence on the line of the model's own code in which an error was raised; or ""."""
    lines = [(Path(frame.f_code.co_filename), n) for frame, n in traceback.walk_tb(error.__traceback__)]
    own = [(path, n) for path, n in lines if not any(path.is_relative_to(package) for package in _PACKAGES)]
    return f" It failed at line {own[-1][1]} of {own[-1][0].name}." if own else ""
