"""Part 2 of the proof: every level has the predicted shapes and loads strictly; its exits compute what they should."""

from collections.abc import Iterable

import torch
from torch import nn

from fleetfit.check.full import Full, describe, difference, load
from fleetfit.errors import ModelError
from fleetfit.layout import build_module, named_tensors, outputs
from fleetfit.submodel import Submodel, extract


def check_depths(full: Full, exits: Iterable[tuple[int, ...]]) -> None:
    """Check that models of full width with fewer exits give what the full model gives there.

    Raises:
        ModelError: One does not.
    """
    for some in dict.fromkeys(exits):
        if some == full.layout.exits:
            continue
        module = loaded(full, Submodel({}, some))
        with torch.no_grad():
            ours = outputs(module, full.x)
        error = difference(ours, [full.expected[full.layout.exits.index(e)] for e in some])
        if error > full.tolerance:
            raise ModelError(
                f"a model of full width with exits {', '.join(map(str, some))} gives other outputs than the full model "
                f"at these exits; they differ by {error:.2g} of their size. What a block or a classifier computes must "
                "not depend on how many follow it."
            )


def loaded(full: Full, level: Submodel) -> nn.Module:
    """Build a level's module in float64, compare its shapes with the predicted ones, and load its state.

    Raises:
        ModelError: They differ.
    """
    layout = full.layout
    module = build_module(full.architecture, {**layout.full_sizes, **level.sizes}, level.exits).eval()
    built = {name: tuple(tensor.shape) for name, tensor, _ in named_tensors(module)}
    own = {name: shape for name, shape in built.items() if name not in layout.aliases and name not in full.base}
    _compare(full, level, layout.shapes(level.sizes, level.exits), own)
    module.double()
    base = {name: tensor for name, tensor in full.base.items() if name in built}
    load(module, {**base, **extract(layout, full.state, level)})
    return module


def _compare(
    full: Full, level: Submodel, predicted: dict[str, tuple[int, ...]], built: dict[str, tuple[int, ...]]
) -> None:
    where = f"level with {describe(level)}"
    odd = sorted(predicted.keys() ^ built.keys())
    if odd:
        which = "and the builder does not make it" if odd[0] in predicted else "and the builder makes it all the same"
        raise ModelError(
            f'{where}: "{odd[0]}" {"is" if odd[0] in predicted else "is not"} part of it by the layout, {which}. '
            "A level has no blocks after its last exit, and the classifiers of its exits only. Names tell which is "
            "which, blocks.{i}.* and heads.{block count}.*, or a declaration: block(i), exit_after(block count)."
        )
    for name, shape in predicted.items():
        if built[name] != shape:
            axes = sorted({axis for dim in full.layout.tensors[name].dims for s in dim for axis in s.axes})
            raise ModelError(
                f'{where}: the layout predicts {shape} for "{name}" (axes: {", ".join(axes) or "none"}), the builder '
                f"makes {built[name]}. A size that is derived by rounding must be an axis of its own, or its granule "
                "be set so that it divides."
            )
