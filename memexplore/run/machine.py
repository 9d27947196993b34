"""The machine that a program runs on: its GPUs, and everything else that decides how memory is requested and placed."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os as system
import pathlib
from collections.abc import Iterable

import torch

from memexplore.allocator import Settings
from memexplore.allocator.placement import system_of
from memexplore.hardware import catalogue
from memexplore.hardware.catalogue import Flops, Gpu, Sources
from memexplore.hardware.outside_allocator import Loading
from memexplore.recorder import cuda, history_api
from memexplore.recorder.recording import predicted
from memexplore.tape import Os
from memexplore.tape.allocator_settings import settings_of_environment
from memexplore.text.units import size_text
from memexplore.torch_internals.tensors import storage_key
from memexplore.virtual_gpu.device import VirtualGpu, active, release_of, turned_on
from memexplore.virtual_gpu.distributed.ranks import of_group
from memexplore.virtual_gpu.patches.install import Patched
from memexplore.virtual_gpu.patches.program_settings import ChosenBy
from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values.setting import Values

CUDA, CPU = "cuda", "cpu"
"""Names of the real GPU and the CPU of this machine; every other name means a virtual GPU."""
DEFAULT_VIRTUAL = "T4"
UNLIMITED = 1 << 50
"""Bytes of a memory without a known limit: a PiB."""


class Kind(enum.Enum):
    """What a program runs on."""

    VIRTUAL = "a virtual GPU"
    GPU = "the GPU of this machine"
    CPU = "the CPU of this machine"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where a program runs. Make one with `machine_of`.

    >>> machine = machine_of("T4", release="2.11.0")
    >>> machine.gpu.key, machine.is_virtual, machine.unlimited().gpu.total
    ('T4', True, 1125899906842624)
    """

    gpus: tuple[Gpu, ...]
    """The GPUs in the order of their index; for a CPU the entry that predicts it."""
    kind: Kind
    release: str
    """torch release whose rules apply."""
    settings: str = ""
    """Allocator settings, as in ``PYTORCH_CUDA_ALLOC_CONF``."""
    settings_chosen_by: ChosenBy = ChosenBy.ENVIRONMENT
    """Whether the program may change them."""
    os: Os = Os.LINUX
    """Operating system whose driver places the segments of a virtual GPU."""
    values: Values = Values.KNOWN
    """Which values of virtual tensors are computed."""
    skew: float = 0.0
    """The share of the rows of unknown scores that choose the same candidates, see the knob `skew`."""
    world: int | None = None
    """Number of processes of a distributed run; None for a process alone."""
    rank: int = 0

    @property
    def gpu(self) -> Gpu:
        """The first GPU."""
        return self.gpus[0]

    @property
    def is_virtual(self) -> bool:
        """Whether programs run on a virtual GPU."""
        return self.kind is Kind.VIRTUAL

    @property
    def device(self) -> torch.device:
        """The real device.

        Raises RuntimeError while a virtual GPU is on, ValueError where this machine has no usable GPU.
        """
        return real_device(CPU if self.kind is Kind.CPU else CUDA)

    @property
    def recorded_device(self) -> torch.device | None:
        """The device that `record` takes: None for a virtual GPU, which it finds by itself. Raises as `device`."""
        return None if self.is_virtual else self.device

    @property
    def name(self) -> str:
        """The name for messages and menus.

        >>> machine_of("cpu").name, machine_of("T4").name
        ("this machine's CPU", 'Tesla T4')
        """
        if self.kind is Kind.CPU:
            return "this machine's CPU"
        return self.gpu.name if self.is_virtual else f"this machine's {self.gpu.name}"

    @property
    def key(self) -> str:
        """The name that `machine_of` takes: ``cuda``, ``cpu``, or the key of the virtual GPU."""
        return {Kind.GPU: CUDA, Kind.CPU: CPU}.get(self.kind, self.gpu.key)

    @property
    def capacity(self) -> int:
        """Bytes of the first GPU that the allocator can reserve under the release and the settings."""
        capacity = self.gpu.for_release(self.release).capacity
        limit = Settings.parse(self.settings).limit(self.gpu.total)
        return capacity if limit is None else min(capacity, limit)

    def replace(self, **changes: object) -> Machine:
        """Return the same machine with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def with_gpu(self, gpu: Gpu) -> Machine:
        """Return the machine with one virtual GPU instead of its GPUs; kernels are loaded as they were."""
        return self.replace(gpus=(gpu.loaded(self.gpu.loading),), kind=Kind.VIRTUAL)

    def with_settings(self, settings: str) -> Machine:
        """Return the machine with allocator settings that hold whatever the program sets."""
        return self.replace(settings=str(Settings.parse(settings)), settings_chosen_by=ChosenBy.USER)

    def unlimited(self) -> Machine:
        """Return the virtual machine on which everything fits: its GPUs have a PiB of memory."""
        return self.replace(gpus=tuple(map(unlimited, self.gpus)), kind=Kind.VIRTUAL)

    def twin(self) -> Machine:
        """Return the virtual machine that predicts this one; a CPU has a GPU with unlimited memory as its twin."""
        return self.unlimited() if self.kind is Kind.CPU else self.replace(kind=Kind.VIRTUAL)

    def virtual_gpu(self) -> VirtualGpu:
        """Return the first GPU as a virtual one, switched off."""
        process = of_group(self.rank, self.world)
        settings = Settings.parse(self.settings)
        chosen_by = self.settings_chosen_by
        return VirtualGpu(self.gpu, self.release, settings, self.os, self.values, process, chosen_by, self.skew)

    def turned_on(self) -> Patched[VirtualGpu]:
        """Turn the virtual GPU on for a block. Raises RuntimeError if one is on already."""
        return turned_on(self.virtual_gpu, lambda device: history_api.patches(device, lambda: predicted(device)))

    def block(self) -> contextlib.AbstractContextManager[VirtualGpu | None]:
        """Return the block that a program runs in: the virtual GPU is on there, and on a real device nothing is."""
        return self.turned_on() if self.is_virtual else contextlib.nullcontext()


def machine_of(
    gpu: str | Gpu | torch.device | None = None,
    *,
    release: str | None = None,
    settings: str = "",
    os: str = Os.LINUX,
    values: str | Values = Values.KNOWN,
    world: int | None = None,
    rank: int = 0,
) -> Machine:
    """Return the machine that a command line, a magic or a keyword names.

    `gpu` is a name of the catalogue, a size such as ``24GiB`` or a `Gpu`, which mean a virtual GPU, or ``cuda`` or
    ``cpu`` for the GPU or the CPU of this machine. Default: the real GPU if usable, else a virtual T4. `release` is the
    torch release whose rules apply, by default the installed one; `settings` a ``PYTORCH_CUDA_ALLOC_CONF`` string, by
    default the environment's; `os` the operating system whose driver places segments: ``linux``, ``wsl`` or
    ``windows``. `values` says which values of tensors are computed. With `world` the process is `rank` of as many.

    >>> machine_of("24GiB").gpu.total == 24 * 1024**3
    True

    Raises ValueError for an unknown GPU, release, system, setting or rank, for a real GPU that this machine lacks, and
    for another release on a real device; RuntimeError for a real device while a virtual GPU is on.
    """
    if gpu is None:
        gpu = default_name()
    kind, entry = Kind.VIRTUAL, gpu
    if isinstance(gpu, torch.device) or gpu in (CUDA, CPU):
        device = real_device(gpu, release)
        kind = Kind.CPU if device.type == "cpu" else Kind.GPU
        entry = _cpu() if kind is Kind.CPU else cuda.catalogue_gpu(device)
    elif not isinstance(gpu, Gpu):
        entry = catalogue.find(gpu)
    if kind is not Kind.CPU and system.environ.get("CUDA_MODULE_LOADING") == Loading.EAGER.value.upper():
        entry = entry.loaded(Loading.EAGER)  # type: ignore[union-attr]
    of_group(rank, world)  # raises
    machine = Machine(
        gpus=(entry,),  # type: ignore[arg-type]
        kind=kind,
        release=release_or_installed(release),
        settings=str(Settings.parse("" if settings else settings_of_environment())),
        os=system_of(os),
        values=Values.of(values),
        world=world,
        rank=rank,
    )
    return machine.with_settings(settings) if settings else machine


def virtual(
    gpu: str | Gpu = DEFAULT_VIRTUAL,
    *,
    release: str | None = None,
    settings: str = "",
    os: str = Os.LINUX,
    values: str | Values = Values.KNOWN,
    world: int | None = None,
    rank: int = 0,
) -> Patched[VirtualGpu]:
    """Run the block on a virtual GPU: `cuda` is available, and tensors on it take no memory.

    `gpu` is a name of the catalogue, a size such as ``24GiB`` or a `Gpu`. `release` is the torch release whose rules
    apply, by default the installed one. `settings` is a ``PYTORCH_CUDA_ALLOC_CONF`` string, by default the
    environment's. `os` is the operating system whose driver places the segments: ``linux``, ``wsl`` or ``windows``.
    `values` says which values of tensors are computed, see `memexplore.Values`. With `world` the process is `rank` of
    as many processes, as `torchrun` starts them on nodes of eight GPUs: it has the environment variables of the rank,
    and process groups have this size.

    >>> import torch
    >>> with virtual("T4"):
    ...     x = torch.ones(1000, 1000, device="cuda")
    ...     torch.cuda.memory_allocated()
    4000256
    >>> with virtual("T4"):
    ...     torch.tensor([3, 5, 7]).cuda().max().item()
    7
    >>> with virtual("H100", world=16, rank=9):
    ...     torch.distributed.init_process_group("nccl")
    ...     torch.distributed.get_world_size(), torch.cuda.current_device()
    (16, 1)

    Raises ValueError for an unknown GPU, release, operating system or setting of `values`, and for a rank that is not
    one of `world`, RuntimeError if a virtual GPU is already on.
    """
    entry = gpu if isinstance(gpu, Gpu) else catalogue.find(gpu)
    return machine_of(
        entry, release=release, settings=settings, os=os, values=values, world=world, rank=rank
    ).turned_on()


def unlimited(gpu: Gpu) -> Gpu:
    """Return a GPU with a PiB of memory, on which every step fits.

    >>> unlimited(catalogue.find("T4")).total
    1125899906842624
    """
    return dataclasses.replace(gpu, total=UNLIMITED, limit=None)


def release_or_installed(requested: str | None) -> str:
    """Return the requested torch release, else the installed one.

    Raises ValueError for a text that is not a release.
    """
    release = requested or torch.__version__.partition("+")[0]
    release_of(release)
    return release


def default_name() -> str:
    """Return the name of the default machine: the real GPU if usable, else a virtual T4."""
    # While a virtual GPU is on, `torch.cuda` answers for the virtual one.
    return CUDA if active() is None and torch.cuda.is_available() else DEFAULT_VIRTUAL


def real_device(name: str | torch.device, release: str | None = None) -> torch.device:
    """Return a real device of this machine, for ``cuda`` the current one.

    Raises RuntimeError while a virtual GPU is on, ValueError where this machine has no usable GPU or another release.
    """
    on, device = active(), torch.device(name)
    if on is not None:
        raise RuntimeError(f"a virtual {on.gpu.name} is on: turn it off first (%memgpu off, or leave its block)")
    if device.type == CUDA and not torch.cuda.is_available():
        raise ValueError("torch finds no GPU on this machine: name a virtual one such as T4, or cpu for plain training")
    if release is not None and release != release_or_installed(None):
        shown = f"this machine's {CPU.upper() if device.type == CPU else cuda.catalogue_gpu(device).name}"
        raise ValueError(f"{shown} runs the installed torch: name a virtual GPU for another release")
    return torch.device(CUDA, torch.cuda.current_device()) if name == CUDA else device


def free_now(device: torch.device, own: int = 0) -> Gpu:
    """Return the virtual GPU with the numbers of a real one and the memory that a program could get there right now.

    That is what is free, the cache of this process's allocator, and `own`: bytes of tensors on the GPU that the
    program makes again. What other processes and other tensors of this process have is taken; so is the memory outside
    the allocator, also as far as it is not taken yet, as kernels are loaded at their first call. A limit on what this
    process may reserve holds for its other tensors too.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    gpu = cuda.catalogue_gpu(device).for_release(release_or_installed(None))
    others = max(allocated - own, 0)
    taken = max(total - free - reserved, gpu.outside) + others
    limit = None if gpu.limit is None else max(gpu.limit - others, 0)
    note = (
        f"{size_text(taken)} of {size_text(total)} are taken right now: by CUDA and its kernels, other processes, and "
        "other tensors of this process."
    )
    return dataclasses.replace(gpu, key="this GPU", total=total, outside=min(taken, total), note=note, limit=limit)


def bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that tensors have on a real GPU; a storage that several of them share counts once.

    >>> x = torch.zeros(8)
    >>> bytes_on(torch.device("cpu"), [x, x[:2], torch.zeros(2, device="meta")])
    32
    """
    storages = {
        storage_key(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if not is_virtual(tensor) and tensor.layout is torch.strided and tensor.device == device
    }
    return sum(storages.values())


def _cpu() -> Gpu:
    """Return this machine's CPU as a catalogue entry; its kernels are predicted as on an A100."""
    return Gpu(
        key=CPU,
        name=CPU,
        total=system_memory(),
        outside=0,
        compute_capability=(8, 0),
        multiprocessors=108,
        bandwidth=None,
        flops=Flops(),
        sources=Sources("memory of this machine", "nothing subtracted", "estimate: compute capability 8.0 as the A100"),
    )


def system_memory() -> int:
    """Return the bytes of memory of this machine, or of its container if less; a PiB if neither can be read."""
    sizes = [UNLIMITED]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sizes.append(system.sysconf("SC_PHYS_PAGES") * system.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # "max" where the container has no limit
        sizes.append(int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes)


def available_system_memory() -> int:
    """Return the bytes of `system_memory` that are free now; all of them if the system does not report it."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(system_memory(), int(line.split()[1]) * 1024)
    return system_memory()
