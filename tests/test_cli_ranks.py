"""Ranks of one script on the command line: each is run, and the worst is named."""

from __future__ import annotations

import json
import pathlib

import pytest

import memexplore as mx
from memexplore.cli import commands
from memexplore.cli.rank_runs import RankRun, report, worst
from tests.test_cli import memexplore

MIB = 2**20
SCRIPT = f"""
import os, sys, torch
torch.distributed.init_process_group("nccl")
rank = torch.distributed.get_rank()
assert rank == int(os.environ["RANK"]) and sys.argv[1:] == ["--mib", "20"]
x = torch.zeros((20 if rank < 2 else 40) * {MIB // 4}, device="cuda")
print("rank", rank)
"""


@pytest.fixture
def script(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def run(script: str, *options: str) -> int:
    return commands.main(["run", script, *options, "--", "--mib", "20"])


def test_equal_ranks_share_a_row_and_the_worst_is_named(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(script, "--gpu", "T4", "--world", "3", "--rank", "all") == 0
    lines = capsys.readouterr().out.splitlines()
    # A tensor of 10 MiB or more has a segment of its own, here of whole 2 MiB.
    assert lines[0].startswith("Rank 2 of 3 needs the most: 40.0 MiB reserved of ")
    assert [line.split() for line in lines[3:5]] == [
        ["2", "40.0", "MiB", "40.0", "MiB", "fits"],
        ["0–1", "20.0", "MiB", "20.0", "MiB", "fits"],
    ]


def test_a_rank_without_memory_decides_the_status(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(script, "--gpu", "32MiB", "--world", "3", "--rank", "0,2", "--json") == 3
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["world"], found["worst"]) == (3, 2)
    assert [one["outcome"] for one in found["ranks"]] == ["fits", "oom"]
    assert "Tried to allocate 40.00 MiB" in captured.err


def test_one_rank_is_an_ordinary_run(script: str) -> None:
    options = ("--gpu", "T4", "--world", "1024", "--rank", "1000", "--json")
    done = memexplore("run", script, *options, "--", "--mib", "20")
    found = json.loads(done.stdout)
    assert found["peak_allocated"] == 40 * MIB
    assert any(note.endswith("this is rank 1000 of 1024") for note in found["notes"])


def test_ranks_are_written_to_a_folder(script: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page, pages = tmp_path / "ranks", tmp_path / "worst.html", tmp_path / "pages"
    options = ("--gpu", "32MiB", "--world", "3", "--rank", "1,2", "-o", str(folder))
    assert run(script, *options, "--html", str(page)) == 3
    ranks = mx.load(folder)
    # Rank 2 asks for 40 MiB of 32.
    assert ranks.worst == 2
    assert ranks.table()[["rank", "state", "peak_allocated"]].to_numpy().tolist() == [
        [2, "failed", 0],
        [1, "ended", 20 * MIB],
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["rank-1.tape", "rank-2.tape"]
    assert (ranks.tape(1).meta.rank, ranks.tape(1).meta.world) == (1, 3)
    assert "rank 2 of 3" in page.read_text()
    assert run(script, "--gpu", "T4", "--world", "3", "--rank", "0,2", "--html", str(pages)) == 0
    assert sorted(path.name for path in pages.iterdir()) == ["rank-0.html", "rank-2.html"]
    capsys.readouterr()
    assert commands.main(["open", str(folder)]) == 0
    assert "2 ranks · 1 ended with an error, first rank 2: torch.OutOfMemoryError: CUDA" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--rank", "0"], "--rank needs the number of processes"),
        (["--world", "0"], "--world 0 is no number of processes"),
        (["--world", "4", "--rank", "4"], "names ranks that a world of 4 does not have"),
        (["--world", "4", "--rank", "one"], "names no ranks"),
        (["--world", "4", "--rank", "all", "--advise"], "--advise is for one rank"),
        (["--world", "4", "--rank", "all", "-o", __file__], "is a file; several ranks are written to a folder"),
        (["--world", "4", "--rank", "all", "-o", str(pathlib.Path(__file__).parent)], "is not empty"),
        (["--world", "4", "--gpu", "cpu"], "--world needs a virtual GPU"),
    ],
)
def test_wrong_options_are_refused(
    script: str, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script, *options) == 2
    assert reason in capsys.readouterr().err


def test_a_failed_rank_comes_before_those_that_need_more() -> None:
    fits = {"outcome": "fits", "peak_allocated": 8, "peak_reserved": 8, "gpu": "T4", "capacity": 64, "notes": []}
    runs = [RankRun(0, fits, 0, ""), RankRun(1, None, 1, "Traceback")]
    assert worst(runs).rank == 1
    assert report(runs, 2).splitlines()[0].endswith("exit status 1.")
