"""The loss that teaches a model and its pieces what several received models say, on average."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fleetfit.layout import State, named_tensors, outputs
from fleetfit.submodel import FlatState, Submodel, concat_state, get_shapes, get_slice_plan
from fleetfit.tasks import NOT_SCORED
from fleetfit.training import get_local_model, iter_batches
from fleetfit.values import Device, Job, Update

_BATCH = 128
_ROOM = 1 << 26  # teachers' logits on held-out data that are kept, in numbers


class Distillation:
    """The mean divergence of the students from their teachers' mean: the full model and some of its pieces."""

    def __init__(
        self, job: Job, device: Device, teachers: Sequence[Update], students: Sequence[Submodel], temperature: float
    ) -> None:
        """Bring the teachers to where the device computes.

        Args:
            job: The server's job.
            device: The server's device, with the unlabelled data.
            teachers: Updates, each with its own sub-model.
            students: Pieces that learn along with the full model.
            temperature: Softens the distributions.
        """
        problem, place = device.problem, device.accelerator
        self._device, self._temperature = device, temperature
        self._teachers = [
            (get_local_model(problem, u.submodel, place, "teacher"), _moved(u.state, place)) for u in teachers
        ]
        for piece, _ in self._teachers:
            piece.module.eval()
        self._students = [
            (get_local_model(problem, s, place, "student").module, get_slice_plan(problem.layout, s)) for s in students
        ]
        self._held_out: dict[int, Tensor] = {}
        self._room = _ROOM
        self._nothing = torch.empty(0, device=place)
        self._found: list[float] = []

    def __call__(self, module: nn.Module, x: Any, y: Tensor) -> Tensor:
        """Return the loss on a batch; `y` holds no labels and is not looked at."""
        return self._divergence(self.taught(x), module, x)

    @torch.no_grad()
    def taught(self, x: Tensor) -> Tensor:
        """Return the mean of the teachers' logits, in eval mode."""
        total: Tensor | None = None
        for piece, state in self._teachers:
            piece.load(state)
            logits = outputs(piece.module, x)[-1]
            total = logits.clone() if total is None else total.add_(logits)
        assert total is not None
        return total.div_(len(self._teachers))

    def _divergence(self, teacher: Tensor, module: nn.Module, x: Tensor) -> Tensor:
        task = self._device.problem.task
        y = self._nothing
        if task.name == "next_token":  # padding teaches nothing
            y = torch.where(x == self._device.data.padding, NOT_SCORED, 0)
        found = [task.divergence(teacher, z, self._temperature, y) for z in self._logits(module, x)]
        return torch.stack(found).mean()

    def _logits(self, module: nn.Module, x: Tensor) -> Iterator[Tensor]:
        """Yield the logits of the full model and of its pieces, which share its parameters."""
        yield outputs(module, x)[-1]
        if not self._students:
            return
        full = {name: tensor for name, tensor, _ in named_tensors(module)}
        for piece, compiled in self._students:
            if piece.training != module.training:
                piece.train(module.training)
            called: Callable[[Tensor], Any] = _with(piece, compiled.through(full))
            yield outputs(called, x)[-1]  # type: ignore[arg-type]

    def held_out(self, module: nn.Module) -> float:
        """Return the divergence on the held-out data; the teachers are asked once, as far as there is room."""
        data, total = self._device.data, 0.0
        indices = data.split("validation")
        for i, batch in enumerate(iter_batches(indices, _BATCH)):
            x = self._device.put(data.batch(batch)[0])
            teacher = self._held_out.get(i)
            if teacher is None:
                teacher = self.taught(x)
                if teacher.numel() <= self._room:
                    self._held_out[i], self._room = teacher, self._room - teacher.numel()
            total += float(self._divergence(teacher, module, x)) * len(batch)
        self._found.append(total / len(indices))
        return self._found[-1]

    def metrics(self) -> dict[str, float]:
        """Return the divergence on held-out data before the first step, and that of the state that was kept."""
        return {"before": self._found[0], "after": min(self._found)} if self._found else {}


def _moved(state: State, place: torch.device) -> State:
    return FlatState(concat_state(state).to(place), get_shapes(state))


def _with(module: nn.Module, tensors: dict[str, Tensor]) -> Callable[[Tensor], Any]:
    return lambda x: functional_call(module, tensors, (x,))
