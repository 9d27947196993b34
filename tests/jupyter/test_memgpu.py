"""The GPU of a profile and of a notebook, loading and unloading, and a real kernel."""

from __future__ import annotations

import contextlib
import pathlib
import re
import signal
import types
from collections.abc import Callable, Iterator
from typing import Any

import nbclient
import nbformat
import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from memexplore.analysis import curves
from memexplore.hardware.catalogue import find
from memexplore.jupyter import magics, profile
from memexplore.recorder import recording
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import Machine, virtual
from memexplore.text.units import size_text
from tests.jupyter.magics_shell import BLOCK, ONES, Shell
from tests.sample_tapes import small_tape

REPOSITORY = pathlib.Path(__file__).parents[2]


# -- the GPU of the notebook


def test_memgpu_lasts_over_cells(shell: Shell) -> None:
    shell.run("%memgpu T4").raise_error()
    shell.run(f"x = {ONES}\nassert torch.cuda.get_device_properties(0).name == 'Tesla T4'").raise_error()
    shell.run(f"%%memprofile\ny = {ONES}").raise_error()
    # x was there before: two blocks at the peak
    assert curves.peak(shell.shown[0])[0] == 2 * BLOCK
    shell.run("%memgpu off").raise_error()
    assert shell.run("torch.cuda.is_available()").result is torch.cuda.is_available()


def test_memgpu_prints_its_state(shell: Shell) -> None:
    shell.run("%memgpu")
    assert "No virtual GPU is on" in shell.text
    shell.run("%memgpu T4")
    shell.run("%memgpu")
    assert (
        f"The virtual Tesla T4 is on: {size_text(find('T4').for_release(torch.__version__).capacity)} usable"
        in shell.text
    )
    shell.run("%memgpu off")
    assert "Tesla T4 is off" in shell.text


def test_a_notebook_is_one_rank_of_many(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    shell.run("%memgpu H100 --world 16 --rank 9").raise_error()
    shell.run("import os; torch.distributed.init_process_group('nccl')").raise_error()
    found = "torch.distributed.get_world_size(), torch.distributed.get_rank(), os.environ['LOCAL_RANK']"
    assert shell.run(found).result == (16, 9, "1")
    with pytest.raises(UsageError, match="is on as another rank"):
        shell.run("%memgpu H100 --world 16 --rank 8").raise_error()
    shell.run("%memgpu off").raise_error()
    assert shell.run("'RANK' in os.environ").result is False


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("H100 --world 8 --rank 8", "rank 8 is not one of the 8 ranks"),
        ("H100 --rank 1", "--rank needs the number of processes"),
        ("H100 --world many", "write a whole number"),
        ("H100 --nodes 2", "cannot read --nodes 2: write --values SETTING"),
        ("H100 --world", "cannot read --world: write --values SETTING"),
    ],
)
def test_a_wrong_rank_raises_one_sentence(shell: Shell, line: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        shell.run(f"%memgpu {line}").raise_error()
    shell.run("%memgpu")
    assert "No virtual GPU is on" in shell.text


def test_another_gpu_while_one_is_on_raises(shell: Shell) -> None:
    shell.run("%memgpu T4").raise_error()
    assert "Run %memgpu off first" in str(shell.run("%%memprofile --gpu A100\nran = True").error_in_exec)
    assert "run %memgpu off before" in str(shell.run("%memgpu A100").error_in_exec)
    assert "ran" not in shell.shell.user_ns
    shell.run("%%memprofile --gpu 'Tesla T4'\nran = True").raise_error()


def test_memgpu_inside_a_virtual_block_raises_one_sentence(shell: Shell) -> None:
    result = shell.run(
        "import memexplore as mx\nwith mx.virtual('T4'):\n    get_ipython().run_line_magic('memgpu', 'A100')"
    )
    assert isinstance(result.error_in_exec, UsageError)
    assert "a virtual Tesla T4 is already on; turn it off first" in str(result.error_in_exec)


def test_memgpu_cannot_change_inside_a_profile(shell: Shell) -> None:
    assert isinstance(shell.run("%%memprofile --gpu T4\n%memgpu off").error_in_exec, UsageError)
    assert len(shell.shown) == 1


# -- a real device


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


PLAIN = "count = 128\nx = torch.ones(count)"


def test_cpu_is_measured_if_named(shell: Shell) -> None:
    shell.run(f"%%memprofile --gpu cpu\n{PLAIN}").raise_error()
    (tape,) = shell.shown
    assert (str(tape.meta.source), tape.meta.device, curves.peak(tape)[0]) == ("measured", "cpu", 512)


def test_explorer_runs_the_cell_on_the_same_device(shell: Shell, explored: list[Any]) -> None:
    shell.run(f"%%memprofile --gpu cpu --slider count=128:256:128\n{PLAIN}").raise_error()
    (shown,) = explored
    assert (str(shown.run.tape.meta.source), curves.peak(shown.run.tape)[0]) == ("measured", 512)
    shown.knobs = Knobs(variables={"count": 256})
    assert (str(shown.run.tape.meta.source), curves.peak(shown.run.tape)[0]) == ("measured", 1024)
    assert shell["count"] == 128


@pytest.mark.usefixtures("without_gpu")
def test_missing_gpu_raises_one_sentence(shell: Shell) -> None:
    error = shell.run("%%memprofile --gpu cuda\n1").error_in_exec
    assert isinstance(error, UsageError)
    assert "torch finds no GPU on this machine" in str(error)


def test_release_of_a_real_device_raises(shell: Shell) -> None:
    assert isinstance(shell.run("%%memprofile --gpu cpu --release 2.11\n1").error_in_exec, UsageError)


def test_explorer_runs_on_a_usable_real_gpu(shell: Shell, contexts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        profile, "record_like_replay", lambda device, gpu: recording.record() if device is None else None
    )
    monkeypatch.setattr(profile, "show_explorer", lambda *_: contexts.append("explored"))
    shell.run("%%memprofile --explore\n1").raise_error()
    assert contexts == ["enter record", "leave record", "explored"]


# -- which GPU is taken, and in which order contexts are entered and left


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of stand-ins for the real contexts, as they are entered and left."""
    seen: list[str] = []

    def context(name: Callable[..., str]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def enter(*arguments: Any, **options: Any) -> Iterator[Any]:
            seen.append(f"enter {name(*arguments, **options)}")
            yield types.SimpleNamespace(tape=small_tape())
            seen.append(f"leave {name(*arguments, **options)}")

        return enter

    monkeypatch.setattr(Machine, "turned_on", context(lambda machine: f"{machine.gpu.key} {machine.release}"))
    monkeypatch.setattr(recording, "record", context(lambda: "record"))
    return seen


def test_default_without_a_gpu_is_a_t4(shell: Shell, contexts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shell.run("%%memprofile --release 2.12\n1").raise_error()
    assert contexts == ["enter T4 2.12", "enter record", "leave record", "leave T4 2.12"]


def test_default_with_a_gpu_is_the_real_one(shell: Shell, contexts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shell.run("%%memprofile\n1").raise_error()
    assert contexts == ["enter record", "leave record"]


# -- coming and going


def test_loading_twice_has_no_further_effect(shell: Shell) -> None:
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
    with virtual("T4"):  # the GPU of the notebook is off, else this would raise
        pass
    InteractiveShell.clear_instance()


def test_help_lists_the_options(shell: Shell) -> None:
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
        '%%memprofile --gpu 256MiB\nlarge = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")',
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=240, allow_errors=True, kernel_name="python3").execute()
    kinds = [[output.output_type for output in cell.outputs] for cell in notebook.cells]
    live, dead = "display_data", "display_data"
    assert kinds[1] == [live, dead]
    assert kinds[2] == ["error", live, dead]
    assert "----> 3 1 / 0" in re.sub(r"\x1b\[[\d;]*m", "", "\n".join(notebook.cells[2].outputs[0].traceback))
    assert kinds[3] == ["stream"]
    assert notebook.cells[3].outputs[0].text.startswith("UsageError: ")
    assert notebook.cells[4].outputs[0].text == "False True\n"
    # The answer to running out of memory stands above the traceback and the picture.
    assert kinds[5][-1] == "error"
    assert notebook.cells[5].outputs[0].data["text/plain"].startswith("Out of memory\n")
    assert "----> 2 large" in re.sub(r"\x1b\[[\d;]*m", "", "\n".join(notebook.cells[5].outputs[-1].traceback))
    # plotly.js alone is 5 MB: nothing of that may be saved with the notebook
    assert len(nbformat.writes(notebook)) < 1_000_000


def test_ctrl_c_is_deferred_in_each_cell_though_jupyter_sets_its_own_handler(shell: Shell) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        shell.run("%memgpu T4")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as ipykernel does before a cell
        shell.run("import signal; seen = type(signal.getsignal(signal.SIGINT)).__name__")
        assert shell.shell.user_ns["seen"] == "Deferral"
        shell.run("%memgpu off")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
