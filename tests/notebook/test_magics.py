"""The magics in a real IPython shell, and in a real kernel."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import nbclient
import nbformat
import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from memexplore import capture
from memexplore.analysis import curves, tables
from memexplore.gpu_catalogue import find
from memexplore.knobs.knobs import Knobs
from memexplore.notebook import magics, profile
from memexplore.tape import Action, Tape
from memexplore.units import size_text

REPOSITORY = pathlib.Path(__file__).parents[2]
# 1000 x 1000 numbers of 4 bytes, in blocks of 512 bytes: 7813 x 512
BLOCK = 4_000_256
ONES = 'torch.ones(1000, 1000, device="cuda")'


class Shell:
    """A shell with the extension loaded; `shown` are the tapes that a person would have seen."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.shown: list[Tape] = []
        self.text = ""

    def run(self, cell: str) -> Any:
        """Run a cell as a front end does, and answer its result."""
        with capture_output() as captured:
            result = self.shell.run_cell(cell, store_history=True)
        self.text = captured.stdout + captured.stderr
        return result

    def __getitem__(self, name: str) -> Any:
        return self.shell.user_ns[name]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Shell]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    InteractiveShell.clear_instance()
    config = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}})
    shell = Shell(InteractiveShell.instance(config=config))
    monkeypatch.setattr(profile, "show_view", shell.shown.append)
    shell.shell.user_ns["torch"] = torch
    shell.run("%load_ext memexplore")
    yield shell
    shell.run("%unload_ext memexplore")
    shell.shell.reset()
    InteractiveShell.clear_instance()
    # What is alive on a virtual GPU is there again on the next one, as on a real one: a traceback keeps its frames.
    for name in ("last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    gc.collect()


def cell_lines(error: BaseException) -> list[int]:
    """The lines of a traceback that lie in a cell, outermost first."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if "ipython-input" in trace.tb_frame.f_code.co_filename:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return lines


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


def test_time_above_it_works(shell: Shell) -> None:
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
        ("-o 3", "'3' is not a variable name"),
        ("-o class", "'class' is not a variable name"),
        ("--html nowhere/page.html", "the folder nowhere does not exist"),
        ("T4", "takes options only"),
    ],
)
def test_wrong_option_stops_the_cell(shell: Shell, options: str, words: str) -> None:
    result = shell.run(f"%%memprofile {options}\nran = True")
    assert isinstance(result.error_in_exec, UsageError)
    assert words in str(result.error_in_exec)
    assert "ran" not in shell.shell.user_ns
    assert shell.shown == []


def test_page_is_written(shell: Shell, tmp_path: pathlib.Path) -> None:
    shell.run(f"%%memprofile --gpu T4 --html '{tmp_path}/a page.html'\nx = {ONES}").raise_error()
    assert "3.81 MiB" in (tmp_path / "a page.html").read_text(encoding="utf-8")  # 4 000 256 / 1024**2


# -- a cell that is explored


@pytest.fixture
def explored(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The explorers that a person would have seen."""
    seen: list[Any] = []
    monkeypatch.setattr(profile, "display", seen.append)
    return seen


# 128 floats fill a block of 512 bytes.
COUNTED = 'count = 128\nx = torch.ones(count, device="cuda")'


def test_slider_runs_the_cell_again_in_a_copy_of_the_names(shell: Shell, explored: list[Any]) -> None:
    shell.run(f"%%memprofile --gpu T4 --slider count=128:256:128\n{COUNTED}\nprint('ran')").raise_error()
    (shown,) = explored
    assert curves.peak(shown.trial.tape)[0] == 512
    shown.knobs = Knobs(variables={"count": 256})
    assert curves.peak(shown.trial.tape)[0] == 1024
    assert shell["count"] == 128
    # the line of the cell is still known by its number
    assert {tables.user_line(stack).rpartition(":")[2] for stack in shown.trial.tape.stacks} == {"3"}


def test_explore_begins_with_the_run_as_written(shell: Shell, explored: list[Any]) -> None:
    shell.run(f"%%memprofile --gpu T4 --explore -o tape\n{COUNTED}").raise_error()
    assert explored[0].trial.tape is shell["tape"]
    assert shell.shown == []


def test_out_of_memory_is_explored_and_other_exceptions_are_not(shell: Shell, explored: list[Any]) -> None:
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
        ("--slider count", "invalid slider value: 'count'"),
        ("--slider count=5:1", "invalid slider value"),
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


def test_line_is_recorded_and_gives_its_value(shell: Shell) -> None:
    assert shell.run(f"%memprofile --gpu T4 -o tape {ONES}.shape[0] + 2").result == 1002
    assert curves.peak(shell["tape"])[0] == BLOCK


def test_line_sets_variables_and_reads_locals(shell: Shell) -> None:
    shell.run("def f(n):\n    %memprofile --gpu T4 m = n + 1; print(m)\nf(4)").raise_error()
    assert "5" in shell.text.split()
    shell.run("%memprofile --gpu T4 z = 7").raise_error()
    assert shell["z"] == 7


def test_line_that_fails_raises_and_shows(shell: Shell) -> None:
    assert isinstance(shell.run("%memprofile --gpu T4 1 / 0").error_in_exec, ZeroDivisionError)
    assert shell.text.count("Traceback (most recent call last)") == 1
    assert len(shell.shown) == 1


@pytest.mark.parametrize("line", ["%memprofile", "%memprofile --gpu T4", "%memprofile --gpu T4 await f()"])
def test_line_without_a_statement_it_can_run_is_an_error(shell: Shell, line: str) -> None:
    assert isinstance(shell.run(line).error_in_exec, UsageError)
    assert shell.shown == []


# -- the GPU of the notebook


def test_memgpu_lasts_over_cells(shell: Shell) -> None:
    shell.run("%memgpu T4").raise_error()
    shell.run(f"x = {ONES}\nassert torch.cuda.get_device_properties(0).name == 'Tesla T4'").raise_error()
    shell.run(f"%%memprofile\ny = {ONES}").raise_error()
    # x was there before: two blocks at the peak
    assert curves.peak(shell.shown[0])[0] == 2 * BLOCK
    shell.run("%memgpu off").raise_error()
    assert shell.run("torch.cuda.is_available()").result is torch.cuda.is_available()


def test_memgpu_tells_its_state(shell: Shell) -> None:
    shell.run("%memgpu")
    assert "No virtual GPU is on" in shell.text
    shell.run("%memgpu T4")
    shell.run("%memgpu")
    assert f"The virtual Tesla T4 is on: {size_text(find('T4').under(torch.__version__).capacity)} usable" in shell.text
    shell.run("%memgpu off")
    assert "Tesla T4 is off" in shell.text


def test_another_gpu_while_one_is_on_is_an_error(shell: Shell) -> None:
    shell.run("%memgpu T4").raise_error()
    assert "Run %memgpu off first" in str(shell.run("%%memprofile --gpu A100\nran = True").error_in_exec)
    assert "run %memgpu off before" in str(shell.run("%memgpu A100").error_in_exec)
    assert "ran" not in shell.shell.user_ns
    shell.run("%%memprofile --gpu 'Tesla T4'\nran = True").raise_error()


def test_memgpu_cannot_change_inside_a_profile(shell: Shell) -> None:
    assert isinstance(shell.run("%%memprofile --gpu T4\n%memgpu off").error_in_exec, UsageError)
    assert len(shell.shown) == 1


# -- a real device


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


PLAIN = "count = 128\nx = torch.ones(count)"


def test_cpu_is_measured_where_it_is_named(shell: Shell) -> None:
    shell.run(f"%%memprofile --gpu cpu\n{PLAIN}").raise_error()
    (tape,) = shell.shown
    assert (str(tape.meta.source), tape.meta.device, curves.peak(tape)[0]) == ("measured", "cpu", 512)


def test_cell_is_explored_where_it_ran(shell: Shell, explored: list[Any]) -> None:
    shell.run(f"%%memprofile --gpu cpu --slider count=128:256:128\n{PLAIN}").raise_error()
    (shown,) = explored
    assert (str(shown.trial.tape.meta.source), curves.peak(shown.trial.tape)[0]) == ("measured", 512)
    shown.knobs = Knobs(variables={"count": 256})
    assert (str(shown.trial.tape.meta.source), curves.peak(shown.trial.tape)[0]) == ("measured", 1024)
    assert shell["count"] == 128


@pytest.mark.usefixtures("without_gpu")
def test_gpu_that_is_not_there_is_one_clear_error(shell: Shell) -> None:
    error = shell.run("%%memprofile --gpu cuda\n1").error_in_exec
    assert isinstance(error, UsageError)
    assert "torch finds no GPU on this machine" in str(error)


def test_real_device_follows_the_torch_that_is_installed(shell: Shell) -> None:
    assert isinstance(shell.run("%%memprofile --gpu cpu --release 2.11\n1").error_in_exec, UsageError)


def test_cell_is_explored_on_the_real_gpu_where_there_is_one(
    shell: Shell, contexts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profile, "record_like_replay", lambda device, gpu: capture.record() if device is None else None)
    monkeypatch.setattr(profile, "show_explorer", lambda explored, tape, options: contexts.append("explored"))
    shell.run("%%memprofile --explore\n1").raise_error()
    assert contexts == ["enter record", "leave record", "explored"]


# -- which GPU is taken, and in which order contexts are entered and left


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was entered and left, in place of the real contexts."""
    seen: list[str] = []

    def context(name: Callable[..., str]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def enter(*arguments: Any, **options: Any) -> Iterator[Any]:
            seen.append(f"enter {name(*arguments, **options)}")
            yield types.SimpleNamespace(tape=None)
            seen.append(f"leave {name(*arguments, **options)}")

        return enter

    monkeypatch.setattr(capture, "virtual", context(lambda gpu, release=None: f"{gpu} {release}"))
    monkeypatch.setattr(capture, "record", context(lambda: "record"))
    return seen


def test_without_a_gpu_a_t4_is_taken(shell: Shell, contexts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shell.run("%%memprofile --release 2.12\n1").raise_error()
    assert contexts == ["enter T4 2.12", "enter record", "leave record", "leave T4 2.12"]


def test_the_real_gpu_is_taken_where_there_is_one(
    shell: Shell, contexts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shell.run("%%memprofile\n1").raise_error()
    assert contexts == ["enter record", "leave record"]


# -- coming and going


def test_loading_twice_changes_nothing(shell: Shell) -> None:
    shell.run("from memexplore import load_ipython_extension as load\nload(get_ipython())").raise_error()
    assert shell.shell.input_transformers_cleanup.count(magics.rewrite_first_line) == 1
    shell.run("%%memprofile --gpu T4\n1").raise_error()
    assert len(shell.shown) == 1


def test_unloading_leaves_nothing_behind() -> None:
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()

    def traces() -> tuple[Any, ...]:
        manager = shell.magics_manager
        names = {kind: set(found) for kind, found in manager.magics.items()}
        events = {name: len(callbacks) for name, callbacks in shell.events.callbacks.items()}
        return names, set(manager.registry), events, len(shell.input_transformers_cleanup)

    before = traces()
    magics.load_ipython_extension(shell)
    assert traces() != before
    shell.run_line_magic("memgpu", "T4")
    magics.unload_ipython_extension(shell)
    assert traces() == before
    assert magics.unload_ipython_extension(shell) is None
    with capture.virtual("T4"):  # the GPU of the notebook is off, else this would raise
        pass
    InteractiveShell.clear_instance()


def test_help_tells_the_options(shell: Shell) -> None:
    shell.run("%memprofile?")
    text = shell.text or shell.shell.find_line_magic("memprofile").__doc__
    for option in ("--gpu", "--release", "-o", "--html", "--explore", "--slider", "cannot be undone"):
        assert option in text


# -- a real kernel


def test_in_a_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    cells = [
        "import torch\n%load_ext memexplore",
        f"%%memprofile --gpu T4 -o tape\nimport asyncio\nawait asyncio.sleep(0)\nx = {ONES}",
        "%%memprofile --gpu T4\n\n1 / 0",
        "%%memprofile --gpuu T4\nran = True",
        "print('ran' in globals(), len(tape) > 0)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, allow_errors=True, kernel_name="python3").execute()
    kinds = [[output.output_type for output in cell.outputs] for cell in notebook.cells]
    live, dead = "display_data", "display_data"
    assert kinds[1] == [live, dead]
    assert kinds[2] == ["error", live, dead]
    assert "----> 3 1 / 0" in re.sub(r"\x1b\[[\d;]*m", "", "\n".join(notebook.cells[2].outputs[0].traceback))
    assert kinds[3] == ["stream"]
    assert notebook.cells[3].outputs[0].text.startswith("UsageError: ")
    assert notebook.cells[4].outputs[0].text == "False True\n"
    # plotly.js alone is 5 MB: nothing of that may be saved with the notebook
    assert len(nbformat.writes(notebook)) < 500_000
