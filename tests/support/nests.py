"""Nested values, as messages and records hold them, for Hypothesis."""

import torch
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 99))
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9
    return numbers.to(draw(st.sampled_from(DTYPES)))


scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)


nests = st.recursive(
    scalars | tensors(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
