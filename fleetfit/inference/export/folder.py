"""The folder that goes to a device: all its files, each checked against the model before anything is left behind.

Beside the forms that were asked for: tensors as safetensors, config.json (what the model is and takes, when samples
leave early), and a short model card (what it was trained on, how good each exit is, how to run it).
"""

import json
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
from fleetfit.errors import ConfigError, DataError, ModelError, RunError, did_you_mean, make_printable
from fleetfit.inference.export import checked, executorch, int8
from fleetfit.inference.export.checked import Variant
from fleetfit.inference.export.graphs import (
    TOKENS,
    Graph,
    Prepared,
    need_onnx,
    segment_graphs,
    whole_graph,
    write_onnx,
    write_program,
)
from fleetfit.inference.export.shipped import Shipped
from fleetfit.inference.export.to_transformers import notes_on_transformers, write_transformers
from fleetfit.values import DataDescription

PROGRAM, SCRIPT, CARD = "model.pt2", "run.py", "README.md"
FLOAT, DYNAMIC, STATIC = "float", "int8", "static-int8"
_ONNX = {"onnx", DYNAMIC, STATIC}
Say = Callable[[str], None]


FORMS: Mapping[str, str] = {
    "onnx": "one ONNX graph with all exits, and one for each segment, so that a device can stop early",
    "int8": "these in dynamic int8",
    "static-int8": "these in static int8, calibrated on validation samples",
    "transformers": "a transformers folder of the last exit (BERT, ViT, DeiT)",
    "executorch": "one .pte file lowered to XNNPACK, a method for each segment",
}
"""What may be written beside safetensors, config and `torch.export` program; both int8 forms are ONNX and bring it."""


@dataclass(frozen=True)
class Export:
    """An exported model.

    Attributes:
        folder: Where it is.
        level: Of the model.
        variants: The model in PyTorch, then each of its forms, on the same samples.
        notes: Sentences that the user must see.
        samples: Which ones: "test"; where there are none "validation", and then "training"; "drawn" without data.
    """

    folder: Path
    level: str
    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()
    samples: str = "test"


def export(shipped: Shipped, out: str | Path, forms: Sequence[str] = ("onnx",), say: Say = lambda what: None) -> Export:
    """Write a level's model for devices.

    Everything is written beside `out` first and moved there when it is whole and checked.

    Args:
        shipped: The model.
        out: A folder that is new or empty.
        forms: Which of `FORMS` are wanted.
        say: Told what is being done.

    Raises:
        ConfigError: There is no such form.
        RunError: The folder is not empty or cannot be written.
        ModelError: The model cannot be traced, or a form does not compute what the model does.
        MissingExtra: A form needs an optional dependency.
    """
    target = Path(os.path.realpath(files.parse_path(out)))
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise RunError(f"{target} exists and is not empty; choose another folder for the export.", path=target)
    except OSError as error:
        raise RunError(f"{target} cannot be written: {error.strerror}.", path=target) from None
    unknown = [form for form in forms if form not in FORMS]
    if unknown:
        raise ConfigError(f'there is no form "{unknown[0]}"; there are {", ".join(FORMS)}.'
                          f"{did_you_mean(unknown[0], FORMS)}", key="forms")  # fmt: skip
    if _ONNX & set(forms):
        need_onnx()
    try:
        with files.atomic_folder(target) as part:
            found = _Writing(shipped, part, forms, say).all()
            for file in (part, *part.rglob("*")):
                file.chmod(0o755 if file.is_dir() else 0o644)
            if target.exists():  # it may be where a card is mounted, or the folder that somebody stands in
                for file in sorted(part.iterdir(), key=lambda file: file.name == CONFIG):  # the one that names the rest
                    file.rename(target / file.name)
            else:
                part.rename(target)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{target} cannot be written: {getattr(error, 'strerror', None) or error}.", path=target
        ) from None
    return Export(target, shipped.level, tuple(found.variants), tuple(found.notes), shipped.looked_at)


class _Writing:
    """One export on its way."""

    def __init__(self, shipped: Shipped, folder: Path, forms: Sequence[str], say: Say) -> None:
        self.shipped, self.folder, self.forms, self.say = shipped, folder, set(forms), say
        self.x, labels = shipped.samples(shipped.filled_split, shipped.most_samples)
        self.labels = labels if shipped.data.task == "classification" else labels[:0]
        self.ours = checked.in_torch(shipped, self.x)
        self.onnx: dict[str, Any] = {}
        self.variants: list[Variant] = []
        self.notes: list[str] = []
        self.free_tokens = True

    def all(self) -> "_Writing":
        """Write everything."""
        shipped, folder = self.shipped, self.folder
        self._early()
        self.say("safetensors")
        write_tensors(shipped.module, folder / WEIGHTS)
        self._note("pytorch", [WEIGHTS], self.ours)
        examples = self.x[:2] if len(self.x) > 1 else self.x.repeat(2, *[1] * (self.x.dim() - 1))
        self.say("torch.export")
        whole = self._program(examples)
        if _ONNX & self.forms:
            self._onnx([whole, *self._segments(examples, self.free_tokens)])
        if "executorch" in self.forms:
            self._executorch(examples)
        columns = getattr(shipped.data, "columns", "")
        if columns:
            (folder / COLUMNS).write_text(columns, encoding="utf-8")
            self.notes.append(
                f"A sample is a row of a table as {COLUMNS} makes it: (value - mean) / std of each number, 0 where it "
                "is missing (and 1 in the feature after it, if there is one); 1 for the category that it has, in order."
            )
        write_config(config_of(shipped, self.onnx), folder)
        text = card(shipped, self.variants, self.notes, loader=(folder / SCRIPT).exists())
        (folder / CARD).write_text(text, encoding="utf-8")
        return self

    def _early(self) -> None:
        """Do first what is refused at once: nobody waits for graphs that are thrown away then."""
        if "executorch" in self.forms:
            executorch.need()
        if STATIC in self.forms and not len(self.shipped.own_data.split("validation")):
            raise DataError("static int8 is calibrated on validation samples, and this data set has none.")
        if "transformers" in self.forms:
            self._transformers()
        if isinstance(self.shipped.data, DataDescription):
            self.notes.append(
                "The data are on the nodes of a fleet, so scaling is not part of the graphs: hand over samples as the "
                "nodes' data functions give them to the model. With --data NAME, a data set like theirs, it is."
            )

    def _program(self, examples: Tensor) -> Graph:
        """Write the program, and return the graph; where samples of any length cannot be traced, for those of one."""
        whole = whole_graph(self.shipped, examples)
        try:
            write_program(whole, self.folder / PROGRAM)
        except ModelError:
            if TOKENS not in whole.dims[0].values():
                raise
            self.free_tokens = False
            self.notes.append(f"The graphs take samples of exactly {examples.shape[1]} tokens; pad shorter ones.")
            whole = whole_graph(self.shipped, examples, free_tokens=False)
            write_program(whole, self.folder / PROGRAM)
        return whole

    def _segments(self, examples: Tensor, free_tokens: bool) -> list[Graph]:
        try:
            return segment_graphs(self.shipped, examples, free_tokens)
        except ModelError as error:
            if len(self.shipped.exits) > 1 and not any(note.startswith("No segments") for note in self.notes):
                self.notes.append(f"No segments were written, so a device cannot stop early: {error}")
            return []

    def _onnx(self, graphs: Sequence[Graph]) -> None:
        for graph in graphs:
            self.say(f"ONNX: {graph.name}")
            write_onnx(graph, self.folder / f"{graph.name}.onnx")
        names = [graph.name for graph in graphs]
        self._variant(FLOAT, [f"{name}.onnx" for name in names])
        if self.shipped.data.task == "classification" and len(names) > 1:
            script = resources.files("fleetfit.inference.export").joinpath("on_device.py").read_text(encoding="utf-8")
            (self.folder / SCRIPT).write_text(script, encoding="utf-8")
        if DYNAMIC in self.forms:
            self.say("int8")
            for name in names:
                int8.dynamic(self.folder / f"{name}.onnx", self.folder / f"{name}.{DYNAMIC}.onnx")
            self._variant(DYNAMIC, [f"{name}.{DYNAMIC}.onnx" for name in names])
        if STATIC in self.forms:
            self._static(names)

    def _static(self, names: Sequence[str]) -> None:
        self.say("static int8")
        x = self.shipped.samples("validation", int8.CALIBRATION_SAMPLES)[0].numpy()
        sessions = [checked.session(self.folder / f"{name}.onnx") for name in names]
        feeds = [*int8.chained_feeds(sessions[:1], x), *int8.chained_feeds(sessions[1:], x)]
        for name, given in zip(names, feeds, strict=True):
            int8.static(self.folder / f"{name}.onnx", self.folder / f"{name}.{STATIC}.onnx", given)
        self._variant(STATIC, [f"{name}.{STATIC}.onnx" for name in names])

    def _variant(self, name: str, files: Sequence[str]) -> None:
        """Check the files of an ONNX variant, the whole graph first, and note what they are worth."""
        whole, *segments = [self.folder / file for file in files]
        found = checked.in_whole(whole, self.x)
        chained = checked.in_segments(segments, self.x) if segments else found
        if name == FLOAT:
            checked.must_equal("the ONNX graph", self.ours, found)
            checked.must_equal("the chain of ONNX segments", self.ours, chained)
        self.onnx[name] = {"all_exits": files[0], "segments": list(files[1:])}
        self._note(name, files[1:] or files, chained)

    def _executorch(self, examples: Tensor) -> None:
        """Write the program; where its lowering loses a free size, with that size fixed.

        Raises:
            ModelError: It computes something else also with all sizes fixed.
        """
        self.say("ExecuTorch")
        sizes = [
            (most, free) for free in ([True, False] if self.free_tokens else [False]) for most in (executorch.MOST, 1)
        ]
        for most, free in sizes:
            try:
                logits = self._lowered(examples, most, free)
                break
            except ModelError:
                if (most, free) == sizes[-1]:
                    raise
        if most == 1:
            self.notes.append("The ExecuTorch program takes one sample at a time.")
        if self.free_tokens and self.shipped.takes_tokens and not free:
            length = examples.shape[1]
            self.notes.append(f"The ExecuTorch program takes samples of exactly {length} tokens; pad shorter ones.")
        self._note("executorch", [executorch.FILE], logits)

    def _lowered(self, examples: Tensor, most: int, free_tokens: bool) -> Tensor:
        """Write a program and return its logits, which are the model's, of shorter samples too if it takes them.

        Raises:
            ModelError: They are not.
        """
        graphs = self._segments(examples, free_tokens) or [whole_graph(self.shipped, examples, free_tokens)]
        file = executorch.write(graphs, self.folder, most)
        logits = executorch.run(file, graphs, self.x, most)
        checked.must_equal("the ExecuTorch program", self.ours, logits)
        if TOKENS in graphs[0].dims[0].values():
            short = self.x[: 2 * executorch.MOST, : max(1, examples.shape[1] // 2)]
            theirs = executorch.run(file, graphs, short, most)
            checked.must_equal("the ExecuTorch program", checked.in_torch(self.shipped, short), theirs)
        return logits

    def _transformers(self) -> None:
        self.say("transformers")
        write_transformers(self.shipped, self.folder / "transformers")
        self.notes += notes_on_transformers(self.shipped)

    def _note(self, name: str, files: Sequence[str], found: Any) -> None:
        size = sum((self.folder / file).stat().st_size for file in files)
        task = self.shipped.data.task
        self.variants.append(checked.compared(name, size, self.ours, found, self.labels, task))


# ---- tensors and config.json -----------------------------------------------------------------------------------------

FORMAT = 1
COLUMNS = "columns.json"
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write_tensors(module: nn.Module, path: Path) -> None:
    """Write all parameters and buffers of a module, batch-norm statistics included, under their own names."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in module.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})


def config_of(shipped: Shipped, onnx: dict[str, Any]) -> dict[str, Any]:
    """Return what `config.json` says.

    Args:
        shipped: The model.
        onnx: The files of each variant.
    """
    data, x = shipped.data, shipped.samples("test", 2)[0]
    prepared = Prepared(data)
    policy = shipped.policy
    return {
        "fleetfit_export": FORMAT,
        "model": shipped.facts.get("model", type(shipped.architecture).__name__),
        "level": shipped.level,
        "sizes": dict(shipped.sizes),
        "exits": list(shipped.exits),
        "task": data.task,
        "classes": data.classes,
        "class_names": list(getattr(data, "class_names", ())),
        "input": {
            "shape": list(x.shape[1:]),
            "dtype": str(x.dtype).removeprefix("torch."),
            "inside_the_graph": {
                "scale": _listed(prepared.scale),
                "shift": _listed(prepared.shift),
                "resize": prepared.resize and list(prepared.resize),
            },
            "vocabulary": data.vocabulary,
            "padding": data.padding,
        },
        "onnx": onnx,
        "policy": None if policy is None else {
            "measure": policy.measure, "thresholds": list(policy.thresholds), "temperatures": list(policy.temperatures)
        },
    }  # fmt: skip


def write_config(config: dict[str, Any], folder: Path) -> None:
    """Write `config.json`."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _listed(value: torch.Tensor | None) -> list[float] | None:
    return None if value is None else np.atleast_1d(value.numpy()).ravel().astype(float).tolist()


# ---- the card --------------------------------------------------------------------------------------------------------

_RUN = """## Run it

```python
import torch

model = torch.export.load("model.pt2").module()  # PyTorch alone; returns the logits of every exit
logits = model({example})
```
"""
_DEVICE = """
Without PyTorch, with numpy and onnxruntime; `--stop` leaves early where the model is sure, if it was calibrated:

```sh
pip install numpy onnxruntime
python run.py samples.npy{stop}             # or: from run import Model
```

`model.onnx` computes every exit at once, whatever output is asked for; only the segments save time.
"""


def card(shipped: Shipped, variants: Sequence[Variant], notes: Sequence[str], loader: bool) -> str:
    """Return the card as Markdown.

    Args:
        shipped: The model.
        variants: Its forms, measured.
        notes: What whoever uses it must know.
        loader: Whether `run.py` is there.
    """
    facts, data = shipped.facts, shipped.data
    title = facts.get("model", type(shipped.architecture).__name__)
    x = shipped.samples("test", 1)[0]
    rows = {
        "data": f"{data.name}, " + (f"{data.classes} classes" if data.task == "classification" else data.task),
        "method": facts.get("method"),
        "trained": facts.get("trained"),
        "exits after blocks": ", ".join(map(str, shipped.exits)),
        "parameters": _grouped(sum(p.numel() for p in shipped.module.parameters())),
        "multiply-adds until each exit": ", ".join(map(_grouped, facts.get("costs", ()))) or None,
        "input": _input(shipped, x),
    }  # fmt: skip
    lines = [f"# {title}, level {shipped.level}", "", "A piece of one model that a fleet of unequal devices trained, "
             "cut out with FleetFit.", "", "| | |", "| --- | --- |"]  # fmt: skip
    lines += [f"| {name} | {value} |" for name, value in rows.items() if value]
    lines += [line for note in notes for line in ("", note)]
    lines += ["", "## How good it is", "", *_measured(variants, shipped.looked_at), *_calibration(shipped), ""]
    example = f"torch.zeros(1, {', '.join(map(str, x.shape[1:]))}, dtype={x.dtype})"
    lines.append(_RUN.format(example=example))
    found = make_printable("\n".join(lines))
    return found + (_DEVICE.format(stop=" --stop" if shipped.policy else "") if loader else "")


def _measured(variants: Sequence[Variant], which: str) -> list[str]:
    """Return the table of the model's forms."""
    scored = any(variant.accuracies for variant in variants)
    exits = variants[0].exits
    heads = [f"exit {i + 1}" for i in range(exits)]
    lines = [f"On {variants[0].samples} {which} samples: " + ("accuracy in percent, and " if scored else "")
             + "how often the answer is PyTorch's.", ""]  # fmt: skip
    lines += [f"| form | kB | {' | '.join(heads)} | same answer | largest difference of a logit |",
              f"| --- | --- | {' | '.join('---' for _ in heads)} | --- | --- |"]  # fmt: skip
    for variant in variants:
        cells = [f"{100 * a:.2f}" for a in variant.accuracies] or ["-"] * exits
        agreement = f"{100 * min(variant.agreement):.2f}" if variant.agreement else "-"
        lines.append(f"| {variant.name} | {variant.size_bytes / 1000:.0f} | {' | '.join(cells)} | {agreement} | "
                     f"{variant.difference:.1e} |")  # fmt: skip
    return lines


def _calibration(shipped: Shipped) -> list[str]:
    found, policy = shipped.facts.get("calibration"), shipped.policy
    if not found or policy is None:
        return []
    test = found["test"]
    last = found["costs"][-1]
    shares = ", ".join(f"{100 * share:.1f}%" for share in test["shares"])
    scaled = bool(policy.temperatures)
    errors = ", ".join(f"{100 * before:.1f}% / {100 * after:.1f}%" if scaled else f"{100 * before:.1f}%"
                       for before, after in found["calibration_errors"])  # fmt: skip
    unit = "multiply-adds" if found["cost"] == "multiply_adds" else "seconds"
    return [
        "",
        "## Leaving early",
        "",
        f"A sample leaves at the first exit whose confidence ({policy.measure}) reaches its threshold. With thresholds "
        f"chosen on validation data, on test data {shares} of the samples leave at exits 1 to {len(shipped.exits)}: "
        f"accuracy {100 * test['accuracy']:.2f}% at an average of {test['cost']:.4g} {unit}, against "
        f"{100 * test['full']:.2f}% at {last:.4g} for all at the last exit. Expected calibration error of each exit"
        f"{', before / after temperature scaling' if scaled else ''}: {errors}.",
    ]


def _grouped(n: float) -> str:
    return f"{int(n):,}"


def _input(shipped: Shipped, x: Tensor) -> str:
    if shipped.takes_tokens:
        return f"token ids [batch, up to {x.shape[1]}]"
    what = f"{str(x.dtype).removeprefix('torch.')} [batch, {', '.join(map(str, x.shape[1:]))}]"
    if isinstance(shipped.data, DataDescription):
        return f"{what}, scaled as the nodes scale their data"
    return f"{what}, as stored: scaling is part of the graphs"
