"""Predict a data set with a run's model, as a table and a CSV file."""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit import files
from fleetfit.api.inference import (
    check_early_exits,
    find_level,
    load_calibration,
    load_model,
    load_other_data,
    select_data,
)
from fleetfit.api.results import Run, load
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, escape_controls, one_line
from fleetfit.inference import Policy, read_policy, stop_early
from fleetfit.layout import predictions
from fleetfit.report.text import Table, exit_names, format_percent

_EXACT = 1e16  # whole numbers above have an exponent


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
    """Samples [N], labels [N], classes [exits in the table, N], and the exits where samples stopped, from 1 [N]."""

    indices: Tensor
    labels: Tensor
    answers: Tensor
    exits: Tensor


def predict_dataset(options: PredictOptions) -> Table:
    """Predict a data set, write the predictions if `out` is set, and return a table of accuracies or counts.

    Raises:
        ConfigError: Options contradict each other, or the level was not calibrated.
        FleetFitError: The folder is not a run folder, or its model does not support the options.
    """
    if options.adaptive + options.stop + options.best > 1:
        raise ConfigError("--adaptive, --stop and --best-exit exclude each other. Choose one.", key="adaptive")
    run = load(options.folder)
    other = None if options.data is None else load_other_data(run, options.data)
    data = select_data(run, options.client, other, False)
    if data.task not in ("classification", "regression"):
        raise ConfigError(
            f"predict returns classes or numbers, but the task of this run is {data.task}. Use fleetfit eval for "
            "its scores.",
            path=options.folder,
        )
    if data.task == "regression" and (options.adaptive or options.stop or options.best):
        raise ConfigError(
            "--adaptive, --stop and --best-exit are for classification, but this run is a regression. Leave them out.",
            key="adaptive" if options.adaptive else "stop" if options.stop else "best",
        )
    indices = data.split(options.split)
    if not len(indices):
        raise DataError(f"{data.name} has no {options.split} samples.")
    if data.task == "regression":
        return _predict_targets(run, data, indices, options)
    level = find_level(run, options.level)
    best_exit = run.best_exit(options.level, options.client) if options.best else None
    policy = None
    if options.stop:
        check_early_exits(run, level)
        calibration = load_calibration(run, options.level)
        if calibration is None:
            raise ConfigError(
                f'level {level.name} is not calibrated. Run "fleetfit calibrate {run.folder} --level {level.name} '
                '--budget 0.75".',
                key="stop",
                path=run.folder,
            )
        policy = read_policy(calibration)
    model = load_model(run, options.level)
    parts = []
    for part in indices.split(options.batch_size):
        x, y = data.batch(part)
        parts.append((part, y, *_predict_batch(model, x, options.adaptive, policy, best_exit)))
    result = _Predictions(*(torch.cat(column, dim=-1) for column in zip(*parts, strict=True)))
    exits = exit_names(level.submodel.exits, run.assembly.federation.problem.exits)
    if options.out is not None:
        _write_classes(result, data, options, [name.partition(" ")[0] for name in exits])
    if data.labelled:
        return _make_accuracy_table(result, _describe_level(run, options), options, data, exits)
    names = data.class_names or tuple(map(str, range(data.classes)))
    counts = torch.bincount(result.answers[-1], minlength=data.classes).tolist()
    rows = tuple((one_line(name), str(count)) for name, count in zip(names, counts, strict=True) if count)
    size = "1 sample" if len(result.labels) == 1 else f"{len(result.labels)} samples"
    title = f"{_describe_level(run, options)} on {size} of {data.name} without labels"
    return Table(("predicted class", "samples"), rows, title, _list_notes(data, options))


def _describe_level(run: Run, options: PredictOptions) -> str:
    name = find_level(run, options.level).name
    is_chosen = options.level is not None or len(run.assembly.federation.levels) == 1
    return f"level {name}" if is_chosen else f"level {name} (the largest; --level names another)"


def _list_notes(data: Data, options: PredictOptions) -> tuple[str, ...]:
    return (*data.notes, *([] if options.out else ["--out FILE.csv writes the prediction of each row."]))


def _predict_batch(
    model: nn.Module, x: Tensor, adaptive: bool, policy: Policy | None, best_exit: int | None
) -> tuple[Tensor, Tensor]:
    """Return predicted classes [exits in the table, B], and the exits where samples stopped, from 1 [B]."""
    if policy is not None:
        stopped = stop_early(model, x, policy)
        return stopped.logits.argmax(-1)[None], stopped.exits + 1
    every = adaptive or best_exit is not None
    answers: list[Tensor] = []
    for logits in predictions(model, x, every=every):
        answers.append(logits.argmax(-1))
        if len(answers) == best_exit:  # later exits are not computed
            break
    last = len(answers) if every else len(getattr(model, "exits", answers))
    return torch.stack(answers if adaptive else answers[-1:]), torch.full((len(x),), last)


def _write_classes(result: _Predictions, data: Data, options: PredictOptions, exits: Sequence[str]) -> None:
    answers = [f"exit{number}" for number in exits] if options.adaptive else ["prediction"]
    label = ["label"] if data.labelled else []
    names = [escape_controls(name) for name in data.class_names or map(str, range(data.classes))]
    file_names = []
    if data.file_names is not None:
        file_names.append([escape_controls(os.fsdecode(data.file_names[i])) for i in result.indices.tolist()])
    columns = [result.indices.tolist(), *file_names, *([[names[y] for y in result.labels.tolist()]] if label else [])]
    columns += [[names[a] for a in row] for row in result.answers.tolist()]
    rows = zip(*columns, (exits[i - 1] for i in result.exits.tolist()), strict=True)
    _write_csv(options.out, [["sample", *(["file"] if file_names else []), *label, *answers, "exit"], *rows])


def _write_csv(out: Path | None, rows: Iterable[Sequence[object]]) -> None:
    """Write rows as CSV.

    Raises:
        ConfigError: The file cannot be written.
    """
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    try:
        files.write_user_file(str(out), text.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write the predictions to {out}: {error.strerror}.", path=out) from None


def _make_accuracy_table(
    result: _Predictions, level: str, options: PredictOptions, data: Data, exits: Sequence[str]
) -> Table:
    """Return the accuracy of each exit, or of the samples that stopped there."""
    correct = (result.answers == result.labels).double()
    samples = str(len(result.labels))
    title = f"{level} on {samples} {options.split} samples of {data.name}"
    notes = data.notes if options.data is not None else ()
    if options.adaptive:
        rows = [(exits[i], samples, format_percent(float(row.mean()))) for i, row in enumerate(correct)]
        return Table(("exit (after block)", "samples", "accuracy %"), tuple(rows), title, notes)
    rows = []
    for number in sorted(set(result.exits.tolist())):
        is_here = result.exits == number
        rows.append((exits[number - 1], str(int(is_here.sum())), format_percent(float(correct[0][is_here].mean()))))
    if len(rows) > 1:
        rows.append(("all", samples, format_percent(float(correct[0].mean()))))
    return Table(("left at exit (after block)", "samples", "accuracy %"), tuple(rows), title, notes)


def _predict_targets(run: Run, data: Data, indices: Tensor, options: PredictOptions) -> Table:
    """Predict the targets of a regression with the last exit, in the unit of the training targets.

    Raises:
        ConfigError: The predictions cannot be written.
    """
    mean, std = data.target_scale
    model = load_model(run, options.level)
    parts = [next(predictions(model, data.batch(part)[0], every=False)) for part in indices.split(options.batch_size)]
    answers, y = torch.cat(parts).double() * std + mean, data.y[indices].double()
    if options.out is not None:
        several = answers.shape[1] > 1
        heads = [f"{name}{i + 1 if several else ''}" for name in (["label"] if data.labelled else []) + ["prediction"]
                 for i in range(answers.shape[1])]  # fmt: skip
        labels = (data.y.cpu().numpy() if data.exact_targets is None else data.exact_targets)[indices.numpy()]
        columns = [*labels.T] if data.labelled else []
        texts = [[*map(_format_number, column)] for column in [*columns, *answers.numpy().T]]
        _write_csv(options.out, [["sample", *heads], *zip(indices.tolist(), *texts, strict=True)])
    error = (answers - y).abs()
    title = f"{_describe_level(run, options)} on {len(indices)} {options.split} samples of {data.name}"
    notes = data.notes if options.data is not None else ()
    if not data.labelled:
        numbers = (
            ("lowest prediction", f"{answers.min().item():.4g}"),
            ("mean", f"{answers.mean():.4g}"),
            ("highest", f"{answers.max().item():.4g}"),
        )
        return Table(("without labels", "value"), numbers, title, _list_notes(data, options))
    explained = 1 - float(error.square().sum() / (y - y.mean(0)).square().sum().clamp_min(1e-12))
    scores = (("mean absolute error", f"{error.mean():.4g}"), ("explained variance (R2) %", format_percent(explained)))
    return Table(("what", "value"), scores, title, notes)


def _format_number(value: Any) -> str:
    """Return a number of NumPy with all digits of its type; a whole one without a point or an exponent."""
    return str(int(value)) if float(value).is_integer() and abs(value) < _EXACT else str(value)
