"""Layouts of several GPUs: groups by hand, and contradictions with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from memexplore.run.knobs.gpus import Layout, layout_of
from memexplore.run.knobs.knobs import Knobs, conflicts
from memexplore.run.knobs.strategy import Strategy, strategy_of


@pytest.mark.parametrize(
    ("setting", "layout"),
    [
        ({}, Layout(1, 1, 1)),
        ({"gpus": 8}, Layout(8, 1, 1)),
        ({"gpus": 8, "strategy": "zero 1"}, Layout(8, 1, 1)),
        ({"gpus": 8, "strategy": "fsdp2"}, Layout(1, 8, 1)),
        # a node of 8 on each side of the copy; half a node each
        ({"gpus": 16, "strategy": "hsdp"}, Layout(2, 8, 1)),
        ({"gpus": 8, "strategy": "hsdp"}, Layout(2, 4, 1)),
        ({"gpus": 8, "tensor_parallel": 8}, Layout(1, 1, 8)),
        ({"gpus": 16, "tensor_parallel": 4, "strategy": "fsdp2"}, Layout(1, 4, 4)),
        # 8 groups of 4 GPUs: two of them are in a node
        ({"gpus": 32, "tensor_parallel": 4, "strategy": "hsdp"}, Layout(4, 2, 4)),
    ],
)
def test_the_product_of_a_layout_is_the_number_of_gpus(setting: Any, layout: Layout) -> None:
    knobs = Knobs(**setting)
    assert conflicts(knobs) == []
    assert layout_of(knobs) == layout
    assert layout.data_parallel * layout.tensor == (knobs.gpus or 1)


def test_several_gpus_without_a_strategy_run_ddp() -> None:
    assert strategy_of(Knobs(gpus=2)) is Strategy.DDP
    assert strategy_of(Knobs(gpus=1)) is Strategy.AS_WRITTEN


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"strategy": "fsdp2"}, "needs several GPUs: write gpus=8"),
        ({"gpus": 6, "tensor_parallel": 4}, "does not divide gpus=6"),
        ({"gpus": 8, "tensor_parallel": 4}, "write strategy='fsdp2'"),
        ({"gpus": 2, "strategy": "hsdp"}, "write gpus=4 or more"),
        ({"gpus": 2, "fsdp_offload": "shards on the CPU"}, "policy of FSDP2"),
        ({"gpus": 2, "update": "in backward"}, "write another update, or gpus=1"),
        ({"gpus": 2, "tensor_parallel": 2, "precision": "bf16"}, "write precision='all bf16'"),
    ],
)
def test_a_contradiction_says_what_to_write(setting: Any, message: str) -> None:
    assert any(message in sentence for sentence in conflicts(Knobs(**setting)))


def test_settings_are_shown_as_they_are_written() -> None:
    knobs = Knobs(gpus=8, strategy="fsdp2", fsdp_precision="bf16")
    assert str(knobs) == "8 GPUs, strategy fsdp2, fsdp precision bf16"
    assert repr(knobs) == "Knobs(gpus=8, strategy='fsdp2', fsdp_precision='bf16')"
