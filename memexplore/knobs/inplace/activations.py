"""Calls of activation functions: which they are, where in a model they stand, and how to run each in either form."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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


class Place(NamedTuple):
    """Where an activation function is called: a module with an `inplace` flag, or a call of a function in a module.

    A call is known by the module whose forward runs, the line, the function and which call of these it is while that
    forward runs, so it is found again in the next run, in a loop, on a line that several modules share, and where a
    checkpoint calls the module once more.

    >>> print(Place("decoder.act", "ReLU"))
    decoder.act
    >>> print(Place("decoder", "relu", "/home/ada/model.py", 31, 1))
    decoder: relu at model.py:31 (call 2)
    """

    module: str
    """Qualified name, empty for the model itself."""
    function: str
    """Name of the function, or the class of the module with the flag."""
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
    """A function in its two forms."""

    name: str
    plain: Callable[..., Any]
    into: Callable[..., Any]
    flagged: bool
    """Whether one function has both forms and an argument `inplace` that chooses."""


def _table() -> dict[Any, tuple[Activation, Form]]:
    found: dict[Any, tuple[Activation, Form]] = {}
    for name, function in vars(functional).items():
        if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters:
            kind = Activation(
                name.strip("_"),
                functools.partial(function, inplace=False),
                functools.partial(function, inplace=True),
                True,
            )
            found[function] = (kind, Form.OUT_OF_PLACE)
    for owner in (torch, torch.Tensor, NN_FUNCTIONS):
        for name in _PAIRS:
            plain, into = getattr(owner, name, None), getattr(owner, f"{name}_", None)
            if plain is not None and into is not None:
                kind = Activation(name, plain, into, False)
                found[plain], found[into] = (kind, Form.OUT_OF_PLACE), (kind, Form.IN_PLACE)
    return found


_PAIRS = (
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "rrelu", "silu", "mish", "sigmoid", "tanh", "threshold"),
    *("hardtanh", "hardswish", "hardsigmoid", "clamp", "clamp_min", "clamp_max", "clip"),
    *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
)
ACTIVATIONS = _table()
"""Function -> its two forms, and which of them it is."""
_MODULES = str(Path(torch.nn.modules.__file__).parent)
_LIBRARY = {torch.overrides.__file__, functional.__file__, JIT_INTERNAL.__file__, device_names.__file__}
_OWN = str(Path(__file__).parent)


class _Stack(threading.local):
    """The calls of watched modules that are open in a thread: the name, and how often each line called a function."""

    def __init__(self) -> None:
        self.calls: list[tuple[str | None, Counter[tuple[str, str, int]]]] = []


class Watching(TorchFunctionMode):
    """Sees the calls of activation functions; a subclass says what becomes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = _Stack()

    def activation(self, place: Place, written: Form, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
        """What a call answers; `run` runs it in a form."""
        raise NotImplementedError

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which it sees calls; torch hides it from what runs inside a function that it was shown."""
        return contextlib.nullcontext() if self in function_mode_stack() else self

    @contextlib.contextmanager
    def inside(self, name: str | None) -> Iterator[None]:
        """The forward of a module runs; calls inside one without a name are its own affair."""
        calls = self.stack.calls
        calls.append((name, Counter()))
        try:
            yield
        finally:
            calls.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = ACTIVATIONS.get(func)
        if known is None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        kind, written = known
        tensor = args[0] if args else kwargs.get("input")
        calls = self.stack.calls
        if not _is_plain(tensor) or not calls or calls[-1][0] is None:
            return func(*args, **kwargs)
        if kind.flagged:
            kwargs = dict(kwargs)
            written = Form.IN_PLACE if kwargs.pop("inplace", False) else Form.OUT_OF_PLACE
        name, counted = calls[-1]
        key = (kind.name, *_line())
        place = Place(str(name), *key, counted[key])
        counted[key] += 1
        forms = {Form.OUT_OF_PLACE: kind.plain, Form.IN_PLACE: kind.into}
        return self.activation(place, written, tensor, lambda form: forms[form](*args, **kwargs))


def _is_plain(value: Any) -> bool:
    """Whether a tensor is none of a class with ideas of its own."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) or isinstance(value, FakeTensor)


def _line() -> tuple[str, int]:
    """File and line of who calls an activation function."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if file not in _LIBRARY and not file.startswith(_OWN):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def has_flag(module: torch.nn.Module) -> bool:
    """Whether a module is an activation with an `inplace` flag.

    >>> has_flag(torch.nn.ReLU()), has_flag(torch.nn.GELU())
    (True, False)
    """
    return isinstance(vars(module).get("inplace"), bool) and not children_of(module) and not is_script(module)


def is_script(module: torch.nn.Module) -> bool:
    """Whether a module runs in TorchScript, where nothing of this reaches it."""
    return isinstance(module, torch.jit.ScriptModule)


Around = Callable[[torch.nn.Module, Callable[..., Any], Any, Any], Any]
"""What runs instead of a forward: given the module, its forward, and the arguments."""


@contextlib.contextmanager
def forwards(modules: Iterable[torch.nn.Module], around: Around) -> Iterator[None]:
    """Have `around` run the forward of modules for the block."""
    with contextlib.ExitStack() as undo:
        for module in modules:
            if is_script(module):
                continue
            before = {name: value for name, value in vars(module).items() if name == "forward"}
            vars(module)["forward"] = _around(module, module.forward, around)
            undo.callback(_put_back, module, before)
        yield


def _around(module: torch.nn.Module, inner: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(module, inner, args, kwargs)

    return forward


def _put_back(module: torch.nn.Module, before: dict[str, Any]) -> None:
    del vars(module)["forward"]
    vars(module).update(before)


class Switch(Watching):
    """Runs calls of activation functions in given forms, others as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self._forms: dict[Place, Form] = {}
        self._names: dict[torch.nn.Module, str] = {}
        self.mode: bool | None = None
        """Whether the forms are those of `train()` or of `eval()`, where that matters."""

    def activation(self, place: Place, written: Form, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
        """What a call answers in the form asked for."""
        return run(self._forms.get(place, written))

    def forward(self, module: torch.nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward of a module."""
        name = self._names.get(module)
        if name is None:
            return inner(*args, **kwargs)
        with self.watching(), self.inside(name):
            return inner(*args, **kwargs)

    @contextlib.contextmanager
    def on(self, model: torch.nn.Module, forms: dict[Place, Form]) -> Iterator[None]:
        """Follow forms for the block, and have the flags of modules follow them."""
        named = dict(model.named_modules())
        calls = {place.module for place in forms if place.file}
        self._forms, self._names = forms, {named[name]: name for name in calls if name in named}
        flags = {
            named[place.module]: form is Form.IN_PLACE
            for place, form in forms.items()
            if not place.file and place.module in named and has_flag(named[place.module])
        }
        before = {module: module.inplace for module in flags}
        try:
            for module, flag in flags.items():
                module.inplace = flag  # type: ignore[assignment]
            yield
        finally:
            self._forms, self._names = {}, {}
            for module, written in before.items():
                module.inplace = written


@contextlib.contextmanager
def switched(model: torch.nn.Module, forms: dict[Place, Form]) -> Iterator[None]:
    """Have activations run in given forms for the block: flags are set, and calls inside a module's forward changed.

    Nothing is changed outside the forwards of the modules that are named.

    >>> relu = torch.nn.ReLU()
    >>> with switched(relu, {Place("", "ReLU"): Form.IN_PLACE}):
    ...     relu.inplace
    True
    >>> relu.inplace
    False
    """
    switch = Switch()
    calls = {place.module for place in forms if place.file}
    modules = [module for name, module in model.named_modules() if name in calls]
    with switch.on(model, forms), forwards(modules, switch.forward):
        yield
