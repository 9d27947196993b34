"""Private names of tensors, their storages and autograd nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memexplore.torch_internals.dispatch import DisableTorchFunction
from memexplore.torch_internals.table import (
    CHECKPOINTS,
    NO_IN_PLACE,
    NO_RECORDING,
    NO_VIRTUAL_GPU,
    attribute_names,
    attribute_of,
    look_up,
    method_of,
    replaceable,
)


def _tensor() -> torch.Tensor:
    return torch.ones(1)


def _node() -> Any:
    return torch.ones(1, requires_grad=True).neg().grad_fn


def _parameter() -> torch.Tensor:
    return nn.Parameter(torch.ones(1))


untyped_storage: Callable[[torch.Tensor], torch.UntypedStorage] = look_up(
    "torch._C.TensorBase.untyped_storage", "a tensor's storage, whatever its class overrides", NO_RECORDING
)
storage_key = attribute_of(
    "torch.UntypedStorage",
    "_cdata",
    lambda: _tensor().untyped_storage(),
    "identity of a storage while it lives (its address in C++); `data_ptr` is 0 for fake ones",
    NO_RECORDING,
)
version_of = attribute_of(
    "torch.Tensor",
    "_version",
    _tensor,
    "how often a tensor was written in place",
    f"{CHECKPOINTS} and {NO_IN_PLACE}",
)
base_of = attribute_of("torch.Tensor", "_base", _tensor, "the tensor of which one is a view", NO_VIRTUAL_GPU)
is_view: Callable[[torch.Tensor], bool] = look_up(
    "torch.Tensor._is_view", "autocast caches no views", "autocast on a virtual GPU"
)
use_count: Callable[[torch.Tensor], int] = look_up(
    "torch.Tensor._use_count", "whether autograd alone holds a gradient and adds to it in place", NO_VIRTUAL_GPU
)
storage_use_count: Callable[[int], int] = look_up(
    "torch._C._storage_Use_Count", "whether a gradient's storage has one owner", NO_VIRTUAL_GPU
)
sequence_number_of: Callable[[Any], int] = method_of(
    "torch.autograd.graph.Node",
    "_sequence_nr",
    _node,
    "links a backward operator to the forward one that made its node",
    "recordings without layers and lines of the backward pass",
)
next_sequence_number: Callable[[], int] = look_up(
    "torch._C._autograd._get_sequence_nr",
    "number of the next autograd node",
    "recordings without layers and lines of the backward pass",
    probe=lambda number: isinstance(number(), int),
)
current_autograd_node: Callable[[], Any] = look_up(
    "torch._C._current_autograd_node",
    "the node that the backward pass is running",
    "recordings without layers and lines of the backward pass",
    probe=lambda node: node() is None,
)


def gradient_of(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a weight, None of one that autograd computed, whose `grad` would warn.

    `torch.func.functional_call` puts such weights into a model for one call.
    """
    return weight.grad if weight.is_leaf or weight.retains_grad else None


forward_gradients_enabled: Callable[[], bool] = look_up(
    "torch._C._is_fwd_grad_enabled",
    "whether an operator runs inside forward-mode differentiation",
    NO_RECORDING,
    probe=lambda enabled: isinstance(enabled(), bool),
)
TENSOR_HOOKS = attribute_names(
    "torch.Tensor",
    "_backward_hooks _post_accumulate_grad_hooks",
    _parameter,
    "hooks of a parameter that moves to the virtual GPU",
    "hooks of moved parameters would be lost",
)
swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = look_up(
    "torch._C._swap_tensor_impl",
    "moves a parameter in place; `torch.utils.swap_tensors` refuses where weak references exist",
    "models cannot be moved to a virtual GPU",
)
_is_functorch_wrapper: Callable[[Any], bool] = look_up(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "which tensors belong to `torch.func`",
    "torch.func on a virtual GPU",
)
_unwrapped: Callable[[Any], Any] = look_up(
    "torch._C._functorch.get_unwrapped", "the tensor inside those of `torch.func`", "torch.func on a virtual GPU"
)


def without_functorch(tensor: Any) -> Any:
    """Return the tensor inside the wrappers of `torch.func`, the tensor itself where it has none."""
    while _is_functorch_wrapper(tensor):
        tensor = _unwrapped(tensor)
    return tensor


MAKE_WRAPPER = replaceable(
    "torch.Tensor._make_wrapper_subclass", "wrappers on the virtual GPU have the device meta in C++", NO_VIRTUAL_GPU
)
_device: Any = look_up("torch._C.TensorBase.device", "a tensor's device, whatever its class overrides", NO_VIRTUAL_GPU)


def raw_device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device of a tensor in C++."""
    return _device.__get__(tensor)


_IN_C: Any = look_up(
    "torch._C.TensorBase", "attributes of a tensor, whatever its class overrides", "post-mortems name no holders"
)


def stored_in_tensor(tensor: torch.Tensor, name: str) -> Any:
    """Return an attribute of a tensor as C++ has it: neither its class nor a function mode is asked."""
    with DisableTorchFunction():
        return vars(_IN_C)[name].__get__(tensor)


def storage_in_tensor(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor: neither its class nor a function mode is asked."""
    with DisableTorchFunction():
        return untyped_storage(tensor)


_is_cpu: Any = look_up("torch._C.TensorBase.is_cpu", "whether a tensor's device in C++ is the CPU", NO_VIRTUAL_GPU)


def raw_is_cpu(tensor: torch.Tensor) -> bool:
    """Return whether the device of a tensor in C++ is the CPU."""
    return _is_cpu.__get__(tensor)  # type: ignore[no-any-return]


has_python_key = attribute_of(
    "torch.Tensor", "_python_dispatch", _tensor, "whether C++ sends the ops of a tensor to Python", NO_VIRTUAL_GPU
)
REDUCE = replaceable(
    "torch.Tensor._reduce_ex_internal", "pickles the contents of a tensor; torch pickles its class", NO_VIRTUAL_GPU
)
set_conj: Callable[[torch.Tensor, bool], None] = look_up(
    "torch._C._set_conj", "a view that is conjugated", "complex tensors on a virtual GPU"
)
set_neg: Callable[[torch.Tensor, bool], None] = look_up(
    "torch._C._set_neg", "a view that is negated, as the imaginary part of a conjugated one", "complex tensors"
)
set_only_lift_cpu_tensors: Callable[[bool], None] = look_up(
    "torch._C._set_only_lift_cpu_tensors", "`torch.tensor(..., device='cuda')` makes a CPU tensor first", NO_VIRTUAL_GPU
)
only_lift_cpu_tensors: Callable[[], bool] = look_up(
    "torch._C._only_lift_cpu_tensors", "the setting that is restored", NO_VIRTUAL_GPU
)
_RAW_SAVED = attribute_names(
    "torch.autograd.graph.Node",
    "_raw_saved_result",
    lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    "the tensors that a graph keeps for backward, read without unpacking them",
    "post-mortems do not say which graphs are kept",
)[0].removesuffix("result")


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_RAW_SAVED))


def saved_values(node: Any) -> list[Any]:
    """Return what an autograd node keeps for backward: tensors, or what hooks of saved tensors made of them.

    No hook is called, so a checkpoint is not computed again. A graph that was freed keeps nothing.
    """
    values: list[Any] = []
    kind: Any = type(node)
    for name in _saved_names(kind):
        try:
            saved = getattr(node, name)
            values += [value.data for value in (saved if isinstance(saved, tuple | list) else (saved,))]
        except (RuntimeError, AttributeError):  # freed
            continue
    return [value for value in values if value is not None]
