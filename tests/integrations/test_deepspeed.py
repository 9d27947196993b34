"""DeepSpeed's stages of ZeRO as one rank of eight: what the rank keeps, from the number of parameters alone.

Its optimizers are FusedAdam and DeepSpeedCPUAdam, whose kernels are not compiled.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

import pytest

from memexplore.ranks.loading import load
from memexplore.tape import Tape
from tests import python_programs

WORLD = 8
WIDTH = 512
PARAMETERS = 4 * WIDTH * WIDTH
"""Of four square layers without bias: 131 072 for each of eight ranks."""
BUCKET = 2**21
"""Elements that are reduced at once: more than the parameters."""
SCRIPT = f"""
import sys
import deepspeed
import torch
from torch import nn

stage, device = int(sys.argv[1]), sys.argv[2]
config = {{
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {{"enabled": True}},
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4}}}},
    "zero_optimization": {{
        "stage": stage,
        "reduce_bucket_size": {BUCKET},
        "offload_optimizer": {{"device": device}},
    }},
}}


def network():
    return nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range(4)))


deepspeed.init_distributed()
if stage == 3:
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = network()
else:
    model = network()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(2):
    x = torch.randn(4, {WIDTH}, device=engine.device, dtype=torch.bfloat16)
    loss = engine(x).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
"""


@functools.cache
def tape(stage: int, optimizer: str = "none", rank: int = 0) -> Tape:
    """Return the tape of two steps, with the optimizer on a device if it is offloaded."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        arguments = ["run", "train.py", "--gpu", "H100", "--world", str(WORLD), "--rank", str(rank)]
        command = python_programs.command("memexplore", *arguments)
        ended = subprocess.run(
            [*command, "-o", "tape.tape", "--", str(stage), optimizer], cwd=folder, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        loaded = load(folder / "tape.tape")
    return loaded if isinstance(loaded, Tape) else next(iter(loaded.values()))


def at_the_end(stage: int, category: str, optimizer: str = "none", rank: int = 0) -> int:
    return int(tape(stage, optimizer, rank).by_category()[category].iloc[-1])


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_keeps_all_weights_in_bf16_and_its_part_in_fp32(stage):
    assert at_the_end(stage, "parameter") == 2 * PARAMETERS + 4 * PARAMETERS // WORLD


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_keeps_its_part_of_both_moments(stage):
    assert at_the_end(stage, "optimizer state") == 2 * 4 * PARAMETERS // WORLD


def test_with_stage_3_a_rank_keeps_its_part_of_the_weights():
    assert at_the_end(3, "parameter") == 4 * PARAMETERS // WORLD
    assert at_the_end(3, "parameter", rank=5) == 4 * PARAMETERS // WORLD
    assert int(tape(3).by_category().sum(axis=1).iloc[-1]) < 2 * PARAMETERS + 2 * BUCKET + 100 * 2**20


def test_an_offloaded_optimizer_leaves_the_weights_in_bf16():
    assert at_the_end(2, "parameter", "cpu") == 2 * PARAMETERS
    assert at_the_end(2, "optimizer state", "cpu") == 0
