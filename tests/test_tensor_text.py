"""Shapes and dtypes as text, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.text.tensor_text import dtype_of, interned, is_tensor_text, shape_of, tensor_text

shapes = st.lists(st.integers(0, 1 << 62), max_size=6).map(tuple)


@given(shapes, st.sampled_from(["float32", "bfloat16", "int64", "float8_e4m3fn", "complex64"]))
def test_shape_and_dtype_are_read_back(shape: tuple[int, ...], dtype: str) -> None:
    text = tensor_text(shape, f"torch.{dtype}")
    assert is_tensor_text(text)
    assert (shape_of(text), dtype_of(text)) == (shape, dtype)


@pytest.mark.parametrize(
    "text", ["", "float32", "float32[1,2]", "float32[-1]", "float32[1, ]", "[3]", "<b>[3]", "float32[3]\n", "a[3][4]"]
)
def test_other_texts_are_recognised(text: str) -> None:
    assert not is_tensor_text(text)


@given(st.lists(st.sampled_from(["", "int64[]", "float32[2]", "float32[3]"])))
def test_indices_lead_to_the_texts(texts: list[str]) -> None:
    numbers, table = interned(texts)
    assert [table[number] if number >= 0 else "" for number in numbers] == texts
    assert "" not in table
    assert len(set(table)) == len(table)
