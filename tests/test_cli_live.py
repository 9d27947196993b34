"""`memexplore run --live`: options, folders, reports and exit statuses, on a virtual GPU and on the CPU."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch

import memexplore as mx
from memexplore.cli import live_run
from memexplore.cli.run_options import normalized
from memexplore.run.machine import machine_of
from memexplore.tape import Tape
from tests.live.test_cuda import real_gpu  # noqa: F401  (a fixture)
from tests.live.training import Loop
from tests.test_cli import memexplore

TRAINING = """
import sys, time
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
history = []

def step(batch=32):
    model(torch.randn(batch, 256, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def write(tmp_path):
    def write_script(text, name="train.py"):
        path = tmp_path / name
        path.write_text(TRAINING + textwrap.dedent(text))
        return path

    return write_script


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--live", "train.py"], ["run", "--live=", "train.py"]),
        (["run", "train.py", "--live"], ["run", "train.py", "--live="]),
        (["run", "train.py", "--live", "--gpu", "T4"], ["run", "train.py", "--live=", "--gpu", "T4"]),
        (["run", "train.py", "--live", "runs/a"], ["run", "train.py", "--live=runs/a"]),
        (["run", "--live", "runs/a", "train.py"], ["run", "--live=runs/a", "train.py"]),
        (["run", "--live", "runs/a", "-m", "package"], ["run", "--live=runs/a", "-m", "package"]),
        (["run", "--live=runs/a", "train.py"], ["run", "--live=runs/a", "train.py"]),
    ],
)
def test_live_takes_a_folder_or_nothing(arguments, expected):
    assert normalized(arguments) == expected


def test_a_file_without_suffix_is_the_script(tmp_path):
    path = tmp_path / "train"
    path.write_text("")
    assert normalized(["run", "--live", str(path)]) == ["run", "--live=", str(path)]


def test_a_folder_of_another_run_is_a_usage_error(write, tmp_path):
    (tmp_path / "run" / "rank=0").mkdir(parents=True)
    done = memexplore("run", write("print('ran')"), "--live", tmp_path / "run", "--gpu", "T4")
    assert done.returncode == 2
    assert "exists already; name another folder, or remove this one" in done.stderr
    assert done.stdout == ""


def test_a_folder_that_is_a_file_is_a_usage_error(write, tmp_path):
    (tmp_path / "notes.txt").write_text("")
    done = memexplore("run", write("print('ran')"), f"--live={tmp_path / 'notes.txt'}", "--gpu", "T4")
    assert done.returncode == 2
    assert "is a file; name a folder" in done.stderr


# --- without a terminal --------------------------------------------------------------------------------------------


def test_a_file_gets_plain_lines_and_the_report(write):
    # The program goes on until the thread that writes lines, which looks every half second, has written one.
    path = write("""
        import pathlib
        for number in range(30):
            step(8192 if number == 9 else 32)
        while "memexplore: step " not in pathlib.Path("stderr.txt").read_text():
            time.sleep(0.05)
        print("done")
    """)
    errors = path.parent / "stderr.txt"
    with errors.open("w") as stream:
        done = memexplore("run", path, "--live", "--gpu", "T4", cwd=path.parent, stderr=stream)
    written = errors.read_text()
    assert done.returncode == 0, written
    assert "\x1b" not in done.stdout + written
    line = next(line for line in written.splitlines() if line.startswith("memexplore: step "))
    assert "ms/step · virtual Tesla T4 · watching costs" in line
    lines = done.stdout.splitlines()
    assert lines[0] == "done"
    assert lines[1].startswith("■ ended · step 30 · ")
    assert "in step 10" in done.stdout
    assert "larger batch: 8192×256 float32 instead of 32×256 float32" in done.stdout
    assert "Step 10, the recorded step with the highest peak:" in done.stdout
    assert "Fits: needs" in done.stdout


def test_steps_are_those_of_the_recorded_program(write, tmp_path):
    path = write("for _ in range(6):\n    step()\n")
    done = memexplore("run", path, "--live", "--gpu", "T4", "--json", "-o", tmp_path / "live.tape")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["steps"], result["outcome"], result["error"]) == (6, "fits", None)
    whole = memexplore("run", path, "--gpu", "T4", "--json")
    recorded = json.loads(whole.stdout)
    assert result["worst_step"]["peak_allocated"] == recorded["peak_allocated"] == result["peak_allocated"]
    assert Tape.load(tmp_path / "live.tape").peak()[0] == recorded["peak_allocated"]


def test_the_cpu_is_watched(write):
    done = memexplore("run", write("for _ in range(4):\n    step()\n"), "--live", "--gpu", "cpu")
    assert done.returncode == 0, done.stderr
    assert "■ ended · step 4 · " in done.stdout
    assert "· cpu ·" in done.stdout


def test_a_page_is_written(write, tmp_path):
    done = memexplore("run", write("step()"), "--live", "--gpu", "T4", "--html", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").read_text().startswith("<!")


@pytest.mark.parametrize(
    ("ending", "status", "text"),
    [
        ("raise ValueError('no such class')", 1, "ValueError: no such class (train.py:"),
        ("sys.exit(7)", 7, "exit status 7"),
        ("sys.exit(0)", 0, "■ ended · step 2"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("torch.empty(2**40, dtype=torch.uint8, device='cuda')", 3, "CUDA out of memory"),
    ],
)
def test_exit_statuses_are_those_of_run(write, ending, status, text):
    path = write(f"step()\nstep()\n{ending}\n")
    done = memexplore("run", path, "--live", "--gpu", "T4", cwd=path.parent)
    assert done.returncode == status
    assert text in done.stdout
    assert "memexplore/" not in done.stderr


def test_an_out_of_memory_error_that_ends_the_training_is_status_3(write):
    path = write("""
        step()
        try:
            torch.empty(2**40, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            print("too large")
    """)
    done = memexplore("run", path, "--live", "--gpu", "T4")
    assert done.returncode == 3
    assert "Out of memory: no step of the program followed its last out-of-memory error." in done.stdout


def test_a_program_that_goes_on_after_an_out_of_memory_error_fits(write):
    path = write("""
        try:
            torch.empty(2**40, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            step()
    """)
    done = memexplore("run", path, "--live", "--gpu", "T4")
    assert done.returncode == 0, done.stdout
    assert "Note: the program went on after 1 out-of-memory error" in done.stdout


def test_training_on_the_cpu_beside_a_virtual_gpu_is_status_4(write):
    path = write("model.cpu()\ndevice = 'cpu'\nmodel.zero_grad()\nfor _ in range(3):\n    step()\n")
    done = memexplore("run", path, "--live", "--gpu", "T4")
    assert done.returncode == 4
    assert "Nothing trained on the Tesla T4." in done.stdout


def test_a_program_without_steps_says_so(write):
    done = memexplore("run", write("model(torch.ones(4, 256, device=device))"), "--live", "--gpu", "T4")
    assert done.returncode == 0, done.stderr
    assert "No training step came to its end, because no optimizer stepped. The program's peak is" in done.stdout


def test_growth_names_its_holder_at_the_end(write):
    path = write("""
        for _ in range(60):
            step()
            history.append(torch.zeros(1 << 20, device=device))
            time.sleep(0.03)
    """)
    done = memexplore("run", path, "--live", "--gpu", "T4", cwd=path.parent)
    assert "⚠ Memory grows by 4.00 MiB a step since step " in done.stdout
    assert "held by train.py:18: history.append(torch.zeros(1 << 20, device=device))" in done.stdout


def test_a_failure_on_the_cpu_is_reported_with_the_recorded_step_of_the_highest_peak(write):
    path = write("for _ in range(8):\n    step()\nraise ValueError('the data ended')\n")
    done = memexplore("run", path, "--live", "--gpu", "cpu", cwd=path.parent)
    assert done.returncode == 1
    assert "✖ failed · step 9 · " in done.stdout
    assert "Peak allocated 0 B" not in done.stdout
    assert ", the recorded step with the highest peak:\nPeak " in done.stdout


# --- programs that watch themselves --------------------------------------------------------------------------------


def test_a_run_that_the_program_watches_itself_takes_over(write, tmp_path):
    path = write("""
        import memexplore as mx
        with mx.watch(model, optimizer, first=1) as live:
            for _ in range(5):
                step()
        print(len(live.steps()), "own steps")
    """)
    folder = tmp_path / "run"
    done = memexplore("run", path, "--live", folder, "--gpu", "T4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "5 own steps"
    assert "■ ended · step 5" in done.stdout
    assert mx.load(folder).table()["steps"].tolist() == [5]


# --- a real GPU ----------------------------------------------------------------------------------------------------


def test_a_real_gpu_is_watched(real_gpu):  # noqa: F811
    loop = Loop("cuda")

    def program():
        for _ in range(6):
            loop.step()

    watched = live_run.watch(program, machine_of("cuda"), live_run.NO_FOLDER)
    assert watched.outcome == "fits"
    assert watched.status.device == "cuda:0"
    assert watched.status.newest.step == 6
    assert watched.status.capacity == torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    assert watched.peak == torch.cuda.max_memory_allocated()
    assert watched.text().startswith("■ ended · step 6 · ")


# --- folders -------------------------------------------------------------------------------------------------------


def test_a_folder_has_the_steps_and_is_opened_again(write, tmp_path):
    folder = tmp_path / "runs" / "a"
    path = write("for _ in range(8):\n    step()\n")
    done = memexplore("run", path, "--live", folder, "--gpu", "T4")
    assert done.returncode == 0, done.stderr
    assert f"The run is in {folder}: memexplore open {folder}" in done.stdout
    ranks = mx.load(folder)
    assert ranks.steps(0)["step"].tolist() == list(range(1, 9))
    assert ranks.table()["state"].tolist() == ["ended"]
    assert not list(folder.rglob("*.unfinished"))
    opened = memexplore("open", folder)
    assert opened.returncode == 0
    assert "■ ended · step 8 · " in opened.stdout
