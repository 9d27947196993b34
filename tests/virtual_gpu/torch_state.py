"""The global state of torch that a run on a virtual GPU could change, as values to compare."""

from __future__ import annotations

import gc
import sys
import threading
import types
from concurrent.futures.thread import _WorkItem
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import DefaultDeviceType

from memexplore.torch_internals.state import DISPATCH_FLAGS
from memexplore.virtual_gpu import device
from memexplore.virtual_gpu.kernels import cuda_build
from memexplore.virtual_gpu.tensors import methods
from memexplore.virtual_gpu.tensors.tensor import DeviceState
from tests import threads

_HOOKS = ("torch.nn.modules.module", "torch.optim.optimizer")


def functions() -> dict[str, int]:
    """Return the identity of each function and class in a torch module, and of each member of the main classes."""
    owners: list[tuple[str, dict[str, Any]]] = [
        (name, vars(module)) for name, module in list(sys.modules.items()) if name.split(".")[0] == "torch" and module
    ]
    classes = (torch.Tensor, nn.Module, nn.Parameter, nn.DataParallel, torch.optim.Optimizer, torch.Generator)
    owners += [(kind.__name__, dict(vars(kind))) for kind in classes]
    return {
        f"{owner}.{name}": id(value)
        for owner, members in owners
        for name, value in list(members.items())
        if callable(value) and not name.startswith("__") and not isinstance(value, types.ModuleType)
        # These stay while a virtual tensor is alive, and test_identity.py has their end.
        if not (owner == "Tensor" and name in methods.NAMES)
    }


def _global_hooks() -> dict[str, int]:
    return {
        key: len(value)
        for name in _HOOKS
        for key, value in vars(sys.modules[name]).items()
        if key.startswith("_global") and isinstance(value, dict)
    }


def global_state() -> dict[str, Any]:
    """Return the global state except functions and classes; for those see `functions`."""
    return {
        "hooks": _global_hooks(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "threads": threads.begun(),
        "random": torch.get_rng_state().numpy().tobytes(),
        "default": (torch.get_default_dtype(), torch.get_default_device()),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cpu"),
            torch.get_autocast_dtype("cuda"),
            torch.get_autocast_dtype("privateuseone"),
            torch.is_autocast_cache_enabled(),
        ),
        "lift": torch._C._only_lift_cpu_tensors(),
        "safe globals": set(torch.serialization.get_safe_globals()),
        "cuda": torch.cuda.is_available(),
        "collector": (len(gc.callbacks), gc.isenabled()),
        "device": device.active(),
        "modes": [flag.value for flag in DISPATCH_FLAGS],
        "device state": {name: value for name, value in vars(DeviceState).items() if not name.startswith("__")},
        "build": cuda_build.current(),
        "thread": (threading.Thread.start, vars(threading.Condition)["_acquire_restore"], _WorkItem.run),
        "checkpoint": vars(DefaultDeviceType)["_default_device_type"],
        "types": [len(sys.modules[name]._foreach_supported_types) for name in _TYPES],
        "trace": (sys.gettrace(), sys.getprofile()),
    }


_TYPES = ("torch.optim.optimizer", "torch.utils._foreach_utils")
