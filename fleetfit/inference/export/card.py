"""A short model card: what the model is, what it was trained on, how good each exit is, how to run it."""

from collections.abc import Sequence

from torch import Tensor

from fleetfit.inference.export.checked import Variant
from fleetfit.inference.export.shipped import Shipped
from fleetfit.values import Facts

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
    lines += ["", "## How good it is", "", *_measured(variants), *_calibration(shipped), ""]
    example = f"torch.zeros(1, {', '.join(map(str, x.shape[1:]))}, dtype={x.dtype})"
    lines.append(_RUN.format(example=example))
    found = "\n".join(lines)
    return found + (_DEVICE.format(stop=" --stop" if shipped.policy else "") if loader else "")


def _measured(variants: Sequence[Variant]) -> list[str]:
    """Return the table of the model's forms."""
    scored = any(variant.accuracies for variant in variants)
    exits = variants[0].exits
    heads = [f"exit {i + 1}" for i in range(exits)]
    lines = [f"On {variants[0].samples} test samples: " + ("accuracy in percent, and " if scored else "")
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
    if isinstance(shipped.data, Facts):
        return f"{what}, scaled as the nodes scale their data"
    return f"{what}, as stored: scaling is part of the graphs"
