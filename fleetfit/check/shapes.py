"""Part 2 of the proof: every level has the predicted shapes, and its state loads strictly."""

from torch import nn

from fleetfit.check.full import Full, describe, load
from fleetfit.errors import ModelError
from fleetfit.layout import build_module, named_tensors
from fleetfit.submodel import Submodel, extract


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
            "Blocks are named blocks.{i}.*, classifiers heads.{block count}.*, and a level has no blocks after its "
            "last exit."
        )
    for name, shape in predicted.items():
        if built[name] != shape:
            axes = sorted({s.axis for dim in full.layout.tensors[name].dims for s in dim if s.axis is not None})
            raise ModelError(
                f'{where}: the layout predicts {shape} for "{name}" (axes: {", ".join(axes) or "none"}), the builder '
                f"makes {built[name]}. A size that is derived by rounding must be an axis of its own, or its granule "
                "be set so that it divides."
            )
