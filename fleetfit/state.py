"""A state, named tensors in one flat buffer; and the one codec of nests of values and tensors, for files and messages.

A nest (tables, lists, tuples, numbers, text, None, tensors and NumPy arrays) is taken apart into plain values, which
JSON can say, and one flat buffer for each type of numbers, in which its tensors lie side by side in the order of their
appearance. Among the plain values stand

    {"$s": [dtype, {name: shape}]}    a state: tensors of one type by name
    {"$t": [dtype, shape]}            a tensor            {"$a": [dtype, shape]}    a NumPy array
    {"$u": [values]}                  a tuple             {"$d": [[key, value]]}    a table whose keys are not all text

What holds the two is a message (`fleetfit.messages`) or a file (`fleetfit.records.checkpoints`). Either may come from a
stranger: `put_together` makes nothing of what is announced before it is held against what there is.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = Mapping[str, Tensor]
"""Tensors by name."""
Shapes = Mapping[str, tuple[int, ...]]


class FlatState(Mapping[str, Tensor]):
    """A read-only state whose tensors are views of one flat buffer, made when first asked for.

    Attributes:
        flat: The buffer, in the order of the names; fp32 but in a compressed update.
        shapes: The shape of each tensor.
    """

    def __init__(self, flat: Tensor, shapes: Shapes) -> None:
        """Take a buffer and the shapes of the tensors that lie in it side by side."""
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
    """Return a state as one flat fp32 tensor, in its own order: no copy when its tensors lie side by side already."""
    if isinstance(state, FlatState):
        return state.flat
    tensors = list(state.values())
    found = _side_by_side(tensors) if tensors[0].dtype == torch.float32 else None
    return torch.cat([t.detach().reshape(-1).float() for t in tensors]) if found is None else found


def concat_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one type as one flat one: no copy where they lie side by side already."""
    found = _side_by_side(tensors)
    return torch.cat([t.detach().reshape(-1) for t in tensors]) if found is None else found


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors of one type as one, without a copy, where each begins at the end of the one before."""
    first = tensors[0]
    place, width, buffer = first.data_ptr(), first.element_size(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        ours = (
            tensor.data_ptr() == place and tensor.untyped_storage().data_ptr() == buffer
        )  # neighbours may be strangers
        if tensor.dtype != first.dtype or not ours or not tensor.is_contiguous():
            return None
        place += tensor.numel() * width
    total = (place - first.data_ptr()) // width
    return first.detach().as_strided((total,), (1,), first.storage_offset())


# ---- the codec: what it can hold -----------------------------------------------------------------------------------

DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (torch.float64, torch.int64, torch.uint64, torch.float32, torch.int32, torch.uint32, torch.float16,
              torch.bfloat16, torch.int16, torch.uint16, torch.int8, torch.uint8, torch.bool)
}  # fmt: skip
"""What a buffer's numbers may be, by name; in this order buffers lie one behind the other, each aligned to its type."""

Buffers = Mapping[str, Tensor]  # flat, by the name of their type
_DEEPEST = 64  # tables and lists within each other, in the plain values
_MOST_DIMENSIONS = 16
_LARGEST_SIZE = 2**40  # of a dimension; elements are bounded by what there is
_TENSOR_BYTES = 900  # of memory that a tensor takes beside its numbers (CPython 3.11, torch 2)


# ---- apart ---------------------------------------------------------------------------------------------------------


def flatten(nest: Any) -> tuple[Any, dict[str, list[Tensor]]]:
    """Return a nest's plain values, and the parts of its buffers: flat tensors on the host, by the name of their type.

    Raises:
        ValueError: Something else is in it, named by its place, or it is nested too deeply.
    """
    parts: dict[str, list[Tensor]] = {}
    plain = _apart(nest, parts, "", 0)
    return plain, {name: parts[name] for name in DTYPES if name in parts}


def _apart(nest: Any, parts: dict[str, list[Tensor]], where: str, depth: int) -> Any:
    if isinstance(nest, Tensor):
        return {"$t": [_put(nest.detach().reshape(-1), parts, where), list(nest.shape)]}
    if nest is None or isinstance(nest, bool | int | float | str):
        return nest
    if depth > _DEEPEST - 4:  # a tuple or a table of pairs is some levels in JSON
        raise ValueError(f"{where[:60]} nests more than {_DEEPEST - 4} deep")
    if isinstance(nest, FlatState) and nest:
        return {"$s": [_put(nest.flat.detach(), parts, where), {name: list(s) for name, s in nest.shapes.items()}]}
    if isinstance(nest, Mapping):
        return _table_apart(nest, parts, where, depth)
    if isinstance(nest, tuple):
        return {"$u": [_apart(value, parts, f"{where}/{i}", depth + 2) for i, value in enumerate(nest)]}
    if isinstance(nest, list):
        return [_apart(value, parts, f"{where}/{i}", depth + 1) for i, value in enumerate(nest)]
    if isinstance(nest, np.ndarray):
        return {"$a": [_put(torch.from_numpy(nest).reshape(-1), parts, where), list(nest.shape)]}
    if isinstance(nest, np.generic):
        return _apart(nest.item(), parts, where, depth)
    raise ValueError(f"{where or 'the whole'} is a {type(nest).__name__}")


def _table_apart(nest: Mapping[Any, Any], parts: dict[str, list[Tensor]], where: str, depth: int) -> dict[str, Any]:
    named = all(isinstance(key, str) and not key.startswith("$") for key in nest)
    if not named:
        pairs = [(_apart(k, parts, where, depth + 3), _apart(v, parts, f"{where}/{k}", depth + 3))
                 for k, v in nest.items()]  # fmt: skip
        return {"$d": [list(pair) for pair in pairs]}
    values = list(nest.values())
    if values and all(isinstance(v, Tensor) and v.dtype == values[0].dtype for v in values):
        return {"$s": [_put(concat_tensors(values), parts, where), {name: list(v.shape) for name, v in nest.items()}]}
    return {key: _apart(value, parts, f"{where}/{key}" if where else key, depth + 1) for key, value in nest.items()}


def _put(flat: Tensor, parts: dict[str, list[Tensor]], where: str) -> str:
    name = str(flat.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{where or 'the whole'} is a tensor of {flat.dtype}")
    parts.setdefault(name, []).append(flat if flat.is_meta else flat.cpu().contiguous())
    return name


def tensor_bytes(flat: Tensor) -> memoryview | bytes:
    """Return the bytes of a flat tensor on the host, without a copy."""
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


# ---- together ------------------------------------------------------------------------------------------------------


def unflatten(plain: Any, buffers: Buffers, most_bytes: int | None = None) -> Any:
    """Return the nest that was taken apart; its tensors are views of the buffers, and `plain` is used up.

    Args:
        plain: Plain values, as JSON reads them.
        buffers: What is there, flat and by the name of its type.
        most_bytes: Memory that tensors may take beside their numbers, where a stranger sent it; his tables have no keys
            that share one hash, and nothing becomes a NumPy array.

    Raises:
        ValueError: It is nothing that `taken_apart` returns, beyond the bounds, or names other tensors than there are.
    """
    source = _Buffered(buffers, most_bytes)
    found = rebuilt(plain, source.leaf, bounded=most_bytes is not None)
    source.check_empty()
    return found


Leaf = Callable[[str, Any], Any]
"""Returns what a word stands for, of what stands behind it; raises ValueError where that is nothing."""


def rebuilt(
    plain: Any, leaf: Leaf, tuples: str = "$u", tables: str = "$d", deepest: int = _DEEPEST, bounded: bool = False
) -> Any:
    """Return a nest of plain values, with what `leaf` makes of words that stand for something else.

    Args:
        plain: Lists and tables are filled in place: the nest is not held twice.
        leaf: For every word that begins with a dollar sign, but for those of tuples and tables.
        tuples: The word of tuples.
        tables: The word of tables whose keys are not all text.
        deepest: Lists and tables within each other.
        bounded: Whether keys of tables must be text or small numbers.
    """
    return _Rebuilt(leaf, tuples, tables, deepest, bounded).of(plain, 0)


@dataclass(frozen=True)
class _Rebuilt:
    """Puts plain values together; the fields are the arguments of `rebuilt`."""

    leaf: Leaf
    tuples: str
    tables: str
    deepest: int
    bounded: bool

    def of(self, nest: Any, depth: int) -> Any:
        if not isinstance(nest, list | dict):
            return nest
        if depth > self.deepest:
            raise ValueError(f"it nests more than {self.deepest} deep")
        if isinstance(nest, list):
            for place, value in enumerate(nest):
                nest[place] = self.of(value, depth + 1)
            return nest
        word = next((key for key in nest if key.startswith("$")), None)
        if word is not None:
            return self._word(word, nest, depth)
        for key, value in nest.items():
            nest[key] = self.of(value, depth + 1)
        return nest

    def _word(self, word: str, nest: dict[str, Any], depth: int) -> Any:
        inner = nest[word]
        if len(nest) != 1:
            raise ValueError(f'"{word[:20]}" in it does not stand alone')
        if word == self.tuples and isinstance(inner, list):
            return tuple(self.of(inner, depth + 1))
        if word == self.tables and isinstance(inner, list):
            return self._table(inner, depth + 1)
        return self.leaf(word, inner)

    def _table(self, pairs: list[Any], depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError("a table in it has something else than pairs")
            key = self.of(pair[0], depth + 2)
            if not _is_key(key, self.bounded):
                kind = "no text and no number of at most 60 bits" if self.bounded else "none"
                raise ValueError(f"a key of a table is {kind}")
            found[key] = self.of(pair[1], depth + 2)
        return found


def _is_key(key: Any, bounded: bool) -> bool:
    """Tell whether something may be a key: of larger numbers, and of tuples, thousands have one and the same hash."""
    if isinstance(key, tuple):
        return not bounded and all(_is_key(part, False) for part in key)
    if isinstance(key, int) and bounded:
        return -(2**60) <= key <= 2**60
    return isinstance(key, str | int | float | None)


class _Buffered:
    """Takes tensors out of flat buffers, in the order in which they lie there."""

    def __init__(self, buffers: Buffers, most_bytes: int | None) -> None:
        """Begin at the beginning of each."""
        self._buffers, self._left = buffers, most_bytes
        self._at = dict.fromkeys(buffers, 0)
        self._arrays = most_bytes is None

    def leaf(self, word: str, inner: Any) -> Any:
        """Return the tensor, array or state that a word stands for."""
        if word not in ("$t", "$s", "$a") or (word == "$a" and not self._arrays):
            raise ValueError(f'"{word[:20]}" in it is unknown')
        if not isinstance(inner, list) or len(inner) != 2:
            raise ValueError(f'"{word}" in it has no type and shape')
        dtype, shape = inner
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError("a tensor has a type of numbers that is unknown here")
        if word == "$s":
            return self._state(dtype, shape)
        found = self._next(dtype, _checked(shape))
        return found.numpy() if word == "$a" else found

    def _state(self, dtype: str, shapes: Any) -> dict[str, Tensor]:
        if not isinstance(shapes, dict):
            raise ValueError("a state has no table of shapes")
        if any(name.startswith("$") for name in shapes):
            raise ValueError("a tensor of a state has a name that none can have")
        for name, shape in shapes.items():  # in place: the table is not held twice
            shapes[name] = self._next(dtype, _checked(shape))
        return shapes

    def _next(self, dtype: str, shape: list[int]) -> Tensor:
        if self._left is not None:
            self._left -= _TENSOR_BYTES
            if self._left < 0:
                raise ValueError("its tensors would take more memory than is allowed for so few bytes")
        count = math.prod(shape)  # of at most 16 numbers below 2^40
        if not count:
            return torch.empty(shape, dtype=DTYPES[dtype])
        start = self._at.get(dtype, 0)
        if dtype not in self._buffers or start + count > self._buffers[dtype].numel():
            raise ValueError("it ends before its tensors do")
        self._at[dtype] = start + count
        return self._buffers[dtype][start : start + count].view(shape)  # neighbours can be read as one

    def check_empty(self) -> None:
        """Raise ValueError where something is there that nothing stands for."""
        for dtype, at in self._at.items():
            if at != self._buffers[dtype].numel():
                raise ValueError(f"it has {self._buffers[dtype].numel()} numbers in {dtype} and describes {at}")


def _checked(shape: Any) -> list[int]:
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has no list of at most {_MOST_DIMENSIONS} sizes")
    if not all(type(n) is int and 0 <= n < _LARGEST_SIZE for n in shape):
        raise ValueError("a tensor has sizes that are no whole numbers from 0 on")
    return shape
