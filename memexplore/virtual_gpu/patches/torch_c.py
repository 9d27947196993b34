"""Functions of torch's C++ module that other libraries call, such as bitsandbytes, triton and DeepSpeed.

In: a virtual GPU. Out: rows for the table of patches. Builds of torch for the CPU lack these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memexplore.torch_internals.cuda import CLEAR_CUBLAS_WORKSPACES, CUDA_DEVICE_TYPE, CUDA_FUNCTIONS, GRAPH_TREE_NAMES
from memexplore.virtual_gpu.dispatch import runner
from memexplore.virtual_gpu.patches.install import Replace


def rows(run: runner.PlanRunner, functions: dict[str, Any]) -> list[Replace]:
    """Return the replacements; `functions` are those of `torch.cuda`."""

    def stream(index: int = 0) -> tuple[int, int, int]:
        return functions["current_stream"]().stream_id, 0, CUDA_DEVICE_TYPE

    def clear_workspaces() -> None:
        with runner.lock:
            run.free_workspaces()

    replacements: dict[str, Callable[..., Any]] = {
        "getDevice": lambda: 0,
        "getDeviceCount": lambda: 1,
        "setDevice": lambda index: None,
        "exchangeDevice": lambda index: 0,
        "maybeExchangeDevice": lambda index: 0,
        "getCurrentRawStream": lambda index=0: functions["current_stream"]().cuda_stream,
        "getCurrentStream": stream,
        "getDefaultStream": lambda index=0: (0, 0, CUDA_DEVICE_TYPE),
        "isCurrentStreamCapturing": lambda: False,
        "synchronize": lambda: None,
        "emptyCache": functions["empty_cache"],
        "init": lambda: None,
    }
    return [
        Replace(*CLEAR_CUBLAS_WORKSPACES, clear_workspaces),
        *(Replace(*function, replacements[function.name.rpartition("_")[2]]) for function in CUDA_FUNCTIONS),
        # A name that is there stays: the module that imports it keeps it after the block.
        *(Replace(*name, _none) for name in GRAPH_TREE_NAMES if not hasattr(*name)),
    ]


def _none(*args: Any) -> None:
    """Stand for a function of CUDA graphs, which never run on a virtual GPU."""
