"""Activation functions: a table of their in-place and out-of-place forms, and a function mode that sees their calls."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memexplore.torch_internals.dispatch import FakeTensor, function_mode_stack
from memexplore.torch_internals.modules import JIT_INTERNAL, NN_FUNCTIONS, children_of
from memexplore.virtual_gpu.patches import device_names


class Form(enum.Enum):
    """Whether a call overwrites its input."""

    IN_PLACE = "in place"
    OUT_OF_PLACE = "out of place"


class CallSite(NamedTuple):
    """Call of an activation function: a module with an `inplace` flag, or a call of a function in a module's forward.

    A call is identified by the module whose forward runs, the line, the function, and its number among equal calls
    during that forward. So it is recognised in the next run, in a loop, on a line that several modules share, and when
    a checkpoint calls the module again.

    >>> print(CallSite("decoder.act", "ReLU"))
    decoder.act
    >>> print(CallSite("decoder", "relu", "/home/ada/model.py", 31, 1))
    decoder: relu at model.py:31 (call 2)
    """

    module: str
    """Qualified name, empty for the model itself."""
    function: str
    """Name of the function, or of the class of the module with the flag."""
    file: str = ""
    """Empty for a module with the flag."""
    line: int = 0
    number: int = 0

    def __str__(self) -> str:
        if not self.file:
            return self.module or self.function
        if self.file.startswith(_MODULES) and self.module:
            return self.module
        before = f"{self.module}: " if self.module else ""
        after = f" (call {self.number + 1})" if self.number else ""
        return f"{before}{self.function} at {Path(self.file).name}:{self.line}{after}"


class Activation(NamedTuple):
    """An activation function in its two forms."""

    name: str
    plain: Callable[..., Any]
    into: Callable[..., Any]
    flagged: bool
    """Whether one function has both forms, chosen by an argument `inplace`."""


def _table() -> dict[Any, tuple[Activation, Form]]:
    table: dict[Any, tuple[Activation, Form]] = {}
    for name, function in vars(functional).items():
        if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters:
            kind = Activation(
                name.strip("_"),
                functools.partial(function, inplace=False),
                functools.partial(function, inplace=True),
                True,
            )
            table[function] = (kind, Form.OUT_OF_PLACE)
    for owner in (torch, torch.Tensor, NN_FUNCTIONS):
        for name in _PAIRS:
            plain, into = getattr(owner, name, None), getattr(owner, f"{name}_", None)
            if plain is not None and into is not None:
                kind = Activation(name, plain, into, False)
                table[plain], table[into] = (kind, Form.OUT_OF_PLACE), (kind, Form.IN_PLACE)
    return table


_PAIRS = (
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "rrelu", "silu", "mish", "sigmoid", "tanh", "threshold"),
    *("hardtanh", "hardswish", "hardsigmoid", "clamp", "clamp_min", "clamp_max", "clip"),
    *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
)
ACTIVATIONS = _table()
"""Function -> its two forms, and the form of the function itself."""
_MODULES = str(Path(torch.nn.modules.__file__).parent)
_LIBRARY = {torch.overrides.__file__, functional.__file__, JIT_INTERNAL.__file__, device_names.__file__}
_OWN = str(Path(__file__).parent)


class _Stack(threading.local):
    """Forwards that run in a thread: the module's name, and how often each line called a function."""

    def __init__(self) -> None:
        self.calls: list[tuple[str | None, Counter[tuple[str, str, int]]]] = []


class ActivationMode(TorchFunctionMode):
    """Intercepts the calls of activation functions; a subclass decides in which form each runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = _Stack()

    def activation(self, call: CallSite, written: Form, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
        """Return the result of a call; `run` runs it in a form."""
        raise NotImplementedError

    def intercepting(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the mode sees calls; inside a function that it handles torch takes it away."""
        return contextlib.nullcontext() if self in function_mode_stack() else self

    @contextlib.contextmanager
    def inside(self, name: str | None) -> Iterator[None]:
        """Run the forward of a module in the block; calls inside a forward without a name are not intercepted."""
        calls = self.stack.calls
        calls.append((name, Counter()))
        try:
            yield
        finally:
            calls.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        entry = ACTIVATIONS.get(func)
        if entry is None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        kind, written = entry
        tensor = args[0] if args else kwargs.get("input")
        calls = self.stack.calls
        if not _is_plain(tensor) or not calls or calls[-1][0] is None:
            return func(*args, **kwargs)
        if kind.flagged:
            kwargs = dict(kwargs)
            written = Form.IN_PLACE if kwargs.pop("inplace", False) else Form.OUT_OF_PLACE
        name, counted = calls[-1]
        key = (kind.name, *_line())
        call = CallSite(str(name), *key, counted[key])
        counted[key] += 1
        forms = {Form.OUT_OF_PLACE: kind.plain, Form.IN_PLACE: kind.into}
        return self.activation(call, written, tensor, lambda form: forms[form](*args, **kwargs))


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor of a class without operators of its own."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) or isinstance(value, FakeTensor)


def _line() -> tuple[str, int]:
    """Return file and line of the code that calls an activation function."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if file not in _LIBRARY and not file.startswith(_OWN):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def has_flag(module: torch.nn.Module) -> bool:
    """Return whether a module is an activation with an `inplace` flag.

    >>> has_flag(torch.nn.ReLU()), has_flag(torch.nn.GELU())
    (True, False)
    """
    return isinstance(vars(module).get("inplace"), bool) and not children_of(module) and not is_script(module)


def is_script(module: torch.nn.Module) -> bool:
    """Return whether a module runs in TorchScript, which function modes do not see."""
    return isinstance(module, torch.jit.ScriptModule)
