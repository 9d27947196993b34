"""Installing patches: all or none, and restored completely after any failure."""

from __future__ import annotations

import gc
import types
from functools import partial
from typing import Any

import pytest
import torch

import memexplore as mx
from memexplore.allocator import Settings
from memexplore.hardware.catalogue import find
from memexplore.virtual_gpu import device as virtual_device
from memexplore.virtual_gpu.device import VirtualGpu
from memexplore.virtual_gpu.patches import install
from memexplore.virtual_gpu.patches.install import Call, Insert, Keep, Patched, Replace
from tests.interrupts import lines_of
from tests.virtual_gpu.torch_state import functions, global_state


def _owner(**attributes: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**attributes)


def test_an_attribute_is_replaced_for_the_block():
    owner = _owner(a=1)
    with Patched(lambda: ("value", [Replace(owner, "a", 2)])) as value:
        assert (value, owner.a) == ("value", 2)
    assert owner.a == 1


def test_an_added_attribute_is_removed_after_the_block():
    owner = _owner()
    with Patched(lambda: (None, [Replace(owner, "a", 2)])):
        assert owner.a == 2
    assert vars(owner) == {}


def test_an_attribute_replaced_twice_is_restored_to_its_first_value():
    owner = _owner(a=1)
    with Patched(lambda: (None, [Replace(owner, "a", 2), Replace(owner, "a", 3)])):
        assert owner.a == 3
    assert owner.a == 1


def test_rows_next_to_each_other_restore_what_was_there_and_remove_the_rest():
    first, second = _owner(a=1, b=2), _owner(a=3)
    rows = [Replace(first, "a", 10), Replace(first, "c", 11), Replace(second, "a", 12), Replace(second, "b", 13)]
    with Patched(lambda: (None, rows)):
        assert (vars(first), vars(second)) == ({"a": 10, "b": 2, "c": 11}, {"a": 12, "b": 13})
    assert (vars(first), vars(second)) == ({"a": 1, "b": 2}, {"a": 3})


class _Locked:
    """An object whose attribute `locked` cannot be set."""

    def __init__(self) -> None:
        vars(self).update(a=1, locked=1, b=1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "locked":
            raise AttributeError(name)
        vars(self)[name] = value


@pytest.mark.parametrize("when", ["replaced", "restored"])
def test_rows_next_to_one_that_fails_are_restored(when):
    owner = _Locked()
    rows = [Replace(owner, "a", 2), Replace(owner, "b", 2), Replace(owner, "c", 2)]
    if when == "replaced":
        rows.insert(1, Replace(owner, "locked", 2))
        with pytest.raises(AttributeError, match="locked"), Patched(lambda: (None, rows)):
            pass
    else:
        undo = install.ReplaceTogether((owner,) * 4, ("a", "locked", "b", "c"), (2,) * 4).undo()
        for row in rows:
            row.install()
        with pytest.raises(AttributeError, match="locked"):
            undo()
    assert vars(owner) == {"a": 1, "locked": 1, "b": 1}


def _lines(rows: int) -> int:
    owner = _owner(**{f"name{number}": 0 for number in range(rows)})
    patches = [Replace(owner, name, 1) for name in vars(owner)]

    def block() -> None:
        with Patched(lambda: (None, patches)):
            pass

    # A collection of garbage may run callbacks of weak references, whose lines would count.
    gc.collect()
    gc.disable()
    try:
        return len(lines_of(block))
    finally:
        gc.enable()


def test_more_rows_run_no_more_lines():
    # An interrupt may arrive at each line, and turning a virtual GPU on installs hundreds of rows.
    assert _lines(300) == _lines(3)


def test_only_the_added_entry_is_removed_after_the_block():
    entries = {1: "before"}
    with Patched(lambda: (None, [Insert(entries, "key", "hook")])):
        entries[2] = "of the block"
    assert entries == {1: "before", 2: "of the block"}


def test_state_that_the_block_changes_is_written_back():
    owner = _owner(a=1)
    with Patched(lambda: (None, [Keep(lambda: owner.a, partial(setattr, owner, "a"))])):
        owner.a = 5
    assert owner.a == 1


def test_undo_runs_in_reverse():
    order: list[int] = []
    with Patched(lambda: (None, [Call(unmake=partial(order.append, number)) for number in range(3)])):
        pass
    assert order == [2, 1, 0]


def test_later_undo_actions_run_after_one_that_raises():
    owner = _owner(a=1)
    patches = [Replace(owner, "a", 2), Call(unmake=lambda: 1 / 0)]
    with pytest.raises(ZeroDivisionError), Patched(lambda: (None, patches)):
        pass
    assert owner.a == 1
    install.restore()


def test_a_nested_block_raises_and_the_outer_one_stays_on():
    owner = _owner(a=1)
    with Patched(lambda: (None, [Replace(owner, "a", 2)])):
        with pytest.raises(RuntimeError, match="leave that block first"), Patched(lambda: (None, [])):
            pass
        assert owner.a == 2
    assert owner.a == 1


def test_deleting_a_block_ends_it():
    owner = _owner(a=1)
    block = Patched(lambda: (None, [Replace(owner, "a", 2)]))
    block.__enter__()
    del block
    assert owner.a == 1


def test_a_context_manager_serves_one_block_only():
    owner = _owner(a=1)
    block = Patched(lambda: ("value", [Replace(owner, "a", 2)]))
    with block:
        with pytest.raises(RuntimeError, match="make a new one"):
            block.__enter__()
        assert owner.a == 2
    with pytest.raises(RuntimeError, match="make a new one"):
        block.__enter__()
    assert owner.a == 1


def test_a_decorated_function_runs_in_a_block_each_time():
    owner = _owner(a=1)
    read = Patched(lambda: (None, [Replace(owner, "a", 2)]))(lambda: owner.a)
    assert (read(), owner.a, read(), owner.a) == (2, 1, 2, 1)


def test_an_exception_of_the_block_is_raised():
    with pytest.raises(KeyError), Patched(lambda: (None, [])):
        raise KeyError


def _fail() -> None:
    raise ZeroDivisionError


def _device() -> VirtualGpu:
    return VirtualGpu(find("T4"), "2.13", Settings())


POSITIONS = len(_device().patches()) + 1


def test_torch_is_restored_after_a_failure_at_every_position():
    with mx.virtual("T4"):
        pass
    before, every_function = global_state(), functions()
    for position in range(POSITIONS):

        def switch(position: int = position) -> tuple[None, list[install.Patch]]:
            patches = _device().patches()
            return None, [*patches[:position], Call(_fail), *patches[position:]]

        with pytest.raises(ZeroDivisionError), Patched(switch):
            pass
        assert global_state() == before, position
    assert functions() == every_function


def test_torch_is_restored_after_an_undo_that_fails_at_every_position():
    with mx.virtual("T4"):
        pass
    before, every_function = global_state(), functions()
    for position in range(POSITIONS):

        def switch(position: int = position) -> tuple[None, list[install.Patch]]:
            patches = _device().patches()
            return None, [*patches[:position], Call(unmake=_fail), *patches[position:]]

        with pytest.raises(ZeroDivisionError), Patched(switch):
            assert torch.cuda.is_available()
        assert global_state() == before, position
    assert functions() == every_function


def test_a_failure_of_the_last_patch_leaves_no_gpu_on(monkeypatch):
    monkeypatch.setattr(virtual_device.mode.VirtualMode, "__enter__", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError), mx.virtual("T4"):
        pass
    assert not torch.cuda.is_available()
    assert virtual_device.active() is None


def _interrupted_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave patches installed after their block has ended."""
    with monkeypatch.context() as context:
        context.setattr(install, "restore", lambda: None)
        with mx.virtual("T4"):
            pass
    assert torch.cuda.is_available()


def test_the_next_block_restores_patches_left_by_an_earlier_one(monkeypatch):
    before, every_function = global_state(), functions()
    _interrupted_more_than_once(monkeypatch)
    with mx.virtual("A100"):
        assert torch.cuda.get_device_name() == find("A100").name
    assert (global_state(), functions()) == (before, every_function)


def test_turning_off_restores_patches_left_by_a_block(monkeypatch):
    before, every_function = global_state(), functions()
    _interrupted_more_than_once(monkeypatch)
    virtual_device.turn_off()
    assert (global_state(), functions()) == (before, every_function)


def test_turning_off_ends_a_block_that_still_runs():
    before, every_function = global_state(), functions()
    block = mx.virtual("T4")
    block.__enter__()
    virtual_device.turn_off()
    assert (global_state(), functions()) == (before, every_function)
    assert not block.running
    block.close()
    gc.collect()
    assert (global_state(), functions()) == (before, every_function)
