"""What a sub-model costs: parameters, multiply-adds, bytes, training memory and latency.

ScaleFL (CVPR 2023) 3.1.1 measures cost(M) in parameters or in "FLOPs"; its tables print multiply-adds of convolutions
and linear layers, one image at a time. A level's sub-model has its own classifier and the shallower ones, and they
count; cost(M), and so level L, is the full model without early classifiers (Table 1 counts so).

| cost | what it is |
| --- | --- |
| `parameters` | numbers in the parameters, frozen ones included |
| `non_embedding_parameters` | the same outside of `nn.Embedding` modules |
| `multiply_adds` | of one forward pass of one sample; half of what torch counts as FLOPs on the meta device |
| `size_bytes` | a message of `fleetfit.messages` that holds the state: 4 bytes a number and a header |
| `memory_bytes` | the peak of one training step, predicted on the meta device |
| `latency_s` | the median time of one sample on this machine, one thread |

`compute_cost` gives any of them for one sub-model. The planner needs thousands of sub-models, so it uses a `Grid`: the
costs of all depths and widths, put together from a `Profile` (rest, blocks, heads) of each distinct set of sizes. The
first three add up exactly. Memory and latency do not: their grid is an estimate, and `Grid.compute` counts or measures.
"""

from fleetfit.cost.count import (
    BATCH_SIZE as BATCH_SIZE,
    Conditions as Conditions,
    Cost as Cost,
    Piece as Piece,
    call_once as call_once,
    full_cost as full_cost,
    get_layout as get_layout,
    submodel_cost as submodel_cost,
)
from fleetfit.cost.grid import (
    WIDTHS as WIDTHS,
    Grid as Grid,
    compute_mean_width as compute_mean_width,
    cost_grid as cost_grid,
)
from fleetfit.cost.kinds import (
    COSTS as COSTS,
    compute_cost as compute_cost,
    get_cost_kind as get_cost_kind,
)
from fleetfit.cost.latency import (
    Latency as Latency,
    TimedModel as TimedModel,
    get_latency as get_latency,
    measure_latencies as measure_latencies,
    measure_latency as measure_latency,
)
from fleetfit.cost.memory import training_memory as training_memory
from fleetfit.cost.parts import message_size as message_size
