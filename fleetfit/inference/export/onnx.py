"""Write and run a level's graphs as ONNX, in float and in int8.

Int8 is dynamic (weights; activations are scaled at run time) or static (both, calibrated on validation samples). For
convolutional models dynamic int8 saves space but no time. Logits change, so accuracy and agreement are measured.
Depthwise convolutions stay in float in the dynamic form: they have few parameters, and the runtime uses one scale for
all their channels, which destroys accuracy (a small MobileNetV2 kept 0.16 of its predictions; with these layers in
float, 0.93).
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetfit.inference.export.level import Graph, explain_failure, quiet_exporters

OPSET = 20
BATCH = 64
CALIBRATION_SAMPLES, _CALIBRATION_BATCH = 256, 32
Feed = Mapping[str, np.ndarray]


def write_onnx(graph: Graph, path: Path) -> None:
    """Write a graph as one ONNX file. Inputs are named input0, ..., and outputs `graph.results`.

    Raises:
        ModelError: The graph cannot be traced.
    """
    dims = tuple(dict(names) for names in graph.dims)
    with quiet_exporters(), explain_failure(graph.name, "torch.onnx"), torch.no_grad():
        torch.onnx.export(
            graph.module, graph.inputs, path, dynamo=True, opset_version=OPSET, verbose=False, external_data=False,
            dynamic_shapes=(dims,) if graph.is_variadic else dims, output_names=list(graph.results),
            input_names=[f"input{i}" for i in range(len(graph.inputs))],
        )  # fmt: skip
    _strip(path)


def _strip(path: Path) -> None:
    """Remove metadata from an ONNX file: stack traces, notes, inferred shapes."""
    import onnx

    model: Any = onnx.load(path)
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer, *model.functions):
        del part.metadata_props[:]
        part.doc_string = ""
    for function in model.functions:
        for node in function.node:
            del node.metadata_props[:]
    del graph.value_info[:]
    onnx.save(model, path)


# ---- int8 ------------------------------------------------------------------------------------------------------------


def quantize_dynamic(source: Path, target: Path) -> None:
    """Write a graph with int8 weights and activations scaled per call."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    with _preprocess(source) as simplified, quiet_exporters():
        convolutions = [node for node in onnx.load(simplified).graph.node if node.op_type == "Conv"]
        depthwise = [n.name for n in convolutions if any(a.name == "group" and a.i > 1 for a in n.attribute)]
        quantize_dynamic(simplified, target, nodes_to_exclude=depthwise)
    _strip(target)


def quantize_static(source: Path, target: Path, feeds: Sequence[Feed]) -> None:
    """Write a graph with int8 weights and activations, with scales calibrated on inputs.

    Args:
        source: A float graph.
        target: The file to write.
        feeds: Inputs by name, a batch each.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.remaining: Iterator[Feed] = iter(feeds)

        def get_next(self) -> Any:
            return next(self.remaining, None)

    with _preprocess(source) as simplified, quiet_exporters():
        quantize_static(simplified, target, Reader(), quant_format=QuantFormat.QDQ, per_channel=True)
    _strip(target)


@contextlib.contextmanager
def _preprocess(source: Path) -> Iterator[Path]:
    """Yield a copy of a graph, simplified and with shapes, as quantization needs it.

    This prevents onnxruntime from saving a graph to the current folder if it cannot infer shapes.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process
    from onnxruntime.tools import symbolic_shape_infer

    library = symbolic_shape_infer.onnx
    with tempfile.TemporaryDirectory(prefix="fleetfit-int8-") as folder:
        target = Path(folder) / "simplified.onnx"
        symbolic_shape_infer.onnx = _WithoutSaving(library)
        try:
            with quiet_exporters():
                quant_pre_process(source, target)
        except Exception:  # "Incomplete symbolic shape inference", of a transformer's
            with quiet_exporters():
                quant_pre_process(source, target, skip_symbolic_shape=True)
        finally:
            symbolic_shape_infer.onnx = library
        yield target


class _WithoutSaving:
    """The library `onnx` without saving."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def save_model(self, *arguments: Any, **keywords: Any) -> None:
        """Write nothing."""


def make_calibration_feeds(sessions: Sequence[Any], x: np.ndarray) -> list[list[Feed]]:
    """Return the inputs of each segment, in batches, from running samples through the earlier float segments."""
    feeds: list[list[Feed]] = [[] for _ in sessions]
    for start in range(0, len(x), _CALIBRATION_BATCH):
        carry = [x[start : start + _CALIBRATION_BATCH]]
        for i, session in enumerate(sessions):
            feed = _name_inputs(session, carry)
            feeds[i].append(feed)
            carry = session.run(None, feed)[1:]
    return feeds


# ---- running ---------------------------------------------------------------------------------------------------------


def open_session(path: Path) -> Any:
    """Return an onnxruntime session on the processor."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_whole(path: Path, x: Tensor) -> Tensor:
    """Return the logits [E, N, classes] by the graph with all exits."""
    session = open_session(path)
    logits = [np.stack(session.run(None, _name_inputs(session, [batch.numpy()]))) for batch in x.split(BATCH)]
    return torch.from_numpy(np.concatenate(logits, axis=1))


def run_segments(paths: Sequence[Path], x: Tensor) -> Tensor:
    """Return the logits [E, N, classes] by the segments, in sequence."""
    sessions = [open_session(path) for path in paths]
    batches = []
    for batch in x.split(BATCH):
        carry, exits = [batch.numpy()], []
        for session in sessions:
            logits, *carry = session.run(None, _name_inputs(session, carry))
            exits.append(logits)
        batches.append(np.stack(exits))
    return torch.from_numpy(np.concatenate(batches, axis=1))


def _name_inputs(session: Any, arrays: Sequence[np.ndarray]) -> Feed:
    return {entry.name: array for entry, array in zip(session.get_inputs(), arrays, strict=True)}
