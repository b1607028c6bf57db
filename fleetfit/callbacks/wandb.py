"""Weights & Biases: every number of every round, the run file and the summary; online, or offline in the run folder.

A run that goes on after an interruption is the same run there; the runs of a comparison are one group. What is printed
is not sent.
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
        entity: The user or team it belongs to; by default whoever is logged in.
        group: The group of runs; by default the name of the comparison's folder.
        tags: The run's tags.
        mode: "online", "offline" (what it writes stays in the run folder until `wandb sync` sends it) or "disabled";
            by default what the environment variable WANDB_MODE says, and without one "online".

    Raises:
        MissingExtra: wandb is not installed.
    """
    import_optional("wandb", "wandb", "Writing for Weights & Biases")
    given = {"project": project, "entity": entity or None, "tags": list(tags) or None, "mode": mode or None}
    return _WeightsAndBiases(given, group)


class _WeightsAndBiases(Callback):
    """One run there; its id is kept in the run folder."""

    def __init__(self, given: Mapping[str, Any], group: str) -> None:
        self._given, self._group = given, group

    def on_start(self, start: RunStart) -> None:
        """Begin a run, or go on with it."""
        import wandb as library

        kept = start.folder / "wandb.json"
        known = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
        known = {"id": secrets.token_hex(4), "group": self._group or start.group, **known}
        files.write_text(kept, json.dumps(known) + "\n")
        place = files.safe_join(start.folder, "wandb/run").parent  # which is no link to elsewhere
        self._run = library.init(
            dir=place.parent, name=start.title, config=dict(start.config), id=known["id"], resume="allow",
            group=known["group"] or None, reinit="create_new", settings=library.Settings(console="off", quiet=True),
            **self._given,
        )  # fmt: skip

    def on_round(self, report: Mapping[str, Any]) -> None:
        """Send a round's numbers; the step is the round."""
        self._run.log(scalars(report), step=report["round"])

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """Send the summary, and close the run."""
        if summary is not None:
            self._run.summary.update({f"final/{place}": value for place, value in scalars(summary).items()})
        self._run.finish(exit_code=0 if summary is not None else 1)
