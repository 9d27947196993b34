"""`--rank all`: equal ranks are found by their requests, and distinct ones run to the end."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping

import pytest

from memexplore.cli import commands
from memexplore.cli.equal_ranks import Equal, Part, run_distinct
from memexplore.cli.first_steps import Until
from memexplore.cli.rank_runs import RankRun, report

MIB = 2**20
SCRIPT = f"""
import torch
torch.distributed.init_process_group("nccl")
rank = torch.distributed.get_rank()
weight = torch.nn.Parameter(torch.zeros({MIB // 4}, device="cuda"))
optimizer = torch.optim.SGD([weight])
held = torch.zeros((20 if rank == 3 else 10) * {MIB // 4}, device="cuda")
for _ in range(2):
    weight.sum().backward()
    optimizer.step()
print("END OF", rank)
"""


def _world(
    first: Mapping[int, str | None], end: Mapping[int, str]
) -> tuple[list[RankRun], tuple[Equal, ...], list[Part]]:
    """Run ranks of which the requests until the first step and to the end are given; return also what was run."""
    started: list[Part] = []

    def run(parts: Iterable[Part]) -> list[RankRun]:
        now = list(parts)
        started.extend(now)
        found = []
        for rank, until in now:
            step = None if first[rank] is None else [3, first[rank]]
            stops = until is Until.FIRST_STEP and step is not None
            requests = {"first_step": step, "end": None if stops else [9, end[rank]]}
            found.append(RankRun(rank, {"requests": requests, "outcome": "fits"}, 0, ""))
        return found

    return *run_distinct(sorted(first), run), started


def test_the_first_and_the_last_of_equal_ranks_run_to_the_end() -> None:
    same = dict.fromkeys(range(8), "x")
    runs, equal, started = _world(same, same)
    assert [one.rank for one in runs] == [0, 7]
    assert equal == (Equal((1, 2, 3, 4, 5, 6), (0, 7), 3),)
    assert started == [(0, Until.END), *((rank, Until.FIRST_STEP) for rank in range(1, 7)), (7, Until.END)]


def test_every_distinct_rank_runs_to_the_end() -> None:
    # Two ranks of each of three stages of a pipeline, and one with an uneven shard.
    stages = dict(enumerate("aabbcdc"))
    runs, equal, started = _world(stages, stages)
    assert ([one.rank for one in runs], equal) == ([0, 1, 2, 3, 4, 5, 6], ())
    assert [rank for rank, until in started if until is Until.END] == [0, 6, 1, 2, 3, 4, 5]


def test_ranks_that_differ_after_the_first_step_all_run_to_the_end() -> None:
    # Rank 0 alone gathers a checkpoint.
    runs, equal, _ = _world(dict.fromkeys(range(5), "x"), {rank: "x" if rank else "saved" for rank in range(5)})
    assert ([one.rank for one in runs], equal) == ([0, 1, 2, 3, 4], ())


def test_ranks_without_an_optimizer_step_run_once_to_their_end() -> None:
    runs, equal, started = _world(dict.fromkeys(range(4), None), dict.fromkeys(range(4), "x"))
    assert ([one.rank for one in runs], equal, len(started)) == ([0, 1, 2, 3], (), 4)


def test_ranks_that_failed_are_not_equal_to_ranks_that_ended() -> None:
    def run(parts: Iterable[Part]) -> list[RankRun]:
        return [
            RankRun(rank, None if rank == 1 else {"requests": {"first_step": [3, "x"], "end": [9, "x"]}}, rank == 1, "")
            for rank, _ in parts
        ]

    runs, equal = run_distinct([0, 1, 2], run)
    assert ([one.status for one in runs], equal) == ([0, 1, 0], ())


def test_equal_ranks_stand_in_the_row_of_their_equals() -> None:
    summary = {"outcome": "fits", "peak_allocated": 8 * MIB, "peak_reserved": 8 * MIB, "gpu": "T4"}
    runs = [RankRun(rank, summary, 0, "") for rank in (0, 3)]
    lines = report(runs, 4, [Equal((1, 2), (0, 3), 24)]).splitlines()
    assert lines[3].split() == ["0–3", "8.00", "MiB", "8.00", "MiB", "fits"]
    assert lines[4].startswith(
        "Note: ranks 1–2 made the 24 requests of ranks 0, 3 until the end of the first optimizer"
    )


def test_the_command_runs_equal_ranks_only_until_the_end_of_their_first_step(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert commands.main(["run", str(script), "--gpu", "T4", "--world", "5", "--rank", "all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["worst"] == 3
    # Weight, gradient and 20 MiB: rank 3 is distinct, ranks 1 and 2 equal ranks 0 and 4.
    assert {one["rank"]: one["peak_allocated"] >= 22 * MIB for one in found["ranks"]} == {0: False, 3: True, 4: False}
    assert [(each["ranks"], each["to"]) for each in found["equal"]] == [([1, 2], [0, 4])]
