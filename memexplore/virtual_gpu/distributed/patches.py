"""Join all patches of `torch.distributed`, those of modules that a program imports later included."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from memexplore.torch_internals.distributed import ACCELERATOR, AVAILABLE, c10d
from memexplore.torch_internals.sharded import FSDP2, ZERO
from memexplore.torch_internals.state import compiler_is_imported, compiler_rules
from memexplore.virtual_gpu.dispatch.runner import PlanRunner
from memexplore.virtual_gpu.distributed import (
    accelerate_state,
    data_parallel,
    deepspeed_kernels,
    fsdp2,
    groups,
    objects,
    other_processes,
    works,
    zero_redundancy,
)
from memexplore.virtual_gpu.patches import install
from memexplore.virtual_gpu.patches.install import Call, Patch, Replace


def patches(runner: PlanRunner) -> list[Patch]:
    """Return the patches of process groups, collectives and DistributedDataParallel."""
    if not AVAILABLE:
        return []
    dtensors, rules = _Once(_of_dtensor), _Once(_of_compiler_rules)
    makes = {**deepspeed_kernels.PATCHES, ZERO: zero_redundancy.patches, FSDP2: fsdp2.patches}
    imported = {name: _Once(make) for name, make in makes.items()}

    def on_group() -> None:
        dtensors.install()
        for once in imported.values():
            once.install()

    modules = (torch.distributed, c10d, torch.distributed.device_mesh)
    start = _starting(torch.distributed.init_process_group, rules)
    return [
        *(Replace(module, "init_process_group", start) for module in modules),
        Replace(ACCELERATOR.owner, ACCELERATOR.name, _accelerator),
        *groups.patches(on_group),
        after_import({name: once.install for name, once in imported.items()}),
        *other_processes.patches_of_remote_calls(),
        accelerate_state.patch(),
        *works.patches(),
        *objects.patches(),
        *other_processes.patches(),
        *data_parallel.patches(runner),
        *(dtensors.patches() if torch.distributed.is_initialized() else []),
    ]


def _starting(original: Callable[..., Any], rules: _Once) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if compiler_is_imported():
            rules.install()
        return original(*args, **kwargs)

    return init_process_group


def _of_dtensor() -> list[Patch]:
    # Importing DTensor takes 0.5 s, and the others together 0.3 s.
    from memexplore.virtual_gpu.distributed import checkpoints, dtensor, fsdp1, pipelines

    return [
        *dtensor.patches(),
        *checkpoints.patches(),
        *fsdp1.patches(),
        *pipelines.patches(),
    ]


def _of_compiler_rules() -> list[Patch]:
    return [Replace(compiler_rules(), "clear_lru_cache", lambda: None)]


class _Once:
    """Patches that are installed at most once for a block, when it needs them and there are any."""

    def __init__(self, make: Callable[[], list[Patch]]) -> None:
        self._make = make
        self._installed = False

    def patches(self) -> list[Patch]:
        """Return the patches, for a caller that installs them."""
        patches = self._make()
        self._installed = bool(patches)
        return patches

    def install(self) -> None:
        """Install the patches for the running block, unless they are installed; again after an interrupt."""
        if not self._installed:
            patches = self._make()
            install.add(patches)
            self._installed = bool(patches)


def _accelerator(check: Any = None) -> torch.device:
    return torch.device("cuda")


# --- modules that the program imports later ---------------------------------------------------------------------------


def after_import(after: Mapping[str, Callable[[], object]]) -> Patch:
    """Return the patch that calls a function of `after` when the module of its name has been imported.

    Other imports are not changed.
    """
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
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
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
