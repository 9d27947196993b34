"""Formatting with `%` on the virtual GPU: unknown values read `virtual`, all others as Python formats them."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memexplore as mx
from memexplore.virtual_gpu.tensors.percent_format import percent
from memexplore.virtual_gpu.tensors.virtual_numbers import VirtualFloat, VirtualInt

LOSS, TOKEN = VirtualFloat(1), VirtualInt(1)


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        ("%.4f", LOSS, "virtual"),
        (
            "[%d/%d] %-10s|%10.3g|%-9.2e|%d %%",
            (1, 2, "x", LOSS, LOSS, TOKEN),
            "[1/2] x         |   virtual|virtual  |virtual %",
        ),
        ("%(loss).3f %(step)03d", {"loss": LOSS, "step": 7}, "virtual 007"),
        ("%.*f", (2, LOSS), "1.00"),
        ("%s", ((LOSS, 2),), "(virtual, 2)"),
    ],
)
def test_virtual_numbers_read_virtual(template: str, arguments: object, expected: str) -> None:
    assert percent(template, arguments) == expected


@given(
    st.lists(st.sampled_from(["%d", "%5.2f", "%-8s", "%%", "%x", "%+.1e", "a"])),
    st.lists(st.integers(0, 300), max_size=6),
)
def test_other_values_are_formatted_as_by_python(parts: list[str], numbers: list[int]) -> None:
    template = " ".join(parts)
    try:
        expected = template % tuple(numbers)
    except TypeError as error:
        with pytest.raises(TypeError, match=str(error)):
            percent(template, tuple(numbers))
    else:
        assert percent(template, tuple(numbers)) == expected


def test_messages_of_logging(caplog: pytest.LogCaptureFixture) -> None:
    original = logging.LogRecord.getMessage
    with mx.virtual("T4"), caplog.at_level(logging.INFO):
        loss = torch.randn(10_000_000, device="cuda").sum()
        logging.info("epoch %d loss %.3f %.2f", 3, loss.item(), loss)
        assert caplog.messages == ["epoch 3 loss virtual virtual"]
    assert logging.LogRecord.getMessage is original
