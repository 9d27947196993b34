"""Turn a virtual GPU on and off: code that says `cuda` runs on a GPU of the catalogue under a torch release."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from memexplore.allocator import Allocator, Settings
from memexplore.allocator.placement import placement_on
from memexplore.allocator.sizes import underivable_ends
from memexplore.hardware.catalogue import Gpu
from memexplore.hardware.nvidia_smi import State
from memexplore.tape import Action, Category, Os
from memexplore.torch_internals import check
from memexplore.torch_internals.state import (
    BUFFER_REGISTRATION_HOOKS,
    OPTIMIZER_PRE_HOOKS,
    PARAMETER_REGISTRATION_HOOKS,
)
from memexplore.torch_internals.tensors import only_lift_cpu_tensors, set_only_lift_cpu_tensors
from memexplore.virtual_gpu.dispatch import cpu_ops, interrupts, mode, runner, streams, work
from memexplore.virtual_gpu.dispatch.value_lane import ValueLane
from memexplore.virtual_gpu.distributed import accelerate_state, ranks
from memexplore.virtual_gpu.distributed import patches as distributed
from memexplore.virtual_gpu.distributed.ranks import Rank
from memexplore.virtual_gpu.files import session
from memexplore.virtual_gpu.kernels import attention, composite_dispatch, convolutions, cuda_build
from memexplore.virtual_gpu.kernels.cublas_workspace import Workspaces, cublas_size
from memexplore.virtual_gpu.patches import (
    autocast,
    cuda_objects,
    extensions,
    indexing,
    install,
    modes,
    nvidia_smi,
    nvml,
    processes,
    serialization,
    storages,
    table,
    threads,
    torch_names,
    truncated_normal,
    user_classes,
    wrappers,
)
from memexplore.virtual_gpu.patches import streams as stream_patches
from memexplore.virtual_gpu.patches.compile import EagerCompile
from memexplore.virtual_gpu.patches.device_names import DeviceRenaming
from memexplore.virtual_gpu.patches.install import Call, Insert, Keep, Patch, Patched, Replace
from memexplore.virtual_gpu.patches.module_moves import ModuleMoves
from memexplore.virtual_gpu.patches.program_settings import ChosenBy, ProgramSettings
from memexplore.virtual_gpu.tensors import fake_tensors, local_device, methods, tensor
from memexplore.virtual_gpu.tensors.live_storages import live_storages
from memexplore.virtual_gpu.values import choices, known_values, notes, reading
from memexplore.virtual_gpu.values.setting import Values

_active: VirtualGpu | None = None
_plans: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}
"""Plans of ops by the rules that decide them: a later run of the same step uses those of an earlier one."""
_MAX_PLANS = 200_000
"""All plans are dropped when there are more; one takes about a KiB."""


def active() -> VirtualGpu | None:
    """Return the virtual GPU that is on, or None."""
    return _active


def turn_off() -> None:
    """Restore torch, whatever turned a virtual GPU on and whether or not its block has ended."""
    try:
        install.restore()
    finally:
        # Once more for what an interrupt has left.
        install.restore()


def _wait_for_current_stream() -> None:
    stream_patches.finished(streams.current())


def _plans_under(rules: tuple[Any, ...]) -> dict[tuple[Any, ...], Any]:
    if sum(map(len, _plans.values())) > _MAX_PLANS:
        _plans.clear()
    return _plans.setdefault(rules, {})


def _flags() -> tuple[Any, ...]:
    """The global settings of torch that kernels are chosen by."""
    return torch.get_default_dtype(), *convolutions.settings(), *attention.settings()


def release_of(text: str) -> tuple[int, int]:
    """Return the major and minor number of a torch release.

    >>> release_of("2.13.0+cpu")
    (2, 13)

    Raises ValueError for text that is not a release from 2.0 on.
    """
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()) or int(major) < 2:
        raise ValueError(f"{text!r} is not a torch release; write one such as 2.11")
    return int(major), int(minor)


class VirtualGpu:
    """One virtual GPU while it is on: its allocator, its dispatch mode and the recorders that watch it."""

    def __init__(
        self,
        gpu: Gpu,
        release: str,
        settings: Settings,
        os: Os = Os.LINUX,
        compute: Values = Values.KNOWN,
        rank: Rank | None = None,
        settings_chosen_by: ChosenBy = ChosenBy.ENVIRONMENT,
        skew: float = 0.0,
    ) -> None:
        check.warn_if_untested()
        # torch's fake mode imports much of torch, which must not see anything patched.
        fake_tensors.fake_mode()
        self.gpu = gpu = gpu.for_release(release)
        self.release = release
        self.os = os
        major_minor = release_of(release)
        self.allocator = Allocator(
            settings, capacity=gpu.total - gpu.outside, total=gpu.total, release=release, placement=placement_on(os)
        )
        if gpu.limit is not None:
            self.allocator.limit_to(gpu.limit)
        build = cuda_build.Build(major_minor, gpu.compute_capability, gpu.multiprocessors)
        self.workspaces = Workspaces(
            cublas_size(gpu.compute_capability, major_minor),
            major_minor,
            build.multiprocessors * build.resident_threads,
        )
        self.rules = (
            *major_minor,
            gpu.compute_capability,
            gpu.multiprocessors,
            *self.workspaces.sizes.values(),
            *_flags(),
        )
        """Everything that kernels are chosen by when the GPU is turned on: under equal rules the same code makes the
        same requests. What code changes later is in the keys of its plans (`Kind.SETTINGS`)."""
        self.properties_read = False
        """Whether code read properties of the GPU or how full it is, and so may run differently on another GPU."""
        self.values = compute
        self.skew = skew
        """The share of the rows of unknown scores that choose the same candidates."""
        self.rank = rank
        """Of processes that `torchrun` would have started, None where the environment says which rank this is."""
        self.generator = cuda_objects.Generator("cuda")
        """The default generator of the GPU's random numbers."""
        lane = None if compute is Values.NONE else ValueLane(compute, self.generator)
        self.runner = runner.PlanRunner(self.allocator, self.workspaces)
        self.runner.seconds_of = work.seconds_on(gpu)
        self.mode = mode.VirtualMode(self.runner, _plans_under(self.rules), lane)
        self.deferral = interrupts.Deferral()
        """Of Ctrl-C until a request of memory has ended."""
        self._module_moves = ModuleMoves()
        self._recorders: list[Any] = []
        self.program_settings = ProgramSettings(self, settings_chosen_by)
        self._has_context = False
        """Whether a request has made the CUDA context, which takes what lies outside the allocator."""
        self._connect_recorders()

    @property
    def settings(self) -> Settings:
        """The settings of the allocator now."""
        return self.allocator.settings

    def state(self) -> State:
        """Return the GPU and its process as `nvidia-smi` shows them."""
        return State(
            name=self.gpu.name,
            total=self.gpu.total,
            capability=self.gpu.compute_capability,
            uuid=str(cuda_objects.Properties(self.gpu).uuid),
            cuda=torch_names.cuda_version(self.release),
            count=local_device.count(),
            pid=os.getpid(),
            process=sys.executable,
            used=self._used(),
        )

    def _used(self) -> int:
        return self.gpu.outside + self.allocator.reserved if self._has_context else 0

    def patches(self) -> list[Patch]:
        """Return all patches that make `cuda` this GPU, in the order of installation. Call it while torch is unpatched.

        Raises RuntimeError while another virtual GPU is on.
        """
        if _active is not None:
            raise RuntimeError(
                f"a virtual {_active.gpu.name} is already on; turn it off first (%memgpu off, or leave its block)"
            )
        self._reset_tensors()
        self.mode.is_beside_real_gpu = torch.cuda.is_initialized()
        if self.mode.lane is None:
            # Nothing would follow the writes to tensors of an earlier virtual GPU.
            known_values.forget_all()
        notes.reset()
        composite_dispatch.register()
        cpu_ops.remember_keys()
        release, moves = release_of(self.release), self._module_moves
        launched = {} if self.rank is None else ranks.variables(self.rank)
        compiling = EagerCompile()
        renaming = DeviceRenaming(moves.set_data, {**indexing.handlers(release), **moves.contents.handlers()})
        build = cuda_build.Build(release, self.gpu.compute_capability, self.gpu.multiprocessors)
        state = tensor.DeviceState
        of_nvml, after_nvml = nvml.patches(self)
        return [
            # Undone last.
            self.deferral,
            Keep(torch.get_rng_state, torch.set_rng_state),
            *modes.kept(),
            Replace(state, "calls", type(state.calls)()),
            Call(compiling.start, compiling.stop),
            # Undone after everything that is below: the tensors of modules are exchanged on an unpatched torch.
            Call(unmake=moves.restore),
            Insert(PARAMETER_REGISTRATION_HOOKS, moves, moves.registered),
            Insert(BUFFER_REGISTRATION_HOOKS, moves, moves.registered),
            Insert(OPTIMIZER_PRE_HOOKS, moves, moves.stepping),
            Keep(only_lift_cpu_tensors, set_only_lift_cpu_tensors),
            Call(partial(set_only_lift_cpu_tensors, True)),
            Call(partial(runner.set_active, self.runner), partial(runner.set_active, None)),
            Call(streams.start),
            Replace(reading, "on_read", _wait_for_current_stream),
            Replace(choices.Routing, "skew", self.skew),
            Replace(cuda_build, "_current", build),
            Replace(sys.modules[__name__], "_active", self),
            # Before and after the name is set, which says that a virtual GPU needs them.
            Call(unmake=methods.take_off_unless_needed),
            Replace(state, "gpu_name", self.gpu.name),
            Call(methods.put_on),
            ranks.SetVariables(launched),
            Replace(state, "cuda", local_device.from_environment(launched)),
            Replace(state, "ranks", 1),
            Replace(state, "is_default_type_cuda", False),
            *autocast.patches(release),
            *serialization.patches(),
            *table.rows(self, moves, renaming, compiling),
            *self.program_settings.rows(),
            *storages.rows(self.runner),
            *extensions.patches(),
            *wrappers.rows(),
            *user_classes.rows(),
            *moves.lazy.rows(moves.exchange),
            *truncated_normal.patches(release),
            *threads.Threads(self.mode, renaming).patches(),
            *processes.patches(),
            *distributed.patches(self.runner),
            nvidia_smi.Shown(self.state),
            *of_nvml,
            distributed.after_import({nvml.NAME: after_nvml, **session.after_import()}),
            *([accelerate_state.cleared()] if launched else []),
            *session.patches(),
            Call(renaming.__enter__),
            Call(self.mode.__enter__),
        ]

    def _reset_tensors(self) -> None:
        """Start empty: a tensor of an earlier virtual GPU is placed only when it is used again.

        So the same code gives the same tape twice, and a model of an earlier cell can still be used.
        """
        for storage in list(live_storages.values()):
            storage.address = 0
        self.runner.has_earlier_tensors = bool(live_storages)

    @contextlib.contextmanager
    def watch(self, recorder: Any) -> Iterator[None]:
        """Report every request of the block to `recorder`, after the blocks allocated when it begins."""
        for segment in self.allocator.snapshot():
            action = Action.SEGMENT_MAP if segment["is_expandable"] else Action.SEGMENT_ALLOC
            recorder.segment(action, segment["address"], segment["total_size"], segment["stream"])
        for key, address in self.workspaces.kept.items():
            size = self.workspaces.sizes[key.library]
            recorder.preexisting(address, size, None, Category.WORKSPACE, stream=key.stream)
        placed = [storage for storage in list(live_storages.values()) if storage.address]
        for storage in sorted(placed, key=lambda storage: storage.address):
            stream = self.allocator.live[storage.address].free_set.stream
            recorder.preexisting(storage.address, storage.size, storage.origin, tensor=storage.tensor, stream=stream)
        ends = underivable_ends(self.allocator.live.values())
        for address in ends:
            recorder.preexisting(address, 0, None)
        for address in ends:
            recorder.free(address, 0)
        self._recorders.append(recorder)
        self._connect_recorders()
        try:
            yield
        finally:
            self.unwatch(recorder)

    def unwatch(self, recorder: Any) -> None:
        """Report no more requests to `recorder`. It may be called twice, and without `watch`."""
        with runner.lock:
            runner.free_waiting()
        self._recorders = [other for other in self._recorders if other is not recorder]
        self._connect_recorders()

    def _connect_recorders(self) -> None:
        """Report requests to the recorders; a second one is a script's own memory history."""
        recorders = self._recorders
        observer: Any = None if not recorders else recorders[0] if len(recorders) == 1 else _Fan(tuple(recorders))
        self.runner.observer = self._module_moves.observer = observer

        def segment(*event: Any) -> None:
            self._has_context = True
            nvidia_smi.show_used(self._used())
            if observer is not None:
                observer.segment(*event)

        self.allocator.segments.on_event = segment

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`."""
        with runner.lock:
            runner.free_waiting()
            self.allocator.empty_cache()


def turned_on(
    make: Callable[[], VirtualGpu], further: Callable[[VirtualGpu], Sequence[Patch]] = lambda device: ()
) -> Patched[VirtualGpu]:
    """Return a context manager that turns the GPU of `make` on for a block, with `further` patches for it."""

    def switch() -> tuple[VirtualGpu, list[Patch]]:
        device = make()
        return device, [*device.patches(), *further(device)]

    return Patched(switch)


class _Fan:
    """An observer that passes every call on to several observers."""

    def __init__(self, observers: tuple[Any, ...]) -> None:
        self._observers = observers

    def __getattr__(self, name: str) -> Any:
        methods = [getattr(observer, name) for observer in self._observers]

        def call_all(*args: Any, **kwargs: Any) -> None:
            for method in methods:
                method(*args, **kwargs)

        return call_all
