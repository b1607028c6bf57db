"""ONNX graphs in int8: dynamic (weights; activations as they come) and static (both, measured on validation samples).

For convolutional models dynamic int8 saves space and not time; logits move, so accuracy and agreement are what counts.
Depthwise convolutions stay in float in the dynamic form: they hold few numbers, and one scale for all their channels,
which is what the runtime has for them, loses everything (a small MobileNetV2 gave 0.16 of its answers again; with them
in float, 0.93).
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetfit.errors import ModelError
from fleetfit.inference.export.graphs import quiet, strip

CALIBRATION_SAMPLES = 256
_BATCH = 32
Feed = Mapping[str, np.ndarray]


def dynamic(source: Path, target: Path) -> None:
    """Write a graph with int8 weights, whose activations are scaled call by call."""
    from onnxruntime.quantization import quantize_dynamic

    with _preprocessed(source) as ready, quiet():
        quantize_dynamic(ready, target, nodes_to_exclude=_depthwise(ready))
    strip(target)


def static(source: Path, target: Path, feeds: Sequence[Feed]) -> None:
    """Write a graph with int8 weights and activations, scaled once for what these inputs show.

    Args:
        source: A float graph.
        target: The file to write.
        feeds: Inputs by name, a batch each.

    Raises:
        ModelError: There are none.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    if not feeds:
        raise ModelError("static int8 is calibrated on validation samples, and this data set has none.")

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left: Iterator[Feed] = iter(feeds)

        def get_next(self) -> Any:
            return next(self.left, None)

    with _preprocessed(source) as ready, quiet():
        quantize_static(ready, target, Reader(), quant_format=QuantFormat.QDQ, per_channel=True)
    strip(target)


class _preprocessed:
    """A copy of a graph, simplified and with shapes, as quantisation wants it."""

    def __init__(self, source: Path) -> None:
        self._source, self._place = source, tempfile.TemporaryDirectory(prefix="fleetfit-int8-")

    def __enter__(self) -> Path:
        from onnxruntime.quantization.shape_inference import quant_pre_process

        ready = Path(self._place.name) / "ready.onnx"
        with quiet(), _nothing_dumped():
            try:
                quant_pre_process(self._source, ready)
            except Exception:  # "Incomplete symbolic shape inference", of a transformer's: it does without
                quant_pre_process(self._source, ready, skip_symbolic_shape=True)
        return ready

    def __exit__(self, *error: Any) -> None:
        self._place.cleanup()


@contextlib.contextmanager
def _nothing_dumped() -> Iterator[None]:
    """Keep onnxruntime from writing a graph whose shapes it cannot infer into whatever folder is the current one."""
    from onnxruntime.tools import symbolic_shape_infer

    library = symbolic_shape_infer.onnx
    symbolic_shape_infer.onnx = _Undumped(library)
    try:
        yield
    finally:
        symbolic_shape_infer.onnx = library


class _Undumped:
    """The library `onnx`, but saving does nothing."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def save_model(self, *given: Any, **named: Any) -> None:
        """Write nothing."""


def _depthwise(path: Path) -> list[str]:
    """Return the names of the convolutions whose channels have groups."""
    import onnx

    nodes = onnx.load(path).graph.node
    return [n.name for n in nodes if n.op_type == "Conv" and any(a.name == "group" and a.i > 1 for a in n.attribute)]


def chained_feeds(sessions: Sequence[Any], x: np.ndarray) -> list[list[Feed]]:
    """Return what each segment gets, batch by batch, when samples run through the float segments before it."""
    found: list[list[Feed]] = [[] for _ in sessions]
    for start in range(0, len(x), _BATCH):
        carry = [x[start : start + _BATCH]]
        for i, session in enumerate(sessions):
            feed = {given.name: value for given, value in zip(session.get_inputs(), carry, strict=True)}
            found[i].append(feed)
            carry = session.run(None, feed)[1:]
    return found
