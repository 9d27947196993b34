"""The virtual GPU: turned on, code that says `cuda` runs on it; turned off, everything is as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memexplore.allocator import Allocator, Settings
from memexplore.allocator.sizes import underivable_ends
from memexplore.gpu_catalogue import Gpu
from memexplore.tape import Action, Category
from memexplore.torch_internals.cuda import NVTX, PIN_MEMORY, global_device_context
from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.modules import (
    DEFAULT_DEVICE_TYPE,
    ENGINE_RUN_BACKWARD,
    FOREACH_TYPES,
    MODULE_APPLY,
    PARSE_TO,
    TRUNCATED_NORMAL,
)
from memexplore.torch_internals.tensors import only_lift_cpu_tensors, set_only_lift_cpu_tensors
from memexplore.virtual_gpu.dispatch import mode
from memexplore.virtual_gpu.kernels import composites, cuda_build
from memexplore.virtual_gpu.kernels.cublas_workspace import Workspaces, cublas_size
from memexplore.virtual_gpu.patches import autocast, cuda_api, cuda_objects, device_names, getitem, serialization
from memexplore.virtual_gpu.patches.compile import Compiling
from memexplore.virtual_gpu.patches.module_moves import Moves, parsing
from memexplore.virtual_gpu.tensors import tensor, values

_active: VirtualGpu | None = None
_plans: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}
"""What ops return and request, by the rules that decide it: a step that is run again has been worked out already."""
_LOOKS = frozenset(
    "get_device_name get_device_properties mem_get_info memory_stats memory_stats_as_nested_dict memory_allocated "
    "max_memory_allocated memory_reserved max_memory_reserved memory_snapshot empty_cache "
    "set_per_process_memory_fraction".split()
)
_MANY = 200_000
"""Plans are forgotten beyond so many; one is about a KiB."""


def active() -> VirtualGpu | None:
    """The virtual GPU that is on, None where none is."""
    return _active


def _remembered(rules: tuple[Any, ...]) -> dict[tuple[Any, ...], Any]:
    if sum(map(len, _plans.values())) > _MANY:
        _plans.clear()
    return _plans.setdefault(rules, {})


def _flags() -> tuple[Any, ...]:
    """The global settings of torch that kernels are chosen by."""
    cudnn = torch.backends.cudnn
    return (
        torch.get_default_dtype(),
        cudnn.enabled,
        cudnn.allow_tf32,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


def release_of(text: str) -> tuple[int, int]:
    """Major and minor number of a torch release.

    >>> release_of("2.13.0+cpu")
    (2, 13)

    Raises ValueError where the text is no release from 2.0 on.
    """
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()) or int(major) < 2:
        raise ValueError(f"{text!r} is no torch release: write one such as 2.11")
    return int(major), int(minor)


class VirtualGpu:
    """One virtual GPU from on to off: its allocator, its dispatch mode and what it replaced."""

    def __init__(self, gpu: Gpu, release: str, settings: Settings) -> None:
        # torch's fake mode imports much of torch, which must not see anything patched.
        tensor.fake_mode()
        self.gpu = gpu = gpu.under(release)
        self.release = release
        self.settings = settings
        numbers = release_of(release)
        self.allocator = Allocator(settings, capacity=gpu.capacity, total=gpu.total, release=release)
        self.workspaces = Workspaces(cublas_size(gpu.compute_capability, numbers), numbers)
        self.rules = (*numbers, gpu.compute_capability, gpu.multiprocessors, self.workspaces.size, *_flags())
        """All that kernels are chosen by: under equal rules the same code makes the same requests."""
        self.looked_at = False
        """Whether code asked what this GPU is or how full it is, and so may do something else on another."""
        self.mode = mode.VirtualMode(self.allocator, self.workspaces, _remembered(self.rules))
        self._moves = Moves()
        self._watchers: list[Any] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> VirtualGpu:
        global _active
        if _active is not None:
            raise RuntimeError(
                f"a virtual {_active.gpu.name} is already on; turn it off first (%memgpu off, or leave its block)"
            )
        with contextlib.ExitStack() as undo:
            self._adopt()
            values.reset()
            random_state = torch.get_rng_state()
            undo.callback(lambda: torch.set_rng_state(random_state))
            self._patch(undo)
            self._moves = moves = Moves()
            undo.callback(moves.restore)
            module = torch.nn.modules.module
            undo.callback(module.register_module_parameter_registration_hook(moves.registered).remove)
            undo.callback(module.register_module_buffer_registration_hook(moves.registered).remove)
            _replace(undo, *MODULE_APPLY, lambda *args, **kwargs: moves.apply(*args, **kwargs))
            undo.callback(register_optimizer_step_pre_hook(moves.stepping).remove)
            undo.callback(set_only_lift_cpu_tensors, only_lift_cpu_tensors())
            set_only_lift_cpu_tensors(True)
            mode.set_active(self.mode)
            undo.callback(self._off)
            tensor.DeviceState.gpu_name = self.gpu.name
            undo.enter_context(autocast.on(release_of(self.release)))
            rules = cuda_build.Build(release_of(self.release), self.gpu.compute_capability, self.gpu.multiprocessors)
            undo.enter_context(composites.on(rules))
            if rules.release < getitem.SKIPPED_SINCE:
                _replace(undo, tensor.VirtualTensor, "__getitem__", getitem.getitem)
            # torch asks once in a process which accelerator it has, and a checkpoint on the CPU has been told "none".
            _replace(undo, *DEFAULT_DEVICE_TYPE, "cuda")
            undo.enter_context(serialization.on())
            undo.callback(torch.set_default_device, _default_device())
            renaming = undo.enter_context(device_names.Renaming(moves.exchange))
            engine = ENGINE_RUN_BACKWARD.value
            _replace(undo, *ENGINE_RUN_BACKWARD, device_names.in_backward(renaming, engine))
            undo.enter_context(self.mode)
            _active = self
            self._undo = undo.pop_all()
        # Last, as they may add to what is undone.
        compiling = Compiling(self._undo)
        _replace(self._undo, torch, "compile", compiling.function)
        _replace(self._undo, torch.nn.Module, "compile", lambda *args, **kwargs: compiling.method(*args, **kwargs))
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _off(self) -> None:
        global _active
        _active = None
        tensor.DeviceState.gpu_name = None
        mode.set_active(None)

    def _adopt(self) -> None:
        """Start empty: what is alive from an earlier virtual GPU is placed when it is used again, and only then.

        So the same code gives the same tape twice, and a model of an earlier cell can still be used.
        """
        for ref in tensor.live_storages.values():
            ref.address = 0
        self.mode.has_earlier_tensors = bool(tensor.live_storages)

    @contextlib.contextmanager
    def watch(self, recorder: Any) -> Iterator[None]:
        """Tell `recorder` of every request, and first of what is there already."""
        for segment in self.allocator.snapshot():
            action = Action.SEGMENT_MAP if segment["is_expandable"] else Action.SEGMENT_ALLOC
            recorder.segment(action, segment["address"], segment["total_size"])
        for address in self.workspaces.kept.values():
            recorder.preexisting(address, self.workspaces.size, None, Category.WORKSPACE)
        placed = (ref for ref in tensor.live_storages.values() if ref.address)
        for ref in sorted(placed, key=lambda ref: ref.address):
            recorder.preexisting(ref.address, ref.size, ref.origin)
        ends = underivable_ends(self.allocator.live.values())
        for address in ends:
            recorder.preexisting(address, 0, None)
        for address in ends:
            recorder.free(address, 0)
        self._watchers.append(recorder)
        self._tell()
        try:
            yield
        finally:
            self._watchers.remove(recorder)
            self._tell()

    def _tell(self) -> None:
        """Let the device tell whoever watches; several only where a script takes its own history meanwhile."""
        watchers = self._watchers
        observer: Any = None if not watchers else watchers[0] if len(watchers) == 1 else _Several(tuple(watchers))
        self.mode.observer = self._moves.observer = observer
        self.allocator.on_event = observer.segment if observer is not None else None

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`."""
        self.allocator.empty_cache()

    def _noticed(self, function: Any) -> Any:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            self.looked_at = True
            return function(*args, **kwargs)

        return noticed

    def _patch(self, undo: contextlib.ExitStack) -> None:
        functions = cuda_api.functions(self)
        for name in _LOOKS & functions.keys():
            functions[name] = self._noticed(functions[name])
        for name, value in functions.items():
            _replace(undo, torch.cuda, name, value)
        for name in cuda_api.MEMORY_NAMES:
            _replace(undo, torch.cuda.memory, name, functions[name])
        for name in cuda_api.RANDOM_NAMES:
            _replace(undo, torch.cuda.random, name, functions[name])
        module_of = torch.get_device_module
        _replace(undo, torch, "get_device_module", lambda device=None: module_of("cuda" if device is None else device))
        _replace(undo, torch, "Generator", cuda_objects.Generator)
        _replace(undo, torch.Tensor, "record_stream", cuda_api.record_stream)
        _replace(undo, *TRUNCATED_NORMAL, _trunc_normal(TRUNCATED_NORMAL.value))
        # torch takes the foreach path only for exactly these types.
        for types in FOREACH_TYPES:
            _replace(undo, *types, [*types.value, tensor.VirtualTensor])
        for name, value in cuda_api.accelerator(functions).items():
            if hasattr(torch.accelerator, name):
                _replace(undo, torch.accelerator, name, value)
        _replace(undo, torch.autograd.graph, "save_on_cpu", _SaveOnCpu)
        _replace(undo, torch.nn.DataParallel, "scatter", _scatter)
        _replace(undo, *PARSE_TO, parsing(PARSE_TO.value))
        _replace(undo, *NVTX, cuda_objects.Nvtx())
        # Pinned memory is host memory: the loader's own thread must not look for a device.
        _replace(undo, *PIN_MEMORY, lambda data, device=None: data)


class _Several:
    """Tells several observers the same."""

    def __init__(self, observers: tuple[Any, ...]) -> None:
        self._observers = observers

    def __getattr__(self, name: str) -> Any:
        methods = [getattr(observer, name) for observer in self._observers]

        def tell(*args: Any, **kwargs: Any) -> None:
            for method in methods:
                method(*args, **kwargs)

        return tell


def _default_device() -> torch.device | None:
    context = getattr(global_device_context, "device_context", None)
    return context.device if context is not None else None


def _scatter(self: Any, inputs: tuple[Any, ...], kwargs: Any, device_ids: Any) -> tuple[Any, Any]:
    """`DataParallel.scatter` onto the one device there is."""
    moved = pytree.tree_map_only(torch.Tensor, lambda value: value.cuda(), (inputs, kwargs or {}))
    return (moved[0],), (moved[1],)


class _SaveOnCpu(torch.autograd.graph.save_on_cpu):
    """Saves as without pinned memory: a pinned buffer would be a real one, as large as all that is saved."""

    def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
        super().__init__(False, device_type)


def _trunc_normal(original: Any) -> Any:
    # Its rejection loop ends only when no value lies outside, and a virtual tensor has no values.
    def trunc_normal(target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return target if device_names.is_virtual(target) else original(target, *args, **kwargs)

    return trunc_normal


_MISSING = object()


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until `undo` is closed."""
    before = owner.__dict__.get(name, _MISSING)

    def put_back() -> None:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, value)
    undo.callback(put_back)
