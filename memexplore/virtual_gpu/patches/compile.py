"""Run the eager code of what `torch.compile` would compile, and say so in a note on the tape."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.state import (
    compiler_callback,
    compiler_is_imported,
    compiler_stance,
    set_compiler_stance,
)
from memexplore.virtual_gpu.patches.install import Replace
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
    """`torch.compile`, which `Module.compile` calls, while a virtual GPU is on. Make it while it is not replaced."""

    def __init__(self) -> None:
        self._original = torch.compile
        self._set_stance = torch.compiler.set_stance
        self._stance_before: Any = None
        """The compiler's stance that `stop` restores; None while it is unchanged."""
        self._unpatch: Callable[[], object] = lambda: None
        self._has_run = False
        """Whether compiled code has run, so that the note is there."""

    def start(self) -> None:
        """Run functions that were compiled in an earlier cell eagerly."""
        if compiler_is_imported():
            self._run_eagerly()

    def stop(self) -> None:
        """Restore the compiler's stance."""
        self._unpatch()
        if self._stance_before is not None:
            set_compiler_stance(self._stance_before)
        while _OWN_HOOKS in warnings.filters:
            warnings.filters.remove(_OWN_HOOKS)  # type: ignore[attr-defined]

    def _run_eagerly(self) -> None:
        if self._stance_before is None:
            noting = Replace(*compiler_callback(), self._noting(compiler_callback().value))
            self._unpatch, self._stance_before = noting.undo(), compiler_stance()
            noting.install()
            self._set_stance("force_eager")
            warnings.filters.insert(0, _OWN_HOOKS)  # type: ignore[attr-defined]

    def _noting(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the function that compiled code calls when it runs, with a note at the first run."""

        def callback(compiling: Any) -> Any:
            if not self._has_run and callable(compiling):
                compiled = sys._getframe(1).f_locals.get("fn")
                self._has_run = getattr(compiled, "__name__", "") != _FLEX_WRAPPER
                if self._has_run:
                    notes.assume(_NOTE)
            return original(compiling)

        return callback

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
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def function(self, model: Callable[..., Any] | None = None, **options: Any) -> Any:
        """`torch.compile`."""
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
