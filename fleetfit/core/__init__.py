"""The values of a round: problem, clients, levels, devices, federation, job, update, server.

Values, not services: a `Job` goes in, an `Update` comes out; state is passed and returned. `Clients` has the
server's knowledge of them, a `Device` is a client's own; no function gets both.
"""

from fleetfit.core.fleet import (
    Aggregator as Aggregator,
    Clients as Clients,
    DataDescription as DataDescription,
    Device as Device,
    Federation as Federation,
    NodeDescription as NodeDescription,
    Simulation as Simulation,
)
from fleetfit.core.local import Local as Local
from fleetfit.core.problem import (
    Level as Level,
    Problem as Problem,
    apply_peft as apply_peft,
    check_rebuildable as check_rebuildable,
)
from fleetfit.core.resources import (
    Availability as Availability,
    Clock as Clock,
    DeviceResources as DeviceResources,
    Drift as Drift,
    Speed as Speed,
)
from fleetfit.core.work import (
    FREQUENCIES as FREQUENCIES,
    ClientMemory as ClientMemory,
    Evaluation as Evaluation,
    Failure as Failure,
    Job as Job,
    LocalResult as LocalResult,
    RoundSums as RoundSums,
    Server as Server,
    Update as Update,
)
