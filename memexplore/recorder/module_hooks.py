"""Global hooks that report module calls and optimizer steps to a recorder, and the names of modules.

They need no change to the user's code.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memexplore.frame_variables import variables
from memexplore.recorder import stacks

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
        """Entries above which those of dead modules are removed."""
        self._prefixes: dict[str, int] = {}
        self._plain: weakref.ref[torch.nn.Module] | None = None
        """The first model with layers, whose layers have no prefix."""
        self.in_parent: dict[tuple[int, int], int] = {}
        """Numbers of a module that several layers have and of one of these layers -> its number when that calls it."""
        self._unfinished: dict[int, str] = {}
        """Number of a model whose constructor has called its layers -> the prefix of their names."""

    def intern(self, name: str, module: torch.nn.Module | None = None) -> int:
        """Return the number of a name, which is that of `module`."""
        number = self._interned.get(name)
        if number is None:
            number = self._interned[name] = len(self.table)
            self.table.append(name)
            self.classes.append("")
        if module is not None:
            self.classes[number] = type(module).__name__
        return number

    def root(self, module: torch.nn.Module) -> bool:
        """Name all modules of a model that is called from outside any module; return whether it is new."""
        number = self._number(module)
        prefix = self._unfinished.pop(number, None) if number is not None else None
        if number is not None and prefix is None:
            return False
        if number is None:
            title = type(module).__name__
            uses = self._prefixes[title] = self._prefixes.get(title, 0) + 1
            if uses > 1:
                title = f"{title}#{uses}"
            self._keep(module, self.intern(title, module))
            prefix = f"{title}."
        children = [(name, child) for name, child in module.named_modules() if name]
        if children and self._plain is None:
            self._plain = weakref.ref(module)
        if self._plain is not None and self._plain() is module:
            prefix = ""
        for name, child in children:
            child_number = self.intern(f"{prefix}{name}", child)
            if self._number(child) is None:
                self._keep(child, child_number)
        own = {name for name, _ in children}
        for name, parent in [("", module), *children]:
            for attribute, child in parent.named_children():
                inner = f"{name}.{attribute}" if name else attribute
                if inner not in own and next(itertools.chain(child.parameters(), child.buffers()), None) is None:
                    self._share(child, self.number(parent, -1), f"{prefix}{inner}")
        return number is None

    def _share(self, module: torch.nn.Module, parent: int, name: str) -> None:
        """Give a module without weights, such as one ReLU of all layers, another name for the calls by one layer."""
        first, number = self._number(module), self.intern(name, module)
        if first is not None and self.in_parent.setdefault((first, parent), number) == number != parent:
            for attribute, child in module.named_children():
                self._share(child, number, f"{name}.{attribute}")

    def root_called_by(self, module: torch.nn.Module, frame: FrameType | None) -> None:
        """Name the modules of a model as `root`; of one whose constructor is running, if that calls `module`."""
        if self._number(module) is None and (outer := _under_construction(module, frame)) is not None:
            self.root(outer)
            number = self._number(outer)
            assert number is not None
            # Its other modules get their names when it is called.
            self._unfinished[number] = f"{self.table[number]}."
        self.root(module)

    def _number(self, module: torch.nn.Module) -> int | None:
        found = self._numbers.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

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
    """Return the outermost model that has `module`, and whose constructor is running in the frames of the stack."""
    found = None
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            outer = variables(frame).get("self")
            # Before `super().__init__()` it has no modules.
            if isinstance(outer, torch.nn.Module) and outer is not module and "training" in vars(outer):
                found = outer if any(each is module for each in outer.modules()) else found
        frame = frame.f_back
    return found


def hooks(recorder: Recorder) -> contextlib.ExitStack:
    """Install global hooks that report to `recorder`; closing the returned stack removes them."""
    undo = contextlib.ExitStack()

    def before_call(module: torch.nn.Module, args: Any) -> None:
        recorder.call_begins(module, args, stacks.caller(1))

    def after_call(module: torch.nn.Module, args: Any, result: Any) -> None:
        recorder.call_ends(module)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.optimizer_begins(optimizer, stacks.caller(2))

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.optimizer_ends(optimizer)

    installed: list[Callable[[], Any]] = [
        lambda: register_module_forward_pre_hook(before_call),
        lambda: register_module_forward_hook(after_call, always_call=True),
        lambda: register_optimizer_step_pre_hook(before_step),
        lambda: register_optimizer_step_post_hook(after_step),
    ]
    with undo:
        for install in installed:
            undo.callback(install().remove)
        return undo.pop_all()
