"""The lines for several GPUs: what they say, and that a script with them makes the run of the knobs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.run.code.lines import lines
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.run import run


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(3)))


def step_of(network: nn.Module) -> Step:
    return Step(network, (torch.ones(8, 512), torch.ones(8, 512)), loss=nn.functional.mse_loss)


def test_ddp_keeps_the_optimizer_of_the_script() -> None:
    text = lines(step_of(model()), Knobs(gpus=2))
    assert "torchrun --nproc-per-node 2 train.py" in text
    assert "model = DistributedDataParallel(model.cuda()" in text
    assert "optimizer =" not in text


def test_lines_without_a_step_name_what_is_missing() -> None:
    assert "each of the repeated blocks" in lines(None, Knobs(gpus=2, strategy="fsdp2"))


@pytest.mark.parametrize(
    "setting",
    [
        {"strategy": "ddp"},
        {"strategy": "fsdp2"},
        {"strategy": "fsdp2 no reshard", "fsdp_precision": "bf16, reduced in fp32"},
        {"strategy": "hsdp", "fsdp_offload": "shards on the CPU"},
        {"strategy": "zero 1"},
    ],
    ids=str,
)
def test_a_script_with_the_lines_has_the_peak_of_the_knobs(setting: dict[str, Any]) -> None:
    knobs = Knobs(gpus=4, optimizer="Adam", zero_grad="set to none", **setting)
    network = model()
    outcome = run(step_of(network), knobs, machine_of("H100")).outcome
    code = compile(lines(step_of(network), knobs), "train.py", "exec")
    with mx.virtual("H100", world=4):
        names: dict[str, Any] = {"model": model(), "loss_function": nn.functional.mse_loss}
        if setting["strategy"] in ("ddp", "zero 1"):
            names["model"].cuda()
        names["batches"] = Batches()
        exec(code, names)
        assert torch.cuda.max_memory_allocated() == outcome.peak_allocated


class Batches:
    """Two batches, which are on the GPU when they are asked for."""

    def __iter__(self) -> Any:
        for _ in range(2):
            yield torch.ones(8, 512).cuda(), torch.ones(8, 512).cuda()
