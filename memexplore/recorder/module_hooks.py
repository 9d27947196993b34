"""Global hooks that report module calls and optimizer steps to a recorder, and the names of modules.

They need no change to the user's code.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memexplore.recorder import stacks

if TYPE_CHECKING:
    from memexplore.recorder.recorder import Recorder


class Names:
    """Qualified names of modules, interned as numbers.

    A layer has its name inside the model (`layer3.5.conv2`), the model itself the name of its class. Layers of a second
    model have the model's name in front.
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
        self._plain = True

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
        if self._number(module) is not None:
            return False
        title = type(module).__name__
        uses = self._prefixes[title] = self._prefixes.get(title, 0) + 1
        if uses > 1:
            title = f"{title}#{uses}"
        self._keep(module, self.intern(title, module))
        children = [(name, child) for name, child in module.named_modules() if name]
        prefix = ""
        if children:
            prefix, self._plain = ("" if self._plain else f"{title}."), False
        for name, child in children:
            number = self.intern(prefix + name, child)
            if self._number(child) is None:
                self._keep(child, number)
        return True

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
        return number


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
