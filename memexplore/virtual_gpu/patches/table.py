"""List the replacements in torch while a virtual GPU is on: the owner of a name, the name, and the replacement.

Modes, hooks and other state are in the modules that need them; `memexplore.virtual_gpu.device` joins all patches in the
order in which they are installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.backends.cudnn.rnn as cudnn_rnn
from torch import nn

from memexplore.torch_internals import cuda as internal_cuda
from memexplore.torch_internals import modules as internals
from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.higher_order import HIGHER_ORDER_CALL
from memexplore.virtual_gpu.dispatch import streams
from memexplore.virtual_gpu.kernels import encoder, recurrent
from memexplore.virtual_gpu.patches import (
    autocast,
    bitsandbytes,
    cuda_api,
    cuda_objects,
    failed_backward,
    higher_order,
    line_search,
    profiling,
    refusals,
    torch_names,
    triton_kernels,
)
from memexplore.virtual_gpu.patches.compile import EagerCompile
from memexplore.virtual_gpu.patches.device_names import DeviceRenaming, in_backward
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.patches.module_moves import ModuleMoves, parsing
from memexplore.virtual_gpu.patches.serialization import load_function
from memexplore.virtual_gpu.tensors.tensor import DeviceState, is_virtual
from memexplore.virtual_gpu.user_traceback import without_own_frames


def rows(
    device: cuda_api.Device, moves: ModuleMoves, renaming: DeviceRenaming, compiling: EagerCompile
) -> list[Replace]:
    """Return the names of torch that are replaced while `device` is on. Call it while nothing is replaced."""
    functions = cuda_api.functions(device)
    accelerator = cuda_api.accelerator(functions)
    return [
        *map(Replace, itertools.repeat(torch.cuda), functions, functions.values()),
        *_aliases(torch.cuda, functions, _CUDA_MODULES),
        *(
            Replace(torch.accelerator, name, function)
            for name, function in accelerator.items()
            if hasattr(torch.accelerator, name)
        ),
        *_aliases(torch.accelerator, accelerator, _ACCELERATOR_MODULES),
        *torch_names.rows_of_c(device.runner, functions),
        *bitsandbytes.rows(),
        *torch_names.rows(device, functions),
        *triton_kernels.rows(),
        *line_search.rows(),
        *refusals.rows(),
        *(Replace(torch, name, function) for name, function in autocast.functions().items()),
        Replace(torch, "get_device_module", _device_module(torch.get_device_module)),
        Replace(torch, "Generator", cuda_objects.Generator),
        *profiling.rows(),
        Replace(torch, "load", load_function(torch.load)),
        Replace(torch, "compile", compiling.function),
        Replace(torch.compiler, "set_stance", compiling.stance),
        Replace(torch.Tensor, "record_stream", cuda_api.record_stream),
        Replace(torch.autograd.graph, "save_on_cpu", _SaveOnCpu),
        Replace(nn.DataParallel, "scatter", _scatter),
        Replace(torch.backends.cudnn, "is_acceptable", _is_acceptable(torch.backends.cudnn.is_acceptable)),
        Replace(torch.overrides, "has_torch_function", encoder.has_torch_function),
        Replace(cudnn_rnn, "get_cudnn_mode", recurrent.MODES.__getitem__),
        # Names that torch calls private.
        Replace(*HIGHER_ORDER_CALL, higher_order.calling(HIGHER_ORDER_CALL.value, compiling.runs_compiled_code)),
        Replace(*internals.MODULE_APPLY, _method(moves.apply)),
        Replace(*internals.PARSE_TO, parsing(internals.PARSE_TO.value)),
        Replace(*internals.ENGINE_RUN_BACKWARD, without_own_frames(in_backward(renaming, _run_backward()))),
        Replace(*internals.USE_CUDNN_RNN, lambda: True),
        Replace(*internals.GROUP_TENSORS, _grouped(internals.GROUP_TENSORS.value)),
        # torch looks for an accelerator once in a process, and a checkpoint on the CPU has found none.
        Replace(*internals.DEFAULT_DEVICE_TYPE, "cuda"),
        Replace(*internal_cuda.EXCHANGE_DEVICE, lambda device: 0),
        Replace(*internal_cuda.MAYBE_EXCHANGE_DEVICE, lambda device: 0),
        Replace(*internal_cuda.NVTX, cuda_objects.Nvtx()),
    ]


_CUDA_MODULES = (torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs)
_ACCELERATOR_MODULES = (torch.accelerator.memory,)


def _aliases(owner: Any, functions: dict[str, Any], modules: tuple[Any, ...]) -> list[Replace]:
    """Return the replacements of the same names in the modules that define them, or that import them."""
    return [
        Replace(module, name, functions[name])
        for module in modules
        for name in filter(vars(module).__contains__, functions)
        if vars(module)[name] is vars(owner).get(name)
    ]


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function, which a class binds to its instance, that calls a bound method."""
    return without_own_frames(lambda *args, **kwargs: function(*args, **kwargs))


def _device_module(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device=None: original("cuda" if device is None else device)


def _scatter(self: Any, inputs: tuple[Any, ...], kwargs: Any, device_ids: Any) -> tuple[Any, Any]:
    """`DataParallel.scatter` onto one device."""
    moved = pytree.tree_map_only(torch.Tensor, lambda value: value.cuda(), (inputs, kwargs or {}))
    return (moved[0],), (moved[1],)


class _SaveOnCpu(torch.autograd.graph.save_on_cpu):
    """`save_on_cpu` without pinned memory: a pinned buffer would be a real one, as large as all that is saved.

    Pinned buffers are contiguous, so a tensor that is not, such as the transpose of a weight, is copied on the GPU.
    """

    def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
        super().__init__(False, device_type)
        if pin_memory:
            self.pack_hook = lambda tensor: (
                tensor.device,
                tensor.to("cpu", memory_format=None if tensor.is_sparse else torch.contiguous_format),
            )
            self.unpack_hook = lambda packed: packed[1].to(packed[0], non_blocking=True)


def _run_backward() -> Callable[..., Any]:
    return streams.by_engine(failed_backward.emptying_queue(internals.ENGINE_RUN_BACKWARD.value))


def _is_acceptable(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.backends.cudnn.is_acceptable`, with which `flatten_parameters` decides, for virtual tensors too."""
    types = torch.backends.cudnn.CUDNN_TENSOR_DTYPES

    def is_acceptable(tensor: torch.Tensor) -> bool:
        if is_virtual(tensor) and tensor.is_cuda:
            return torch.backends.cudnn.enabled and tensor.dtype in types
        return original(tensor)

    return is_acceptable


def _grouped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that groups tensors by device and type, with virtual ones on `cuda`; C++ says `meta`."""

    def group(tensors: Any, with_indices: bool = False) -> Any:
        groups = original(tensors, with_indices)
        if not any(device.type == "meta" for device, _ in groups):
            return groups
        cuda = DeviceState.cuda
        return {(cuda if device.type == "meta" else device, dtype): group for (device, dtype), group in groups.items()}

    return group
