"""`memexplore run`: programs that end early or run without the GPU, and modules."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch

import memexplore as mx
from memexplore.analysis.verdict_content import verdict_content
from memexplore.cli import options
from tests.test_cli import FITTING, TOO_LARGE, memexplore


@pytest.fixture
def write(tmp_path):
    def write_script(text):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write_script


# --- endings -------------------------------------------------------------------------------------------------------


def test_training_on_the_cpu_is_status_4_and_never_fits(write):
    path = write("""
        import torch
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    """)
    done = memexplore("run", path, "--gpu", "T4")
    assert done.returncode == 4
    assert done.stdout.startswith("Nothing trained on the Tesla T4: Linear trained on the CPU\n")
    assert "fits" not in done.stdout.lower()


def test_error_is_reported_with_the_peak_so_far_and_the_notes(write):
    path = write(FITTING + "count = int(model(x).argmax())\nraise ValueError(f'{count} classes')\n")
    done = memexplore("run", path, "--gpu", "T4", cwd=path.parent)
    assert done.returncode == 1
    lines = done.stdout.splitlines()[1:]
    assert lines[0].startswith("Ended by an error: ValueError: ")
    assert lines[0].endswith("(train.py:10)")
    assert lines[1].startswith("Peak so far ")
    assert any(line.startswith("Note: assumed: ") and line.endswith("(train.py:9)") for line in lines)
    assert "fits" not in done.stdout.lower()


def test_caught_out_of_memory_errors_are_listed_and_the_run_fits(write):
    path = write("""
        import torch
        size = 2 ** 36
        while True:
            try:
                torch.empty(size, dtype=torch.uint8, device="cuda")
                break
            except torch.OutOfMemoryError:
                size //= 2
    """)
    done = memexplore("run", path, "--gpu", "T4", "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["outcome"], result["failed_request"]) == (0, "fits", None)
    # 64, 32 and 16 GiB fail on a T4, 8 GiB fit.
    assert [one["requested"] for one in result["caught_requests"]] == [2**36, 2**35, 2**34]
    assert result["caught_requests"][0]["line"] == f"{path}:6"
    assert result["peak_allocated"] == 2**33


TRAINS = """\
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
        self.blocks = torch.nn.Sequential(*blocks)

    def forward(self, x):
        return self.blocks(x).square().mean()

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(3000, 1024, device="cuda")).backward()
optimizer.step()
"""


def test_advice_after_an_out_of_memory_error_is_a_setting_with_which_the_script_fits(write):
    # 8 blocks keep 2 * 3000 * 1024 * 4 bytes each: 188 MiB, with 32 MiB of weights and 32 MiB of gradients.
    done = memexplore("run", write(TRAINS), "--gpu", "256MiB", "--advise", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)["what_fits"]
    assert (found["failed"], found["assumed"]) == ("", [])
    code = {option["setting"]: option["code"] for option in found["options"]}["checkpoint every 1"]
    changed = TRAINS.replace("optimizer = ", f"{code}\noptimizer = ")
    assert memexplore("run", write(changed), "--gpu", "256MiB").returncode == 0
    smaller = TRAINS.replace("3000", str(found["largest_batch"]))
    assert memexplore("run", write(smaller), "--gpu", "256MiB").returncode == 0


LOOP = (
    TRAINS.partition("model(torch.randn")[0]
    + """\
for step in range(3):
    loss = model(torch.randn(3000, 1024, device="cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


def test_a_copy_of_the_script_that_fits_is_written_beside_it_and_runs(write):
    path = write(LOOP)
    foreign = path.with_name("train_fits.py")
    foreign.write_text("my own file\n")
    done = memexplore("run", path, "--gpu", "256MiB", "--advise", "--json")
    copy = json.loads(done.stdout)["fitting_copy"]
    assert copy["path"] == str(path.with_name("train_fits_2.py"))
    assert (path.read_text(), foreign.read_text()) == (LOOP, "my own file\n")
    again = memexplore("run", copy["path"], "--gpu", "256MiB", "--json")
    assert (again.returncode, json.loads(again.stdout)["need"]["smallest"]) == (0, copy["needed"])
    assert "\n+ " in copy["diff"]
    # The next run has the same copy.
    text = memexplore("run", path, "--gpu", "256MiB", "--advise").stdout
    assert "train_fits_2.py beside it is a copy with setting " in text
    assert sorted(file.name for file in path.parent.glob("*_fits*")) == ["train_fits.py", "train_fits_2.py"]


def test_advice_for_a_model_of_a_module_beside_the_script(write):
    model, _, rest = TRAINS.partition("model = ")
    path = write(f"import torch\nfrom nets_beside_the_script import Net\nmodel = {rest}")
    (path.parent / "nets_beside_the_script.py").write_text(model)
    done = memexplore("run", path, "--gpu", "256MiB", "--advise", "--json")
    found = json.loads(done.stdout)["what_fits"]
    assert (found["failed"], bool(found["options"])) == ("", True)


def test_a_script_that_cannot_be_run_again_says_so_and_what_to_do(write):
    path = write(f"import sys\nsys.stdin.readline() or sys.exit('no line')\n{TRAINS}")
    done = memexplore("run", path, "--gpu", "256MiB", "--advise", "--json", input="one line\n")
    found = json.loads(done.stdout)["what_fits"]
    assert found["options"] == []
    assert found["failed"].startswith("The script cannot be run again: RuntimeError: the script ended with exit status")
    assert found["failed"].endswith("Search with mx.advise(mx.Step(model, batch, loss, optimizer)).")


def test_places_are_those_of_the_script(write):
    done = memexplore("run", write(TRAINS), "--gpu", "256MiB", cwd=write(TRAINS).parent)
    places = [line for line in done.stdout.splitlines() if line.startswith("  at ")]
    # The line in `forward`, torch's own call of it, and the line that calls the model.
    assert [place for place in places if "train.py" not in place and "torch" not in place] == []
    assert "train.py, line 14: " in places[-1]


def test_lines_of_a_script_in_a_folder_named_torch_are_the_users(tmp_path):
    (tmp_path / "torch").mkdir()
    path = tmp_path / "torch" / "train.py"
    path.write_text(FITTING)
    done = memexplore("run", path, "--gpu", "T4", cwd=path.parent)
    by_line = done.stdout.partition("By line of code:\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert {line.split()[-1].partition(":")[0] for line in by_line} == {"train.py"}


def test_advice_is_not_for_a_script_that_fits_nor_with_live(write):
    done = memexplore("run", write(FITTING), "--gpu", "T4", "--advise", "--json")
    assert "what_fits" not in json.loads(done.stdout)
    done = memexplore("run", write(FITTING), "--gpu", "T4", "--advise", "--live", "--json")
    assert done.returncode == 2
    assert "leave out --live" in done.stderr


def test_out_of_memory_is_status_3_with_the_traceback_of_the_script(write):
    path = write(TOO_LARGE)
    done = memexplore("run", path, "--gpu", "T4", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 3
    assert result["outcome"] == "oom"
    # Allocated at the failed request: the first tensor of 1 GiB.
    assert result["peak_allocated"] == 1024**3
    # 14 913 MiB of the T4 − 140.875 outside the allocator: nothing is held, the request is larger than what is left.
    assert result["post_mortem"]["cause"] == "too much memory"
    assert result["post_mortem"]["request"]["line"].startswith(f"{path}:")
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{path}", line ')
    assert lines[-1].startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate ")
    assert os.path.dirname(mx.__file__) + os.sep not in done.stderr


def test_windows_would_put_what_is_over_into_system_memory(write):
    def hold():
        return [torch.empty(10 * 2**30, dtype=torch.uint8, device="cuda") for _ in range(3)]

    # The whole run needs 30 GiB of 16.
    detail = verdict_content(mx.simulate(hold, gpu="16GiB", os="windows")).detail
    assert " · on Windows 14.0 GiB would be in system memory, which is slow, without an OutOfMemoryError" in detail
    done = memexplore("run", write(TOO_LARGE), "--gpu", "16GiB", "--os", "windows")
    # 1 GiB is held when 1024 more are requested: 1009 of 1025 GiB are over.
    assert " · on Windows more than 0.99 TiB would be in system memory" in done.stdout
    assert done.returncode == 3


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("1 / 0", 1), ('torch.empty(1 << 40, device="cuda")', 3), ("raise KeyboardInterrupt", 130)]
    + [("import sys; sys.exit(5)", 5)],
)
def test_the_exit_status_says_how_the_program_ended(write, ending, status):
    assert memexplore("run", write(FITTING + ending + "\n"), "--gpu", "T4").returncode == status


def test_the_documentation_lists_every_exit_status():
    page = (pathlib.Path(__file__).parent.parent / "docs/fits.md").read_text()
    table = page.partition("| status | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    statuses = [line.split("|")[1].strip() for line in table.splitlines()]
    named = (options.FITS, options.ERROR, options.USAGE, options.OOM, options.NOT_KNOWN, options.INTERRUPTED)
    assert statuses == [*map(str, named), "any other"]


# --- run -m --------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "shared.py").write_text("ANSWER = 42\n")
    (folder / "train.py").write_text(
        "import sys\nfrom .shared import ANSWER\n"
        "print(__name__, __spec__.name, __package__, ANSWER, sys.argv, sys.path[0], sys.modules['__main__'].ANSWER)\n"
        "import torch\ntorch.ones(3, device='cuda' if 'gpu' in sys.argv else 'cpu')\n"
    )
    (folder / "__main__.py").write_text("import sys\nprint('main of the package', sys.argv[1:])\n")
    return tmp_path


def test_module_runs_as_python_runs_it(package):
    python = subprocess.run([sys.executable, "-m", "tools.train", "-x", "--", "5"], cwd=package, capture_output=True)
    done = memexplore("run", "--gpu", "T4", "-m", "tools.train", "-x", cwd=package)
    assert done.stdout.splitlines()[0] == python.stdout.decode().splitlines()[0].replace(", '--', '5'", "")


def test_arguments_of_a_module_follow_its_name_or_two_dashes(package):
    done = memexplore("run", "-m", "tools.train", "--json", "--gpu", "A100", "--", "gpu", cwd=package)
    assert json.loads(done.stdout)["gpu"] == "A100 SXM4 40GB" or json.loads(done.stdout)["gpu"].startswith("A100")
    assert "gpu" in done.stderr


def test_package_runs_its_main(package):
    done = memexplore("run", "-m", "tools", "5", cwd=package)
    assert done.stdout.splitlines()[0] == "main of the package ['5']"


@pytest.mark.parametrize("name", ["nope", "tools.nope", "tools.shared.py", "nope.train", ".train", "tools.shared.x"])
def test_missing_module_prints_the_error_of_python(package, name):
    python = subprocess.run([sys.executable, "-m", name], cwd=package, capture_output=True, text=True)
    done = memexplore("run", "-m", name, cwd=package)
    assert (done.returncode, done.stderr) == (python.returncode, python.stderr)
    assert done.stdout == ""


def test_script_and_module_together_are_a_usage_error(package):
    done = memexplore("run", "tools/train.py", "-m", "tools.train", cwd=package)
    assert done.returncode == 2
    assert "not allowed with" in done.stderr


# --- files ---------------------------------------------------------------------------------------------------------


def test_script_whose_name_is_no_text_is_reported(tmp_path):
    path = os.path.join(tmp_path, os.fsdecode(b"caf\xe9.py"))
    pathlib.Path(path).write_text(FITTING + "count = int(model(x).argmax())\n")
    done = memexplore("run", path, "--gpu", "T4", "--html", "page.html", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "caf?.py:9" in done.stdout
    assert "caf?.py:9" in (tmp_path / "page.html").read_text()


# --- printed values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["script", "module"])
def test_unknown_values_read_virtual_or_1_and_a_note_says_how_many(write, how):
    path = write("""
        import torch
        loss = torch.randn(10_000_000, device="cuda").sum()
        print(f"{loss:.4f}", loss)
        print("%.4f %d" % (loss.item(), loss.item()), float(loss), int(loss))
    """)
    options = ["--gpu", "T4", "-m", path.stem] if how == "module" else [path, "--gpu", "T4"]
    lines = memexplore("run", *options, cwd=path.parent).stdout.splitlines()
    assert lines[:2] == ["virtual virtual(float32, device='cuda:0')", "1.0000 1 1.0 1"]
    assert f"assumed: 4 unknown floating-point values were read as 1, first at {path.name}:5" in lines[-1]
