"""Patches of modules that a program imports while the virtual GPU is on, installed as soon as such a module has run.

In: names of modules, and for each a function. Out: a patch with which imports call it; other imports are not changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

from memexplore.virtual_gpu.patches.install import Call, Patch


def patch(after: Mapping[str, Callable[[], object]]) -> Patch:
    """Return the patch that calls a function of `after` when the module of its name has been imported."""
    finder: Any = _Finder(after)

    def remove() -> None:
        while finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return Call(lambda: sys.meta_path.insert(0, finder), remove)


class _Finder:
    """Finds the modules that are waited for where the finders behind it find them."""

    def __init__(self, after: Mapping[str, Callable[[], object]]) -> None:
        self._after = after

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return where a module is, with a loader that calls the function after it has run the module."""
        if name not in self._after:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, self._after[name])
        return spec


def _call_after(loader: Any, function: Callable[[], object]) -> None:
    execute = loader.exec_module

    def run(module: Any) -> None:
        # The loader stays with the module.
        del loader.exec_module
        execute(module)
        function()

    loader.exec_module = run
