"""Which parameters a gradient reaches in a job."""

from functools import partial

from torch import Tensor

from fleetfit.train.workpiece import Workpiece


class Reached:
    """Watches the trained parameters of a module until each has had its first gradient; costs nothing after that.

    A gradient of zeros is one; a parameter that the loss does not depend on has none.
    """

    def __init__(self, piece: Workpiece) -> None:
        """Begin to watch."""
        self._waiting = {
            name: tensor.register_post_accumulate_grad_hook(partial(self._noted, name))
            if tensor.requires_grad
            else None
            for name, tensor in piece.parameters.items()
        }

    def _noted(self, name: str, tensor: Tensor) -> None:
        handle = self._waiting.pop(name)
        if handle is not None:
            handle.remove()

    def closed(self) -> tuple[str, ...]:
        """Stop watching, and return the names of those that had no gradient, in the module's order."""
        for handle in self._waiting.values():
            if handle is not None:
                handle.remove()
        return tuple(self._waiting)
