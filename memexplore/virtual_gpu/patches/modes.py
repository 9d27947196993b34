"""Restore the function modes, dispatch modes and default device of a thread as a whole.

`with mode` and `torch.set_default_device` cannot be undone twice: each undo removes whatever lies on the stack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from memexplore.torch_internals.cuda import device_module, global_device_context
from memexplore.torch_internals.dispatch import function_mode_stack
from memexplore.torch_internals.state import (
    DISPATCH_FLAGS,
    dispatch_mode_stack,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    set_compiled_code_sees_modes,
)
from memexplore.virtual_gpu.patches.install import Keep, Patch


def kept() -> list[Patch]:
    """Patches that restore the modes and the default device, and change nothing."""
    return [
        *(Keep(partial(getattr, *flag), partial(setattr, *flag)) for flag in DISPATCH_FLAGS),
        Keep(lambda: DISPATCH_FLAGS[-1].value, set_compiled_code_sees_modes),
        Keep(dispatch_mode_stack, set_dispatch_modes),
        Keep(function_mode_stack, set_function_modes),
        Keep(partial(getattr, device_module, "CURRENT_DEVICE"), partial(setattr, device_module, "CURRENT_DEVICE")),
        Keep(
            partial(getattr, global_device_context, "device_context", None),
            partial(setattr, global_device_context, "device_context"),
        ),
    ]


def set_dispatch_modes(modes: list[Any]) -> None:
    """Make `modes` the dispatch modes of the calling thread, the outermost first."""
    _set_stack(dispatch_mode_stack, push_dispatch_mode, partial(pop_dispatch_mode, None), modes)


def set_function_modes(modes: list[Any]) -> None:
    """Make `modes` the function modes of the calling thread, the outermost first."""
    _set_stack(function_mode_stack, push_function_mode, pop_function_mode, modes)


def _set_stack(
    read: Callable[[], list[Any]], push: Callable[[Any], object], pop: Callable[[], object], modes: list[Any]
) -> None:
    while (stack := read()) != modes[: len(stack)]:
        pop()
    for mode in modes[len(stack) :]:
        push(mode)
