"""MLflow: every number of every round, the run file as parameters, and the summary.

Numbers go to the tracking server that MLflow is set to, by default `mlflow.db` in the working folder, which `mlflow ui`
shows. A resumed run continues the same run there; the runs of a comparison have one tag.
"""

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from fleetfit import files
from fleetfit.callbacks import Callback, RunStart, scalars
from fleetfit.config.merge import flatten
from fleetfit.errors import import_optional

_MAX_PARAMETERS = 100  # of a request
_LONGEST_NAME = 250


def mlflow(uri: str = "", experiment: str = "fleetfit", group: str = "") -> Callback:
    """MLflow: every number of every round, the run file as parameters, and the summary.

    Args:
        uri: The tracking server or database, such as "http://host:5000"; by default MLFLOW_TRACKING_URI, or else
            `mlflow.db` in the working folder.
        experiment: The experiment that the run goes to.
        group: Value of the run's tag `group`; by default the name of the comparison's folder.

    Raises:
        MissingExtra: MLflow is not installed.
    """
    import_optional("mlflow", "mlflow", "Writing for MLflow")
    return _MLflow(uri, experiment, group)


class _MLflow(Callback):
    """One run there; its id is kept in the run folder."""

    def __init__(self, uri: str, experiment: str, group: str) -> None:
        self._uri, self._experiment, self._group = uri, experiment, group

    def on_start(self, start: RunStart) -> None:
        """Start a run, or continue it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(self._uri or None)
        path = start.folder / "mlflow.json"
        if path.is_file():
            self._run = json.loads(path.read_text(encoding="utf-8"))["run"]
            self._client.update_run(self._run, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
        tags = {"folder": str(start.folder), "group": self._group or start.group}
        self._run = self._client.create_run(number, run_name=start.title, tags=tags).info.run_id
        files.write_text(path, json.dumps({"run": self._run}) + "\n")
        config = {name: section for name, section in start.config.items() if name != "recorded"}
        parameters = [Param(_make_name(key), value) for key, value in flatten(config).items()]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[first : first + _MAX_PARAMETERS])

    def on_round(self, report: Mapping[str, Any]) -> None:
        """Send a round's numbers; the step is the round."""
        self._log(scalars(report), report["round"])

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """Send the summary, and end the run."""
        if summary is not None:
            self._log({f"final/{name}": value for name, value in scalars(summary).items()}, summary["rounds"])
        self._client.set_terminated(self._run, "FAILED" if summary is None else "FINISHED")

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_make_name(name), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)


def _make_name(text: str) -> str:
    """Return a name that MLflow accepts on every platform."""
    return re.sub(r"[^\w.\-/ ]", "_", text)[:_LONGEST_NAME]
