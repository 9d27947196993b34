import json
import os
import pickle
import subprocess
import sys
import textwrap

import pytest

import memexplore as mx
from memexplore.tape import Tape
from tests import python_programs

FITTING = """
import sys
import torch

model = torch.nn.Linear(1024, 1024, bias=False).cuda()
x = torch.randn(64, 1024, device="cuda")
print("the script says", *sys.argv[1:])
model(x).sum().backward()
"""
TOO_LARGE = """
import torch

first = torch.empty(2**30, dtype=torch.uint8, device="cuda")
second = torch.empty(2**40, dtype=torch.uint8, device="cuda")
"""


def memexplore(*arguments, cwd=None, env=None, **keywords):
    # Some variables are read when Python starts.
    fresh = [sys.executable, "-m", "memexplore.cli", *map(str, arguments)]
    return subprocess.run(
        fresh if env else python_programs.command("memexplore.cli", *arguments),
        cwd=cwd,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | (env or {}),
        text=True,
        timeout=240,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | keywords,
    )


@pytest.fixture
def write(tmp_path):
    def write_script(text, name="train.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write_script


# --- run -----------------------------------------------------------------------------------------------------------


def test_run_prints_a_summary_after_the_output_of_the_script(write):
    path = write(FITTING)
    done = memexplore("run", path, "--gpu", "T4", "--", "hello", "--gpu", cwd=path.parent)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "the script says hello --gpu"
    # Segments of 2, 20 and 20 MiB.
    assert lines[1].startswith("Fits: needs 42.0 MiB · T4 has 14.4 GiB · ")
    assert lines[2].startswith("Peak ")
    assert "predicted" in lines[2]
    # 1024 x 1024 fp32 are 4 MiB, allocated in line 5 of the script.
    assert any("4.00 MiB" in line and "parameter" in line and "train.py:5" in line for line in lines)


def test_json_is_the_whole_stdout_and_the_script_prints_to_stderr(write):
    path = write(FITTING + "import atexit, os\natexit.register(print, 'late')\nos.system('echo from a child')\n")
    done = memexplore("run", path, "--gpu", "RTX 4090", "--json", "--", "hello")
    result = json.loads(done.stdout)
    assert done.returncode == 0
    assert (result["source"], result["gpu"], result["outcome"]) == ("predicted", "RTX 4090", "fits")
    for text in ("the script says hello", "late", "from a child"):
        assert text in done.stderr
    # Parameter and gradient, 4 MiB each, and the input and output of 64 x 1024 fp32, 256 KiB each.
    assert result["peak_requested"] >= 2 * 4 * 1024**2 + 2 * 256 * 1024
    assert set(result["at_peak"]) == {"step", "phase", "layer", "op", "line", "by_category"}
    assert sum(result["at_peak"]["by_category"].values()) == result["peak_allocated"]


def test_default_gpu_is_a_t4(write):
    done = memexplore("run", write(FITTING), "--json")
    assert json.loads(done.stdout)["gpu"] == "T4"


def test_run_on_the_cpu_is_measured(write):
    text = FITTING.replace(".cuda()", "").replace(', device="cuda"', "")
    done = memexplore("run", write(text), "--gpu", "cpu", "--json")
    result = json.loads(done.stdout)
    assert (result["source"], result["outcome"]) == ("measured", "fits")
    # weight and its gradient of 1024 x 1024 floats, 4 MiB each
    assert result["at_peak"]["by_category"]["parameter"] == result["at_peak"]["by_category"]["gradient"] == 4 * 1024**2


def test_cuda_without_a_gpu_is_one_error(write):
    done = memexplore("run", write(FITTING), "--gpu", "cuda")
    assert done.returncode == 2
    assert "torch finds no GPU on this machine: name a virtual one such as T4" in done.stderr
    assert "Traceback" not in done.stderr


def test_gpu_can_be_a_size_and_prints_the_assumption(write):
    path = write(FITTING)
    assert json.loads(memexplore("run", path, "--gpu", "24GiB", "--json").stdout)["capacity"] == 24 * 1024**3
    assert "Compute capability 8.0 is assumed" in memexplore("run", path, "--gpu", "24GiB").stdout


def test_traceback_has_only_frames_of_the_script(write):
    path = write("""
        import torch

        def broken(x):
            return x @ torch.ones(3, 3, device="cuda")

        try:
            broken(torch.ones(2, 2, device="cuda"))
        except RuntimeError as error:
            raise ValueError("raised by the script") from error
    """)
    done = memexplore("run", path, "--gpu", "T4", "--json")
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert (result["outcome"], result["error"]) == ("error", f"ValueError: raised by the script ({path}:10)")
    assert f'File "{path}", line 10, in <module>' in done.stderr
    assert f'File "{path}", line 5, in broken' in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: raised by the script")
    assert os.path.dirname(mx.__file__) + os.sep not in done.stderr


def test_syntax_error_prints_the_same_as_python(write):
    path = write("x = (\n")
    memexplore_run = memexplore("run", path)
    python = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert memexplore_run.returncode == python.returncode == 1
    assert memexplore_run.stderr == python.stderr


@pytest.mark.parametrize(
    ("ending", "status"), [("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(5)", 5), ("sys.exit('why')", 1)]
)
def test_exit_status_of_the_script_is_kept(write, ending, status):
    done = memexplore("run", write(FITTING + ending + "\n"), "--gpu", "T4", "--json")
    assert done.returncode == status
    assert json.loads(done.stdout)["outcome"] == ("error" if status else "fits")
    assert ("why" in done.stderr) == (status == 1)


def test_script_is_main_in_its_own_folder(write):
    write("ANSWER = 42\n", "neighbour.py")
    path = write("""
        import pickle
        import sys
        import neighbour

        class Mine:
            pass

        pickle.loads(pickle.dumps(Mine()))
        print(__name__, neighbour.ANSWER, sys.argv, sys.path[0] == sys.argv[1], __file__ == sys.argv[2])
        if __name__ == "__main__":
            print("is main")
    """)
    done = memexplore("run", path.name, "--", path.parent, path, cwd=path.parent)
    assert done.stdout.splitlines()[:2] == [
        f"__main__ 42 ['train.py', {str(path.parent)!r}, {str(path)!r}] True True",
        "is main",
    ]


def test_run_writes_tape_and_page(write, tmp_path):
    done = memexplore(
        "run", write(FITTING), "--gpu", "T4", "-o", tmp_path / "tape.tape", "--html", tmp_path / "page.html"
    )
    assert done.returncode == 0, done.stderr
    assert Tape.load(tmp_path / "tape.tape").meta.gpu == "T4"
    assert (tmp_path / "page.html").read_text().lstrip().lower().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["fly"], "invalid choice"),
        (["run"], "required"),
        (["run", "missing.py"], "no script 'missing.py'"),
        (["run", __file__, "--gpu", "RTX 4091"], "did you mean RTX 4090"),
        (["run", __file__, "--release", "new"], "not a torch release"),
        (["run", __file__, "--os", "macos"], "invalid choice: 'macos'"),
        (["run", __file__, "--gpu", "cpu", "--os", "wsl"], "--os needs a virtual GPU"),
        (["run", __file__, "--epochs", "3"], "after --"),
        (["run", __file__, "--html", "/no/such/folder/page.html"], "folder '/no/such/folder' does not exist"),
        (["run", __file__, "--html", __file__], "exists and is not an HTML page, so it is not replaced"),
        (["run", __file__, "-o", __file__], "exists and is not a tape, so it is not replaced"),
        (["run", __file__, "-o", "."], "is a folder"),
        (["run", __file__, "-o", "no such folder/"], "is a folder"),
        (["run", __file__, "-o", "same", "--html", "./same"], "name the same file"),
        (["run", __file__, "--release", "1.0"], "'1.0' is not a torch release"),
        (["run", __file__, "--release", "9" * 5000 + ".1"], "is not a torch release"),
        (["run", __file__, "--gpu", "9" * 400 + "GiB"], "in the catalogue"),
        (["open", __file__, "--html", "/no/such/folder/page.html"], "folder '/no/such/folder' does not exist"),
        (["gpus", "--release", "1.0"], "'1.0' is not a torch release"),
        (["gpus", "banana"], "no GPU 'banana'"),
    ],
)
def test_wrong_usage_is_status_2_with_a_message(arguments, message):
    done = memexplore(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# --- gpus, lab, doctor, the rest -----------------------------------------------------------------------------------


def test_gpus_lists_the_catalogue():
    done = memexplore("gpus")
    assert done.returncode == 0
    assert any(line.split()[:2] == ["T4", "14.4"] for line in done.stdout.splitlines())


def test_gpus_as_json_has_bytes_and_sources():
    gpus = {gpu["gpu"]: gpu for gpu in json.loads(memexplore("gpus", "--json", "--release", "2.14").stdout)["gpus"]}
    # 14 913 MiB in total, 140.875 MiB of them outside the allocator.
    assert gpus["T4"]["capacity"] == (14913 - 140.875) * 1024**2
    assert "Ultralytics" in gpus["T4"]["source_total"]


def test_gpus_with_a_name_prints_sources():
    assert "NVIDIA T4 datasheet" in memexplore("gpus", "t4").stdout


def test_gpus_with_a_release_prints_memory_outside_the_allocator():
    # T4 with 2.11: 14.54 GiB - 13.90 GiB - 504.07 MiB = 151 MiB; all readings are from 124 - 15 to 205 + 15 MiB.
    shown = memexplore("gpus", "t4", "--release", "2.11").stdout
    assert "outside the allocator: 151 MiB (104 MiB to 220 MiB, depending on the program; torch 2.11, training" in shown


def test_gpus_with_a_wrong_release_is_status_2():
    done = memexplore("gpus", "--release", "new")
    assert done.returncode == 2
    assert "'new' is not a torch release" in done.stderr


def test_gpus_does_not_import_torch():
    code = "import sys; from memexplore.cli import main; main(['gpus']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_command_imports_neither_torch_nor_pandas_before_it_needs_them():
    code = "import sys; from memexplore.cli import main; sys.exit(bool({'torch', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("module", ["memexplore", "memexplore.cli"])
def test_command_line_runs_as_a_module(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("memexplore ")


def test_closed_pipe_prints_no_traceback():
    command = f"{sys.executable} -m memexplore.cli gpus --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_doctor_lists_the_environment():
    done = memexplore("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("torch ", "GPU: none", "Virtual GPU: works", "plotly ", "Browser: "):
        assert text in done.stdout


# --- open, verify ---------------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path):
    """Return the path of a snapshot with one segment, a live block of 1000 bytes and a freed block."""
    MIB = 1024**2
    frames = [{"filename": "/home/me/train.py", "line": 7, "name": "step"}]
    trace = [
        {"action": "segment_alloc", "addr": 4096, "size": 2 * MIB, "stream": 0, "frames": frames},
        {"action": "alloc", "addr": 4096, "size": 1000, "stream": 0, "frames": frames},
        {"action": "alloc", "addr": 4096 + 1024, "size": 3000, "stream": 0, "frames": []},
        {"action": "free_requested", "addr": 4096 + 1024, "size": 3000, "stream": 0, "frames": []},
        {"action": "free_completed", "addr": 4096 + 1024, "size": 3000, "stream": 0, "frames": []},
    ]
    blocks = [
        {"address": 4096, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": frames},
        {"address": 5120, "size": 2 * MIB - 1024, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    segment = {
        "device": 0, "address": 4096, "total_size": 2 * MIB, "allocated_size": 1024, "active_size": 1024,
        "requested_size": 1000, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": frames, "blocks": blocks,
    }  # fmt: skip
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [trace]}))
    return path


def test_open_as_json_has_events_segments_and_peaks(snapshot):
    done = memexplore("open", snapshot, "--json")
    assert json.loads(done.stdout) == {
        "devices": [
            {
                "device": 0,
                "events": 5,
                "segments": 1,
                # 1000 bytes take a block of 1024, 3000 bytes one of 3072.
                "current_allocated": 1024,
                "current_reserved": 2 * 1024**2,
                "peak_allocated": 1024 + 3072,
                "peak_reserved": 2 * 1024**2,
                "ooms": 0,
            }
        ]
    }
    assert done.returncode == 0


def test_open_prints_tensors_without_missing_columns(snapshot):
    lines = memexplore("open", snapshot).stdout.splitlines()
    assert lines[0].startswith("Device 0: 5 events, 1 segments, 1.00 KiB allocated of 2.00 MiB reserved")
    # 1000 bytes are 0.98 KiB.
    assert any("0.98 KiB" in line and "train.py:7" in line for line in lines)
    assert not any("layer" in line for line in lines)


def test_open_says_that_a_file_has_no_device(tmp_path):
    path = tmp_path / "empty.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    assert "nothing was on the GPU" in memexplore("open", path).stderr


def test_open_writes_a_page(snapshot, tmp_path):
    assert memexplore("open", snapshot, "--html", tmp_path / "page.html").returncode == 0
    assert (tmp_path / "page.html").read_text().lstrip().lower().startswith("<!doctype html>")


def test_open_reads_a_tape_saved_by_run(write, tmp_path):
    memexplore("run", write(FITTING), "--gpu", "T4", "-o", tmp_path / "tape.tape")
    result = json.loads(memexplore("open", tmp_path / "tape.tape", "--json").stdout)
    assert result["devices"][0]["peak_reserved"] > 4 * 1024**2


def test_verify_counts_equal_addresses(snapshot):
    done = memexplore("verify", snapshot, "--json")
    device = json.loads(done.stdout)["devices"][0]
    assert done.returncode == 0
    assert device["alloc_addresses"] == [2, 2]
    assert device["segment_allocs"] == [1, 1]
    assert any(line.split() == ["0", "alloc", "addresses", "2", "2"] for line in
               memexplore("verify", snapshot).stdout.splitlines())  # fmt: skip


@pytest.mark.parametrize("command", ["open", "verify"])
def test_file_that_is_no_snapshot_is_one_sentence(command, tmp_path):
    path = tmp_path / "nonsense.pickle"
    path.write_bytes(b"nonsense")
    done = memexplore(command, path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "nonsense.pickle" in done.stderr


@pytest.mark.parametrize("command", ["open", "verify"])
def test_missing_file_is_one_sentence(command, tmp_path):
    done = memexplore(command, tmp_path / "missing.pickle")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
