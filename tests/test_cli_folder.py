"""`memexplore open FOLDER` while a run is written, and of runs that failed or died."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from memexplore.cli import commands
from memexplore.ranks.rows import StepRow
from tests.ranks.test_ranks import MIB, write_rank
from tests.screens import terminal
from tests.test_cli import memexplore


def row(step, peak):
    return StepRow(step, 0.1, peak * MIB, 2 * peak * MIB, MIB, "larger batch" if peak > 30 else "", 3 * MIB)


def test_a_run_is_followed_to_its_end(tmp_path):
    running = write_rank(tmp_path, 0, 10 * MIB, 12 * MIB, state="watching")
    running.status = lambda: {
        "growth": "Memory grows by 1.00 MiB a step since step 1.",
        "held_by": ["train.py:3: history.append(loss)"],
        "overhead": 0.0123,
    }
    running.describe("watching", "")
    with terminal("open", tmp_path) as screen:
        screen.wait_for("● step 2 · 100 ms/step · cuda:0 · watching costs 1.2 %")
        screen.wait_for("held by train.py:3: history.append(loss)")
        running.add(row(3, 40))
        running.flush()
        screen.wait_for("● step 3 · ")
        screen.wait_until(lambda lines: sum("Peak allocated" in line for line in lines) == 1)
        screen.wait_for("\npeak rose   3  40.0 MiB  larger batch")
        assert screen.process.poll() is None
        running.describe("ended", "")
        assert screen.wait() == 0
        assert any(line.startswith("■ ended · step 3 · ") for line in screen.everything())


def test_the_first_steps_are_waited_for(tmp_path):
    from memexplore.ranks.writer import Writer

    running = Writer(tmp_path, 0, {"device": "cuda:0", "capacity": None})
    with terminal("open", tmp_path) as screen:
        screen.wait_for("no step yet")
        running.add(row(1, 10))
        running.flush()
        screen.wait_for("● step 1 · ")
        running.describe("ended", "")
        assert screen.wait() == 0


def test_ranks_are_followed_with_the_worst_first(tmp_path):
    writers = [write_rank(tmp_path, rank, peak * MIB, state="watching") for rank, peak in enumerate((10, 30, 12))]
    with terminal("open", tmp_path, columns=180) as screen:
        screen.wait_for("3 ranks · rank 1 has the highest peak: 30.0 MiB in step 1, +18.0 MiB (+150 %) beside rank 2")
        screen.wait_for("Rank 1")
        writers[2].describe("failed", "OutOfMemoryError: CUDA out of memory (train.py:7)")
        screen.wait_for(
            "3 ranks · 1 ended with an error, first rank 2: OutOfMemoryError: CUDA out of memory (train.py:7)"
        )
        writers[0].describe("failed", "RuntimeError: connection closed by peer")
        screen.wait_for("3 ranks · 2 ended with an error, first rank 2: OutOfMemoryError")
        screen.wait_until(
            lambda lines: (
                [line.split()[:2] for line in lines if line.startswith("   ")][:3]
                == [["2", "failed"], ["0", "failed"], ["1", "watching"]]
            )
        )
        writers[1].describe("ended", "")
        assert screen.wait() == 0


def test_an_interrupt_ends_the_following_only(tmp_path):
    write_rank(tmp_path, 0, MIB, state="watching")
    with terminal("open", tmp_path) as screen:
        screen.wait_for("● step 1")
        screen.interrupt()
        assert screen.wait() == 130
        assert "Traceback" not in "\n".join(screen.everything())


def test_a_pipe_shows_a_run_once_or_follows_it(tmp_path):
    running = write_rank(tmp_path, 0, MIB, state="watching")
    once = memexplore("open", tmp_path)
    assert once.returncode == 0
    assert once.stdout.startswith("● step 1 · ")
    command = [sys.executable, "-m", "memexplore.cli", "open", str(tmp_path), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout.readline().startswith("rank 0: step 1 · 100 ms/step")
        running.describe("ended", "")
        rest = following.stdout.read()
        assert following.wait() == 0
    assert "■ ended · step 1" in rest
    assert "\x1b" not in rest


def test_a_run_whose_process_is_gone_has_died(tmp_path):
    write_rank(tmp_path, 0, 5 * MIB, 7 * MIB, state="watching")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path = tmp_path / "rank=0" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": gone.pid}))
    with terminal("open", tmp_path) as screen:
        assert screen.wait() == 0
        lines = screen.everything()
    assert any(line.startswith("✖ died · step 2 · ") for line in lines)


@pytest.mark.parametrize("description", ["{", "[]", '{"growth": 7, "notes": 3, "overhead": "x", "time": 1e400}'])
def test_a_damaged_description_is_shown_or_named(tmp_path, description):
    write_rank(tmp_path, 0, MIB)
    (tmp_path / "rank=0" / "run.json").write_text(description)
    done = memexplore("open", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 1" in done.stdout


def test_texts_of_a_folder_cannot_control_the_terminal(tmp_path):
    writer = write_rank(tmp_path, 0, MIB, state="watching")
    writer.status = lambda: {"growth": "\x1b[2Jgone", "held_by": ["\x1b]0;title\x07"], "notes": ["\x1b[31m"]}
    writer.describe("failed", "\x1b[2Jerror")
    done = memexplore("open", tmp_path)
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    assert "�[2Jerror" in done.stdout


def test_a_rank_that_writes_nothing_is_named(tmp_path, monkeypatch, capsys):
    now = time.time()
    for rank, age in enumerate([600, 0]):
        monkeypatch.setattr("time.time", lambda age=age: now - age)
        write_rank(tmp_path, rank, MIB, state="watching")
    assert commands.main(["open", str(tmp_path), "--no-follow"]) == 0
    text = capsys.readouterr().out
    assert "Rank 0 has written nothing for 10 min: a step takes long, or the process is gone." in text
