"""Predictions of a run's model on a data set, as a table and a CSV file."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fleetfit import files
from fleetfit.api.inference import data_of, level_named, other_data, saved_calibration, served, submodel_of
from fleetfit.api.results import Run, load
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, escape_controls, one_line
from fleetfit.inference import Policy, read_policy, stop_early
from fleetfit.layout import predictions
from fleetfit.report.text import Table, exit_names, percent


@dataclass(frozen=True)
class PredictOptions:
    """The options of `fleetfit predict`."""

    folder: Path
    level: str | None
    adaptive: bool
    stop: bool
    best: bool
    client: int | None
    data: str | None
    split: str
    batch_size: int
    out: Path | None


@dataclass(frozen=True)
class _Predictions:
    """Samples, labels [N], answers [exits shown, N], and the exits of the level where samples left, from 1 [N]."""

    indices: Tensor
    labels: Tensor
    answers: Tensor
    exits: Tensor


def predict_dataset(options: PredictOptions) -> Table:
    """Predict a data set, write the predictions if `out` is set, and return how good they are.

    Raises:
        ConfigError: Options contradict each other, or the level was not calibrated.
        FleetFitError: It is not a run folder, or its model cannot do what the options ask for.
    """
    if options.adaptive + options.stop + options.best > 1:
        raise ConfigError("--adaptive, --stop and --best-exit exclude each other; choose one.")
    run = load(options.folder)
    other = None if options.data is None else other_data(run, options.data)
    data = data_of(run, options.client, other, False)
    if data.task not in ("classification", "regression"):
        raise ConfigError(
            f"predict gives classes and numbers; the task of this run is {data.task}. Its scores: fleetfit eval."
        )
    if data.task == "regression" and (options.adaptive or options.stop or options.best):
        raise ConfigError(
            "--adaptive, --stop and --best-exit are for classes; a regression is predicted by the last exit."
        )
    indices = data.split(options.split)
    if not len(indices):
        raise DataError(f"{data.name} has no {options.split} samples.")
    if data.task == "regression":
        return _predict_targets(run, data, indices, options)
    exit = run.best_exit(options.level, options.client) if options.best else None
    policy = _load_policy(run, options.level) if options.stop else None
    model = served(run, options.level)
    parts = []
    for part in indices.split(options.batch_size):
        x, y = data.batch(part)
        parts.append((part, y, *_predict_batch(model, x, options.adaptive, policy, exit)))
    predicted = _Predictions(*(torch.cat(column, dim=-1) for column in zip(*parts, strict=True)))
    exits = exit_names(submodel_of(run, options.level).exits, run.assembly.federation.problem.exits)
    if options.out is not None:
        _write_classes(predicted, data, options, [name.partition(" ")[0] for name in exits])
    level = level_named(run, options.level)
    if data.labelled:
        return _make_accuracy_table(predicted, level, options, data, exits)
    return _make_count_table(predicted, level, options, data)


def _load_policy(run: Run, level: str | None) -> Policy:
    calibration = saved_calibration(run, level)
    if calibration is None:
        name = level_named(run, level)
        raise ConfigError(
            f'level {name} was not calibrated. First: "fleetfit calibrate {run.folder} --level {name} --budget 0.75".'
        )
    return read_policy(calibration)


def _predict_batch(
    model: nn.Module, x: Tensor, adaptive: bool, policy: Policy | None, exit: int | None
) -> tuple[Tensor, Tensor]:
    """Return predicted classes [exits shown, B], and the exits where samples left, from 1 [B]."""
    if policy is not None:
        stopped = stop_early(model, x, policy)
        return stopped.logits.argmax(-1)[None], stopped.exits + 1
    every = adaptive or exit is not None
    answers: list[Tensor] = []
    for logits in predictions(model, x, every=every):
        answers.append(logits.argmax(-1))
        if len(answers) == exit:  # later exits are not computed
            break
    last = len(answers) if every else len(getattr(model, "exits", answers))
    return torch.stack(answers if adaptive else answers[-1:]), torch.full((len(x),), last)


def _write_classes(predicted: _Predictions, data: Data, options: PredictOptions, exits: Sequence[str]) -> None:
    answers = [f"exit{number}" for number in exits] if options.adaptive else ["prediction"]
    label = ["label"] if data.labelled else []
    names = [escape_controls(name) for name in data.class_names or map(str, range(data.classes))]
    columns = [predicted.indices.tolist(), *([[names[y] for y in predicted.labels.tolist()]] if label else [])]
    columns += [[names[a] for a in row] for row in predicted.answers.tolist()]
    rows = zip(*columns, (exits[i - 1] for i in predicted.exits.tolist()), strict=True)
    _write_csv(options.out, [["sample", *label, *answers, "exit"], *rows])


def _write_csv(out: Path | None, rows: Iterable[Sequence[object]]) -> None:
    """Write rows as CSV.

    Raises:
        ConfigError: They cannot be written.
    """
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    try:
        files.write_user_file(str(out), text.getvalue())
    except OSError as error:
        raise ConfigError(f"the predictions cannot be written to {out}: {error.strerror}.", path=out) from None


def _make_accuracy_table(
    predicted: _Predictions, level: str, options: PredictOptions, data: Data, exits: Sequence[str]
) -> Table:
    """Return the accuracy of each exit, or of the samples that left there."""
    right = (predicted.answers == predicted.labels).double()
    samples = str(len(predicted.labels))
    title = f"level {level} on {samples} {options.split} samples of {data.name}"
    notes = data.notes if options.data is not None else ()
    if options.adaptive:
        rows = [(exits[i], samples, percent(float(row.mean()))) for i, row in enumerate(right)]
        return Table(("exit (after block)", "samples", "accuracy %"), tuple(rows), title, notes)
    rows = []
    for exit in sorted(set(predicted.exits.tolist())):
        left = predicted.exits == exit
        rows.append((exits[exit - 1], str(int(left.sum())), percent(float(right[0][left].mean()))))
    if len(rows) > 1:
        rows.append(("all", samples, percent(float(right[0].mean()))))
    return Table(("left at exit (after block)", "samples", "accuracy %"), tuple(rows), title, notes)


def _make_count_table(predicted: _Predictions, level: str, options: PredictOptions, data: Data) -> Table:
    """Return how often each class was predicted, for samples without labels."""
    names = data.class_names or tuple(map(str, range(data.classes)))
    counts = torch.bincount(predicted.answers[-1], minlength=data.classes).tolist()
    rows = tuple((one_line(name), str(count)) for name, count in zip(names, counts, strict=True) if count)
    title = f"level {level} on {len(predicted.labels)} samples of {data.name}, which have no labels"
    notes = (*data.notes, *([] if options.out else ["--out FILE.csv writes the prediction of each row."]))
    return Table(("predicted class", "samples"), rows, title, notes)


def _predict_targets(run: Run, data: Data, indices: Tensor, options: PredictOptions) -> Table:
    """Predict the targets of a regression by the last exit, in the unit of the training targets.

    Raises:
        ConfigError: The predictions cannot be written.
    """
    own = run.assembly.data
    mean, std = (own if isinstance(own, Data) else data).target_scale
    model = served(run, options.level)
    parts = [next(predictions(model, data.batch(part)[0], every=False)) for part in indices.split(options.batch_size)]
    answers, y = torch.cat(parts).double() * std + mean, data.y[indices].double()
    if options.out is not None:
        several = answers.shape[1] > 1
        heads = [f"{name}{i + 1 if several else ''}" for name in (["label"] if data.labelled else []) + ["prediction"]
                 for i in range(answers.shape[1])]  # fmt: skip
        columns = torch.cat([y, answers], 1) if data.labelled else answers
        rows = (
            [i, *(f"{value:.6g}" for value in row)] for i, row in zip(indices.tolist(), columns.tolist(), strict=True)
        )
        _write_csv(options.out, [["sample", *heads], *rows])
    level, error = level_named(run, options.level), (answers - y).abs()
    title = f"level {level} on {len(indices)} {options.split} samples of {data.name}"
    notes = data.notes if options.data is not None else ()
    if not data.labelled:
        numbers = (
            ("lowest prediction", f"{answers.min().item():.4g}"),
            ("mean", f"{answers.mean():.4g}"),
            ("highest", f"{answers.max().item():.4g}"),
        )
        hint = () if options.out else ("--out FILE.csv writes the prediction of each row.",)
        return Table(("without labels", "value"), numbers, title, (*notes, *hint))
    explained = 1 - float(error.square().sum() / (y - y.mean(0)).square().sum().clamp_min(1e-12))
    scores = (("mean absolute error", f"{error.mean():.4g}"), ("explained variance (R2) %", percent(explained)))
    return Table(("what", "value"), scores, title, notes)
