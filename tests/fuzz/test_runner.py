"""Inputs that end their process, take too long, need too much memory or fail are found, and the others are run."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.reading import file_of
from tests.fuzz.runner import Finding, Input, run_inputs, seconds_allowed, write_out


def _hang() -> str:
    while True:
        pass


def _hang_in_c() -> str:
    return str(pow(7, 1 << 34) % 2)


def _crash() -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "ended"


def _fail() -> str:
    raise KeyError("no sentence")


def _grow() -> str:
    return str(len(bytes(4 << 30)))


@pytest.mark.parametrize(
    ("run", "kind"), [(_hang, "hang"), (_hang_in_c, "hang"), (_crash, "crash"), (_fail, "error"), (_grow, "error")]
)
def test_a_failing_input_is_found_and_those_behind_it_run(run: Callable[[], str], kind: str, tmp_path: Path) -> None:
    def make(number: int) -> Input:
        return Input(b"%d" % number, 10, run if number == 3 else lambda: "read")

    results = list(run_inputs(make, range(8)))
    [finding] = [finding for result in results for finding in result.findings]
    assert (finding.number, finding.kind) == (3, kind)
    outcomes = sum((result.outcomes for result in results), Counter[str]())
    assert outcomes.total() == 8
    assert write_out(make, finding, tmp_path).read_bytes() == b"3"


def test_an_input_may_take_a_second_a_megabyte() -> None:
    assert [seconds_allowed(length) for length in (0, 1_000_000, 30_000_000)] == [1, 1, 30]


def test_the_text_of_an_error_has_its_traceback() -> None:
    [result] = run_inputs(lambda number: Input(b"", 0, _fail), range(1))
    assert result.findings == [Finding(0, "error", result.findings[0].text)]
    assert "KeyError: 'no sentence'" in result.findings[0].text


def _crash_while_reading() -> str:
    with file_of(b"content") as path:
        assert path.read_bytes() == b"content"
        return _crash()


def test_a_process_that_is_killed_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = [tmp_path, *(path for path in [Path("/dev/shm")] if path.is_dir())]
    before = [list(folder.glob("*memexplore*")) for folder in folders]
    [result] = run_inputs(lambda number: Input(b"", 0, _crash_while_reading), range(1))
    assert [finding.kind for finding in result.findings] == ["crash"]
    assert [list(folder.glob("*memexplore*")) for folder in folders] == before
