"""How programs end under `memexplore run`: the run ends when the program's process would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import memexplore as mx

MIB = 1024**2
ENDS: dict[str, tuple[str, int, int]] = {
    "a thread goes on": (
        "import threading, time\n"
        "def work():\n    time.sleep(0.2)\n    torch.ones(MIB, device='cuda')\n"
        "threading.Thread(target=work).start()",
        0,
        4 * MIB,
    ),
    "a pool goes on": (
        "from concurrent.futures import ThreadPoolExecutor\nimport time\n"
        "def work():\n    time.sleep(0.2)\n    torch.ones(MIB, device='cuda')\n"
        "pool = ThreadPoolExecutor()\npool.submit(work)",
        0,
        4 * MIB,
    ),
    "an exit handler": ("import atexit\natexit.register(torch.ones, MIB, device='cuda')", 0, 4 * MIB),
    "an exit handler after an error": (
        "import atexit\natexit.register(torch.ones, MIB, device='cuda')\nraise ValueError('no')",
        1,
        4 * MIB,
    ),
    "os._exit": ("import os\nx = torch.ones(MIB, device='cuda')\nos._exit(0)", 0, 4 * MIB),
    "os._exit with a status": ("import os\nx = torch.ones(MIB, device='cuda')\nos._exit(3)", 3, 4 * MIB),
    "a closed stdout": ("import sys\nx = torch.ones(MIB, device='cuda')\nsys.stdout.close()", 0, 4 * MIB),
    "another stdout": (
        "import os, sys\nx = torch.ones(MIB, device='cuda')\nsys.stdout = open(os.devnull, 'w')\nsys.stdout.close()",
        0,
        4 * MIB,
    ),
}
"""Program, exit status and peak in bytes: MIB numbers of 4 bytes each."""


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a program on a virtual T4 in a folder."""
    script = folder / "train.py"
    script.write_text(f"import torch\nMIB = {MIB}\n{code}\n")
    command = [sys.executable, "-m", "memexplore", "run", str(script), "--gpu", "T4", *options]
    environment = os.environ | {"PYTHONPATH": str(Path(mx.__file__).parents[1])}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("end", ENDS)
def test_the_run_ends_with_the_program(tmp_path: Path, end: str) -> None:
    code, status, peak = ENDS[end]
    done = run(tmp_path, code, "--json")
    assert (done.returncode, json.loads(done.stdout)["peak_allocated"]) == (status, peak)


def test_the_report_of_a_program_that_closes_stdout_is_printed(tmp_path: Path) -> None:
    done = run(tmp_path, "import sys\nx = torch.ones(MIB, device='cuda')\nsys.stdout.close()")
    assert done.stdout.startswith("Fits: needs 20.0 MiB")
    assert done.stderr == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reports_nothing(tmp_path: Path) -> None:
    code = """
import os, sys
x = torch.ones(MIB, device="cuda")
child = os.fork()
if child == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr)
"""
    done = run(tmp_path, code, "--json", "-o", "run.tape")
    assert json.loads(done.stdout)["outcome"] == "fits"
    assert done.stderr.splitlines()[0] == "7"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows replaces no process")
def test_a_program_that_replaces_its_process_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    done = run(tmp_path, "import os, sys\nos.execlp(sys.executable, sys.executable, '-c', 'print(1)')")
    assert done.returncode == 1
    assert "run that program under memexplore instead" in done.stderr


def test_names_of_the_command_line_belong_to_its_folder(tmp_path: Path) -> None:
    code = "import os, tempfile\nos.chdir(tempfile.mkdtemp())\ntorch.ones(8, device='cuda')"
    assert run(tmp_path, code, "-o", "run.tape", "--html", "page.html").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run.tape", "train.py"]


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path, "print('ran')", "--live", "file/folder")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_sigterm_ends_the_processes_of_all_ranks_and_their_folders(tmp_path: Path) -> None:
    started = tmp_path / "started"
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import time, torch
torch.ones(8, device="cuda")
open({str(started)!r}, "a").write("x")
time.sleep(600)
"""
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(mx.__file__).parents[1]), "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "memexplore", "run", str(script), "--gpu", "T4", "--world", "4", "--rank", "0-1"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while len(children(process.pid)) < 2:
        time.sleep(0.1)
    waited = children(process.pid)
    time.sleep(3)  # the ranks may be anywhere: importing torch, or in the program
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 130
    assert [pid for pid in waited if Path(f"/proc/{pid}").exists()] == []
    assert list(temporary.glob("memexplore-ranks-*")) == []


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(text) for text in found.stdout.split()]


def test_a_disk_that_is_full_leaves_what_stood_there(tmp_path: Path) -> None:
    from memexplore.text import result_files

    page = tmp_path / "page.html"
    page.write_text("<html>old</html>")

    def writer(path: Path) -> Any:
        path.write_text("<html>ne")
        if path.parent == tmp_path:
            raise OSError(28, "No space left on device")

    written, problem = result_files.write(page, writer)
    assert page.read_text() == "<html>old</html>"
    assert "No space left on device" in problem
    assert written.parent != tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert tempfile.gettempdir() in str(written)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_crash_in_compiled_code_names_the_lines_that_led_to_it(tmp_path: Path) -> None:
    ended = run(tmp_path, "import ctypes\ndef reads():\n    ctypes.string_at(0)\nreads()")
    assert ended.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in ended.stderr
    # `import torch` and MIB are the first two lines.
    assert f'File "{tmp_path / "train.py"}", line 5 in reads' in ended.stderr
