"""Write the folder for a device. Each file is compared with the model before the folder appears.

Besides the requested forms it has tensors as safetensors, a `torch.export` program, config.json (model, inputs, policy
of early stopping), and a short model card (training data, accuracy of each exit, usage).
"""

import importlib.util
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from fleetfit import files
from fleetfit.core import DataDescription
from fleetfit.data import Data
from fleetfit.data.transform import COLUMNS, TOKENIZER
from fleetfit.errors import ConfigError, DataError, MissingExtra, ModelError, RunError, did_you_mean, make_printable
from fleetfit.inference.export import executorch, onnx
from fleetfit.inference.export.level import (
    AllExits,
    Graph,
    LevelModel,
    Preprocessing,
    has_free_tokens,
    make_segment_graphs,
    make_whole_graph,
    write_program,
)
from fleetfit.inference.export.to_transformers import notes_on_transformers, write_tokenizer, write_transformers

FORMAT = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"
PROGRAM, SCRIPT, ROWS, CARD = "model.pt2", "run.py", "rows.py", "README.md"

# ---- forms -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """What a form of an exported model needs and promises.

    Attributes:
        is_exact: Whether its logits must equal the model's; otherwise the export fails.
        packages: The required optional packages.
        extra: The extra with these packages.
        needs: Another form that is written with it.
        needs_validation: Whether it needs validation samples.
    """

    is_exact: bool = True
    packages: tuple[str, ...] = ()
    extra: str = ""
    needs: str = ""
    needs_validation: bool = False


_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
FORMS: Mapping[str, Form] = {
    "onnx": Form(packages=_ONNX_PACKAGES, extra="export"),
    "int8": Form(is_exact=False, packages=_ONNX_PACKAGES, extra="export", needs="onnx"),
    "static-int8": Form(is_exact=False, packages=_ONNX_PACKAGES, extra="export", needs="onnx", needs_validation=True),
    "transformers": Form(),
    "executorch": Form(packages=("executorch",), extra="executorch"),
}
"""The forms that may be requested beside safetensors and torch.export."""


def check_forms(forms: Sequence[str], model: LevelModel) -> None:
    """Check the forms before writing files.

    Raises:
        ConfigError: A form is unknown.
        MissingExtra: A form needs an optional dependency.
        DataError: A form needs validation samples, but the data have none.
    """
    for name in forms:
        if name not in FORMS:
            raise ConfigError(
                f'no such form: "{name}". The forms are {", ".join(FORMS)}.{did_you_mean(name, FORMS)}', key="forms"
            )
    for name in forms:
        form = FORMS[name]
        if any(importlib.util.find_spec(package) is None for package in form.packages):
            raise MissingExtra(form.extra, f"Writing the form {name}")
        if form.needs_validation and not len(model.own_data.split("validation")):
            raise DataError(
                f"{name} is calibrated on validation samples, but this data set has none. Leave the form out."
            )


# ---- the folder ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Export:
    """An exported model.

    Attributes:
        folder: Its folder.
        level: The level of the model.
        variants: The model in PyTorch and then each of its forms, on the same samples.
        notes: Notes for the user.
        samples: Their split: "test"; without it "validation", and then "training"; "drawn" without data.
    """

    folder: Path
    level: str
    variants: tuple["Variant", ...]
    notes: tuple[str, ...] = ()
    samples: str = "test"


def export(
    model: LevelModel,
    out: str | Path,
    forms: Sequence[str] = ("onnx",),
    say: Callable[[str], None] = lambda form: None,
) -> Export:
    """Write a level's model for devices.

    The files are written to a temporary folder next to `out`, and moved there when complete and checked.

    Args:
        model: The model.
        out: A new or empty folder.
        forms: The requested `FORMS`.
        say: Called with each form before it is written.

    Raises:
        ConfigError: A form is unknown.
        RunError: The folder is not empty or cannot be written.
        ModelError: The model cannot be traced, or a form computes other results.
        DataError: A form needs validation samples, but the data have none.
        MissingExtra: A form needs an optional dependency.
    """
    target = Path(os.path.realpath(files.parse_path(out)))
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise RunError(f"{target} is not empty. Choose another folder for the export.", path=target)
    except OSError as error:
        raise RunError(f"{target} cannot be written: {error.strerror}.", path=target) from None
    check_forms(forms, model)
    try:
        with files.atomic_folder(target) as folder:
            writer = _FolderWriter(model, folder, forms, say)
            writer.write()
            for file in (folder, *folder.rglob("*")):
                file.chmod(0o755 if file.is_dir() else 0o644)
            if target.exists():  # the folder may be a mount point, or a current folder
                for file in sorted(
                    folder.iterdir(), key=lambda file: file.name == CONFIG
                ):  # last, because it lists the other files
                    file.rename(target / file.name)
            else:
                folder.rename(target)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{target} cannot be written: {getattr(error, 'strerror', None) or error}.", path=target
        ) from None
    return Export(target, model.level, tuple(writer.variants), tuple(writer.notes), _name_samples(model))


def _name_samples(model: LevelModel) -> str:
    return {"train": "training"}.get(model.split, model.split)


class _FolderWriter:
    """Writes the files of one export and compares each form with the model."""

    def __init__(self, model: LevelModel, folder: Path, forms: Sequence[str], say: Callable[[str], None]) -> None:
        self.model, self.folder, self.say = model, folder, say
        self.forms = {*forms, *(FORMS[name].needs for name in forms)}
        self.x, labels = model.samples(model.split, model.sample_count)
        if isinstance(model.data, Data) and model.data.task == "regression" and len(labels):
            mean, std = model.data.target_scale
            labels = labels * std + mean  # in the unit of the targets, as the files predict
        self.labels = labels if model.data.task in ("classification", "regression") else labels[:0]
        self.logits = run_torch(model, self.x)
        self.onnx: dict[str, Any] = {}
        self.variants: list[Variant] = []
        self.notes: list[str] = []
        self.free_tokens = True

    def write(self) -> None:
        """Write all files, starting with forms that may be refused."""
        model, folder = self.model, self.folder
        if "transformers" in self.forms:
            self.say("transformers")
            write_transformers(model, folder / "transformers")
            self.notes += notes_on_transformers(model)
        if not model.has_samples and isinstance(model.prepared, Data):
            self.notes.append(f"The files were compared on {len(self.x)} drawn samples: there are no data here.")
        if isinstance(model.prepared, DataDescription):
            self.notes.append(
                "The data are on the nodes of a fleet, so the graphs do not include scaling: pass samples as the "
                "nodes' data functions do. To include scaling, name a similar data set with --data NAME."
            )
        if model.offset is not None:
            self.notes.append(
                "These files reveal the class frequencies of one client: they are part of the logits of every exit. "
                f"Keep them where its data may be. {WEIGHTS} has the plain parameters, and {CONFIG} what is added. The "
                f"accuracies are of {model.data.name}; only that client's samples tell how good the files are (--data)."
            )
            if model.policy is not None:
                self.notes.append("The thresholds of early stopping were chosen without these frequencies.")
        self.say("safetensors")
        write_tensors(model.module, folder / WEIGHTS)
        self._add_variant("pytorch", [WEIGHTS], self.logits)
        examples = self.x[:2] if len(self.x) > 1 else self.x.repeat(2, *[1] * (self.x.dim() - 1))
        self.say("torch.export")
        whole = self._write_program(examples)
        if "onnx" in self.forms:
            self._write_onnx([whole, *self._make_segments(examples, self.free_tokens)])
        if "executorch" in self.forms:
            self._write_executorch(examples)
        samples = "samples.npy" if (folder / SCRIPT).exists() else ""
        texts = {} if model.transform is None else model.transform.to_files()
        texts.pop(TOKENIZER, "")  # written below, with the length of texts
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        if COLUMNS in texts:
            if samples:
                samples = "rows.csv"
                self._copy_script("on_device_rows.py", ROWS)
            self.notes.append(
                f"A sample is a row of a table as {COLUMNS} makes it: (value - mean) / std of each number, 0 where it "
                "is missing (and 1 in the feature after it, if there is one); 1 for the category that it has, in order."
            )
        if model.prepared.tokenizer:
            write_tokenizer(model.prepared_data, folder / TOKENIZER)
            self.notes.append(
                f"{TOKENIZER} makes the token ids of a text, cut and padded to {model.prepared.sample_shape[0]}, with "
                f'the package tokenizers: `Tokenizer.from_file("{TOKENIZER}").encode(text).ids`.'
            )
        config = json.dumps(make_config(model, self.onnx), indent=2, allow_nan=False)
        (folder / CONFIG).write_text(config + "\n", encoding="utf-8")
        card = make_card(model, self.variants, self.notes, samples)
        (folder / CARD).write_text(card, encoding="utf-8")

    def _write_program(self, examples: Tensor) -> Graph:
        """Write the program and return its graph. If samples of any length cannot be traced, the length is fixed."""
        try:
            whole = make_whole_graph(self.model, examples)
            write_program(whole, self.folder / PROGRAM)
        except ModelError:
            if not has_free_tokens(self.model):
                raise
            self.free_tokens = False
            self.notes.append(f"The graphs take samples of exactly {examples.shape[1]} tokens. Pad shorter samples.")
            whole = make_whole_graph(self.model, examples, free_tokens=False)
            write_program(whole, self.folder / PROGRAM)
        return whole

    def _make_segments(self, examples: Tensor, free_tokens: bool) -> list[Graph]:
        try:
            return make_segment_graphs(self.model, examples, free_tokens)
        except ModelError as error:
            if len(self.model.exits) > 1 and not any(note.startswith("No segments") for note in self.notes):
                self.notes.append(f"No segments were written, so a device cannot stop early: {error}")
            return []

    def _write_onnx(self, graphs: Sequence[Graph]) -> None:
        names = [graph.name for graph in graphs]
        floats = [self.folder / f"{name}.onnx" for name in names]
        is_recurrent = any(isinstance(module, nn.RNNBase) for module in self.model.module.modules())
        for graph, path in zip(graphs, floats, strict=True):
            # the exporter writes out each step of such a layer
            self.say(f"ONNX: {graph.name}{', which takes minutes with recurrent layers' * is_recurrent}")
            onnx.write_onnx(graph, path)
        self._compare_onnx("float", floats, is_exact=FORMS["onnx"].is_exact)
        if self.model.data.task in ("classification", "regression"):
            self._copy_script("on_device.py", SCRIPT)
        if "int8" in self.forms:
            self.say("int8")
            targets = [self.folder / f"{name}.int8.onnx" for name in names]
            for source, target in zip(floats, targets, strict=True):
                onnx.quantize_dynamic(source, target)
            self._compare_onnx("int8", targets, is_exact=FORMS["int8"].is_exact)
        if "static-int8" in self.forms:
            self.say("static int8")
            targets = [self.folder / f"{name}.static-int8.onnx" for name in names]
            x = self.model.samples("validation", onnx.CALIBRATION_SAMPLES)[0].numpy()
            whole, *segments = [onnx.open_session(path) for path in floats]
            feeds = [*onnx.make_calibration_feeds([whole], x), *onnx.make_calibration_feeds(segments, x)]
            for source, target, batches in zip(floats, targets, feeds, strict=True):
                onnx.quantize_static(source, target, batches)
            self._compare_onnx("static-int8", targets, is_exact=FORMS["static-int8"].is_exact)

    def _copy_script(self, name: str, target: str) -> None:
        text = resources.files("fleetfit.inference.export").joinpath(name).read_text(encoding="utf-8")
        (self.folder / target).write_text(text, encoding="utf-8")

    def _compare_onnx(self, name: str, paths: Sequence[Path], is_exact: bool) -> None:
        """Run the graphs of an ONNX variant, the whole graph first, and compare their logits."""
        whole, *segments = paths
        logits = onnx.run_whole(whole, self.x)
        chained = onnx.run_segments(segments, self.x) if segments else logits
        if is_exact:
            check_equal("the ONNX graph", self.logits, logits)
            check_equal("the chain of ONNX segments", self.logits, chained)
        file_names = [path.name for path in paths]
        self.onnx[name] = {"all_exits": file_names[0], "segments": file_names[1:]}
        self._add_variant(name, file_names[1:] or file_names, chained)

    def _write_executorch(self, examples: Tensor) -> None:
        """Write the program. If lowering loses a free size, that size is fixed.

        Raises:
            ModelError: Results differ even with all sizes fixed.
        """
        self.say("ExecuTorch")
        attempts = [
            (most, free) for free in ([True, False] if self.free_tokens else [False]) for most in (executorch.MOST, 1)
        ]
        for most, free in attempts:
            try:
                logits = self._lower(examples, most, free)
                break
            except ModelError:
                if (most, free) == attempts[-1]:
                    raise
        if most == 1:
            self.notes.append("The ExecuTorch program takes one sample at a time.")
        if self.free_tokens and self.model.takes_tokens and not free:
            length = examples.shape[1]
            self.notes.append(f"The ExecuTorch program takes samples of exactly {length} tokens. Pad shorter samples.")
        self._add_variant("executorch", [executorch.FILE], logits)

    def _lower(self, examples: Tensor, most: int, free_tokens: bool) -> Tensor:
        """Write a program, check its logits (also of shorter samples, if accepted) and return them.

        Raises:
            ModelError: The logits differ from the model's.
        """
        graphs = self._make_segments(examples, free_tokens) or [make_whole_graph(self.model, examples, free_tokens)]
        path = executorch.write_executorch(graphs, self.folder, most)
        logits = executorch.run_executorch(path, graphs, self.x, most)
        check_equal("the ExecuTorch program", self.logits, logits)
        if graphs[0].has_free_tokens:
            short = self.x[: 2 * executorch.MOST, : max(1, examples.shape[1] // 2)]
            check_equal(
                "the ExecuTorch program",
                run_torch(self.model, short),
                executorch.run_executorch(path, graphs, short, most),
            )
        return logits

    def _add_variant(self, name: str, file_names: Sequence[str], logits: Tensor) -> None:
        size = sum((self.folder / file).stat().st_size for file in file_names)
        self.variants.append(compare_logits(name, size, self.logits, logits, self.labels, self.model.data.task))


# ---- comparing -------------------------------------------------------------------------------------------------------

TOLERANCE = 1e-4
"""Tolerance of an exact form's logits, relative to the larger of 1 and their magnitude."""


@dataclass(frozen=True)
class Variant:
    """A form of the model, compared with the model in PyTorch.

    Attributes:
        name: "pytorch", "float", "int8", "static-int8", "executorch".
        size_bytes: Size of its files.
        accuracies: Accuracy of each exit [E]; () without labels.
        agreement: Share of the samples with PyTorch's prediction at each exit [E]; () for a regression.
        difference: The largest difference of a logit; of a regression, of a prediction in the unit of the targets.
        samples: The number of samples.
        exits: The number of exits.
        errors: Mean absolute error of each exit [E], in the unit of the targets; () but for a regression with labels.
    """

    name: str
    size_bytes: int
    accuracies: tuple[float, ...]
    agreement: tuple[float, ...]
    difference: float
    samples: int
    exits: int
    errors: tuple[float, ...] = ()

    def format_scores(self) -> list[str]:
        """Return the accuracy of each exit in percent, or the error of a regression."""
        scores = [f"{100 * one:.2f}" for one in self.accuracies] or [f"{one:.4g}" for one in self.errors]
        return scores or ["-"] * self.exits


@torch.no_grad()
def run_torch(model: LevelModel, x: Tensor) -> Tensor:
    """Return the logits [E, N, classes] of stored samples [N, ...] by the PyTorch model."""
    whole = AllExits(model).eval()
    return torch.cat([torch.stack(whole(batch)) for batch in x.split(onnx.BATCH)], dim=1)


def compare_logits(name: str, size_bytes: int, expected: Tensor, logits: Tensor, labels: Tensor, task: str) -> Variant:
    """Compare logits [E, N, classes] with those of the PyTorch model.

    Args:
        name: Name of the variant.
        size_bytes: Size of its files.
        expected: The model's logits.
        logits: The variant's logits.
        labels: Classes int64 [N], targets in their unit [N, T], or empty.
        task: The task: multi-label predictions are compared label by label, and a regression has no agreement.
    """
    answers, model_answers = (
        z > 0 if task == "multi_label" else z.argmax(-1) for z in (logits, expected)
    )  # [E, N(, L)]
    is_regression, has_labels = task == "regression", len(labels) == answers.shape[1]
    agreement = (answers == model_answers).double().flatten(1).mean(1).tolist() if not is_regression else []
    accuracies = (answers == labels).double().mean(1).tolist() if has_labels and not is_regression else []
    errors = (logits - labels).abs().flatten(1).mean(1).tolist() if has_labels and is_regression else []
    difference, samples = float((expected - logits).abs().max()), answers.shape[1]
    return Variant(
        name, size_bytes, tuple(accuracies), tuple(agreement), difference, samples, len(expected), tuple(errors)
    )


def check_equal(form: str, expected: Tensor, logits: Tensor) -> None:
    """Check that an exact form computes the model's results.

    Raises:
        ModelError: A logit differs by more than the tolerance.
    """
    scale = max(1.0, float(expected.abs().max()))
    difference = float((expected - logits).abs().max())
    if not math.isfinite(scale):
        raise ModelError("the model's logits are not finite: its training diverged. Train again with a smaller lr.")
    if not difference <= TOLERANCE * scale:
        raise ModelError(
            f"{form} computes other results than the model: logits differ by up to {difference:.2g}. The exporter may "
            "have fixed a value that depends on the input. No files were written."
        )


# ---- tensors and config.json -----------------------------------------------------------------------------------------


def write_tensors(module: nn.Module, path: Path) -> None:
    """Write all parameters and buffers of a module by name, including batch-norm statistics."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in module.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})


def make_config(model: LevelModel, onnx_files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of `config.json`.

    Args:
        model: The model.
        onnx_files: The files of each ONNX variant.
    """
    data, x = model.prepared, model.samples("test", 2)[0]
    preprocessing, policy = Preprocessing(data), model.policy
    scale, shift = (
        None if moment is None else np.atleast_1d(moment.numpy()).ravel().astype(float).tolist()
        for moment in (preprocessing.scale, preprocessing.shift)
    )
    return {
        "fleetfit_export": FORMAT,
        "model": _name_model(model),
        "level": model.level,
        "sizes": dict(model.sizes),
        "exits": list(model.exits),
        "task": data.task,
        "classes": data.classes,
        "class_names": list(getattr(data, "class_names", ())),
        "input": {
            "shape": list(x.shape[1:]),
            "dtype": str(x.dtype).removeprefix("torch."),
            "inside_the_graph": {
                "scale": scale,
                "shift": shift,
                "resize": preprocessing.resize and list(preprocessing.resize),
            },
            "vocabulary": data.vocabulary,
            "padding": data.padding,
        },
        "onnx": onnx_files,
        "policy": None if policy is None else {
            "measure": policy.measure, "thresholds": list(policy.thresholds), "temperatures": list(policy.temperatures)
        },
        **({} if model.offset is None else {"added_to_logits": model.offset.double().tolist()}),
    }  # fmt: skip


def _name_model(model: LevelModel) -> str:
    return str(model.facts.get("model", type(model.architecture).__name__))


# ---- the card --------------------------------------------------------------------------------------------------------

_RUN = """## Run it

```python
import torch

model = torch.export.load("model.pt2").module()  # PyTorch alone; returns the logits of every exit
logits = model({example})
```
"""
_DEVICE = """
Without PyTorch, with numpy and onnxruntime{early}:

```sh
pip install numpy onnxruntime
python run.py {samples}{stop}             # or: from run import Model
```
"""
_EARLY = "; `--stop` stops early if the model is confident (only for calibrated\nmodels)"
_SEGMENTS = """
`model.onnx` computes every exit at once. Only the segments save time.
"""


def make_card(model: LevelModel, variants: Sequence[Variant], notes: Sequence[str], samples: str) -> str:
    """Return the card as Markdown.

    Args:
        model: The model.
        variants: Its measured forms.
        notes: Notes for the user.
        samples: A file that `run.py` takes; "" without `run.py`.
    """
    facts, data, is_multi_label = model.facts, model.data, model.data.task == "multi_label"
    x = model.samples("test", 1)[0]
    shape, dtype = ", ".join(map(str, x.shape[1:])), str(x.dtype).removeprefix("torch.")
    if model.takes_tokens:
        inputs = f"token ids [batch, up to {x.shape[1]}]"
    elif isinstance(model.prepared, DataDescription):
        inputs = f"{dtype} [batch, {shape}], scaled as the nodes scale their data"
    else:
        inputs = f"{dtype} [batch, {shape}], as stored: scaling is part of the graphs"
    rows = {
        "data": f"{data.name}, " + (f"{data.classes} classes" if data.task == "classification" else data.task),
        "method": facts.get("method"),
        "trained": facts.get("trained"),
        "exits after blocks": ", ".join(map(str, model.exits)),
        "parameters": f"{sum(p.numel() for p in model.module.parameters()):,}",
        "multiply-adds up to each exit": ", ".join(f"{int(cost):,}" for cost in facts.get("costs", ())) or None,
        "input": inputs,
        "output": f"logits of {data.classes} labels; a label holds where its logit is above 0" * is_multi_label,
    }  # fmt: skip
    lines = [
        f"# {_name_model(model)}, level {model.level}",
        "",
        "A sub-model of a model that FleetFit trained on a fleet of unequal devices.",
        "",
        "| | |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {value} |" for name, value in rows.items() if value]
    lines += [line for note in notes for line in ("", note)]
    lines += [
        "",
        "## Error" if data.task == "regression" else "## Accuracy",
        "",
        *_list_variants(variants, _name_samples(model)),
        *_list_calibration(model),
    ]
    lines += ["", _RUN.format(example=f"torch.zeros(1, {shape}, dtype={x.dtype})")]
    card = make_printable("\n".join(lines))
    if not samples:
        return card
    has_exits = len(model.exits) > 1
    device = _DEVICE.format(samples=samples, stop=" --stop" if model.policy else "", early=_EARLY * has_exits)
    return card + device + _SEGMENTS * has_exits


def _list_variants(variants: Sequence[Variant], samples: str) -> list[str]:
    """Return the table of the model's forms."""
    first = variants[0]
    score = "accuracy in percent, and " * bool(first.accuracies) + "mean absolute error, and " * bool(first.errors)
    compared = "agreement with PyTorch's predictions" if first.agreement else "the largest difference from PyTorch's"
    unit = "" if first.agreement else ", in the unit of the targets"
    heads = ["form", "kB", *(f"exit {i + 1}" for i in range(first.exits)), *["same answer"] * bool(first.agreement),
             f"largest difference of a {'logit' if first.agreement else 'prediction'}"]  # fmt: skip
    lines = [f"On {first.samples} {samples} samples: {score}{compared}{unit}.", "", f"| {' | '.join(heads)} |",
             f"| {' | '.join('---' for _ in heads)} |"]  # fmt: skip
    for variant in variants:
        agreement = [f"{100 * min(variant.agreement):.2f}"] if variant.agreement else []
        cells = [variant.name, f"{variant.size_bytes / 1000:.0f}", *variant.format_scores(), *agreement,
                 f"{variant.difference:.1e}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _list_calibration(model: LevelModel) -> list[str]:
    calibration, policy = model.facts.get("calibration"), model.policy
    if not calibration or policy is None:
        return []
    test, last = calibration["test"], calibration["costs"][-1]
    shares = ", ".join(f"{100 * share:.1f}%" for share in test["shares"])
    is_scaled = bool(policy.temperatures)
    errors = ", ".join(f"{100 * before:.1f}% / {100 * after:.1f}%" if is_scaled else f"{100 * before:.1f}%"
                       for before, after in calibration["calibration_errors"])  # fmt: skip
    unit = "multiply-adds" if calibration["cost"] == "multiply_adds" else "seconds"
    return [
        "",
        "## Early stopping",
        "",
        f"A sample leaves at the first exit whose confidence ({policy.measure}) reaches its threshold. With thresholds "
        f"chosen on validation data, on test data {shares} of the samples leave at exits 1 to {len(model.exits)}: "
        f"accuracy {100 * test['accuracy']:.2f}% at an average of {test['cost']:.4g} {unit}, against "
        f"{100 * test['full']:.2f}% at {last:.4g} for all at the last exit. Expected calibration error of each exit"
        f"{', before / after temperature scaling' if is_scaled else ''}: {errors}.",
    ]
