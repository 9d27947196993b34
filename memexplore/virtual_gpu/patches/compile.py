"""Run the eager code of what `torch.compile` would compile, and say so in a note on the tape."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memexplore.torch_internals.state import compiler_is_imported, compiler_stance, set_compiler_stance
from memexplore.virtual_gpu.values import notes

_NOTE = "torch.compile runs the eager code, which holds more or less than the compiled kernels would"


_OWN_HOOKS = (
    "ignore",
    re.compile(r"Using `torch\.compile\(module\)` when there are global hooks"),
    UserWarning,
    None,
    0,
)
"""Filter of a warning about the recorder's hooks, which the user did not register."""
_WRAPPERS = os.path.join("_dynamo", "eval_frame.py")
"""The file of the wrappers that `torch.compile` returns."""
_FLEX_WRAPPER = "_flex_attention_hop_wrapper"
"""The function inside flex_attention that torch compiles if the user did not."""


class EagerCompile:
    """`torch.compile` and `Module.compile` while a virtual GPU is on. Make it while they are not replaced."""

    def __init__(self) -> None:
        self._original = torch.compile
        self._set_stance = torch.compiler.set_stance
        self._modules = WeakIdKeyDictionary()
        """Modules that `Module.compile` has compiled."""
        self._stance_before: Any = None
        """The compiler's stance that `stop` restores; None while it is unchanged."""

    def start(self) -> None:
        """Run functions that were compiled in an earlier cell eagerly."""
        if compiler_is_imported():
            self._run_eagerly()

    def stop(self) -> None:
        """Restore the compiler's stance."""
        if self._stance_before is not None:
            set_compiler_stance(self._stance_before)
        while _OWN_HOOKS in warnings.filters:
            warnings.filters.remove(_OWN_HOOKS)  # type: ignore[attr-defined]

    def _run_eagerly(self) -> None:
        if self._stance_before is None:
            self._stance_before = compiler_stance()
            self._set_stance("force_eager")
            warnings.filters.insert(0, _OWN_HOOKS)  # type: ignore[attr-defined]

    def runs_compiled_code(self) -> bool:
        """Return whether the user compiled a function or module that is running.

        flex_attention compiles a function of its own, directly below it.
        """
        frame = sys._getframe(1)
        below = 0
        while frame is not None:
            code = frame.f_code
            if code.co_filename.endswith(_WRAPPERS):
                below += 1
                if below > 1:
                    return True
            elif code.co_name == "_wrapped_call_impl" and frame.f_locals.get("self") in self._modules:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def function(self, model: Callable[..., Any] | None = None, **options: Any) -> Any:
        """`torch.compile`."""
        if getattr(model, "__name__", "") != _FLEX_WRAPPER:
            notes.assume(_NOTE)
        if options.get("disable"):
            return self._original(model, **options)
        self._run_eagerly()
        kept = {name: options[name] for name in ("fullgraph", "dynamic") if name in options}
        return self._original(model, backend="eager", **kept)

    def stance(self, *args: Any, **options: Any) -> Any:
        """`torch.compiler.set_stance`: its arguments are checked, and under each stance compiled code runs eagerly."""
        self._run_eagerly()
        eager = compiler_stance()
        try:
            self._set_stance(*args, **options)
        finally:
            set_compiler_stance(eager)
        return self._set_stance("force_eager")

    def method(self, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        """`Module.compile`."""
        self._modules[module] = True
        notes.assume(_NOTE)
