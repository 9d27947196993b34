"""Overlays of processes that end or are killed: which are left, and what the next process does with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memexplore.virtual_gpu.files import ownership
from memexplore.virtual_gpu.files.overlay import Overlay

NO_VALUES = b"a tensor without values"
PROCESS = """
import sys, time
from memexplore.virtual_gpu.files.overlay import Overlay
overlay = Overlay(b"a tensor without values")
overlay.begin(lambda overlay, logical: True)
overlay.temporary = sys.argv[1]
for name in sys.argv[2:]:
    with open(overlay.for_writing(sys.argv[1] + "/" + name, False), "wb") as file:
        file.write(b"values" if name == "kept" else b"a tensor without values")
print("ready", flush=True)
time.sleep(60)
"""


def overlays(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith("memexplore-files-")]


def started(folder: Path, *names: str) -> subprocess.Popen[str]:
    """Start a process that writes files of these names to an overlay and waits."""
    process = subprocess.Popen([sys.executable, "-c", PROCESS, folder, *names], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def write(folder: Path) -> Overlay:
    """Make an overlay in this process, in which a file is written."""
    overlay = Overlay(NO_VALUES)
    overlay.begin(lambda overlay, logical: True)
    overlay.temporary = str(folder)
    Path(overlay.for_writing(f"{folder}/mine", keep=False)).write_bytes(NO_VALUES)
    return overlay


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="folders of killed processes stay on Windows")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_process_deletes_files_without_values_of_one_that_was_killed(end: int, tmp_path: Path) -> None:
    process = started(tmp_path, "model")
    assert len(overlays(tmp_path)) == 1
    process.send_signal(end)
    process.communicate()
    overlay = write(tmp_path)
    assert [str(path) for path in overlays(tmp_path)] == [os.path.realpath(overlay.root)]
    overlay.close()
    assert overlays(tmp_path) == []


def test_files_with_values_of_a_process_that_was_killed_stay(tmp_path: Path) -> None:
    process = started(tmp_path, "kept", "model")
    process.kill()
    process.communicate()
    write(tmp_path).close()
    (left,) = overlays(tmp_path)
    assert [path.name for path in left.rglob("*") if path.is_file()] == ["kept"]


def test_the_overlay_of_a_running_process_stays(tmp_path: Path) -> None:
    process = started(tmp_path, "model")
    write(tmp_path).close()
    (left,) = overlays(tmp_path)
    assert sorted(path.name for path in left.rglob("*") if path.is_file()) == [ownership.MARK, "model"]
    process.kill()
    process.communicate()


def test_a_program_does_not_see_the_mark(tmp_path: Path) -> None:
    overlay = write(tmp_path)
    assert ownership.MARK not in overlay.names("/")
    overlay.close()
