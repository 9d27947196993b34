"""Targets of a run: ``cuda`` and ``cpu`` are the real GPU and CPU of this machine, every other name is a virtual GPU.

A target goes in as a string or as a `Gpu`; out comes its `torch.device`, its `Gpu` or its name as text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterable

import torch

from memexplore import capture, gpu_catalogue
from memexplore.gpu_catalogue import Flops, Gpu, Sources
from memexplore.recorder import cuda
from memexplore.torch_internals.tensors import storage_key
from memexplore.units import size_text
from memexplore.virtual_gpu.device import active
from memexplore.virtual_gpu.patches.device_names import is_virtual

CUDA, CPU = "cuda", "cpu"
DEFAULT_VIRTUAL = "T4"
"""Default target of a machine without a usable GPU."""


def is_real(target: str | Gpu) -> bool:
    """Return whether a target is a real device.

    >>> is_real("cpu"), is_real("T4")
    (True, False)
    """
    return target in (CUDA, CPU)


def default_target() -> str:
    """Return the default target: the real GPU if usable, else a virtual T4."""
    return CUDA if _has_usable_gpu() else DEFAULT_VIRTUAL


def _has_usable_gpu() -> bool:
    # While a virtual GPU is on, `torch.cuda` answers for the virtual one.
    return active() is None and torch.cuda.is_available()


def real_device(target: str, release: str | None = None) -> torch.device:
    """Return the `torch.device` of a real target; `release` is the requested torch release, None for the installed one.

    Raises RuntimeError while a virtual GPU is on, ValueError where this machine has no usable GPU or another release.
    """
    on = active()
    if on is not None:
        raise RuntimeError(f"a virtual {on.gpu.name} is on: turn it off first (%memgpu off, or leave its block)")
    if release is not None and release != capture.release_or_installed(None):
        name = display_name(target)
        raise ValueError(f"{name} runs the installed torch: name a virtual GPU for another release")
    if target == CPU:
        return torch.device(CPU)
    if not torch.cuda.is_available():
        raise ValueError("torch finds no GPU on this machine: name a virtual one such as T4, or cpu for plain training")
    return torch.device(CUDA, torch.cuda.current_device())


def gpu_of(target: str | Gpu) -> Gpu:
    """Return a target as a `Gpu`: a catalogue entry, the real GPU, or this machine's CPU with its memory.

    >>> gpu_of("T4").key, gpu_of("cpu").key
    ('T4', 'cpu')

    Raises as `real_device` and `gpu_catalogue.find` do.
    """
    if isinstance(target, Gpu):
        return target
    if target == CUDA:
        return cuda.catalogue_gpu(real_device(target))
    if target == CPU:
        return _cpu()
    return gpu_catalogue.find(target)


def free_now(device: torch.device, own: int = 0) -> Gpu:
    """Return the virtual GPU with the numbers of a real one and the memory that a program could get there right now.

    That is what is free, the cache of this process's allocator, and `own`: bytes of tensors on the GPU that the
    program makes again. What other processes and other tensors of this process have is taken; so is the memory outside
    the allocator, also as far as it is not taken yet, as kernels are loaded at their first call. A limit on what this
    process may reserve holds for its other tensors too.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    gpu = cuda.catalogue_gpu(device).for_release(capture.release_or_installed(None))
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


def display_name(target: str | Gpu) -> str:
    """Return the name of a target for messages and menus.

    >>> display_name("cpu"), display_name("T4")
    ("this machine's CPU", 'Tesla T4')
    """
    if target == CPU:
        return "this machine's CPU"
    return f"this machine's {gpu_of(target).name}" if target == CUDA else gpu_of(target).name


def predicted_as(target: str | Gpu) -> Gpu:
    """Return the virtual GPU that predicts a target; for the CPU its memory is unlimited."""
    gpu = gpu_of(target)
    return capture.unlimited(gpu) if target == CPU else gpu


def _cpu() -> Gpu:
    """This machine's CPU as a catalogue entry; its kernels are predicted as those of an A100."""
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
    sizes = [capture.UNLIMITED]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
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
