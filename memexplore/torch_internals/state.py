"""Private names of torch's global state: mode stacks, hooks on all modules and optimizers, the compiler's stance."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, MutableMapping
from types import CodeType
from typing import Any

import torch

from memexplore.torch_internals.table import (
    NO_VIRTUAL_GPU,
    TABLE,
    Attribute,
    Internal,
    attribute_names,
    attribute_of,
    look_up,
    look_up_or_none,
    replaceable,
)

_TRACER = "Tracer"
"""The dispatch key of `torch.jit.trace`."""
_LEFT = "an interrupt while a virtual GPU goes on or off may leave torch changed"

# --- mode stacks: `with mode` cannot be repeated after an interrupt, so the stacks are restored as a whole ----------

push_function_mode: Callable[[Any], None] = look_up(
    "torch._C._push_on_torch_function_stack", "turns a function mode on", NO_VIRTUAL_GPU
)
pop_function_mode: Callable[[], Any] = look_up(
    "torch._C._pop_torch_function_stack", "turns a function mode off", NO_VIRTUAL_GPU
)
push_dispatch_mode: Callable[[Any], None] = look_up(
    "torch._C._push_on_torch_dispatch_stack", "turns a dispatch mode on", NO_VIRTUAL_GPU
)
pop_dispatch_mode: Callable[[None], Any] = look_up(
    "torch._C._pop_torch_dispatch_stack", "turns a dispatch mode off", NO_VIRTUAL_GPU
)
dispatch_mode_stack: Callable[[], list[Any]] = look_up(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "which dispatch modes are on",
    NO_VIRTUAL_GPU,
    probe=lambda stack: isinstance(stack(), list),
)
DISPATCH_FLAGS = tuple(
    replaceable(f"torch.utils._python_dispatch.{name}", "set by every dispatch mode that is on", _LEFT)
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
)
set_compiled_code_sees_modes: Callable[[bool], None] = look_up(
    "torch.utils._python_dispatch.set_is_in_mode_without_ignore_compile_internals",
    "the last of these flags, as C++ keeps it",
    _LEFT,
)

# --- hooks on all modules and optimizers: as entries of these tables they can be removed whatever was interrupted ---

PARAMETER_REGISTRATION_HOOKS: MutableMapping[Any, Any] = look_up(
    "torch.nn.modules.module._global_parameter_registration_hooks",
    "which modules are built while a virtual GPU is on",
    NO_VIRTUAL_GPU,
)
BUFFER_REGISTRATION_HOOKS: MutableMapping[Any, Any] = look_up(
    "torch.nn.modules.module._global_buffer_registration_hooks",
    "which modules are built while a virtual GPU is on",
    NO_VIRTUAL_GPU,
)
OPTIMIZER_PRE_HOOKS: MutableMapping[Any, Any] = look_up(
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "an optimizer's state is kept before its first step on a virtual GPU",
    "optimizers are not restored after a virtual GPU",
)
_NO_LIVE = "`watch`"
OPTIMIZER_POST_HOOKS: MutableMapping[Any, Any] = look_up(
    "torch.optim.optimizer._global_optimizer_post_hooks", "the ends of the steps that are watched", _NO_LIVE
)
ALWAYS_CALLED_HOOKS: MutableMapping[Any, Any] = look_up(
    "torch.nn.modules.module._global_forward_hooks_always_called",
    "a call of a watched model also ends by an exception",
    _NO_LIVE,
)

calls_optimizer_hooks: Callable[[Callable[..., Any]], Callable[..., Any]] = look_up(
    "torch.optim.Optimizer.profile_hook_step",
    "makes the `step` of a user's class again in another process",
    "a step with an optimizer of a class of the notebook or script cannot be sent to another process",
)
OPTIMIZER_HOOKS = attribute_names(
    "torch.optim.Optimizer",
    "_optimizer_step_pre_hooks _optimizer_step_post_hooks",
    lambda: torch.optim.SGD([torch.zeros(1)]),
    "hooks of one optimizer, which can do more than its update",
    "no update is taken from an earlier run",
)

# --- tensors --------------------------------------------------------------------------------------------------------

contents_key = attribute_of(
    "torch.Tensor",
    "_cdata",
    lambda: torch.ones(1),
    "identity of a tensor's contents (its address in C++), which `swap_tensors` exchanges",
    "models cannot be moved to a virtual GPU",
)

# --- autocast -------------------------------------------------------------------------------------------------------

AUTOCAST_ENABLED = attribute_names(
    "torch.autocast",
    "_enabled",
    lambda: torch.autocast("cpu", enabled=False),
    "whether an autocast context casts; there is no public way to ask",
    "runs without the autocast of the model's own code",
)[0]

# --- torch.compile --------------------------------------------------------------------------------------------------

_COMPILER, _BACKENDS = "torch._dynamo.eval_frame", "cached_backends"


def compiler_is_imported() -> bool:
    """Whether `torch.compile` may have been used in this process."""
    return _COMPILER in sys.modules


def compiler_is_used() -> bool:
    """Whether `torch.compile` was called in this process, since `torch.compiler.reset`."""
    backends = getattr(sys.modules.get(_COMPILER), _BACKENDS, {})
    # The compiler's own wrapper that compiles nothing has None.
    return any(backend is not None for backend in list(backends.values()))


_FRAMES, _OWN_CODE = "torch._C._dynamo.eval_frame", "memexplore's own code would be compiled in a recorded step"
_set_strategy, _strategy, _action, _callback = (
    look_up_or_none(
        f"{_FRAMES}.{name}",
        "the compiler leaves a function alone, without a cost for each call; `torch.compiler.disable` has one",
        _OWN_CODE,
        needed=lambda: True,
    )
    for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction", "get_eval_frame_callback")
)


def never_compile(code: CodeType) -> None:
    """Let the compiler leave a function alone, but not the functions that it calls."""
    if _set_strategy is not None and _strategy is not None and _action is not None:
        _set_strategy(code, _strategy(_action.SKIP, _action.DEFAULT))


def is_inside_compiled() -> bool:
    """Whether a compiled function runs, in a part that was not compiled. The compiler then sees no mode that ends."""
    return _callback is not None and callable(_callback())


def compiler_rules() -> Any:
    """Module with the rules of `torch.compile` for functions of torch, which `init_process_group` clears."""
    return importlib.import_module("torch._dynamo.trace_rules")


TABLE.append(
    Internal(
        f"{_COMPILER}.{_BACKENDS}",
        "backends of `torch.compile` that were used, by their ids",
        "`watch` of a model whose compiled module the loop calls compiles memexplore's own code",
        lambda: isinstance(getattr(importlib.import_module(_COMPILER), _BACKENDS, None), dict),
    )
)
TABLE.append(
    Internal(
        "torch._dynamo.trace_rules.clear_lru_cache",
        "the rules are made once, by the functions of an unpatched torch",
        "torch.compile after `init_process_group` on a virtual GPU",
        lambda: hasattr(compiler_rules(), "clear_lru_cache"),
    )
)


def compiler_stance() -> Any:
    """The stance of `torch.compile`. Imports the compiler, which takes seconds the first time."""
    return importlib.import_module(_COMPILER)._stance


def set_compiler_stance(stance: Any) -> None:
    """Set the stance of `torch.compile` to one that `compiler_stance` returned."""
    importlib.import_module(_COMPILER)._stance = stance  # type: ignore[attr-defined]


TABLE.append(
    Internal(
        f"{_COMPILER}._stance",
        "compiled functions run eagerly on a virtual GPU; `torch.compiler.set_stance` does not return the old stance",
        "torch.compile on a virtual GPU",
        lambda: compiler_stance() is not None,
    )
)

_CALLBACK = "_callback_from_stance"


def compiler_callback() -> Attribute:
    """The function that compiled code calls whenever it runs. Imports the compiler, as `compiler_stance` does."""
    return Attribute(importlib.import_module(_COMPILER), _CALLBACK)


TABLE.append(
    Internal(
        f"{_COMPILER}.{_CALLBACK}",
        "compiled code that runs is noted, and code that is only compiled is not",
        "torch.compile on a virtual GPU",
        lambda: hasattr(*compiler_callback()),
    )
)

# --- torch.jit.trace ------------------------------------------------------------------------------------------------

tracing_state: Callable[[], Any] = look_up(
    "torch._C._get_tracing_state",
    "whether `torch.jit.trace` runs, which makes tensors of the sizes that Python reads",
    NO_VIRTUAL_GPU,
    probe=lambda read: read() is None,
)
_set_tracing_state: Callable[[Any], None] = look_up(
    "torch._C._set_tracing_state", "pauses `torch.jit.trace` inside an op", NO_VIRTUAL_GPU
)
_KEYS = "pauses `torch.jit.trace` inside an op, and counts writes there"
_is_excluded: Callable[[str], bool] = look_up("torch._C._dispatch_tls_is_dispatch_key_excluded", _KEYS, NO_VIRTUAL_GPU)
_set_excluded: Callable[[str, bool], None] = look_up(
    "torch._C._dispatch_tls_set_dispatch_key_excluded", _KEYS, NO_VIRTUAL_GPU
)


@contextlib.contextmanager
def without_tracing() -> Iterator[None]:
    """Pause `torch.jit.trace` in the block, which is below an op that the trace has recorded.

    C++ refuses to change the state while the key of the tracer is excluded, as it is below an op.
    """
    state, excluded = tracing_state(), _is_excluded(_TRACER)
    _set_excluded(_TRACER, False)
    _set_tracing_state(None)
    _set_excluded(_TRACER, excluded)
    try:
        yield
    finally:
        _set_excluded(_TRACER, False)
        _set_tracing_state(state)
        _set_excluded(_TRACER, excluded)


def recorded_by_trace() -> contextlib.AbstractContextManager[None]:
    """Let `torch.jit.trace` record the ops that the block calls below another op."""
    return _included(_TRACER)


def counting_writes() -> contextlib.AbstractContextManager[None]:
    """Let the ops that the block calls below another op count writes to tensors, which inference tensors refuse."""
    return _included("ADInplaceOrView")


@contextlib.contextmanager
def _included(key: str) -> Iterator[None]:
    excluded = _is_excluded(key)
    _set_excluded(key, False)
    try:
        yield
    finally:
        _set_excluded(key, excluded)
