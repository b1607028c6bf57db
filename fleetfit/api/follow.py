"""Follow a run that another process computes, by its folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.api.results import Run, open_run
from fleetfit.runs.folder import RunFolder


class FollowedRun:
    """Reads what another process writes to a run folder, and writes nothing. The run may not have started yet.

    Attributes:
        folder: The run folder.
        run: The run; None until it has started.
        round: The last round that was read.
        finished: Whether the run has finished, and all its rounds have been read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: Run | None = None
        self.round, self.finished = 0, False
        self._size = 0

    def read(self) -> Sequence[Mapping[str, Any]]:
        """Return the reports of the rounds since the last call.

        If the run was resumed at an earlier round, `round` goes back to it, and the rounds after it come again.

        Raises:
            RunError: A file of the run is damaged.
        """
        if self.run is None and files.is_file(self.folder / "config.toml"):
            run_folder = RunFolder.open(self.folder)
            self.run = open_run(run_folder, {}, run_folder.read_config())
        if self.run is None or self.finished:
            return ()
        is_finished = self.run.finished  # before the rounds are read: none is written after it
        path, new = self.folder / "metrics.jsonl", list[dict[str, Any]]()
        size = path.stat().st_size if files.is_file(path) else 0
        if size != self._size:
            new, self._size = self.run.files.metrics(after=self.round), size
            self.round = new[-1]["round"] if new else self.run.files.count_reports()
        self.finished = is_finished
        return new
