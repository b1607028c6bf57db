"""What `predict`, `calibrate` and `export` do, and the tables that they print."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit import files
from fleetfit.api import Run, load
from fleetfit.api.inference import (
    cost_of_unit,
    data_of,
    level_named,
    matching,
    other_data,
    saved_calibration,
    served,
    submodel_of,
)
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, escape_controls, one_line
from fleetfit.inference import Calibration, Policy, read_policy, stop_early
from fleetfit.inference.export import Export
from fleetfit.layout import predictions
from fleetfit.report.text import Table, exit_names, percent


@dataclass(frozen=True)
class PredictOptions:
    """What was asked of `predict`; see its options."""

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


def predicted(asked: PredictOptions) -> Table:
    """Classify a data set, write the predictions if they are wanted, and return how good they are.

    Raises:
        ConfigError: Options contradict each other, or the level was not calibrated.
        FleetFitError: It is no run folder, or its model cannot do what is asked.
    """
    if asked.adaptive + asked.stop + asked.best > 1:
        raise ConfigError("--adaptive, --stop and --best-exit exclude each other; choose one.")
    run = load(asked.folder)
    data = own_data(run, asked.data, asked.client, labels=False)
    if data.task == "regression":
        return _regressed(run, data, asked)
    if data.task != "classification":
        raise ConfigError(
            f"predict gives classes and numbers; the task of this run is {data.task}. Its scores: fleetfit eval."
        )
    indices = data.split(asked.split)
    if not len(indices):
        raise DataError(f"{data.name} has no {asked.split} samples.")
    exit = run.best_exit(asked.level, asked.client) if asked.best else None
    policy = _policy(run, asked.level) if asked.stop else None
    model = served(run, asked.level)
    rows = []
    for part in indices.split(asked.batch_size):
        x, y = data.batch(part)
        answers, exits = _answers(model, x, asked.adaptive, policy, exit)
        rows.append((part, y, answers, exits))
    found = _Predicted(*(torch.cat(column, dim=-1) for column in zip(*rows, strict=True)))
    named = exit_names(submodel_of(run, asked.level).exits, run.assembly.federation.problem.exits)
    if asked.out is not None:
        _write(found, data, asked, [name.partition(" ")[0] for name in named])
    return _table(found, run, asked, data, named)


@dataclass(frozen=True)
class _Predicted:
    """Samples, labels [N], answers [exits shown, N], and the exits of the level where samples left, from 1 [N]."""

    indices: Tensor
    labels: Tensor
    answers: Tensor
    exits: Tensor


def own_data(run: Run, name: str | None, client: int | None, labels: bool = True) -> Data:
    """Return the run's data, a client's, or another data set of the same shape and classes; with labels, or any.

    Raises:
        ConfigError: It does not fit, or the run's data are on the nodes of a fleet.
    """
    return data_of(run, client, named_data(run, name), labels)


def named_data(run: Run, name: str | None, halves: bool = False) -> Data | None:
    """Return the data that `--data` names, a data set or a path, or None where it names none; see `other_data`.

    Raises:
        FleetFitError: There are no such data, or they do not fit.
    """
    return None if name is None else other_data(run, name, halves)


def _policy(run: Run, level: str | None) -> Policy:
    found = saved_calibration(run, level)
    if found is None:
        name = level_named(run, level)
        raise ConfigError(
            f'level {name} was not calibrated. First: "fleetfit calibrate {run.folder} --level {name} --budget 0.75".'
        )
    return read_policy(found)


def _answers(
    model: nn.Module, x: Tensor, adaptive: bool, policy: Policy | None, exit: int | None
) -> tuple[Tensor, Tensor]:
    """Return predicted classes [exits shown, B], and where samples left, from 1 [B]."""
    if policy is not None:
        stopped = stop_early(model, x, policy)
        return stopped.logits.argmax(-1)[None], stopped.exits + 1
    every = adaptive or exit is not None
    found: list[Tensor] = []
    for logits in predictions(model, x, every=every):
        found.append(logits.argmax(-1))
        if len(found) == exit:  # nothing behind it is computed
            break
    last = len(found) if every else len(getattr(model, "exits", found))
    return torch.stack(found if adaptive else found[-1:]), torch.full((len(x),), last)


def _write(found: _Predicted, data: Data, asked: PredictOptions, exits: Sequence[str]) -> None:
    shown = [f"exit{number}" for number in exits] if asked.adaptive else ["prediction"]
    known = ["label"] if data.labelled else []
    named = [escape_controls(name) for name in data.class_names or map(str, range(data.classes))]
    columns = [found.indices.tolist(), *([[named[y] for y in found.labels.tolist()]] if known else [])]
    columns += [[named[a] for a in row] for row in found.answers.tolist()]
    rows = zip(*columns, (exits[i - 1] for i in found.exits.tolist()), strict=True)
    _written(asked.out, [["sample", *known, *shown, "exit"], *rows])


def _written(out: Path | None, rows: Iterable[Sequence[object]]) -> None:
    """Write rows as CSV.

    Raises:
        ConfigError: They cannot be written.
    """
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    try:
        files.write_user_file(str(out), text.getvalue())
    except OSError as error:
        raise ConfigError(f"the predictions cannot be written to {out}: {error.strerror}.") from None


def _regressed(run: Run, data: Data, asked: PredictOptions) -> Table:
    """Predict the targets of a regression by the last exit, in the unit of the training targets.

    Raises:
        ConfigError: It is asked where samples leave, or the predictions cannot be written.
        DataError: There are no samples.
    """
    if asked.adaptive or asked.stop or asked.best:
        raise ConfigError(
            "--adaptive, --stop and --best-exit are for classes; a regression is predicted by the last exit."
        )
    indices = data.split(asked.split)
    if not len(indices):
        raise DataError(f"{data.name} has no {asked.split} samples.")
    ours = run.assembly.data
    mean, std = (ours if isinstance(ours, Data) else data).target_scale
    model = served(run, asked.level)
    parts = [next(predictions(model, data.batch(part)[0], every=False)) for part in indices.split(asked.batch_size)]
    answers, y = torch.cat(parts).double() * std + mean, data.y[indices].double()
    if asked.out is not None:
        several = answers.shape[1] > 1
        heads = [f"{what}{i + 1 if several else ''}" for what in (["label"] if data.labelled else []) + ["prediction"]
                 for i in range(answers.shape[1])]  # fmt: skip
        columns = torch.cat([y, answers], 1) if data.labelled else answers
        rows = (
            [i, *(f"{value:.6g}" for value in row)] for i, row in zip(indices.tolist(), columns.tolist(), strict=True)
        )
        _written(asked.out, [["sample", *heads], *rows])
    level, error = level_named(run, asked.level), (answers - y).abs()
    title = f"level {level} on {len(indices)} {asked.split} samples of {data.name}"
    notes = data.notes if asked.data is not None else ()
    if not data.labelled:
        lowest, highest = answers.min().item(), answers.max().item()
        numbers = (
            ("lowest prediction", f"{lowest:.4g}"),
            ("mean", f"{answers.mean():.4g}"),
            ("highest", f"{highest:.4g}"),
        )
        hint = () if asked.out else ("--out FILE.csv writes the prediction of each row.",)
        return Table(("without labels", "value"), numbers, title, (*notes, *hint))
    explained = 1 - float(error.square().sum() / (y - y.mean(0)).square().sum().clamp_min(1e-12))
    scores = (("mean absolute error", f"{error.mean():.4g}"), ("explained variance (R2) %", percent(explained)))
    return Table(("what", "value"), scores, title, notes)


def _counts(found: _Predicted, level: str, asked: PredictOptions, data: Data) -> Table:
    """Return how often each class was predicted, of samples without labels."""
    named = data.class_names or tuple(map(str, range(data.classes)))
    counts = torch.bincount(found.answers[-1], minlength=data.classes).tolist()
    rows = tuple((one_line(name), str(count)) for name, count in zip(named, counts, strict=True) if count)
    title = f"level {level} on {len(found.labels)} samples of {data.name}, which have no labels"
    notes = (*data.notes, *([] if asked.out else ["--out FILE.csv writes the prediction of each row."]))
    return Table(("predicted class", "samples"), rows, title, notes)


def _table(found: _Predicted, run: Run, asked: PredictOptions, data: Data, exits: Sequence[str]) -> Table:
    right = (found.answers == found.labels).double()
    name = level_named(run, asked.level)
    if not data.labelled:
        return _counts(found, name, asked, data)
    title = f"level {name} on {len(found.labels)} {asked.split} samples of {data.name}"
    notes = data.notes if asked.data is not None else ()
    if asked.adaptive:
        rows = [(exits[i], str(len(found.labels)), percent(float(r.mean()))) for i, r in enumerate(right)]
        return Table(("exit (after block)", "samples", "accuracy %"), tuple(rows), title, notes)
    rows = []
    for exit in sorted(set(found.exits.tolist())):
        here = found.exits == exit
        rows.append((exits[exit - 1], str(int(here.sum())), percent(float(right[0][here].mean()))))
    if len(rows) > 1:
        rows.append(("all", str(len(found.labels)), percent(float(right[0].mean()))))
    return Table(("left at exit (after block)", "samples", "accuracy %"), tuple(rows), title, notes)


# ---- calibrate -----------------------------------------------------------------------------------------------------


def calibrated(
    folder: Path, level: str | None, budget: str, cost: str | None, mode: Any, measure: Any, temperature: bool,
    client: int | None, data: str | None,
) -> Calibration:  # fmt: skip
    """Calibrate a level of a run."""
    try:
        amount: float | str = float(budget)
    except ValueError:
        amount = budget
    cost = cost or cost_of_unit(amount)
    run = load(folder)
    return run.calibrate(level, amount, cost, mode, measure, temperature, client, named_data(run, data, halves=True))


def calibration_tables(found: Calibration) -> Iterator[Table]:
    """Yield what was chosen, exit by exit, and the curve over budgets."""
    policy, count = found.policy, len(found.costs)
    rows = []
    for i in range(count):
        before, after = found.calibration_errors[i]
        threshold = "-" if i == count - 1 else "never" if policy.thresholds[i] > 1 else f"{policy.thresholds[i]:.4f}"
        rows.append((
            found.exits[i] if found.exits else str(i + 1), _amount(found.costs[i], found.cost), threshold,
            percent(found.test.shares[i]), percent(found.accuracies[i]), percent(before),
            *([] if after is None else [f"{policy.temperatures[i]:.2f}", percent(after)]),
        ))  # fmt: skip
    heads = ("exit (after block)", _unit(found.cost), "threshold", "test samples that leave %", "accuracy of all %",
             "calibration error %", *(("temperature", "error after it %") if policy.temperatures else ()))  # fmt: skip
    test = found.test
    without = found.costs[-1] if found.level_cost is None else found.level_cost
    saved = 1 - test.cost / without
    notes = [
        f"Test samples: accuracy {percent(test.accuracy)}% at {_amount(test.cost, found.cost)} {_unit(found.cost)} on "
        f"average (budget {_amount(found.budget, found.cost)}); all at the last exit: {percent(test.full)}% at "
        f"{_amount(without, found.cost)}: {100 * abs(saved):.0f}% {'less' if saved >= 0 else 'more'}.",
    ]
    if without != found.costs[-1]:
        notes.append(
            f"A sample passes the classifiers before the exit where it leaves, and they count: "
            f"{_amount(found.costs[-1] - without, found.cost)} {_unit(found.cost)} on the way to the last one. Who "
            "never leaves early does not compute them, so that plans count the full model without."
        )
    what = "all samples share the budget" if found.mode == "budgeted" else "each sample has the budget"
    yield Table(heads, tuple(rows), f"level {found.level}: leaving early by {policy.measure}, {what}", tuple(notes))
    every = found.curve[:: max(1, len(found.curve) // 10)]
    curve = [
        (_amount(p["budget"], found.cost), _amount(p["cost"], found.cost), percent(p["accuracy"]),
         " ".join(f"{100 * share:.0f}" for share in p["shares"])) for p in every
    ]  # fmt: skip
    yield Table(("budget", f"average {_unit(found.cost)}", "accuracy %", "leave at exits %"), tuple(curve),
                "test samples over budgets")  # fmt: skip


def _unit(cost: str) -> str:
    return "ms" if cost == "latency_s" else "multiply-adds"


def _amount(value: float, cost: str) -> str:
    return f"{1000 * value:.3g}" if cost == "latency_s" else f"{value:,.0f}"


# ---- export --------------------------------------------------------------------------------------------------------


def exported(
    folder: Path, level: str | None, out: Path, data: str | None, forms: Sequence[str], say: Callable[[str], None]
) -> Export:
    """Export a level of a run.

    Raises:
        FleetFitError: It cannot be exported.
    """
    run = load(folder)
    other = None if data is None else matching(run, other_data(run, data, halves=True))
    return run.export(level, out, forms, other, say=lambda what: say(f"Writing {what}"))


def export_table(found: Export) -> Table:
    """Return how large each form is, and how it compares with the model in PyTorch."""
    exits = found.variants[0].exits
    heads = ("form", "kB", *(f"exit {i + 1}: accuracy %" for i in range(exits)), "same answer %", "largest difference")
    rows = []
    for each in found.variants:
        scores = [percent(a) for a in each.accuracies] or ["-"] * exits
        same = percent(min(each.agreement)) if each.agreement else "-"
        rows.append((each.name, f"{each.size_bytes / 1000:.0f}", *scores, same, f"{each.difference:.1e}"))
    title = f"level {found.level} on {found.variants[0].samples} {found.samples} samples"
    return Table(heads, tuple(rows), title, found.notes)
