"""The predictions of a run's model: classes, probabilities or numbers, and the exit that answered."""

import csv
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetfit import files
from fleetfit.anatomy import predictions
from fleetfit.api.inference import (
    LevelName,
    TrainedRun,
    best_exit,
    check_early_exits,
    compute_exit_costs,
    compute_last_cost,
    find_level,
    load_calibration,
    load_model,
    select_data,
)
from fleetfit.core import Level
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, did_you_mean, escape_controls, import_optional, one_line
from fleetfit.inference import Policy, read_policy, stop_early
from fleetfit.report.text import Table, exit_names, format_percent

Exit = Literal["last", "best", "early", "all"]
"""Which exit answers: the last, the best on validation data, the first that is confident enough, or each."""
_EXACT = 1e16  # whole numbers above have an exponent
_THRESHOLD = 0.5  # of the probability of a label, where a sample may have several


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    """Predictions of N samples by a level's model.

    Attributes:
        labels: The predicted class of each sample, by name, or as a number where all names are whole numbers; where a
            sample may have several labels, a tuple of those with a probability of at least 0.5. Of a regression:
            numbers in the unit of the targets, [N], or [N, targets] for several.
        classes: Numbers of the predicted classes [N]; 0 or 1 for each label [N, labels]; None for a regression.
        probabilities: [N, classes]; None for a regression.
        exits: The exit that answered, by its number among all exits of the model, from 1 [N].
        costs: Multiply-adds of each sample [N], up to its exit.
        truth: The labels of the samples, as `labels`; None if some have none.
        names: The files of the samples; None if samples are not files.
        samples: The numbers of the samples in their data [N].
        level: Name of the level.
        data: Name of the data.
        split: Their split.
        task: "classification", "multi_label" or "regression".
        class_names: One per class.
        by_exit: With `exit="all"` the predictions of each exit, shallow to deep. Those here are the last exit's.
        notes: Sentences on how the samples were read.
        index: The index of the data frame or series that was given; None for other data.
    """

    labels: Any
    classes: NDArray[np.int64] | None
    probabilities: NDArray[np.float32] | None
    exits: NDArray[np.int64]
    costs: NDArray[np.float64]
    truth: Any
    names: list[str] | None
    samples: NDArray[np.int64]
    level: str
    data: str
    split: str
    task: str
    class_names: tuple[str, ...]
    by_exit: tuple["Predictions", ...] = ()
    notes: tuple[str, ...] = ()
    index: Any = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __repr__(self) -> str:
        """Return the level, the number of samples and the accuracy."""
        score = "R2" if self.task == "regression" else "accuracy"
        accuracy = "" if self.accuracy is None else f", {score} {self.accuracy:.1%}"
        return f"Predictions({len(self)} samples of {self.data}, level {self.level}{accuracy})"

    @property
    def accuracy(self) -> float | None:
        """Share of right classes, or of right labels where a sample may have several; None without labels.

        Of a regression the explained variance (R2): 1 - squared errors / those of the samples' own mean, summed over
        all targets; None where these do not differ. (`run.evaluate` has the variance of the training targets instead.)
        """
        if self.truth is None or not len(self):
            return None
        if self.task == "regression":
            truth = self.truth.astype(np.float64)
            spread = float(np.square(truth - truth.mean(0)).sum())
            return 1 - float(np.square(self.labels - truth).sum()) / spread if spread else None
        return float(self.right.mean())

    @cached_property
    def right(self) -> NDArray[np.float64]:
        """The share of right labels of each sample [N], if samples have labels."""
        if self.task == "classification":
            return np.array([ours == theirs for ours, theirs in zip(self.labels, self.truth, strict=True)], float)
        sets = zip(self.labels, self.truth, strict=True)
        return 1 - np.array([len(set(ours) ^ set(theirs)) for ours, theirs in sets]) / len(self.class_names)

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with a line for each sample: label, prediction, probability, exit and cost.

        The label is there if all samples have one, the file if samples are files, the probability for a classification.
        The index is that of the samples, if they were a frame.

        Raises:
            MissingExtra: pandas is not installed.
        """
        pandas = import_optional("pandas", "tables", "A data frame")
        columns = {name: values for name, values in self._list_columns().items() if name != "sample"}
        if self.task == "classification" and self.probabilities is not None:
            columns["probability"] = self.probabilities.max(1, initial=0)
        return pandas.DataFrame({**columns, "cost": self.costs}, self.index)

    def to_csv(self, path: str | Path) -> None:
        """Write a CSV file with a line for each sample: its number, file, label, prediction and exit.

        Raises:
            ConfigError: The file cannot be written.
        """
        columns = self._list_columns()
        if self.task == "regression":
            del columns["exit"]
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*(map(_format_cell, values) for values in columns.values()), strict=True))
        try:
            files.write_user_file(str(path), text.getvalue())
        except OSError as error:
            raise ConfigError(f"cannot write the predictions to {path}: {error.strerror}.", path=Path(path)) from None

    def _list_columns(self) -> dict[str, Any]:
        """Return values by column; the predictions of each exit have a column if they are there."""
        columns: dict[str, Any] = {"sample": self.samples.tolist()}
        if self.names is not None:
            columns["file"] = self.names
        answers = {f"exit{one.exits[0]}": one.labels for one in self.by_exit if len(one)} or {"prediction": self.labels}
        for name, values in {**({} if self.truth is None else {"label": self.truth}), **answers}.items():
            several = isinstance(values, np.ndarray) and values.ndim > 1
            columns |= {f"{name}{i + 1}": part for i, part in enumerate(values.T)} if several else {name: values}
        return {**columns, "exit": self.exits.tolist()}


def _format_cell(value: Any) -> str:
    """Return a number with all digits of its type, whole ones without a point or an exponent; texts are printable."""
    if isinstance(value, str):
        return escape_controls(value)
    if isinstance(value, tuple):
        return ";".join(map(escape_controls, value))
    return str(int(value)) if float(value).is_integer() and abs(value) < _EXACT else str(value)


# ---- predicting ------------------------------------------------------------------------------------------------------


def predict(
    run: TrainedRun,
    data: Any = None,
    level: LevelName = None,
    exit: Exit = "last",
    split: str = "test",
    client: int | None = None,
    batch_size: int = 256,
) -> Predictions:
    """Return the predictions of a level's model (see `Run.predict`).

    Raises:
        ConfigError: The level, exit or client is unknown, or the level is not calibrated.
        DataError: There are no samples, or they do not fit the model.
    """
    if exit not in get_args(Exit):
        raise ConfigError(
            f'exit must be {", ".join(get_args(Exit))}, got "{exit}".{did_you_mean(str(exit), get_args(Exit))}',
            key="exit",
        )
    if type(batch_size) is not int or batch_size < 1:
        raise ConfigError(f"batch_size must be a whole number of at least 1, got {batch_size}.", key="batch_size")
    samples, entry = select_data(run, client, data, labels=False), find_level(run, level)
    _check_task(samples, exit)
    indices = samples.split(split)
    if not len(indices):
        raise DataError(f"{samples.name} has no {split} samples.", key="split")
    best = best_exit(run, level, client) if exit == "best" else None
    policy = _load_policy(run, entry) if exit == "early" else None
    model = load_model(run, level)
    parts = [_predict_batch(model, samples.batch(part)[0], exit, policy, best) for part in indices.split(batch_size)]
    logits, places = torch.cat([z for z, _ in parts], dim=1), torch.cat([places for _, places in parts], dim=1)
    every = list(run.assembly.federation.problem.exits)
    numbers = np.array([every.index(e) + 1 for e in entry.submodel.exits])
    costs = np.array(compute_exit_costs(run, level, "multiply_adds", samples))
    if exit == "last":  # no other classifier runs
        costs[-1] = compute_last_cost(run, entry)
    by_exit = tuple(
        _make_predictions(z, samples, indices, numbers[at], costs[at], entry.name, split)
        for z, at in zip(logits, places.numpy(), strict=True)
    )
    index: Any = getattr(data, "index", None)  # of a data frame or a series; a list has a method of this name
    index = index if hasattr(index, "__len__") and len(index) == len(indices) else None
    by_exit = tuple(replace(one, index=index) for one in by_exit)
    return replace(by_exit[-1], by_exit=by_exit if exit == "all" else ())


def _check_task(data: Data, exit: Exit) -> None:
    if data.task not in ("classification", "regression", "multi_label"):
        raise ConfigError(
            f"predict returns classes or numbers, but the task of this run is {data.task}. Use evaluate (fleetfit "
            "eval) for its scores, or run.model(level) for its logits.",
            key="task",
        )
    if data.task != "classification" and exit != "last":
        raise ConfigError(
            f'exit = "{exit}" (--adaptive, --stop, --best-exit) is for classes of which one is right, but the task of '
            f"this run is {data.task}. Leave it out.",
            key="exit",
        )


def _load_policy(run: TrainedRun, level: Level) -> Policy:
    """Return the calibrated policy of early stopping.

    Raises:
        ConfigError: There is none, or the level has one exit.
    """
    check_early_exits(run, level)
    calibration = load_calibration(run, level.name)
    if calibration is None:
        raise ConfigError(
            f'level {level.name} is not calibrated. Run "fleetfit calibrate {run.folder} --level {level.name} '
            '--budget 0.75", or run.calibrate.',
            key="exit",
            path=run.folder,
        )
    return read_policy(calibration)


def _predict_batch(
    model: nn.Module, x: Tensor, exit: Exit, policy: Policy | None, best: int | None
) -> tuple[Tensor, Tensor]:
    """Return logits [answers, B, ...], and the exits that gave them, from 0 [answers, B]."""
    if policy is not None:
        stopped = stop_early(model, x, policy)
        return stopped.logits[None], stopped.exits[None]
    logits: list[Tensor] = []
    for z in predictions(model, x, every=exit != "last"):
        logits.append(z)
        if len(logits) == best:  # later exits are not computed
            break
    answers = torch.stack(logits if exit == "all" else logits[-1:]).float()
    last = len(getattr(model, "exits", logits)) if exit == "last" else len(logits)
    return answers, torch.arange(last - len(answers), last)[:, None].expand(-1, len(x))


def _make_predictions(
    logits: Tensor, data: Data, indices: Tensor, exits: Any, costs: Any, level: str, split: str
) -> Predictions:
    """Return the predictions of logits [N, classes], by exits [N] with costs [N]."""
    class_names = data.class_names or tuple(map(str, range(data.classes)))
    y, classes, probabilities = data.y.cpu()[indices], None, None
    labels: Any
    truth: Any
    if data.task == "regression":
        mean, std = data.target_scale
        labels = _drop_only_column((logits.double() * std + mean).numpy())
        truth = _drop_only_column(y.numpy() if data.exact_targets is None else data.exact_targets[indices.numpy()])
    elif data.task == "multi_label":
        probabilities = logits.sigmoid().numpy()
        classes = (probabilities >= _THRESHOLD).astype(np.int64)
        labels, truth = (_list_labels(rows, class_names) for rows in (classes, y.numpy()))
    else:
        probabilities, classes = logits.softmax(-1).numpy(), logits.argmax(-1).numpy()
        are_numbers = all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", name) for name in class_names)
        answers = [*map(int, class_names)] if are_numbers else class_names
        labels, truth = ([answers[i] for i in rows.tolist()] for rows in (classes, y))
    encoded = data.file_names
    names = None if encoded is None else [os.fsdecode(encoded[i]) for i in indices.tolist()]
    return Predictions(
        labels, classes, probabilities, exits, costs, truth if data.labeled else None, names, indices.numpy(), level,
        data.name, split, data.task, class_names, notes=data.notes,
    )  # fmt: skip


def _drop_only_column(values: NDArray[Any]) -> NDArray[Any]:
    return values[:, 0] if values.shape[1] == 1 else values


def _list_labels(rows: NDArray[Any], class_names: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(class_names[i] for i in np.flatnonzero(row).tolist()) for row in rows]


# ---- tables of the command line --------------------------------------------------------------------------------------


def make_prediction_table(
    run: TrainedRun, result: Predictions, is_chosen: bool, is_own: bool, is_written: bool
) -> Table:
    """Return the accuracy of predictions at each exit, or without labels how often each class is predicted.

    Args:
        run: The run.
        result: The predictions.
        is_chosen: Whether the user chose the level.
        is_own: Whether the data are the run's own.
        is_written: Whether the predictions are written to a file.
    """
    every = run.assembly.federation.problem.exits
    titles = dict(enumerate(exit_names(every, every), 1))
    is_chosen = is_chosen or len(run.assembly.federation.levels) == 1
    level = f"level {result.level}{'' if is_chosen else ' (the largest trained; --level names another)'}"
    samples, notes = str(len(result)), () if is_own else result.notes
    title = f"{level} on {samples} {f'{result.split} ' * is_own}samples of {result.data}"
    if result.truth is None:
        hint = () if is_written else ("--out FILE.csv writes the prediction of each row.",)
        notes = (*result.notes, *hint)
    if result.task == "regression":
        columns = ("without labels" if result.truth is None else "what", "value")
        return Table(columns, tuple(_list_scores(result)), title, notes)
    if result.truth is None:
        counts = [(one_line(name), str(count)) for name, count in _count_classes(result) if count]
        title = f"{level} on {'1 sample' if samples == '1' else f'{samples} samples'} of {result.data} without labels"
        return Table(("predicted class", "samples"), tuple(counts), title, notes)
    if result.by_exit:
        rows = [(titles[one.exits[0]], samples, format_percent(one.accuracy or 0.0)) for one in result.by_exit]
        return Table(("exit (after block)", "samples", "accuracy %"), tuple(rows), title, notes)
    rows = []
    for number in sorted(set(result.exits.tolist())):
        right = result.right[result.exits == number]
        rows.append((titles[number], str(len(right)), format_percent(float(right.mean()))))
    if len(rows) > 1:
        rows.append(("all", samples, format_percent(result.accuracy or 0.0)))
    return Table(("left at exit (after block)", "samples", "accuracy %"), tuple(rows), title, notes)


def _count_classes(result: Predictions) -> list[tuple[str, int]]:
    assert result.classes is not None
    is_single = result.classes.ndim == 1
    counts = np.bincount(result.classes, minlength=len(result.class_names)) if is_single else result.classes.sum(0)
    return list(zip(result.class_names, counts.tolist(), strict=True))


def _list_scores(result: Predictions) -> list[tuple[str, str]]:
    """Return the scores of a regression, or without labels the range of its predictions."""
    answers = result.labels
    if result.truth is None:
        low, mean, high = (f"{value:.4g}" for value in (answers.min(), answers.mean(), answers.max()))
        return [("lowest prediction", low), ("mean", mean), ("highest", high)]
    error = np.abs(answers - result.truth.astype(np.float64))
    return [
        ("mean absolute error", f"{error.mean():.4g}"),
        ("explained variance (R2) %", "-" if result.accuracy is None else format_percent(result.accuracy)),
    ]
