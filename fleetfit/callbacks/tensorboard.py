"""TensorBoard: every number of every round as a scalar, in `tensorboard` in the run folder.

`tensorboard --logdir runs` shows all runs below a folder, those of a comparison under its name.
"""

from collections.abc import Mapping
from typing import Any

from fleetfit import files
from fleetfit.callbacks import Callback, RunStart, scalars
from fleetfit.errors import import_optional


def tensorboard() -> Callback:
    """TensorBoard: every number of every round as a scalar, in `tensorboard` in the run folder.

    Raises:
        MissingExtra: TensorBoard is not installed.
    """
    import_optional("tensorboard", "tensorboard", "Writing for TensorBoard")
    return _TensorBoard()


class _TensorBoard(Callback):
    """Writes events, with the round as step, and flushes them after each round."""

    def on_start(self, start: RunStart) -> None:
        """Open a new file of events in the run folder."""
        from torch.utils.tensorboard import SummaryWriter

        folder = files.safe_join(start.folder, "tensorboard/events").parent  # not through a link out of the run folder
        self._writer = SummaryWriter(str(folder))

    def on_round(self, report: Mapping[str, Any]) -> None:
        """Write a round's numbers."""
        for name, value in scalars(report).items():
            self._writer.add_scalar(name, value, report["round"])
        self._writer.flush()

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """Close the file."""
        self._writer.close()
