"""Graphs of a model that ends its forward pass by a hook: `torch.export` cannot trace the exception, `make_fx` can.

`trace_exits` records the forward pass on fake tensors, whose batch (and number of tokens) is a symbol. `split_at_exits`
cuts its exported program where the exits' logits are: a part takes what of the samples crosses the cut, and computes
anew what does not depend on samples (masks, positions, normalized weights). `split_module` of PyTorch would pass the
latter on, too, and sizes as numbers, which no device could select the rows of.
"""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from fleetfit.errors import ModelError

_CLOSE = 1e-4
_SIZES = (
    "the forward pass depends on the number of samples or on their length. If it takes len(x), which is a plain number "
    "in a graph, write x.shape[0]."
)

# ---- tracing ---------------------------------------------------------------------------------------------------------


def trace_exits(
    module: nn.Module, visit: Callable[[Any, Tensor], Sequence[Tensor]], x: Tensor, free: Sequence[int]
) -> GraphModule:
    """Return the operations of a module on samples, with its tensors by their names in it.

    Args:
        module: In eval mode.
        visit: The function of the module and samples that is traced; it gives the logits of each exit.
        x: Examples [2, ...].
        free: Dimensions of samples that may have other sizes.

    Raises:
        ModelError: A size is fixed by the forward pass.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
        is_concrete_int,
    )

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    tensors = _list_tensors(module)
    memo: dict[int, Any] = {}
    for tensor in tensors.values():
        if id(tensor) not in memo:
            memo[id(tensor)] = mode.from_tensor(tensor if tensor.is_leaf else tensor.detach(), static_shapes=True)
    fake_module = copy.deepcopy(module, memo)
    names = {id(memo[id(tensor)]): name for name, tensor in reversed(tensors.items())}
    sizes = [DimDynamic.DYNAMIC if d in free else DimDynamic.STATIC for d in range(x.dim())]
    samples = mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    with torch.no_grad(), mode:
        traced: Any = make_fx(
            lambda samples: tuple(visit(fake_module, samples)), pre_dispatch=True, _allow_non_fake_inputs=True
        )(samples)
    constants: dict[str, Any] = {}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            tensor = operator.attrgetter(node.target)(traced)
            name = names.get(id(tensor))
            node.target = node.target if name is None else name
            constants[node.target] = tensor if name is None else tensors[name]
    graph = GraphModule(constants, traced.graph).eval()
    is_fixed = any(is_concrete_int(samples.shape[d]) for d in free)  # as after `len(samples)`
    if is_fixed and any("lstm" in str(node.target) for node in traced.graph.nodes):
        raise ModelError(_SIZES)  # the kernel would read beyond a state of fewer samples
    _check_sizes(partial(visit, module), graph, x, free)
    return graph


def _list_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers and further tensors in the attributes of modules, by name."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    for prefix, part in module.named_modules():
        own = {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}
        tensors |= {f"{prefix}.{name}" if prefix else name: value for name, value in own.items()}
    return tensors


@torch.no_grad()
def _check_sizes(
    run: Callable[[Tensor], Sequence[Tensor]],
    graph: Callable[[Tensor], Sequence[Tensor]],
    x: Tensor,
    free: Sequence[int],
) -> None:
    """Compare a graph with its function on three samples, and on shorter ones where sizes are free.

    Raises:
        ModelError: They differ.
    """
    other = torch.cat([x, x[:1]])
    for d in free:
        other = other.narrow(d, 0, max(1, x.shape[d] // 2)) if d else other
    try:
        results = graph(other)
    except Exception as error:
        raise ModelError(_SIZES) from error
    for logits, expected in zip(results, run(other), strict=True):
        if logits.shape != expected.shape or not torch.allclose(logits, expected, _CLOSE, _CLOSE):
            raise ModelError(_SIZES)


# ---- cutting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a model, from one exit to the next.

    Attributes:
        module: From the tensors of the part before to an exit's logits, and the tensors for the next part.
        free: For each input, its dimensions with other sizes than the example's.
    """

    module: GraphModule
    free: tuple[tuple[int, ...], ...]


def split_at_exits(program: torch.export.ExportedProgram) -> list[Part]:
    """Return the parts of a program that takes samples and returns the logits of each exit.

    Raises:
        ModelError: What crosses an exit are not tensors with the batch first.
    """
    exported = _Exported(program)
    exits = exported.results
    carries = [exported.list_crossing(i) for i in range(len(exits) - 1)]
    ends = [exported.samples], *carries
    return [
        exported.make_part(inputs, [logits, *carry])
        for inputs, logits, carry in zip(ends, exits, [*carries, []], strict=True)
    ]


class _Exported:
    """The graph of an exported program."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        signature = program.graph_signature
        state: Mapping[str, Any] = {**program.state_dict, **program.constants}
        names = {
            **signature.inputs_to_parameters, **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }  # fmt: skip
        nodes = list(program.graph.nodes)
        self.tensors = {node: (names[node.name], state[names[node.name]]) for node in nodes if node.name in names}
        self.order = {node: i for i, node in enumerate(nodes)}
        by_name = {node.name: node for node in nodes}
        [samples] = signature.user_inputs
        self.samples = by_name[str(samples)]
        self.results = [by_name[str(name)] for name in signature.user_outputs]
        self.of_samples = {self.samples}
        for node in nodes:
            if not _is_size(node) and any(other in self.of_samples for other in node.all_input_nodes):
                self.of_samples.add(node)

    def list_crossing(self, exit: int) -> list[Node]:
        """Return what of the samples is computed before an exit's logits and used behind them, in order.

        Raises:
            ModelError: One is not a tensor with the batch first.
        """
        end, crossing, visited = self.order[self.results[exit]], set(), set()
        remaining = list(self.results[exit + 1 :])
        while remaining:
            node = remaining.pop()
            if node in visited or _is_size(node):
                continue
            visited.add(node)
            if node in self.of_samples and self.order[node] <= end:
                crossing.add(node)
            else:
                remaining += node.all_input_nodes
        batch = self.samples.meta["val"].shape[0]
        for node in crossing:
            value = node.meta["val"]
            if not isinstance(value, Tensor) or not value.dim() or str(value.shape[0]) != str(batch):
                raise ModelError(
                    f"behind exit {exit + 1} it needs a value ({node.name}) that is not a tensor with the batch first."
                )
        return sorted(crossing, key=self.order.__getitem__)

    def make_part(self, inputs: Sequence[Node], results: Sequence[Node]) -> Part:
        """Return the part that computes results of inputs."""
        graph, copies, tensors = Graph(), {}, {}
        for i, node in enumerate(inputs):
            copies[node] = graph.placeholder(f"input{i}")
            copies[node].meta["val"] = node.meta["val"]
        placeholders = [copies[node] for node in inputs]
        sizes: dict[sympy.Expr, Any] = {}
        for node in _list_needed(results, copies):
            if _is_size(node):
                copies[node] = _make_size(graph, placeholders, node.meta["val"].node.expr, sizes)
            elif node in self.tensors:
                name, tensors[name] = self.tensors[node]
                copies[node] = graph.get_attr(name)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        logits, *carry = (copies[node] for node in results)
        # a lowered program reads its inputs with the strides of tracing
        kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
        carry = [graph.call_function(torch.ops.aten.clone.default, (node,), kwargs) for node in carry]
        graph.output((logits, *carry))
        free = tuple(
            tuple(d for d, size in enumerate(node.meta["val"].shape) if isinstance(size, torch.SymInt))
            for node in inputs
        )
        return Part(GraphModule(tensors, graph).eval(), free)


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _list_needed(results: Sequence[Node], inputs: Mapping[Node, Node]) -> list[Node]:
    """Return the nodes that results need beside the inputs; none comes before what it needs."""
    needed: set[Node] = set()
    remaining = list(results)
    while remaining:
        node = remaining.pop()
        if node not in inputs and node not in needed:
            needed.add(node)
            remaining += [] if _is_size(node) else node.all_input_nodes
    return sorted(needed)


_OPERATORS: Mapping[Any, Callable[[Any, Any], Any]] = {
    sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv,
    Mod: operator.mod, PythonMod: operator.mod,
}  # fmt: skip


def _make_size(graph: Graph, placeholders: Sequence[Node], expression: sympy.Expr, sizes: dict[sympy.Expr, Any]) -> Any:
    """Add the operations for a size to a graph, by the sizes of its inputs.

    Raises:
        ModelError: The inputs do not tell it.
    """
    if expression.is_Integer:
        return int(expression)
    if expression not in sizes:
        for node in placeholders:
            for d, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt) and size.node.expr == expression:
                    sizes[expression] = graph.call_function(torch.ops.aten.sym_size.int, (node, d))
                    return sizes[expression]
        combine = _OPERATORS.get(expression.func)
        if combine is None:
            raise ModelError(f"behind an exit it needs a size ({expression}) that no tensor there has.")
        parts = [_make_size(graph, placeholders, part, sizes) for part in expression.args]
        sizes[expression] = reduce(lambda a, b: graph.call_function(combine, (a, b)), parts)
    return sizes[expression]
