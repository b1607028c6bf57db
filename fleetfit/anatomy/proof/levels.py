"""Part 2 of the proof: every level has the predicted shapes, and exits do not depend on what follows them."""

from collections.abc import Iterable

import torch
from torch import nn

from fleetfit.anatomy import build_module, named_tensors
from fleetfit.anatomy.proof.full import (
    FullModel,
    KeptPlaces,
    describe_level,
    difference,
    read_outputs,
    use_float64,
)
from fleetfit.errors import ModelError
from fleetfit.submodel import Submodel


def check_depths(full: FullModel, exits: Iterable[tuple[int, ...]]) -> None:
    """Check that models of full width with fewer exits give what the full model gives there.

    Raises:
        ModelError: One does not.
    """
    for shallower in dict.fromkeys(exits):
        if shallower == full.layout.exits:
            continue
        module = load_level(full, Submodel({}, shallower))
        try:
            with torch.no_grad(), use_float64():
                logits = read_outputs(module, full.x)
        except Exception as cause:  # a tensor that is missing may fail in any way
            raise ModelError(
                f"a model of full width with exits {', '.join(map(str, shallower))} does not run: {cause}. Is "
                "something behind its last exit that it uses?"
            ) from cause
        error = difference(logits, [full.expected[full.layout.exits.index(e)] for e in shallower])
        if error > full.tolerance:
            raise ModelError(
                f"a model of full width with exits {', '.join(map(str, shallower))} gives other outputs than the full "
                f"model at these exits; they differ by {error:.2g} of their size. What a block or a classifier "
                "computes must not depend on how many follow it."
            )


def load_level(full: FullModel, level: Submodel) -> nn.Module:
    """Build a level's module in float64, compare its shapes with the predicted ones, and load its state.

    Raises:
        ModelError: They differ.
    """
    layout = full.layout
    full.release()
    module = build_module(full.architecture, {**layout.full_sizes, **level.sizes}, level.exits).eval()
    built = {name: tuple(tensor.shape) for name, tensor, _ in named_tensors(module)}
    scaled = {name: shape for name, shape in built.items() if name not in layout.aliases and name not in full.base}
    predicted = layout.shapes(level.sizes, level.exits)
    where = f"level with {describe_level(level)}"
    if names := sorted(predicted.keys() ^ scaled.keys()):
        expected, got = ("in", "does not make") if names[0] in predicted else ("not in", "makes")
        raise ModelError(
            f'{where}: by the layout, "{names[0]}" is {expected} this level, but the builder {got} it. A level has no '
            "blocks after its last exit, and only the classifiers of its exits. Name tensors blocks.{i}.* and "
            "heads.{block count}.*."
        )
    for name, shape in predicted.items():
        if built[name] != shape:
            axes = sorted({axis for dim in layout.tensors[name].dims for s in dim for axis in s.axes})
            raise ModelError(
                f'{where}: the layout predicts {shape} for "{name}" (axes: {", ".join(axes) or "none"}), the builder '
                f"makes {built[name]}. Make a size that is derived by rounding an axis of its own, or set its granule "
                "so that it divides."
            )
    module.double()
    full.load(KeptPlaces(layout, level.channels).cut(full.state, predicted), module)
    return module
