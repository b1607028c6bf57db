"""Derive levels, exits and their proof from a plain module: an instance is enough.

1. `observe` runs the instance once, with labels on all parameters (`labels`), and finds units and axes (`units`).
2. `numbers` finds which numbers in its modules depend on sizes, by trials; what does not run stays whole.
3. `exits` finds a chain of blocks, and puts classifiers after them.
4. `plan` is what came out, as plain values; `copies` builds a level from it, `architecture` makes it an `Architecture`.
5. The full model must equal the instance bit for bit, and the layout is proved as any other (`fleetfit.check`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from fleetfit.check import check_layout
from fleetfit.derive.architecture import DerivedArchitecture, check_same_as_instance
from fleetfit.derive.copies import copy_instance
from fleetfit.derive.exits import find_exits
from fleetfit.derive.labels import Reason
from fleetfit.derive.numbers import Trials
from fleetfit.derive.observe import list_aliases, observe
from fleetfit.derive.plan import DerivedPlan
from fleetfit.errors import ModelError
from fleetfit.tensor_defaults import isolate_torch_state

__all__ = ["DerivedArchitecture", "DerivedPlan", "derive_architecture"]

_MOST_CHOICES = 24
_COMPUTES_ELSE = Reason("a narrower model computes something else")


@isolate_torch_state()
def derive_architecture(
    net: nn.Module, example: Tensor, exits: str | Sequence[str] = "auto", axes: Mapping[str, str] | None = None
) -> DerivedArchitecture:
    """Derive the levels of an instance, and prove them.

    Args:
        net: The instance; its weights, modes and hooks stay as they are.
        example: At least two samples [batch, ...].
        exits: See `find_exits`.
        axes: By pattern of axis names another name, or "whole" for axes that are not cut.

    Raises:
        ModelError: It cannot be run or followed, or a level would compute something else.
    """
    net, example = copy_instance(net), example[:2].clone()
    observation = observe(net, example)
    while True:
        trials = Trials(observation)
        points = find_exits(observation, exits)
        steps = [observation.outputs[point.module].step for point in points]
        blocks = {name: sum(step > end for end in steps) for name, step in observation.first_use.items()}
        blocks |= {name: blocks[first] for name, first in list_aliases(net).items() if first in blocks}
        error: ModelError | None = None
        for _ in trials.list_choices(_MOST_CHOICES):
            plan = replace(trials.make_plan(), exits=points, blocks=blocks)
            architecture = DerivedArchitecture(net, plan)
            try:
                check_same_as_instance(architecture, example)
                check_layout(architecture, input_shape=tuple(example.shape[1:]))
            except ModelError as one:
                error = error or one
            else:
                return architecture
        assert error is not None
        raise error
