"""Private names around operators: nested arguments, dispatch and function modes, fake tensors, dispatch keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memexplore.torch_internals.table import (
    CHECKPOINTS,
    NO_IN_PLACE,
    NO_RECORDING,
    NO_VIRTUAL_GPU,
    Attribute,
    attribute_of,
    look_up,
)


def _relu() -> Any:
    return torch.ops.aten.relu.default


# --- trees of arguments ---------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.utils import _pytree as pytree
else:
    pytree = look_up(
        "torch.utils._pytree",
        "tensors inside nested arguments and results; `torch.utils._cxx_pytree` and optree are no public API either",
        "nothing that looks into nested arguments: steps, checkpoints, simulations",
        probe=lambda module: module.tree_leaves(({"a": [1]}, 2)) == [1, 2],
    )

# --- dispatch and function modes ------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = look_up(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "sees every operator below autograd",
        NO_RECORDING,
        probe=lambda mode: hasattr(mode, "__torch_dispatch__") and hasattr(mode, "__enter__"),
    )
disable_current_modes: Callable[[], Any] = look_up(
    "torch.utils._python_dispatch._disable_current_modes",
    "runs a model on fake tensors while a virtual GPU is on",
    NO_IN_PLACE,
)
function_mode_stack: Callable[[], list[Any]] = look_up(
    "torch.overrides._get_current_function_mode_stack",
    "whether a function mode is on already",
    NO_VIRTUAL_GPU,
    probe=lambda stack: isinstance(stack(), list),
)
function_modes: Callable[[], int] = look_up(
    "torch._C._len_torch_function_stack",
    "whether a function mode sees what is read of a tensor",
    NO_RECORDING,
    probe=lambda count: isinstance(count(), int),
)
DisableTorchFunction: Callable[[], Any] = look_up(
    "torch._C.DisableTorchFunction",
    "metadata of a tensor, whatever its class overrides; DisableTorchFunctionSubclass leaves modes on",
    NO_RECORDING,
)
disabled_torch_dispatch: Any = look_up(
    "torch._C._disabled_torch_dispatch_impl",
    "what C++ recognises by identity as no `__torch_dispatch__`, in classes of real tensors",
    NO_VIRTUAL_GPU,
)
disabled_torch_function: Any = look_up(
    "torch._C._disabled_torch_function_impl",
    "whether a tensor class has a `__torch_function__` of its own",
    "TransformerEncoder on a virtual GPU",
)

# --- fake tensors ---------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
else:
    FakeTensor = look_up("torch._subclasses.fake_tensor.FakeTensor", "what fake kernels get", NO_VIRTUAL_GPU)
    FakeTensorMode = look_up(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "shapes and types of results without computing them",
        NO_VIRTUAL_GPU,
        # Attributes without an underscore that no page documents.
        probe=lambda mode: all(hasattr(mode(), name) for name in ("cache_enabled", "in_kernel_invocation")),
    )
    DataDependentOutputException = look_up(
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "an operator whose result depends on values",
        NO_VIRTUAL_GPU,
    )
    DynamicOutputShapeException = look_up(
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "an operator whose shape depends on values",
        NO_VIRTUAL_GPU,
    )
    UnsupportedFakeTensorException = look_up(
        "torch._subclasses.fake_tensor.UnsupportedFakeTensorException", "a tensor that cannot be fake", NO_VIRTUAL_GPU
    )
    UnsupportedOperatorException = look_up(
        "torch._subclasses.fake_tensor.UnsupportedOperatorException",
        "an operator without a fake kernel",
        NO_VIRTUAL_GPU,
    )
fake_dispatch: Callable[..., Any] = look_up(
    "torch._subclasses.fake_tensor.FakeTensorMode._dispatch_impl",
    "the fake kernels, without the cache and the checks of `dispatch`",
    NO_VIRTUAL_GPU,
)
make_subclass: Callable[..., Any] = look_up(
    "torch.Tensor._make_subclass",
    "a virtual tensor over a meta tensor, on a dispatch key of its own; `_make_wrapper_subclass` has no storage",
    NO_VIRTUAL_GPU,
)

FLATTEN = "__tensor_flatten__"
"""Method of tensor classes that wrap other tensors; a documented protocol of torch.compile."""


def tensor_with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first tensor inside of one that wraps others, such as a DTensor; any other tensor itself."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter or not hasattr(kind, FLATTEN):
        return tensor
    return getattr(tensor, getattr(tensor, FLATTEN)()[0][0])


MAKE_SUBCLASS = Attribute(torch.Tensor, "_make_subclass")

# --- operators and dispatch keys ------------------------------------------------------------------------------------

OpOverload: Any = look_up("torch._ops.OpOverload", "distinguishes ATen operators from functions", CHECKPOINTS)
schema_of = attribute_of("torch._ops.OpOverload", "_schema", _relu, "which arguments an operator writes", NO_RECORDING)
_packet_of = attribute_of(
    "torch._ops.OpOverload",
    "_overloadpacket",
    _relu,
    "key of `torch.utils.flop_counter.flop_registry`",
    "no FLOPs, so no predicted times",
)
_run_of = attribute_of(
    "torch._ops.OpOverload", "_op", _relu, "runs an operator in less time than its own `__call__`", NO_RECORDING
)


def runs_of(op: Any) -> Callable[..., Any]:
    """What runs an operator: a function in C++; the operator itself where its class is another one."""
    return _run_of(op) if type(op) is OpOverload else op


def schema_or_none(op: Any) -> Any:
    """Schema of an operator; None for a function or a higher-order operator."""
    return schema_of(op) if isinstance(op, OpOverload) else None


def packet_or_none(op: Any) -> Any:
    """All overloads of an operator, a key of `flop_registry`; None for a function or a higher-order operator."""
    return _packet_of(op) if isinstance(op, OpOverload) else None


_has_kernel: Callable[[str, str], bool] = look_up(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "whether an operator is composite", NO_VIRTUAL_GPU
)


def is_composite(op: Any) -> bool:
    """Whether C++ runs an operator by others on all devices; torch's decompositions in Python do not count."""
    return _has_kernel(op.name(), "CompositeImplicitAutograd")


numbers_are_tensors: Callable[[str], bool] = look_up(
    "torch._C._should_allow_numbers_as_tensors",
    "whether an operator of a name takes a number in place of a tensor",
    "`torch.jit.trace` on a virtual GPU",
    probe=lambda allowed: allowed("add") and not allowed("view"),
)
kernel_lookup_of = attribute_of(
    "torch._ops.OpOverload",
    "_op_dk",
    _relu,
    "calls the kernel of an operator for one dispatch key",
    "composite operators on a virtual GPU",
)
DispatchKey: Any = look_up("torch._C.DispatchKey", "names of dispatch keys", NO_VIRTUAL_GPU)
DispatchKeySet: Any = look_up("torch._C.DispatchKeySet", "sets of dispatch keys", NO_VIRTUAL_GPU)
ExcludeDispatchKeyGuard: Any = look_up(
    "torch._C._ExcludeDispatchKeyGuard", "autocast leaves out its own key", "autocast on a virtual GPU"
)
SetExcludeDispatchKeyGuard: Any = look_up(
    "torch._C._SetExcludeDispatchKeyGuard",
    "a detached tensor that counts versions with the original",
    "selective checkpointing",
)
ForceDispatchKeyGuard: Any = look_up(
    "torch._C._ForceDispatchKeyGuard", "autograd inside an operator of a virtual GPU", "values='real' on a virtual GPU"
)
include_set: Callable[[], Any] = look_up(
    "torch._C._dispatch_tls_local_include_set",
    "autograd inside an operator of a virtual GPU",
    "values='real' on a virtual GPU",
)
exclude_set: Callable[[], Any] = look_up(
    "torch._C._dispatch_tls_local_exclude_set",
    "autograd inside an operator of a virtual GPU",
    "values='real' on a virtual GPU",
)
destroy_library: Callable[[Any], None] = look_up(
    "torch.library.Library._destroy",
    "ends registrations at once; torch does it when nothing refers to the library, such as a traceback",
    "tensor parallelism on a virtual GPU",
)
sdp_priority_order: Callable[[], list[int]] = look_up(
    "torch._C._get_sdp_priority_order",
    "the order in which attention kernels are tried",
    "attention on a virtual GPU",
    probe=lambda order: len(order()) >= 3,
)
