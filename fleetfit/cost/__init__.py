"""What a sub-model costs: parameters, multiply-adds, bytes, training memory and latency.

ScaleFL (CVPR 2023) 3.1.1 measures cost(M) in parameters or in "FLOPs"; its tables print multiply-adds of convolutions
and linear layers, one image at a time. A level's sub-model has its own classifier and the shallower ones, and they
count; cost(M), and so level L, is the full model without early classifiers (Table 1 counts so).

| cost | what it is |
| --- | --- |
| `parameters` | trained numbers |
| `multiply_adds` | of one forward pass of one sample; half of what torch counts as FLOPs on the meta device |
| `size_bytes` | a message of `fleetfit.messages` that holds the state: 4 bytes a number and a header |
| `memory_bytes` | the peak of one training step, predicted on the meta device |
| `latency_s` | the median time of one sample on this machine, one thread |

`cost_of` gives any of them for one sub-model. The planner asks for thousands of sub-models, so it uses a `Grid`: costs
of all depths and widths, put together from a `Profile` (rest, blocks, heads) of each distinct set of sizes. The first
three add up exactly. Memory and latency do not: their grid is an estimate, and `Grid.exactly` counts or measures.
"""

from fleetfit.cost.count import BATCH_SIZE, Conditions, Cost, Piece, accepting, full_cost, submodel_cost
from fleetfit.cost.grid import COSTS, WIDTHS, CostKind, Grid, cost_grid, cost_of, kind_of
from fleetfit.cost.latency import Latency, Timed, latencies_in_turn, latency_now, latency_of
from fleetfit.cost.memory import training_memory
from fleetfit.cost.parts import Measure, Profile, message_size

__all__ = [
    "BATCH_SIZE",
    "COSTS",
    "WIDTHS",
    "Conditions",
    "Cost",
    "CostKind",
    "Grid",
    "Latency",
    "Measure",
    "Piece",
    "Profile",
    "Timed",
    "accepting",
    "cost_grid",
    "cost_of",
    "full_cost",
    "kind_of",
    "latencies_in_turn",
    "latency_now",
    "latency_of",
    "message_size",
    "submodel_cost",
    "training_memory",
]
