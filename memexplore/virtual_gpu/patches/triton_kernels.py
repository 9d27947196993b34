"""Launch no Triton kernels on virtual tensors, whose values become unknown.

A kernel writes into tensors that exist already, so that a launch makes no request to the allocator. The 256 MiB buffer
with which Triton's autotuner empties the cache of a real GPU, once per kernel and set of shapes, is left out.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values import known_values


def rows() -> list[Replace]:
    """Return the replacements of Triton's launches; none if Triton is not installed."""
    if not _is_installed():
        return []
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    return [Replace(launcher, "run", _launch(launcher.run)) for launcher in (JITFunction, Autotuner)]


@functools.cache
def _is_installed() -> bool:
    # torch, too, looks for Triton once in a process.
    return importlib.util.find_spec("triton") is not None


def _launch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if is_virtual(value)]
        if not tensors:
            return original(self, *args, **kwargs)
        for tensor in tensors:
            # The kernel may write into any of them.
            known_values.forget(tensor)
        return None

    return run
