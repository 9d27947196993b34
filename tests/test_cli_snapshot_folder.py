"""`memexplore open FOLDER` of snapshot files, one for each rank of a job."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

import memexplore as mx
from memexplore import snapshot
from memexplore.cli import main, snapshot_folder
from memexplore.tape import Tape

NOON = 1_764_000_000_000_000
"""Microseconds since 1970."""
SECOND = 1_000_000


def layers(width: int) -> None:
    """Hold 20 blocks of width × width numbers of 4 bytes."""
    kept = [torch.zeros(width, width, device="cuda") for _ in range(20)]
    kept.clear()


@pytest.fixture(scope="module")
def tapes() -> dict[str, Tape]:
    """20 × 4 MiB fit 128 MiB, 20 × 16 MiB do not."""
    widths = {"fits": 1024, "fails": 2048}
    return {name: mx.simulate(lambda width=width: layers(width), gpu="128MiB") for name, width in widths.items()}


def write(path: Path, tape: Tape, began: int) -> None:
    content = snapshot.as_snapshot(tape)
    for events in content["device_traces"]:
        for number, event in enumerate(events):
            event["time_us"] = began + number
    path.write_bytes(pickle.dumps(content))


def test_the_first_rank_that_failed_is_named_with_the_reason(tmp_path: Path, tapes: dict[str, Tape]) -> None:
    write(tmp_path / "rank0_memory.pickle", tapes["fails"], NOON + SECOND)
    write(tmp_path / "rank2_memory.pickle", tapes["fits"], NOON)
    write(tmp_path / "rank10_memory.pickle", tapes["fails"], NOON)
    text = snapshot_folder.text(tmp_path)
    summary, table, report = text.split("\n\n", 2)
    assert summary.startswith("3 ranks · rank 10 ran out of memory first, 1.000 s before rank 0: ")
    assert "16.0 MiB" in summary
    assert [line.split()[0] for line in table.splitlines()] == ["rank", "10", "0", "2"]
    assert ["+0.000 s" in table, "+1.000 s" in table] == [True, True]
    assert report.startswith("Rank 10, rank10_memory.pickle:\n")
    assert "Out of memory" in report


def test_json_has_the_time_after_the_first_failure(tmp_path: Path, tapes: dict[str, Tape], capsys) -> None:
    write(tmp_path / "rank0.pickle", tapes["fails"], NOON + SECOND)
    write(tmp_path / "rank1.pickle", tapes["fails"], NOON)
    assert main(["open", str(tmp_path), "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [(each["rank"], each["seconds_after_first"]) for each in ranks] == [(1, 0), (0, 1)]
    assert ranks[0]["post_mortem"]["cause"] == "too much memory"


def test_a_clock_that_begins_with_its_program_is_not_compared(tmp_path: Path, tapes: dict[str, Tape]) -> None:
    for rank in range(2):
        snapshot.save_snapshot(tapes["fails"], tmp_path / f"{rank}.pickle")
    assert "the files do not say which one first" in snapshot_folder.text(tmp_path)


def test_without_a_failure_the_highest_peak_comes_first(tmp_path: Path, tapes: dict[str, Tape]) -> None:
    write(tmp_path / "a.pickle", mx.simulate(lambda: layers(512), gpu="128MiB"), NOON)
    write(tmp_path / "b.pickle", tapes["fits"], NOON)
    # 20 × 4 MiB
    assert snapshot_folder.text(tmp_path).startswith(
        "2 ranks · none ran out of memory · rank 1 has the highest peak: 80.0 MiB"
    )


def test_a_damaged_file_is_named_and_the_others_are_shown(tmp_path: Path, tapes: dict[str, Tape]) -> None:
    write(tmp_path / "rank0.pickle", tapes["fails"], NOON)
    (tmp_path / "rank1.pickle").write_bytes(b"\x80\x04 cut")
    text = snapshot_folder.text(tmp_path)
    assert text.startswith("2 ranks · rank 0 ran out of memory: ")
    assert "Rank 1: " in text


def test_a_folder_of_damaged_files_ends_in_a_sentence(tmp_path: Path, capsys) -> None:
    (tmp_path / "rank0.pickle").write_bytes(b"cut")
    with pytest.raises(SystemExit, match="1"):
        main(["open", str(tmp_path)])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "rank0.pickle is not a snapshot that memexplore can read" in error
