"""Real jobs of `torchrun` on gloo: each rank writes its own part of one folder, and the ranks stand side by side."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memexplore as mx

TRAINING = """
import os, sys, torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, kind = dist.get_rank(), sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
batch = 512 if rank == 1 else 64

def train():
    for _ in range(6):
        model(torch.randn(batch, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

"""
WATCHED = """
import memexplore as mx

with mx.watch(model, optimizer, folder=sys.argv[2], first=2, every=1000):
    train()
dist.barrier()  # a rank whose peers are still in a collective can be ended by gloo
dist.destroy_process_group()
"""
PLAIN = """
train()
dist.barrier()  # a rank whose peers are still in a collective can be ended by gloo
dist.destroy_process_group()
"""


ABORTED = "terminate called without an active exception"
"""What a rank prints that gloo's threads have aborted while its interpreter ended: one plain run in 14, without
memexplore. The cause is described in pull request 179291 of PyTorch."""


def torchrun(processes: int, *command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script or module under torchrun in a folder, again if torch aborts at the exit of a rank."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(mx.__file__).parents[1])}
    whole = [*launch, *map(str, command)]
    for _ in range(3):
        done = subprocess.run(whole, capture_output=True, text=True, env=environment, cwd=folder, check=False)
        if not (done.returncode and ABORTED in done.stderr):
            break
        shutil.rmtree(folder / "run", ignore_errors=True)
    return done


@pytest.mark.parametrize(("kind", "processes"), [("ddp", 2), ("fsdp2", 2), ("ddp", 4), ("fsdp2", 4)])
def test_each_rank_of_torchrun_writes_its_steps_and_the_worst_comes_first(kind, processes, tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(TRAINING + WATCHED)
    done = torchrun(processes, script, kind, folder, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = mx.load(folder)
    table = ranks.table()
    assert sorted(table["rank"]) == list(range(processes))
    assert table["steps"].tolist() == [6] * processes
    assert set(table["state"]) == {"ended"}
    # Rank 1 has the larger batch: 512 × 256 float32 after each of the first two layers.
    assert ranks.worst == 1
    assert ranks.recorded(1)[:2] == [1, 2]
    difference = ranks.difference()
    layers = difference[difference["category"] == "activation"].groupby("layer")["difference"].sum()
    assert layers.max() == (512 - 64) * 256 * 4


@pytest.mark.parametrize(("kind", "processes"), [("ddp", 2), ("fsdp2", 4)])
def test_a_script_of_torchrun_writes_its_steps_without_a_line_of_its_own(kind, processes, tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(TRAINING + PLAIN)
    command = ["-m", "memexplore.cli", "run", script, "--live", folder, "--gpu", "cpu", "--", kind]
    done = torchrun(processes, *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = mx.load(folder)
    table = ranks.table()
    assert sorted(table["rank"]) == list(range(processes))
    assert table["steps"].tolist() == [6] * processes
    assert set(table["state"]) == {"ended"}
    assert ranks.worst == table["rank"].iloc[0] == 1
    for rank in range(processes):
        steps = set(ranks.tape(rank, 1).step.tolist())
        assert steps == {0, 1}
    opened = subprocess.run(
        [sys.executable, "-m", "memexplore", "open", str(folder)], capture_output=True, text=True, check=True
    ).stdout
    assert opened.startswith(f"{processes} ranks · rank 1 has the highest peak: ")
    # The layer between the two linear ones keeps 512 or 64 × 256 float32.
    name = "module.1" if kind == "ddp" else "1"
    row = next(line.split() for line in opened.splitlines() if line.split()[:1] == [name] and "activation" in line)
    assert row[-3:] == [str(64 * 256 * 4), str(512 * 256 * 4), str((512 - 64) * 256 * 4)]


FAILING = """
import atexit, time
import torch, torch.distributed as dist

def leave():  # torchrun ends the other ranks when this one has ended: their error comes first
    dist.destroy_process_group()
    time.sleep(2)

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
for number in range(8):
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if number == 5 and dist.get_rank() == 1:
        atexit.register(leave)
        raise ValueError("a damaged shard")
"""


def test_a_script_under_torchrun_is_watched_and_the_rank_that_failed_first_is_named(tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(FAILING)
    command = ["-m", "memexplore.cli", "run", script, "--live", folder, "--gpu", "cpu"]
    done = torchrun(2, *command, folder=tmp_path)
    assert done.returncode != 0
    # The other process reports in one line.
    assert done.stdout.count("Peak allocated") == 1
    assert "memexplore, rank 1: failed · step " in done.stdout
    opened = subprocess.run(
        [sys.executable, "-m", "memexplore", "open", str(folder)], capture_output=True, text=True, check=True
    ).stdout
    assert "ended with an error, first rank 1: ValueError: a damaged shard" in opened
    assert "Rank 1\n✖ failed · step " in opened


def test_open_shows_the_ranks_as_text_and_json(tmp_path):
    from tests.ranks.test_ranks import MIB, write_rank

    for rank, peak in enumerate((10, 12, 30)):
        write_rank(tmp_path, rank, peak * MIB)
    command = [sys.executable, "-m", "memexplore", "open", str(tmp_path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert text.startswith("3 ranks · rank 2 has the highest peak: 30.0 MiB in step 1, +18.0 MiB (+150 %)")
    assert "Rank 1 → rank 2: Peak 12.0 MiB → 30.0 MiB allocated" in text
    ranks = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert [each["rank"] for each in ranks["ranks"]] == [2, 1, 0]


def test_open_refuses_a_folder_without_ranks_in_one_sentence(tmp_path):
    command = [sys.executable, "-m", "memexplore", "open", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "has no ranks: give a folder that `watch(folder=...)` wrote" in done.stderr
