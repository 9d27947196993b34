"""`record`, whether its block or the building of its tape fails: which exception comes through, and what stays on."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn.modules import module as torch_modules

import memexplore as mx
from memexplore.analysis.verdict_content import verdict_content
from memexplore.recorder import real_device, tape_builder
from memexplore.recorder.allocator_history import AllocatorHistory
from memexplore.recorder.real_device import RealDevice
from memexplore.tape import Action, Tape


@pytest.fixture
def failing_build(monkeypatch):
    """Building a tape raises ArithmeticError."""

    def build(recorder: object, meta: object) -> Tape:
        raise ArithmeticError("no category for row 7")

    monkeypatch.setattr(tape_builder, "build", build)


def _fail() -> None:
    x = torch.ones(1000)
    raise ZeroDivisionError(x.numel())


def _hooks() -> tuple[int, int]:
    return len(torch_modules._global_forward_pre_hooks), len(torch_modules._global_forward_hooks)


@contextlib.contextmanager
def _device(name: str):
    with mx.virtual("T4") if name == "cuda" else contextlib.nullcontext():
        yield


def test_a_second_recording_inside_another_is_refused():
    with mx.record(), pytest.raises(RuntimeError, match="already"), mx.record():
        pass


def test_a_running_recording_has_no_tape():
    with mx.record() as recording, pytest.raises(RuntimeError, match="still running"):
        recording.tape  # noqa: B018


def test_a_block_that_raises_has_a_tape():
    with pytest.raises(ZeroDivisionError), mx.record() as recording:
        _fail()
    assert recording.tape.size.max() == 4000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("failing_build")
def test_the_blocks_own_exception_comes_through_with_the_failed_tape_as_a_note(device):
    with _device(device), pytest.raises(ZeroDivisionError) as raised, mx.record():
        _fail()
    assert raised.value.__notes__ == [
        "memexplore could not build the tape of this recording (ArithmeticError: no category for row 7)."
    ]


@pytest.mark.usefixtures("failing_build")
def test_an_interrupt_of_the_block_comes_through():
    with pytest.raises(KeyboardInterrupt), mx.record():
        raise KeyboardInterrupt


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("failing_build")
def test_a_failed_tape_is_raised_where_the_block_succeeds(device):
    with _device(device), pytest.raises(ArithmeticError, match="row 7"), mx.record():
        torch.ones(1000)


@pytest.mark.usefixtures("failing_build")
def test_a_recording_without_a_tape_names_the_reason():
    with pytest.raises(ZeroDivisionError), mx.record() as recording:
        _fail()
    with pytest.raises(RuntimeError, match="building it failed") as raised:
        recording.tape  # noqa: B018
    assert isinstance(raised.value.__cause__, ArithmeticError)


@pytest.mark.usefixtures("failing_build")
def test_a_simulation_that_runs_out_of_memory_and_has_no_tape_names_the_reason():
    with pytest.raises(RuntimeError, match="building it failed"):
        mx.simulate(lambda: torch.empty(1 << 40, device="cuda"), gpu="T4")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("block", [_fail, lambda: torch.ones(1000)])
def test_a_failed_tape_leaves_nothing_registered(device, block, monkeypatch):
    def recorded() -> Tape:
        with mx.record() as recording:
            block()
        return recording.tape

    before = _hooks()
    with _device(device):
        with monkeypatch.context() as patch:
            patch.setattr(tape_builder, "build", lambda *_: 1 // 0)
            with pytest.raises(ArithmeticError):
                recorded()
        assert _hooks() == before
        # A recorder or a dispatch mode that stayed would refuse the next recording, or note its block twice.
        with mx.record() as recording:
            torch.ones(1000, device=device)
    tape = recording.tape
    assert tape.size[tape.action == Action.ALLOC].tolist() == [4000]


def test_the_blocks_own_exception_comes_through_where_the_history_of_a_gpu_cannot_be_read(monkeypatch):
    class History(AllocatorHistory):
        def begin(self) -> None:
            pass

        def read(self) -> None:
            raise OSError("no space left on device")

    monkeypatch.setattr(real_device, "AllocatorHistory", History)
    real = RealDevice({}, torch.device("cpu"))
    real.device = torch.device("cuda", 0)
    with pytest.raises(ZeroDivisionError) as raised, real.watch():
        _fail()
    assert raised.value.__notes__ == [
        "memexplore could not read the allocator's history (OSError: no space left on device)."
    ]
    with pytest.raises(OSError, match="no space"), real.watch():
        pass


@pytest.mark.parametrize(
    ("system", "first"), [("linux", 0x7EFF_FE00_0000), ("wsl", 0x5_0200_0000), ("windows", 0x7_0000_0000)]
)
def test_the_operating_system_decides_where_segments_lie(system: str, first: int) -> None:
    tape = mx.simulate(lambda: torch.zeros(10, device="cuda"), gpu="T4", os=system)
    # On Linux the first range of 32 MiB ends at 0x7F00_0000_0000.
    assert tape.address[tape.action == Action.SEGMENT_ALLOC].tolist() == [first]
    assert tape.meta.os == system


def test_an_unknown_operating_system_is_refused() -> None:
    with pytest.raises(
        ValueError, match="'macos' is not an operating system of a GPU driver; write linux, wsl, windows"
    ):
        mx.virtual("T4", os="macos").__enter__()


def test_a_function_that_does_not_fit_is_called_again_for_its_whole_run(capsys):
    called = []

    def run():
        called.append(torch.cuda.get_device_properties(0).total_memory)
        print("step")
        kept = [torch.zeros(1 << 18, device="cuda") for _ in range(30)]  # 30 MiB
        del kept

    tape = mx.simulate(run, gpu="20MiB")
    assert called == [20 * 2**20, 2**50]
    assert capsys.readouterr().out == "step\n"
    assert tape.whole.peak()[0] == 30 * 2**20
    # 1 MiB each, two in a segment of 2 MiB
    assert verdict_content(tape).headline == "Needs 30.0 MiB · the GPU has 20.0 MiB · 10.0 MiB over"


def test_a_function_that_fits_is_called_once():
    called = []
    tape = mx.simulate(lambda: called.append(torch.zeros(1, device="cuda").is_cuda), gpu="20MiB")
    assert (called, tape.whole) == ([True], None)


def test_a_loop_that_ends_out_of_memory_has_no_whole_run():
    def run():
        kept = []
        while True:
            kept.append(torch.zeros(1 << 18, device="cuda"))

    assert mx.simulate(run, gpu="20MiB").whole is None


def test_a_second_call_that_fails_leaves_the_tape_of_the_first():
    batches = iter([torch.zeros(1 << 18)] * 30)
    tape = mx.simulate(lambda: [next(batches).cuda() for _ in range(30)], gpu="20MiB")
    assert (len(tape.size[tape.action == Action.OOM]), tape.whole) == (1, None)


def test_a_step_is_no_function():
    step = mx.Step(torch.nn.Linear(3, 1), (torch.zeros(2, 3), torch.zeros(2, 1)), loss=torch.nn.functional.mse_loss)
    with pytest.raises(TypeError, match=r"a function without arguments, not Step; .* mx\.sweep\(step, "):
        mx.simulate(step)
