"""Pipeline schedules on one rank: a stage holds the activations of the micro-batches between forward and backward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as schedules
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.nn import functional

import memexplore as mx

WIDTH, ROWS, BATCHES = 256, 128, 8
UNIT = ROWS * WIDTH * 4
"""Bytes of a tensor between two stages; a weight of WIDTH x WIDTH numbers is two of them."""
WEIGHT = 2
RECEIVED = int(tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15))
"""Torch 2.15 requests what a stage receives in each step, earlier releases once, before the step that is measured."""


def peak(schedule: Any, rank: int, stages: int = 1) -> float:
    """Return what the second step of a rank of 4 adds at its peak, in units of a tensor between two stages."""
    # Torch 2.15 requests cuBLAS workspaces in every backward.
    with mx.virtual("H100", world=4, rank=rank, release="2.13"):
        dist.init_process_group("nccl")
        device = torch.device("cuda", torch.cuda.current_device())
        numbers = [rank, 7 - rank] if "V" in schedule.__name__ else [rank + 4 * count for count in range(stages)]
        made = []
        for number in numbers:
            first = number == 0
            made.append(
                PipelineStage(
                    nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()).to(device),
                    number,
                    4 * stages,
                    device,
                    input_args=torch.empty(ROWS, WIDTH, device="meta", requires_grad=not first),
                    output_args=torch.empty(ROWS, WIDTH, device="meta", requires_grad=True),
                )
            )
        runs = schedule(made[0] if stages == 1 else made, BATCHES, loss_fn=functional.mse_loss)
        optimizer = torch.optim.SGD([weight for stage in made for weight in stage.submod.parameters()])
        batch = torch.ones(ROWS * BATCHES, WIDTH, device="cuda")
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            runs.step(*(batch,) if 0 in numbers else (), **{"target": batch} if 4 * stages - 1 in numbers else {})
            optimizer.step()
            optimizer.zero_grad()
        return (torch.cuda.max_memory_allocated() - before) / UNIT


@pytest.mark.parametrize("rank", [0, 1])
def test_gpipe_holds_the_activations_of_all_micro_batches(rank):
    # The layer and its GELU keep a tensor each for 8 micro-batches. The peak is the backward of the second one, which
    # adds a gradient of the weight to that of the first (two weights): the first one's 2 tensors are free, the gradient
    # behind GELU is there, and on later ranks two gradients of inputs, one of them being sent.
    received = RECEIVED * (BATCHES - 1)
    assert peak(schedules.ScheduleGPipe, rank) == 2 * WEIGHT + 2 * BATCHES - 2 + 1 + (2 + received if rank else 0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_1f1b_holds_the_activations_of_as_many_micro_batches_as_stages_follow(rank):
    # 4 - rank micro-batches are between forward and backward.
    received = RECEIVED * (4 - rank)
    assert peak(schedules.Schedule1F1B, rank) == 2 * WEIGHT + 2 * (4 - rank) + 1 + (2 + received if rank else 0)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    "name",
    [
        "ScheduleInterleaved1F1B",
        "ScheduleLoopedBFS",
        "ScheduleInterleavedZeroBubble",
        "ScheduleZBVZeroBubble",
        "ScheduleDualPipeV",
    ],
)
def test_schedules_with_two_stages_on_a_rank_run(name, rank):
    # 8 micro-batches of two stages, each with two tensors, are the most that a schedule can hold.
    added = peak(getattr(schedules, name), rank, stages=2)
    assert 4 * WEIGHT + 2 <= added <= 4 * WEIGHT + 2 * 2 * BATCHES + 16


@pytest.mark.skipif(not torch.__version__.startswith("2.11"), reason="later releases trace the model")
def test_a_model_that_cannot_be_traced_is_refused():
    with mx.virtual("H100", world=2):
        dist.init_process_group("nccl")
        with pytest.raises(RuntimeError, match=r"install torch 2\.13 or newer"):
            pipeline(nn.Sequential(nn.Linear(8, 8)), (torch.ones(4, 8),))


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="torch.export of 2.11 aborts the process")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_split_from_a_model_is_moved_to_the_gpu(rank):
    with mx.virtual("H100", world=2, rank=rank):
        dist.init_process_group("nccl")
        device = torch.device("cuda", torch.cuda.current_device())
        # 1 MiB each: made without memory of the CPU.
        model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
        split = pipeline(model, (torch.ones(4, 512),), split_spec={"1": SplitPoint.BEGINNING})
        before = torch.cuda.memory_allocated()
        stage = split.build_stage(rank, device)
        assert torch.cuda.memory_allocated() - before == 512 * 512 * 4
        runs = schedules.ScheduleGPipe(stage, 2, loss_fn=functional.mse_loss)
        batch = torch.ones(8, 512, device="cuda")
        runs.step(*() if rank else (batch,), **{"target": batch} if rank else {})


def test_a_stage_without_shapes_needs_the_command():
    with mx.virtual("H100", world=2, rank=1):
        dist.init_process_group("nccl")
        stage = PipelineStage(nn.Linear(8, 8).cuda(), 1, 2, torch.device("cuda", 1))
        runs = schedules.ScheduleGPipe(stage, 2, loss_fn=functional.mse_loss)
        with pytest.raises(RuntimeError, match="pass input_args= and output_args= to PipelineStage"):
            runs.step(target=torch.ones(4, 8, device="cuda"))


_SCRIPT = """
import os, torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = torch.nn.Linear([256, 1024][rank], [1024, 128][rank], bias=False).to(device)
schedule = ScheduleGPipe(PipelineStage(model, rank, 2, device), 2, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(model.parameters())
if rank == 0:
    schedule.step(torch.ones(64, 256, device=device))
else:
    schedule.step(target=torch.ones(64, 128, device=device))
if rank == 1:
    print("SHAPE", list(model.weight.grad.shape), schedule._stage.args_recv_info[0][0].buffer is None)
optimizer.step()
evaluation = ScheduleGPipe(PipelineStage(model, rank, 2, device), 4)
with torch.no_grad():
    result = evaluation.step(*() if rank else (torch.ones(16, 256, device=device),))
print("EVALUATED", rank and list(result.shape))
"""


def test_the_command_runs_other_ranks_for_the_shapes_that_they_send(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "memexplore", "run", "--json", "--gpu", "H100", "--world", "2", "--rank", "1"]
    ended = subprocess.run([*command, str(script)], capture_output=True, text=True, env=dict(os.environ))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["outcome"] == "fits"
    # What is received has the shape that came from the process of rank 0; torch 2.15 keeps no buffer after the step.
    assert f"SHAPE [128, 1024] {bool(RECEIVED)}" in ended.stderr
    # A schedule that is made after the first optimizer step needs further shapes.
    assert "EVALUATED [16, 128]" in ended.stderr
