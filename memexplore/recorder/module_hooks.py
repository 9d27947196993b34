"""Report module calls and optimizer steps to a recorder by global hooks of torch, and name the modules.

The user's code needs no change.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memexplore.recorder import stacks
from memexplore.torch_internals.modules import buffers_of, parameters_of
from memexplore.virtual_gpu.frame_variables import variables

if TYPE_CHECKING:
    from memexplore.recorder.recorder import Recorder


class Names:
    """Qualified names of modules, interned as numbers.

    A layer has its name inside the model (`layer3.5.conv2`), the model itself the name of its class. Layers of a second
    model have the model's name in front. A module without weights that several layers have, such as one ReLU, has the
    name that it has in the layer that calls it.
    """

    def __init__(self) -> None:
        self.table: list[str] = []
        self.classes: list[str] = []
        """Class name of each module, "" for a name of an earlier recording."""
        self._interned: dict[str, int] = {}
        self._numbers: dict[int, tuple[weakref.ref[torch.nn.Module], int]] = {}
        """Id of a module -> the module and its number: a module may define equality, as tensordict's do."""
        self._most = 1000
        """Number of entries above which entries of dead modules are removed."""
        self._prefixes: dict[str, int] = {}
        self._has_plain = False
        """Whether there is a model with layers: the layers of the first model have no prefix."""
        self.in_parent: dict[tuple[int, int], int] = {}
        """Numbers of a module that several layers have and of one of these layers -> its number when that calls it."""
        self._unfinished: set[int] = set()
        """Numbers of models whose constructor was running when they were named."""
        self._provisional: set[int] = set()
        """Numbers of the modules of these models."""

    def intern(self, name: str, module: torch.nn.Module | None = None) -> int:
        """Return the number of the name of a module."""
        number = self._interned.get(name)
        if number is None:
            number = self._interned[name] = len(self.table)
            self.table.append(name)
            self.classes.append("")
        if module is not None:
            self.classes[number] = type(module).__name__
        return number

    def root(self, module: torch.nn.Module) -> bool:
        """Name all modules of a model; return whether it is new."""
        number = self._number(module)
        if number is None or number in self._unfinished:
            # Of a model that was not called since its constructor, which may still run.
            self._name(module, is_constructing=number is not None)
        return number is None

    def root_called_by(self, module: torch.nn.Module, frame: FrameType | None) -> None:
        """Name all modules of a model that is called from outside any module.

        Names that are given while a constructor is running are replaced when its model is called, or one that has it.
        """
        number = self._number(module)
        if number is None or number in self._unfinished:
            outer = _under_construction(module, frame)
            self._name(module if outer is None else outer, is_constructing=outer is not None)

    def _name(self, module: torch.nn.Module, is_constructing: bool) -> None:
        number = self._number(module)
        if number is None:
            title = type(module).__name__
            uses = self._prefixes[title] = self._prefixes.get(title, 0) + 1
            if uses > 1:
                title = f"{title}#{uses}"
            number = self.intern(title, module)
            self._keep(module, number)
        children = [(name, child) for name, child in module.named_modules() if name]
        prefix = f"{self.table[number]}."
        if is_constructing:
            self._unfinished.add(number)
        else:
            self._unfinished.discard(number)
            if children and not self._has_plain:
                self._has_plain, prefix = True, ""
        # A part of a model, such as `model[:2]`, or a wrapper has no layers of its own.
        has_own = any(self._number(child) is None or self._number(child) in self._provisional for _, child in children)
        for name, child in children:
            self._name_child(child, prefix + name, is_constructing)
        if has_own and not is_constructing:
            self._share_all(module, children, prefix)

    def _name_child(self, module: torch.nn.Module, name: str, is_constructing: bool) -> None:
        known = self._number(module)
        if known is None:
            number = self.intern(name, module)
            self._keep(module, number)
            if is_constructing:
                self._provisional.add(number)
        elif known in self._provisional or known in self._unfinished:
            self._unfinished.discard(known)
            if not is_constructing:
                self._provisional.discard(known)
            else:
                self._provisional.add(known)
            if name in self._interned:
                self._keep(module, self._interned[name])
            else:
                # What was recorded by the name so far has the new one too.
                del self._interned[self.table[known]]
                self.table[known], self._interned[name] = name, known

    def _share_all(self, module: torch.nn.Module, children: list[tuple[str, torch.nn.Module]], prefix: str) -> None:
        """Give modules without weights that have another name already a name for the calls by each of these layers."""
        for name, parent in [("", module), *children]:
            caller = self._number(parent)
            if caller is None or (name and self.table[caller] != prefix + name):
                continue
            for attribute, child in parent.named_children():
                inner = f"{prefix}{name}.{attribute}" if name else prefix + attribute
                known = self._number(child)
                if known is not None and self.table[known] != inner and not _has_weights(child):
                    self._share(child, caller, inner, ())

    def _share(self, module: torch.nn.Module, caller: int, name: str, above: tuple[torch.nn.Module, ...]) -> None:
        first = self._number(module)
        if first is None or any(outer is module for outer in above):
            return
        number = self.intern(name, module)
        if self.in_parent.setdefault((first, caller), number) == number:
            for attribute, child in module.named_children():
                self._share(child, number, f"{name}.{attribute}", (*above, module))

    def _number(self, module: torch.nn.Module) -> int | None:
        entry = self._numbers.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def _keep(self, module: torch.nn.Module, number: int) -> None:
        self._numbers[id(module)] = weakref.ref(module), number
        if len(self._numbers) > self._most:
            self._numbers = {key: entry for key, entry in self._numbers.items() if entry[0]() is not None}
            self._most = max(self._most, 2 * len(self._numbers))

    def number(self, module: torch.nn.Module, parent: int) -> int:
        """Return the number of a module's name; a module that its model does not list is named after its class."""
        number = self._number(module)
        if number is None:
            outer = f"{self.table[parent]}." if parent >= 0 else ""
            number = self.intern(outer + type(module).__name__, module)
            self._keep(module, number)
        return self.in_parent.get((number, parent), number) if self.in_parent else number


def _under_construction(module: torch.nn.Module, frame: FrameType | None) -> torch.nn.Module | None:
    """Return the outermost model that has `module` and whose constructor is running in the frames of the stack.

    It is `module` itself where it is called by a constructor whose model does not have it yet; None without one.
    """
    model = None
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            outer = variables(frame).get("self")
            # Any object, such as a model before `super().__init__()`, may raise where it is asked.
            with contextlib.suppress(Exception):
                if isinstance(outer, torch.nn.Module):
                    is_part = any(part is module for part in outer.modules())
                    model = outer if is_part else module if model is None else model
        frame = frame.f_back
    return model


def _has_weights(module: torch.nn.Module) -> bool:
    return any(
        value is not None
        for part in module.modules()
        for value in (*parameters_of(part).values(), *buffers_of(part).values())
    )


def hooks(recorder: Recorder) -> contextlib.ExitStack:
    """Install global hooks that report to `recorder`; closing the returned stack removes them."""
    undo = contextlib.ExitStack()

    def before_call(module: torch.nn.Module, args: Any) -> None:
        recorder.call_begins(module, args, stacks.caller(1))

    def after_call(module: torch.nn.Module, args: Any, result: Any) -> None:
        recorder.call_ends(module)

    def registered(module: torch.nn.Module, name: str, parameter: Any) -> None:
        # A model that is never called has weights too, and one that is still being built.
        if parameter is not None:
            recorder.tags.tag_weight(parameter)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.optimizer_begins(optimizer, stacks.caller(2))

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.optimizer_ends(optimizer)

    installed: list[Callable[[], Any]] = [
        lambda: register_module_forward_pre_hook(before_call),
        lambda: register_module_forward_hook(after_call, always_call=True),
        lambda: register_module_parameter_registration_hook(registered),
        lambda: register_optimizer_step_pre_hook(before_step),
        lambda: register_optimizer_step_post_hook(after_step),
    ]
    with undo:
        for install in installed:
            undo.callback(install().remove)
        return undo.pop_all()
