"""`torch.compile` on the virtual GPU: the eager code runs, and the tape says so."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from memexplore.virtual_gpu.tensors import values


class Compiling:
    """`torch.compile` and `Module.compile` while a virtual GPU is on."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self._original = torch.compile
        self._undo = undo
        self._eager = False
        if "torch._dynamo" in sys.modules:
            # What was compiled in an earlier cell must run eagerly, too.
            self._run_eagerly()

    def _run_eagerly(self) -> None:
        if not self._eager:
            self._eager = True
            self._undo.enter_context(torch.compiler.set_stance("force_eager"))

    def function(self, model: Callable[..., Any] | None = None, **options: Any) -> Any:
        """`torch.compile`."""
        values.assume("torch.compile runs the eager code, which holds more or less than the compiled kernels would")
        if options.get("disable"):
            return self._original(model, **options)
        self._run_eagerly()
        kept = {name: options[name] for name in ("fullgraph", "dynamic") if name in options}
        return self._original(model, backend="eager", **kept)

    def method(self, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        """`Module.compile`."""
        values.assume("torch.compile runs the eager code, which holds more or less than the compiled kernels would")
