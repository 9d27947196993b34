"""The end of a watched run: interrupts at every line, failures, pauses; nothing of the user's stays changed."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import memexplore as mx
from memexplore import live as package
from memexplore.live import watch as watch_module
from memexplore.live.live import State
from memexplore.tape import Ending
from tests.interrupts import LAST, interrupted, interrupts, traced
from tests.live.training import Loop, on
from tests.small_nets import everything
from tests.virtual_gpu.torch_state import functions, global_state

FOLDER = str(Path(package.__file__).parent)
BOTH = pytest.mark.parametrize("device", ["cpu", "cuda"])


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Keep finalizers of earlier tests from running, which are lines of their own."""
    gc.collect()
    gc.disable()
    yield
    LAST.clear()
    gc.enable()


_TORCH = "torch "


def state(loop: Loop) -> dict[str, Any]:
    """Everything that watching may change."""
    optimizer = loop.optimizer
    of_torch = {f"{_TORCH}{name}": value for name, value in global_state().items()}
    return everything(loop.model) | of_torch | {
        "state": {key: sorted(value) for key, value in enumerate(optimizer.state.values())},
        "grad mode": torch.is_grad_enabled(),
        "hooks of all": [dict(table) for table in (watch_module.CALL_HOOKS, watch_module.CALL_PRE_HOOKS,
                                                   watch_module.ALWAYS_CALLED_HOOKS,
                                                   watch_module.OPTIMIZER_PRE_HOOKS,
                                                   watch_module.OPTIMIZER_POST_HOOKS)],
        "scaler": torch.amp.GradScaler.step,
        "flags": [flag.value for flag in watch_module.DISPATCH_FLAGS],
        "modes": watch_module.dispatch_mode_stack(),
    }  # fmt: skip


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two states."""
    return {name: (value, after[name]) for name, value in before.items() if value != after[name]}


def test_an_interrupt_at_any_line_of_entering_and_leaving_leaves_nothing_changed():
    loop = Loop()

    def block() -> None:
        with mx.watch(loop.model, loop.optimizer):
            pass

    block()
    before, every_function = state(loop), functions()
    left = [(changed, line) for line in interrupts(block) if (changed := changes(before, state(loop)))]
    assert left == []
    assert functions() == every_function


@BOTH
def test_an_interrupt_at_any_line_of_a_watched_step_leaves_nothing_changed(device):
    with on(device):
        loop = Loop(device)
        loop.step()

        def block() -> None:
            # Two recorded steps, one whose update repeats theirs on the CPU, and one that is watched lightly.
            with mx.watch(loop.model, loop.optimizer, first=3, every=1000):
                for _ in range(4):
                    loop.step()

        block()
        before = watch_state(loop)
        first: dict[tuple[str, int], int] = {}
        for number, line in enumerate(lines_of_package(block)):
            first.setdefault(line, number)
        left = []
        for line, number in first.items():
            lines_of_package(block, number)
            if changed := changes(before, watch_state(loop)):
                left.append((changed, line))
            # The interrupted step of training itself is the user's, so are its gradients.
            loop.optimizer.zero_grad()
    assert left == []
    assert len(first) > 200


def lines_of_package(function: Callable[[], None], interrupt_at: int = -1) -> list[tuple[str, int]]:
    """Run a function, with a KeyboardInterrupt at one line of the package; return the lines of the package that ran."""
    lines: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) - 1 == interrupt_at:
                raise KeyboardInterrupt
        return trace

    with contextlib.suppress(KeyboardInterrupt):
        traced(function, trace)
    return lines


def watch_state(loop: Loop) -> dict[str, Any]:
    """What watching may change, without what training changes."""
    changed = ("tensors", "gradients", "random", "state")
    return {name: value for name, value in state(loop).items() if name not in changed and not name.startswith(_TORCH)}


@BOTH
def test_after_an_interrupted_watch_another_one_works(device):
    with on(device):
        loop = Loop(device)

        def block() -> None:
            with mx.watch(loop.model) as live:
                loop.step()
                lives.append(live)

        lives: list[Any] = []
        for number in (5, 50, 200):
            interrupted(block, number, FOLDER)
        block()
    assert lives[-1].state is State.ENDED
    assert len(lives[-1].steps()) == 1


@BOTH
def test_an_exception_leaves_the_steps_and_the_tape_of_the_failed_step(device):
    with on(device):
        loop = Loop(device)
        with pytest.raises(ValueError, match="too small"), mx.watch(loop.model, first=3) as live:
            loop.step()
            loop.loss().backward()
            raise ValueError("too small")
    assert live.state is State.FAILED
    assert live.error.startswith("ValueError: too small")
    assert live.steps()["error"].tolist() == ["", live.error]
    assert live.tape(2).meta.ending is Ending.ERROR
    assert live.tape(2).meta.error == live.error


def test_a_light_step_that_fails_on_a_gpu_leaves_what_was_allocated_then():
    with mx.virtual("T4", release="2.13"):
        loop = Loop("cuda")
        with pytest.raises(KeyboardInterrupt), mx.watch(loop.model, first=1, every=1000) as live:
            loop.step()
            loop.step()
            output = loop.model(torch.randn(8, 64, device="cuda"))
            raise KeyboardInterrupt
    tape = live.tape(3)
    assert tape.meta.ending is Ending.INTERRUPTED
    assert "was not recorded: the tape shows what was allocated when it failed" in tape.meta.notes[-1]
    assert tape.peak()[0] == live.steps()["allocated_after"].tolist()[2]
    assert output is not None


def test_an_out_of_memory_error_ends_the_tape_with_the_failed_request():
    with mx.virtual("60MiB", release="2.13"):
        loop = Loop("cuda")
        with pytest.raises(torch.OutOfMemoryError), mx.watch(loop.model, first=1, every=1000) as live:
            loop.step()
            loop.step()
            loop.step(20_000)
    assert live.tape(3).meta.ending is Ending.OUT_OF_MEMORY
    assert live.steps()["recorded"].tolist()[2] == "inputs of new shapes"


def test_an_exception_handled_outside_is_not_the_end_of_the_run():
    loop = Loop()
    try:
        raise ValueError("of the caller")
    except ValueError:
        with mx.watch(loop.model) as live:
            loop.step()
    assert (live.state, live.error) == (State.ENDED, "")


@BOTH
def test_no_tensor_and_no_model_is_kept_alive(device):
    with on(device):
        loop = Loop(device)
        loss = []
        with mx.watch(loop.model, loop.optimizer) as live:
            for _ in range(4):
                loss = [loop.step()]
        gone = [weakref.ref(loop.model), weakref.ref(loop.optimizer), weakref.ref(loss[0].untyped_storage())]
        gone += [weakref.ref(weight.untyped_storage()) for weight in loop.model.parameters()]
        del loop, loss
        gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    assert len(live.steps()) == 4


def test_a_watched_model_can_be_copied_and_saved():
    loop = Loop()
    with mx.watch(loop.model) as live:
        loop.step()
        copied, saved = copy.deepcopy(loop.model), pickle.dumps(loop.model)
        copied(torch.ones(2, 64))
    assert everything(copied)["tensors"][0][0] == "0.weight"
    assert pickle.loads(saved)(torch.ones(2, 64)).shape == (2, 10)
    assert len(live.steps()) == 1


@BOTH
def test_a_pause_counts_steps_and_watches_none(device):
    with on(device):
        loop = Loop(device)
        with mx.watch(loop.model, first=1, every=1000) as live:
            loop.step()
            live.pause()
            loop.step()  # the last watched one: a pause begins at the end of a step
            for _ in range(3):
                loop.step()
                assert live.state is State.PAUSED
                assert watch_module.KEY not in watch_module.CALL_HOOKS
            live.resume()
            loop.step()  # counted: watching begins at the end of a step
            loop.step()
    assert live.steps()["step"].tolist() == [1, 2, 7]


def test_an_interrupt_during_a_pause_leaves_nothing_changed():
    loop = Loop()
    before = watch_state(loop)
    with pytest.raises(KeyboardInterrupt), mx.watch(loop.model) as live:
        live.pause()
        loop.step()
        loop.step()
        raise KeyboardInterrupt
    assert watch_state(loop) == before
    assert live.state is State.FAILED


def test_an_error_of_memexplore_itself_ends_watching_and_not_the_training(monkeypatch):
    loop = Loop()
    before = watch_state(loop)
    with mx.watch(loop.model) as live:
        loop.step()
        monkeypatch.setattr(live._store, "add", None)
        with pytest.warns(UserWarning, match="watches no longer, because of an error of its own"):
            loop.step()
        assert watch_state(loop) == before
        loop.step()
    assert len(live.steps()) == 1
    assert live.state is State.FAILED
