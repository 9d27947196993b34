"""Ends of recorded programs: errors, interrupts, exits and threads."""

import contextlib
import dataclasses
import threading

import pytest
import torch

from memexplore.analysis.verdict import Verdict, verdict
from memexplore.analysis.verdict_content import verdict_content
from memexplore.recorder.endings import End, end_of
from memexplore.recorder.recording import record
from memexplore.run.machine import machine_of, virtual
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.run.simulate import simulate
from memexplore.tape import Ending


def recorded(function, gpu="T4"):
    with virtual(gpu):
        recording = record()
        try:
            with recording as running:
                function()
        except BaseException:
            pass
    return running.tape


def fail(error):
    torch.ones(3, device="cuda")
    raise error


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (ValueError("no"), Ending.ERROR),
        (SystemExit(2), Ending.ERROR),
        (SystemExit("why"), Ending.ERROR),
        (SystemExit(), Ending.COMPLETED),
        (KeyboardInterrupt(), Ending.INTERRUPTED),
        (torch.OutOfMemoryError("raised by hand"), Ending.OUT_OF_MEMORY),
    ],
)
def test_ending_of_a_recording(error, ending):
    assert recorded(lambda: fail(error)).meta.ending is ending


def test_error_has_type_message_and_the_line_of_the_user():
    line = fail.__code__.co_firstlineno + 2
    assert recorded(lambda: fail(ValueError("\nfirst\nsecond"))).meta.error == f"ValueError: first ({__file__}:{line})"


def test_long_message_is_cut():
    assert len(end_of(ValueError("x" * 5000)).error) == len("ValueError: ") + 300  # an ellipsis among them


def test_message_that_no_terminal_can_print_is_cleaned():
    assert end_of(ValueError("no file caf\udce9\x1b[2J")).error == "ValueError: no file caf��[2J"


def test_error_without_a_text_ends_a_recording():
    class BrokenError(Exception):
        def __str__(self):
            raise KeyError("text")

    assert "<exception str() failed>" in recorded(lambda: fail(BrokenError())).meta.error


def test_error_raised_from_an_out_of_memory_error_is_one():
    def run():
        try:
            torch.empty(2**40, device="cuda")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("trainer failed") from error

    assert verdict(recorded(run)) is Verdict.OOM


def test_exit_in_the_handler_of_an_out_of_memory_error_is_one():
    def run():
        try:
            torch.empty(2**40, device="cuda")
        except torch.OutOfMemoryError:
            raise SystemExit(1)  # noqa: B904

    assert verdict(recorded(run)) is Verdict.OOM


def test_program_that_catches_the_error_and_gives_up_does_not_fit():
    def run():
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(2**40, device="cuda")

    tape = recorded(run)
    assert verdict(tape) is Verdict.OOM
    assert "caught the error and allocated nothing afterwards" in verdict_content(tape).detail


def test_line_of_an_error_is_not_that_of_generated_code():
    @dataclasses.dataclass
    class Small:
        size: int

        def __post_init__(self):
            raise ValueError("small")

    assert "<string>" not in recorded(lambda: Small(1)).meta.error


def test_caught_error_does_not_end_the_program():
    def run():
        for size in (2**40, 2**10):
            try:
                torch.empty(size, device="cuda")
            except torch.OutOfMemoryError:
                continue

    tape = recorded(run)
    assert (tape.meta.ending, verdict(tape)) == (Ending.COMPLETED, Verdict.FITS)


def test_error_of_a_thread_ends_the_run_in_an_error(monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", seen.append)

    def run():
        thread = threading.Thread(target=lambda: 1 / 0, name="loader")
        thread.start()
        thread.join()
        torch.ones(3, device="cuda")

    tape = recorded(run)
    assert verdict(tape) is Verdict.ERROR
    assert tape.meta.error.startswith("ZeroDivisionError: division by zero")
    assert tape.meta.error.endswith("in the thread loader")
    assert len(seen) == 1  # the hook of the program is called too


def test_thread_hook_is_restored():
    before = threading.excepthook
    recorded(lambda: None)
    assert threading.excepthook is before


def test_step_that_does_not_fit_ends_out_of_memory():
    step = Step(torch.nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    tape = run(step, machine=machine_of("8MiB")).tape
    assert tape.meta.ending is Ending.OUT_OF_MEMORY


def test_end_without_an_error_is_complete():
    assert end_of(None) == End(Ending.COMPLETED)


# -- training on the CPU


def train_on(device):
    model = torch.nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()


def test_training_on_the_cpu_is_not_a_run_on_the_gpu():
    def run():
        torch.ones(3, device="cuda")  # one tensor on the GPU does not make it a training on the GPU
        train_on("cpu")

    tape = recorded(run)
    assert tape.meta.trained_on_cpu == ("Linear",)
    assert verdict(tape) is Verdict.NOT_ON_GPU


@pytest.mark.parametrize("devices", [("cuda",), ("cuda", "cpu"), ("cpu", "cuda")])
def test_training_on_the_gpu_beside_one_on_the_cpu_fits(devices):
    tape = recorded(lambda: [train_on(device) for device in devices])
    assert (tape.meta.trained_on_cpu, verdict(tape)) == ((), Verdict.FITS)


def test_weights_that_wait_on_the_cpu_train_on_the_gpu():
    def run():
        weight = torch.nn.Parameter(torch.ones(8, 8))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        (torch.ones(2, 8, device="cuda") @ weight.cuda()).sum().backward()
        optimizer.step()

    assert verdict(recorded(run)) is Verdict.FITS


def test_simulate_warns_of_a_function_that_did_not_use_the_gpu():
    with pytest.warns(UserWarning, match="Nothing trained on the Tesla T4: Linear trained on the CPU"):
        simulate(lambda: train_on("cpu"), gpu="T4")


def test_error_of_simulate_has_notes_of_the_assumptions():
    def run():
        size = int(torch.nn.Linear(1024, 1024).cuda()(torch.randn(64, 1024, device="cuda")).argmax())
        raise ValueError(f"{size} is wrong")

    with pytest.raises(ValueError, match="is wrong") as caught:
        simulate(run, gpu="T4")
    assert any("assumed" in note and __file__ in note for note in getattr(caught.value, "__notes__", []))


def test_the_error_of_the_program_is_raised_whatever_optimizers_the_process_has() -> None:
    weight = torch.nn.Parameter(torch.eye(4).to_sparse())
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    torch.sparse.sum(weight * 2).backward()
    optimizer.step()  # its state has no storage
    with pytest.raises(ValueError, match="of the program"), record() as recording:
        error = ValueError("of the program")
        recording.ended_by(error)
        raise error
