"""`%%memprofile` and `%memprofile` in an IPython shell."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError

from memexplore.analysis import curves, tables
from memexplore.run.knobs.knobs import Knobs
from memexplore.tape import Action
from tests.jupyter.magics_shell import BLOCK, ONES, Shell, cell_lines

# -- a cell


def test_cell_is_recorded_and_its_variables_stay(shell: Shell) -> None:
    shell.run(f"%%memprofile --gpu T4 -o tape\nx = {ONES}\ny = 3").raise_error()
    assert curves.peak(shell["tape"])[0] == BLOCK
    assert shell["tape"].meta.device == "Tesla T4"
    assert tuple(shell["x"].shape) == (1000, 1000)
    assert shell["y"] == 3
    assert shell.shown == [shell["tape"]]


def test_last_expression_is_the_result(shell: Shell) -> None:
    assert shell.run("%%memprofile --gpu T4\n40 + 2").result == 42


def test_exception_points_to_the_lines_of_the_cell(shell: Shell) -> None:
    result = shell.run("%%memprofile --gpu T4\ndef f():\n    1 / 0\n\nf()")
    assert cell_lines(result.error_in_exec) == [5, 3]
    assert shell.text.count("Traceback (most recent call last)") == 1
    assert len(shell.shown) == 1


def test_out_of_memory_is_raised_and_shown(shell: Shell) -> None:
    result = shell.run('%%memprofile --gpu 1GiB\nx = torch.empty(2 * 1024**3, dtype=torch.uint8, device="cuda")')
    assert isinstance(result.error_in_exec, torch.OutOfMemoryError)
    assert cell_lines(result.error_in_exec) == [2]
    rows = shell.shown[0].action == Action.OOM
    assert shell.shown[0].size[rows].tolist() == [2 * 1024**3]


def test_interrupt_ends_the_profile(shell: Shell) -> None:
    result = shell.run(f"%%memprofile --gpu T4\nx = {ONES}\nraise KeyboardInterrupt")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert curves.peak(shell.shown[0])[0] == BLOCK
    assert shell.run(f"%%memprofile --gpu T4\nx = {ONES}").success


def test_await_works(shell: Shell) -> None:
    shell.run(f"%%memprofile --gpu T4\nimport asyncio\nawait asyncio.sleep(0)\nx = {ONES}").raise_error()
    assert curves.peak(shell.shown[0])[0] == BLOCK


def test_cell_that_runs_cells_is_recorded_to_its_own_end(shell: Shell) -> None:
    shell.run(f"%%memprofile --gpu T4\nget_ipython().run_cell('q = 1')\nx = {ONES}").raise_error()
    assert curves.peak(shell.shown[0])[0] == BLOCK
    assert shell["q"] == 1


def test_time_magic_above_works(shell: Shell) -> None:
    shell.run(f"%%time\n%%memprofile --gpu T4\nx = {ONES}").raise_error()
    assert curves.peak(shell.shown[0])[0] == BLOCK


def test_cell_that_does_not_compile_starts_nothing(shell: Shell) -> None:
    assert isinstance(shell.run("%%memprofile --gpu T4\nx = = 1").error_before_exec, SyntaxError)
    assert shell.shown == []


def test_second_run_gives_the_same_tape(shell: Shell) -> None:
    cell = (
        "%%memprofile --gpu T4\nmodel = torch.nn.Linear(100, 10).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(2):\n    model(torch.randn(5, 100, device='cuda')).sum().backward(); optimizer.step()"
    )
    for _ in range(2):
        shell.run(cell).raise_error()
        shell.run("del model, optimizer").raise_error()
    first, second = shell.shown
    assert first.replace(stacks=()).equals(second.replace(stacks=()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--gpuu T4", "unrecognized arguments: --gpuu"),
        ("--gpu", "expected one argument"),
        ("--gpu T44", "no GPU 'T44' in the catalogue"),
        ("--gpu T4 --release 1.0", "1.0"),
        ("--gpu T4 --os macos", "'macos' is not an operating system of a GPU driver; write linux, wsl, windows"),
        ("--gpu cpu --os wsl", "--os has no effect on a real device"),
        ("-o 3", "'3' is not a variable name"),
        ("-o class", "'class' is not a variable name"),
        ("-o __builtins__", "'__builtins__' is a name of Python or IPython"),
        ("-o print", "'print' is a name of Python or IPython"),
        ("--os Solaris", "'Solaris' is not an operating system of a GPU driver"),
        ("--html nowhere/page.html", "the folder 'nowhere' does not exist"),
        ("--html /", "'/' is a folder"),
        (f"--slider count=1:{'9' * 400}", "has a number over 1e+15"),
        ("--slider count=nan:3", "has a number over 1e+15"),
        ("--slider count=a:b", "'count=a:b' is not a slider; write NAME=LOW:HIGH:STEP"),
        ("--slider count=8:4", "does not rise from LOW to HIGH"),
        ("--slider class=1:4", "'class=1:4' is not a slider"),
        ("T4", "takes options only"),
    ],
)
def test_wrong_option_stops_the_cell(shell: Shell, options: str, words: str) -> None:
    result = shell.run(f"%%memprofile {options}\nran = True")
    assert isinstance(result.error_in_exec, UsageError)
    assert words in str(result.error_in_exec)
    assert "ran" not in shell.shell.user_ns
    assert shell.shown == []


def test_operating_system_of_a_profile(shell: Shell) -> None:
    shell.run(f"%%memprofile --gpu T4 --os wsl\nx = {ONES}").raise_error()
    assert shell.shown[0].meta.os == "wsl"


def test_page_is_written(shell: Shell, tmp_path: pathlib.Path) -> None:
    shell.run(f"%%memprofile --gpu T4 --html '{tmp_path}/a page.html'\nx = {ONES}").raise_error()
    assert "3.81 MiB" in (tmp_path / "a page.html").read_text(encoding="utf-8")  # 4 000 256 / 1024**2


# -- a cell with an explorer


# 128 floats fill a block of 512 bytes.
COUNTED = 'count = 128\nx = torch.ones(count, device="cuda")'


def test_slider_runs_the_cell_again_in_a_copy_of_the_names(shell: Shell, explored: list[Any]) -> None:
    shell.run(f"%%memprofile --gpu T4 --slider count=128:256:128\n{COUNTED}\nprint('ran')").raise_error()
    (shown,) = explored
    assert curves.peak(shown.run.tape)[0] == 512
    shown.knobs = Knobs(variables={"count": 256})
    assert curves.peak(shown.run.tape)[0] == 1024
    assert shell["count"] == 128
    # stacks still have the line number of the cell
    assert {tables.user_line(stack).rpartition(":")[2] for stack in shown.run.tape.stacks} == {"3"}


def test_explore_begins_with_the_run_as_written(shell: Shell, explored: list[Any]) -> None:
    shell.run(f"%%memprofile --gpu T4 --explore -o tape\n{COUNTED}").raise_error()
    assert explored[0].run.tape is shell["tape"]
    assert shell.shown == []


def test_explorer_after_out_of_memory_but_not_after_other_exceptions(shell: Shell, explored: list[Any]) -> None:
    cell = 'size = 2 * 1024**3\nx = torch.empty(size, dtype=torch.uint8, device="cuda")'
    result = shell.run(f"%%memprofile --gpu 1GiB --explore\n{cell}")
    assert isinstance(result.error_in_exec, torch.OutOfMemoryError)
    assert len(explored) == 1
    shell.run("%%memprofile --gpu T4 --explore\n1 / 0")
    assert (len(explored), len(shell.shown)) == (1, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--slider bach=1:2", "the cell assigns no variable 'bach'; it assigns count, x"),
        ("--slider count", "argument --slider: 'count' is not a slider; write NAME=LOW:HIGH:STEP"),
        ("--slider count=5:1", "argument --slider: 'count=5:1' does not rise from LOW to HIGH"),
    ],
)
def test_wrong_slider_stops_the_cell(shell: Shell, explored: list[Any], options: str, words: str) -> None:
    result = shell.run(f"%%memprofile {options}\n{COUNTED}")
    assert isinstance(result.error_in_exec, UsageError)
    assert words in str(result.error_in_exec)
    assert "count" not in shell.shell.user_ns
    assert explored == []


def test_explorer_needs_a_cell_and_a_gpu_of_its_own(shell: Shell, explored: list[Any]) -> None:
    assert "write %%memprofile as its first line" in str(shell.run("%memprofile --explore x = 1").error_in_exec)
    shell.run("%memgpu T4").raise_error()
    assert "run %memgpu off first" in str(shell.run(f"%%memprofile --explore\n{COUNTED}").error_in_exec)


# -- a line


def test_statement_is_recorded_and_returns_its_value(shell: Shell) -> None:
    assert shell.run(f"%memprofile --gpu T4 -o tape {ONES}.shape[0] + 2").result == 1002
    assert curves.peak(shell["tape"])[0] == BLOCK


def test_statement_sets_variables_and_reads_locals(shell: Shell) -> None:
    shell.run("def f(n):\n    %memprofile --gpu T4 m = n + 1; print(m)\nf(4)").raise_error()
    assert "5" in shell.text.split()
    shell.run("%memprofile --gpu T4 z = 7").raise_error()
    assert shell["z"] == 7


def test_failing_statement_raises_and_shows_the_tape(shell: Shell) -> None:
    assert isinstance(shell.run("%memprofile --gpu T4 1 / 0").error_in_exec, ZeroDivisionError)
    assert shell.text.count("Traceback (most recent call last)") == 1
    assert len(shell.shown) == 1


@pytest.mark.parametrize("line", ["%memprofile", "%memprofile --gpu T4", "%memprofile --gpu T4 await f()"])
def test_magic_without_a_runnable_statement_raises(shell: Shell, line: str) -> None:
    assert isinstance(shell.run(line).error_in_exec, UsageError)
    assert shell.shown == []


def test_a_watched_cell_in_a_terminal_ends_with_the_run_and_its_recorded_step(shell: Shell) -> None:
    shell.run(
        "%%memprofile --live --gpu T4 -o live\nmodel = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(3):\n    model(torch.ones(2, 8, device='cuda')).sum().backward()\n    optimizer.step()"
    ).raise_error()
    assert shell.text.strip() == "<Live: ended, step 3 on Tesla T4>"
    assert shell.shown == [shell["live"].tape()]
