"""Weights & Biases: every number of every round, the run file and the summary; online, or offline in the run folder.

A resumed run continues the same run there; the runs of a comparison are one group. Printed output is not sent.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fleetfit import files
from fleetfit.callbacks import Callback, RunStart, scalars
from fleetfit.errors import import_optional


def wandb(
    project: str = "fleetfit",
    entity: str = "",
    group: str = "",
    tags: Sequence[str] = (),
    mode: Literal["", "online", "offline", "disabled"] = "",
) -> Callback:
    """Weights & Biases: every number of every round, the run file and the summary.

    Args:
        project: The project that the run goes to.
        entity: The user or team it belongs to; by default the user that is logged in.
        group: The group of runs; by default the name of the comparison's folder.
        tags: The run's tags.
        mode: "online", "offline" (files stay in the run folder until `wandb sync` sends them) or "disabled";
            by default the value of the environment variable WANDB_MODE, else "online".

    Raises:
        MissingExtra: wandb is not installed.
    """
    import_optional("wandb", "wandb", "Writing for Weights & Biases")
    options = {"project": project, "entity": entity or None, "tags": list(tags) or None, "mode": mode or None}
    return _WeightsAndBiases(options, group)


class _WeightsAndBiases(Callback):
    """One run there; its id is kept in the run folder."""

    def __init__(self, options: Mapping[str, Any], group: str) -> None:
        self._options, self._group = options, group

    def on_start(self, start: RunStart) -> None:
        """Start a run, or resume it."""
        import wandb as library

        path = start.folder / "wandb.json"
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        stored = {"id": secrets.token_hex(4), "group": self._group or start.group, **stored}
        files.write_text(path, json.dumps(stored) + "\n")
        folder = files.safe_join(start.folder, "wandb/run").parent  # not through a link out of the run folder
        self._run = library.init(
            dir=folder.parent, name=start.title, config=dict(start.config), id=stored["id"], resume="allow",
            group=stored["group"] or None, reinit="create_new", settings=library.Settings(console="off", quiet=True),
            **self._options,
        )  # fmt: skip

    def on_round(self, report: Mapping[str, Any]) -> None:
        """Send a round's numbers; the step is the round."""
        self._run.log(scalars(report), step=report["round"])

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """Send the summary, and close the run."""
        if summary is not None:
            self._run.summary.update({f"final/{name}": value for name, value in scalars(summary).items()})
        self._run.finish(exit_code=0 if summary is not None else 1)
