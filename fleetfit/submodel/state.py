"""A state, named tensors in one flat buffer; and the codec of nested values and tensors, for files and messages.

`flatten` turns a payload (tables, lists, tuples, numbers, text, None, tensors, NumPy arrays) into plain values, which
JSON can hold, and one flat buffer for each dtype with the tensors side by side in the order of their appearance. Plain
values refer to the buffers:

    {"$s": [dtype, {name: shape}]}    a state: tensors of one dtype by name
    {"$t": [dtype, shape]}            a tensor            {"$a": [dtype, shape]}    a NumPy array
    {"$u": [values]}                  a tuple             {"$d": [[key, value]]}    a table whose keys are not all text

Both together are a message (`fleetfit.messages`) or a file (`fleetfit.runs.checkpoints`). Either may come from a
stranger: `unflatten` compares what is announced with the buffers before it makes anything of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetfit.layout import State

Shapes = Mapping[str, tuple[int, ...]]


class FlatState(Mapping[str, Tensor]):
    """A read-only state whose tensors are views of one flat buffer, made when first asked for.

    Attributes:
        flat: The buffer, in the order of the names; fp32 but in a compressed update.
        shapes: The shape of each tensor.
    """

    def __init__(self, flat: Tensor, shapes: Shapes) -> None:
        self.flat = flat
        self.shapes = shapes

    @cached_property
    def _views(self) -> dict[str, Tensor]:
        pieces = self.flat.split([math.prod(shape) for shape in self.shapes.values()])
        return {name: piece.view(s) for (name, s), piece in zip(self.shapes.items(), pieces, strict=True)}

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes


def get_shapes(state: State) -> Shapes:
    """Return the shape of each tensor of a state."""
    if isinstance(state, FlatState):
        return state.shapes
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def concat_state(state: State) -> Tensor:
    """Return a state as one flat fp32 tensor, in its own order; without a copy where its tensors are adjacent."""
    if isinstance(state, FlatState):
        return state.flat
    return concat_tensors(list(state.values())).float() if state else torch.zeros(0)


def concat_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one dtype as one flat tensor; without a copy where they are adjacent."""
    flat = _join_adjacent(tensors)
    return torch.cat([t.detach().reshape(-1) for t in tensors]) if flat is None else flat


def _join_adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view of all tensors where each begins in memory at the end of the one before, else None."""
    first = tensors[0]
    address, width, storage = first.data_ptr(), first.element_size(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.data_ptr() != address or not tensor.is_contiguous():
            return None
        if tensor.untyped_storage().data_ptr() != storage:  # adjacent by chance
            return None
        address += tensor.numel() * width
    total = (address - first.data_ptr()) // width
    return first.detach().as_strided((total,), (1,), first.storage_offset())


# ---- the codec -----------------------------------------------------------------------------------------------------

DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (torch.float64, torch.int64, torch.uint64, torch.float32, torch.int32, torch.uint32, torch.float16,
              torch.bfloat16, torch.int16, torch.uint16, torch.int8, torch.uint8, torch.bool)
}  # fmt: skip
"""The dtypes of buffers by name; in this order buffers follow one another, each aligned to its dtype."""

Buffers = Mapping[str, Tensor]  # flat, by the name of their dtype
_MAX_DEPTH = 64  # of tables and lists in the plain values
_MAX_DIMENSIONS = 16
_LARGEST_SIZE = 2**40  # of a dimension; the buffers bound the elements
_TENSOR_BYTES = 900  # of memory that a tensor takes beside its numbers (CPython 3.11, torch 2)


def flatten(payload: Any) -> tuple[Any, dict[str, list[Tensor]]]:
    """Return the plain values of a payload, and the parts of its buffers: flat tensors on the host, by dtype.

    Raises:
        ValueError: The payload holds another kind of value, named by its place, or is nested too deeply.
    """
    parts: dict[str, list[Tensor]] = {}
    plain = _flatten(payload, parts, "", 0)
    return plain, {name: parts[name] for name in DTYPES if name in parts}


def _flatten(value: Any, parts: dict[str, list[Tensor]], where: str, depth: int) -> Any:
    if isinstance(value, Tensor):
        return {"$t": [_add_part(value.detach().reshape(-1), parts, where), list(value.shape)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > _MAX_DEPTH - 4:  # a tuple or a table of pairs takes several levels of JSON
        raise ValueError(f"{where[:60]} nests more than {_MAX_DEPTH - 4} deep")
    if isinstance(value, FlatState) and value:
        shapes = {name: list(shape) for name, shape in value.shapes.items()}
        return {"$s": [_add_part(value.flat.detach(), parts, where), shapes]}
    if isinstance(value, Mapping):
        return _flatten_table(value, parts, where, depth)
    if isinstance(value, tuple):
        return {"$u": [_flatten(inner, parts, f"{where}/{i}", depth + 2) for i, inner in enumerate(value)]}
    if isinstance(value, list):
        return [_flatten(inner, parts, f"{where}/{i}", depth + 1) for i, inner in enumerate(value)]
    if isinstance(value, np.ndarray):
        return {"$a": [_add_part(torch.from_numpy(value).reshape(-1), parts, where), list(value.shape)]}
    if isinstance(value, np.generic):
        return _flatten(value.item(), parts, where, depth)
    raise ValueError(f"{where or 'the whole'} is a {type(value).__name__}")


def _flatten_table(table: Mapping[Any, Any], parts: dict[str, list[Tensor]], where: str, depth: int) -> dict[str, Any]:
    if not all(isinstance(key, str) and not key.startswith("$") for key in table):
        pairs = [[_flatten(key, parts, where, depth + 3), _flatten(value, parts, f"{where}/{key}", depth + 3)]
                 for key, value in table.items()]  # fmt: skip
        return {"$d": pairs}
    values = list(table.values())
    if values and all(isinstance(value, Tensor) and value.dtype == values[0].dtype for value in values):
        shapes = {name: list(tensor.shape) for name, tensor in table.items()}
        return {"$s": [_add_part(concat_tensors(values), parts, where), shapes]}
    return {key: _flatten(value, parts, f"{where}/{key}" if where else key, depth + 1) for key, value in table.items()}


def _add_part(flat: Tensor, parts: dict[str, list[Tensor]], where: str) -> str:
    """Add a flat tensor to the parts of its dtype, and return the dtype's name."""
    name = str(flat.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{where or 'the whole'} is a tensor of {flat.dtype}")
    parts.setdefault(name, []).append(flat if flat.is_meta else flat.cpu().contiguous())
    return name


def tensor_bytes(flat: Tensor) -> memoryview | bytes:
    """Return the bytes of a flat tensor on the host, without a copy."""
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def unflatten(plain: Any, buffers: Buffers, most_bytes: int | None = None) -> Any:
    """Return the payload of `flatten`; its tensors are views of the buffers, and `plain` is changed in place.

    Args:
        plain: Plain values, as JSON reads them.
        buffers: The flat buffers by dtype.
        most_bytes: Limit of the memory that tensors take beside their numbers, for a payload from a stranger; keys of
            its tables must be text or small numbers, and it has no NumPy arrays.

    Raises:
        ValueError: The plain values are not those of `flatten`, exceed a limit, or describe other buffers.
    """
    reader = _Unflattener(buffers, most_bytes)
    payload = reader.read(plain, 0)
    for dtype, end in reader.ends.items():
        if end != buffers[dtype].numel():
            raise ValueError(f"it has {buffers[dtype].numel()} numbers in {dtype} and describes {end}")
    return payload


class _Unflattener:
    """Rebuilds a payload; takes its tensors from the buffers in their order."""

    def __init__(self, buffers: Buffers, most_bytes: int | None) -> None:
        self._buffers, self._bytes_left, self._is_bounded = buffers, most_bytes, most_bytes is not None
        self.ends = dict.fromkeys(buffers, 0)  # elements taken from each buffer

    def read(self, value: Any, depth: int) -> Any:
        if not isinstance(value, list | dict):
            return value
        if depth > _MAX_DEPTH:
            raise ValueError(f"it nests more than {_MAX_DEPTH} deep")
        if isinstance(value, list):  # in place: the payload is not held twice
            for position, inner in enumerate(value):
                value[position] = self.read(inner, depth + 1)
            return value
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is not None:
            return self._read_tagged(tag, value, depth)
        for key, inner in value.items():
            value[key] = self.read(inner, depth + 1)
        return value

    def _read_tagged(self, tag: str, table: dict[str, Any], depth: int) -> Any:
        inner = table[tag]
        if len(table) != 1:
            raise ValueError(f'"{tag[:20]}" in it has other keys beside it')
        if tag == "$u" and isinstance(inner, list):
            return tuple(self.read(inner, depth + 1))
        if tag == "$d" and isinstance(inner, list):
            return self._read_pairs(inner, depth + 1)
        if tag not in ("$t", "$s", "$a") or (tag == "$a" and self._is_bounded):
            raise ValueError(f'"{tag[:20]}" in it is unknown')
        if not isinstance(inner, list) or len(inner) != 2:
            raise ValueError(f'"{tag}" in it has no dtype and shape')
        dtype, shape = inner
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError("a tensor has an unknown dtype")
        if tag == "$t":
            return self._take_tensor(dtype, shape)
        if tag == "$a":
            return self._take_tensor(dtype, shape).numpy()
        if not isinstance(shape, dict):
            raise ValueError("a state has no table of shapes")
        if any(name.startswith("$") for name in shape):
            raise ValueError('the name of a tensor in a state begins with "$"')
        for name, size in shape.items():  # in place
            shape[name] = self._take_tensor(dtype, size)
        return shape

    def _read_pairs(self, pairs: list[Any], depth: int) -> dict[Any, Any]:
        table: dict[Any, Any] = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError("a table in it has an entry that is not a pair")
            key = self.read(pair[0], depth + 2)
            if not _is_key(key, self._is_bounded):
                expected = "text or a number of at most 60 bits" if self._is_bounded else "text, a number or a tuple"
                raise ValueError(f"a key of a table is not {expected}")
            table[key] = self.read(pair[1], depth + 2)
        return table

    def _take_tensor(self, dtype: str, shape: Any) -> Tensor:
        if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor has no list of at most {_MAX_DIMENSIONS} sizes")
        if not all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in shape):
            raise ValueError("a tensor has sizes that are not whole numbers from 0")
        if self._bytes_left is not None:
            self._bytes_left -= _TENSOR_BYTES
            if self._bytes_left < 0:
                raise ValueError("its tensors would take more memory than its size allows")
        count = math.prod(shape)  # of at most 16 numbers below 2^40
        if not count:
            return torch.empty(shape, dtype=DTYPES[dtype])
        start = self.ends.get(dtype, 0)
        if dtype not in self._buffers or start + count > self._buffers[dtype].numel():
            raise ValueError("it ends before its tensors do")
        self.ends[dtype] = start + count
        return self._buffers[dtype][start : start + count].view(shape)  # adjacent tensors can be read as one


def _is_key(key: Any, is_bounded: bool) -> bool:
    """Return whether a value may be a key; thousands of large numbers, or of tuples, can share one hash."""
    if isinstance(key, tuple):
        return not is_bounded and all(_is_key(part, False) for part in key)
    if isinstance(key, int) and is_bounded:
        return -(2**60) <= key <= 2**60
    return isinstance(key, str | int | float | None)
