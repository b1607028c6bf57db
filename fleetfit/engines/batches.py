"""How many jobs go to a worker in one message, where a message costs as much as a short job.

A message carries at most what is predicted to take half a second, so that whoever stops a run or waits for a round's
last replies waits no longer than that; at most half a worker's part of the work that is left, so that all workers are
done at about the same time; and states of at most 1 MiB, which bounds the replies that are held. Seconds are predicted
from what jobs of the same kind and size took; the first of these go alone. Which jobs travel together changes no bits.
"""

from collections.abc import Sequence

from fleetfit.state import FlatState
from fleetfit.values import Job

_MOST_S = 0.5
_SHARE = 0.5  # of what each worker would get of the jobs that are left


class Batches:
    """Who decides how many jobs a message carries.

    Attributes:
        most_bytes: Of the states of a message's jobs, where these are several.
    """

    most_bytes = 2**20

    def __init__(self) -> None:
        """Begin without knowing what jobs take."""
        self._seconds: dict[tuple[str, int], float] = {}

    def took(self, job: Job, seconds: float) -> None:
        """Note how long a job took."""
        self._seconds[job.kind, state_bytes(job)] = seconds

    def size(self, waiting: Sequence[Job], workers: int) -> int:
        """Return how many of the first jobs that wait go to one of the workers now; at least one."""
        known = [self._seconds.get((job.kind, state_bytes(job))) for job in waiting]
        limit = min(_MOST_S, _SHARE * sum(seconds or 0.0 for seconds in known) / workers)
        count, total, size = 0, 0.0, 0
        for job, seconds in zip(waiting, known, strict=True):
            if seconds is None:
                break
            total, size = total + seconds, size + state_bytes(job)
            if total > limit or size > self.most_bytes:
                break
            count += 1
        return max(count, 1)


def state_bytes(job: Job) -> int:
    """Return the bytes of the state that a job carries."""
    if isinstance(job.state, FlatState):
        return job.state.flat.nbytes
    return sum(tensor.nbytes for tensor in job.state.values())
