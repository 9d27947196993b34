"""Checkpoints that rank 0 alone saves and other ranks read, on the command line."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
import types
from typing import Any

import pytest

import memexplore as mx
from memexplore.virtual_gpu.files import elsewhere, session

SCRIPT = """
import contextlib, os, pathlib, sys, torch
import torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
layer = torch.nn.Linear(256, 1024, device="cuda")
ddp = torch.nn.parallel.DistributedDataParallel(layer)
optimizer = torch.optim.SGD(ddp.parameters())
for epoch in range(2):
    ddp(torch.ones(8, 256, device="cuda")).sum().backward()
    optimizer.step()
    if rank == 0:
        os.makedirs("checkpoints", exist_ok=True)
        torch.save(layer.state_dict(), f"checkpoints/{epoch}.pt")
        pathlib.Path(f"log{epoch}.txt").write_text("loss")
    dist.barrier()
    # On rank 0 the last one is saved after the last step.
    state = torch.load(f"checkpoints/{epoch}.pt", map_location="cuda")
    layer.load_state_dict(state)
    assert pathlib.Path(f"checkpoints/{epoch}.pt").exists()
if rank == 0:
    torch.save(layer.state_dict(), "last.pt")
dist.barrier()
# For a file that is missing everywhere, rank 0 runs to its end; its others can still be read.
with contextlib.suppress(FileNotFoundError):
    open("absent.txt")
print("RANK", rank, tuple(torch.load("last.pt", map_location="cuda")["weight"].shape))
sys.exit()
"""


EACH_ITS_OWN = """
import os, tempfile, torch
import torch.distributed as dist
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
rows = torch.zeros(256, 256, device="cuda")
assert not os.path.exists("rows.pt")
torch.save(rows, f"part-{rank:02d}-of-{world}.pt")
if rank == 0:
    torch.save(rows, "rows.pt")
dist.barrier()
whole = torch.cat([torch.load(f"part-{other:02d}-of-{world}.pt", map_location="cuda") for other in range(world)])
last = os.path.join(tempfile.gettempdir(), "last.checkpoint")
if rank == 0:
    torch.save(whole, last)
dist.barrier()
print("RANK", rank, tuple(torch.load(last, map_location="cuda").shape))
# Beside files that a rank has saved it finds those of others, also one that it only looks for.
assert not os.path.exists("absent.pt")
assert os.path.exists("rows.pt")
if rank == 0:
    os.remove(last)
"""

AWAITED = """
import os, time, torch
import torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
if rank == 0:
    with open("rows.txt", "w") as file:
        file.write("1024")
while not os.path.exists("rows.txt"):
    time.sleep(0.2)
with open("rows.txt") as file:
    rows = int(file.read())
print("RANK", rank, tuple(torch.zeros(rows, 256, device="cuda").shape))
"""


def run(folder: pathlib.Path, rank: str, text: str = SCRIPT) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(text)
    command = [sys.executable, "-m", "memexplore", "run", "--json", "--gpu", "T4", "--world", "4", "--rank", rank]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), TMPDIR=str(folder.parent))
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, cwd=folder, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert f"RANK {rank} (1024, 256)" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_rank_reads_the_checkpoint_that_rank_0_has_saved(tmp_path: pathlib.Path) -> None:
    peaks = [run(tmp_path, rank)["peak_allocated"] for rank in ("0", "3")]
    assert peaks[0] == peaks[1] > 0
    assert not (tmp_path / "checkpoints").exists()


def test_a_rank_reads_the_files_that_each_rank_has_saved_and_one_that_is_removed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").mkdir()
    for rank in ("0", "3"):
        run(tmp_path / "run", rank, EACH_ITS_OWN)
    assert [path.name for path in (tmp_path / "run").glob("*.pt")] == []


def test_a_rank_that_waits_for_a_file_gets_it_from_rank_0(tmp_path: pathlib.Path) -> None:
    # 1024 rows of 256 numbers of 4 bytes.
    assert run(tmp_path, "3", AWAITED)["peak_allocated"] == 1024 * 256 * 4


def test_a_file_that_is_awaited_and_that_no_rank_writes_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    with session.every_file(), mx.virtual("T4"), elsewhere.fetched_by(asked.append):
        with pytest.raises(RuntimeError, match=r"waits for the file absent.txt, and no other rank has written it"):
            while not os.path.exists("absent.txt"):
                time.sleep(0.5)
        assert asked == [str(tmp_path / "absent.txt")]


def test_a_file_that_a_busy_program_looks_for_is_not_awaited(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seconds = iter(range(100))
    # Two seconds pass between two looks, of which the program computes one.
    clocks = types.SimpleNamespace(monotonic=lambda: float(next(seconds)), process_time=lambda: next(seconds) / 2)
    monkeypatch.setattr(elsewhere, "time", clocks)
    asked: list[str] = []
    with session.every_file(), mx.virtual("T4"), elsewhere.fetched_by(asked.append):
        assert not any(os.path.exists("stop.txt") for _ in range(20))
    assert asked == []
