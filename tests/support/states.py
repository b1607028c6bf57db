"""Sub-models put back into full states."""

from fleetfit.layout import Layout, State
from fleetfit.submodel import Submodel, check_shapes, concat_state, full_submodel, get_slice_plan


def put_back(layout: Layout, state: State, submodel: Submodel, piece: State) -> State:
    """Return a new full state in which the sub-model's elements come from `piece`, and all others from `state`."""
    plan = get_slice_plan(layout, submodel)
    check_shapes(piece, plan.shapes)
    full = concat_state({name: state[name] for name in layout.tensors}).clone()
    plan.scatter(full, concat_state({name: piece[name] for name in plan.names}))
    return get_slice_plan(layout, full_submodel(layout)).views(full)
