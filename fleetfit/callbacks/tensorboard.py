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
    """Writes events; the step is the round. What is told is on disk before the next round begins."""

    def on_start(self, start: RunStart) -> None:
        """Open a new file of events beside those that there are."""
        from torch.utils.tensorboard import SummaryWriter

        place = files.safe_join(start.folder, "tensorboard/events").parent  # which is no link to elsewhere
        self._writer = SummaryWriter(str(place))

    def on_round(self, report: Mapping[str, Any]) -> None:
        """Write a round's numbers."""
        for place, value in scalars(report).items():
            self._writer.add_scalar(place, value, report["round"])
        self._writer.flush()

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """Close the file."""
        self._writer.close()
