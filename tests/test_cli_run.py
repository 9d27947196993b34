"""`memexplore run`: programs that end early or run without the GPU, and modules."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from tests.test_cli import FITTING, memexplore


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


def test_unknown_values_read_virtual_where_the_script_formats_them_with_percent(write):
    path = write("""
        from __future__ import annotations
        import torch
        loss = torch.randn(10_000_000, device="cuda").sum()
        print("[%d/%d] loss %.4f" % (1, 2, loss.item()), "seven %d" % torch.tensor(7).cuda(), 7 % 4)
        print(("%3s" + "%9.4g" * 2) % ("x", loss, 0.5))
    """)
    lines = memexplore("run", path, "--gpu", "T4").stdout.splitlines()
    assert lines[:2] == ["[1/2] loss virtual seven 7 3", "  x  virtual      0.5"]


@pytest.mark.parametrize("how", ["script", "module"])
def test_unknown_values_read_virtual_after_float_and_int(write, how):
    path = write("""
        import torch
        loss = torch.randn(10_000_000, device="cuda").sum()
        print(f"{float(loss):.4f} {int(loss)} {float(loss.item()) / 2:.2f}", float("1.5"), int("7", 8), int(2.5))
        print(isinstance(float(loss), float), isinstance(int(loss), int))
    """)
    program = [path] if how == "script" else ["-m", path.stem]
    options = ["--gpu", "T4", *program] if how == "module" else [*program, "--gpu", "T4"]
    lines = memexplore("run", *options, cwd=path.parent).stdout.splitlines()
    assert lines[:2] == ["virtual virtual virtual 1.5 7 2", "True True"]
