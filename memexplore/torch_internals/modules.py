"""Private names of modules, backward passes, checkpoints and optimizers."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memexplore.torch_internals.state import compiler_is_used
from memexplore.torch_internals.table import (
    CHECKPOINTS,
    NO_IN_PLACE,
    NO_VIRTUAL_GPU,
    Attribute,
    attribute_names,
    attribute_of,
    look_up,
    replaceable,
)

# --- modules --------------------------------------------------------------------------------------------------------

MODULE_TABLES = attribute_names(
    "torch.nn.Module",
    "_parameters _buffers _modules _forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks",
    nn.Module,
    "a module's entries and hooks in their order, None included, which `named_parameters` and the like leave out",
    "knobs and simulations cannot restore a model",
)
OWN_TENSORS = MODULE_TABLES[:2]
"""Tables of a module's own parameters and buffers."""
HOOK_TABLES = MODULE_TABLES[3:]
"""Tables of a module's own hooks."""
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter(MODULE_TABLES[0])
buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = operator.attrgetter(MODULE_TABLES[1])


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model, whose class may have a method or an attribute named ``parameters``.

    >>> [tuple(weight.shape) for weight in weights_of(nn.Linear(2, 3))]
    [(3, 2), (3,)]
    """
    return [weight for part in model.modules() for weight in parameters_of(part).values() if weight is not None]


pre_hooks_of: Callable[[nn.Module], dict[int, Callable[..., Any]]] = operator.attrgetter(MODULE_TABLES[4])
pre_hooks_with_kwargs_of: Callable[[nn.Module], dict[int, bool]] = attribute_of(
    "torch.nn.Module",
    "_forward_pre_hooks_with_kwargs",
    nn.Module,
    "which forward pre-hooks take keyword arguments; a hook is removed also if an interrupt lost its handle",
    "a model cannot be restored after knobs",
)
HOOKS_BEFORE_FORWARD = (
    MODULE_TABLES[4],
    "_forward_pre_hooks_with_kwargs",
    *attribute_names(
        "torch.nn.Module",
        "_load_state_dict_pre_hooks",
        nn.Module,
        "a table from which a lazy module removes its own hook when it is initialized",
        "a user's lazy modules cannot be restored after a virtual GPU",
    ),
)
"""Tables from which a lazy module removes its own hooks when it is initialized."""
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter(MODULE_TABLES[2])
GLOBAL_HOOKS = tuple(
    replaceable(
        f"torch.nn.modules.module.{name}",
        "global hooks are off while a model runs on fake tensors",
        NO_IN_PLACE,
    )
    for name in (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    )
)
CALL = "__call__"
"""The public method by which a module is called, replaced in the classes of watched models."""
_compiled_call_of = attribute_of(
    "torch.nn.Module",
    "_compiled_call_impl",
    nn.Module,
    "a model that `Module.compile()` has compiled",
    "`watch` of a compiled model compiles it again",
)
_COMPILED_INSIDE = "_orig_mod"
"""Name under which the module that `torch.compile` returns has the compiled one."""
_COMPILED_BY_LIGHTNING = "_compiler_ctx"
"""Attribute of a LightningModule whose `training_step` is compiled; else it is None."""


def is_compiled(model: nn.Module) -> bool:
    """Whether a model, or a module in it, runs compiled code."""
    return getattr(model, _COMPILED_BY_LIGHTNING, None) is not None or any(
        _compiled_call_of(module) is not None or _COMPILED_INSIDE in children_of(module) for module in model.modules()
    )


def is_compiled_outside(model: nn.Module) -> bool:
    """Whether `torch.compile` has returned a module around a model, so that calls of that one run compiled code.

    It takes 0.04 s per million objects of Python where something was compiled.
    """
    return compiler_is_used() and any(
        isinstance(holder, dict) and holder.get(_COMPILED_INSIDE) is model for holder in gc.get_referrers(model)
    )


BatchNorm: Any = look_up(
    "torch.nn.modules.batchnorm._BatchNorm", "base class of all batch norms", f"{CHECKPOINTS} with batch norms"
)
NormBase: Any = look_up(
    "torch.nn.modules.batchnorm._NormBase", "base class of batch and instance norms", f"{CHECKPOINTS} with norms"
)
apply_of: Callable[[nn.Module], Callable[..., nn.Module]] = attribute_of(
    "torch.nn.Module",
    "_apply",
    nn.Module,
    "every tensor of a module is copied or moved, in its children first; replaced while a virtual GPU is on",
    "models cannot be moved or copied",
)
MODULE_APPLY = Attribute(nn.Module, "_apply")
PARSE_TO = replaceable("torch._C._nn._parse_to", "`Module.to('cuda')` on a virtual GPU", "models cannot be moved")
TRUNCATED_NORMAL = replaceable(
    "torch.nn.init._no_grad_trunc_normal_",
    "its rejection loop never ends on tensors without values",
    "`trunc_normal_` of virtual weights",
)
JIT_INTERNAL: Any = look_up("torch._jit_internal", "frames of this file are torch's own", NO_IN_PLACE)
NN_FUNCTIONS: Any = look_up("torch._C._nn", "activation functions that are found there only", NO_IN_PLACE)

# --- backward, checkpoints and optimizers ---------------------------------------------------------------------------

ENGINE_RUN_BACKWARD = replaceable(
    "torch.autograd._engine_run_backward", "the names of devices are replaced during backward too", NO_VIRTUAL_GPU
)
engine_run_backward: Callable[..., Any] = look_up(
    "torch.autograd.graph._engine_run_backward",
    "distinguishes operators of the engine from those of a Python formula, by the frame that called them",
    NO_VIRTUAL_GPU,
    probe=lambda function: hasattr(function, "__code__"),
)
CHECKPOINT_GENERATOR = replaceable(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
    "switches off the checkpoints that a model makes itself; the name of torch 2.15",
    f"{CHECKPOINTS} on a model that has checkpoints of its own",
    other_names=("torch.utils.checkpoint._checkpoint_without_reentrant_generator",),
)
DEFAULT_DEVICE_TYPE = replaceable(
    "torch.utils.checkpoint.DefaultDeviceType._default_device_type",
    "torch looks up the accelerator once in a process",
    "checkpoints on a virtual GPU after one on the CPU",
)
GROUP_TENSORS = replaceable(
    "torch._C._group_tensors_by_device_and_dtype",
    "foreach optimizers and gradient clipping group virtual tensors under `cuda`",
    "foreach optimizers on a virtual GPU",
)
USE_CUDNN_RNN = replaceable("torch._use_cudnn_rnn_flatten_weight", "RNNs run as with cuDNN", "RNNs on a virtual GPU")
STRONG_WOLFE = replaceable(
    "torch.optim.lbfgs._strong_wolfe",
    "a line search over unknown losses accepts its first point",
    "`torch.optim.LBFGS` with a line search on a virtual GPU",
)
