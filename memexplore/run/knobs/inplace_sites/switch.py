"""Switch of activations: flags of modules, and calls of functions inside the forwards of modules, in given forms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memexplore.run.knobs.applying.forward import wrap_forward
from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.run.knobs.inplace_sites.activations import ActivationMode, CallSite, Form, has_flag, is_script

ForwardRunner = Callable[[torch.nn.Module, Callable[..., Any], Any, Any], Any]
"""Runs instead of a forward; takes the module, its forward, positional and keyword arguments."""


def run_forwards_with(log: UndoLog, modules: Iterable[torch.nn.Module], runner: ForwardRunner) -> None:
    """Make `runner` run the forwards of modules."""
    for module in modules:
        if not is_script(module):
            wrap_forward(log, module, functools.partial(_run, runner, module))


def _run(runner: ForwardRunner, module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return runner(module, forward, args, kwargs)


class Switch(ActivationMode):
    """Runs calls of activation functions in given forms, and all others as written."""

    def __init__(self) -> None:
        super().__init__()
        self._forms: dict[CallSite, Form] = {}
        self._names: dict[torch.nn.Module, str] = {}

    def activation(self, call: CallSite, written: Form, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
        """Return the result of a call in its given form."""
        return run(self._forms.get(call, written))

    def forward(self, module: torch.nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward of a module."""
        name = self._names.get(module)
        if name is None:
            return inner(*args, **kwargs)
        with self.intercepting(), self.inside(name):
            return inner(*args, **kwargs)

    def set_forms(self, log: UndoLog, model: torch.nn.Module, forms: dict[CallSite, Form]) -> None:
        """Follow forms, and set the flags of modules to them."""
        named = dict(model.named_modules())
        functions = {call.module for call in forms if call.file}
        log.add(self._clear)
        self._forms, self._names = forms, {named[name]: name for name in functions if name in named}
        for call, form in forms.items():
            module = named.get(call.module)
            if not call.file and module is not None and has_flag(module):
                log.set_item(module.__dict__, "inplace", form is Form.IN_PLACE)

    def _clear(self) -> None:
        self._forms, self._names = {}, {}


def switch_activations(log: UndoLog, model: torch.nn.Module, forms: dict[CallSite, Form]) -> None:
    """Make activations run in given forms: flags are set, and calls inside a module's forward changed.

    >>> log, relu = UndoLog(), torch.nn.ReLU()
    >>> switch_activations(log, relu, {CallSite("", "ReLU"): Form.IN_PLACE})
    >>> relu.inplace
    True
    >>> log.restore()
    >>> relu.inplace
    False
    """
    switch = Switch()
    functions = {call.module for call in forms if call.file}
    switch.set_forms(log, model, forms)
    modules = [module for name, module in model.named_modules() if name in functions]
    run_forwards_with(log, modules, switch.forward)
