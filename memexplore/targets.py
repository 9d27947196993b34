"""Where a step runs: on a virtual GPU, or for real on the GPU or the CPU of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib

import torch

from memexplore import capture, gpu_catalogue
from memexplore.gpu_catalogue import Flops, Gpu, Sources
from memexplore.recorder import cuda
from memexplore.virtual_gpu.device import active

CUDA, CPU = "cuda", "cpu"
"""The real GPU of this machine, and its CPU; every other name is that of a virtual GPU."""
VIRTUAL = "T4"
"""The virtual GPU of a machine without a real one."""


def is_real(gpu: str | Gpu) -> bool:
    """Whether a place is a real device.

    >>> is_real("cpu"), is_real("T4")
    (True, False)
    """
    return gpu in (CUDA, CPU)


def here() -> str:
    """Return the default device: the real GPU if usable, else a virtual T4."""
    return CUDA if _has_gpu() else VIRTUAL


def _has_gpu() -> bool:
    # While a virtual GPU is on, `torch.cuda` speaks of that one.
    return active() is None and torch.cuda.is_available()


def device_of(gpu: str, release: str | None = None) -> torch.device:
    """The real device of a place, where torch is of the release that is asked for.

    Raises RuntimeError while a virtual GPU is on, ValueError where this machine has no usable GPU or another torch.
    """
    on = active()
    if on is not None:
        raise RuntimeError(f"a virtual {on.gpu.name} is on: turn it off first (%memgpu off, or leave its block)")
    if release is not None and release != capture.release_or_installed(None):
        raise ValueError(f"{title(gpu)} follows the torch that is installed: another release needs a virtual GPU")
    if gpu == CPU:
        return torch.device(CPU)
    if not torch.cuda.is_available():
        raise ValueError("torch finds no GPU on this machine: name a virtual one such as T4, or cpu for plain training")
    return torch.device(CUDA, torch.cuda.current_device())


def find(gpu: str | Gpu) -> Gpu:
    """The numbers of a place: of the catalogue, of the real GPU, or of this machine's CPU and memory.

    >>> find("T4").key, find("cpu").key
    ('T4', 'cpu')

    Raises as `device_of` and `devices.find` do.
    """
    if isinstance(gpu, Gpu):
        return gpu
    if gpu == CUDA:
        return cuda.twin(device_of(gpu))
    if gpu == CPU:
        return _cpu()
    return gpu_catalogue.find(gpu)


def title(gpu: str | Gpu) -> str:
    """What a person reads of a place.

    >>> title("cpu"), title("T4")
    ("this machine's CPU", 'Tesla T4')
    """
    if gpu == CPU:
        return "this machine's CPU"
    return f"this machine's {find(gpu).name}" if gpu == CUDA else find(gpu).name


def twin(gpu: str | Gpu) -> Gpu:
    """The virtual GPU on which a place is predicted; what a CPU would do, any GPU with memory enough does."""
    found = find(gpu)
    return unlimited(found) if gpu == CPU else found


def unlimited(gpu: Gpu) -> Gpu:
    """Return a GPU with a PiB of memory, on which every step fits.

    >>> unlimited(find("T4")).total
    1125899906842624
    """
    return dataclasses.replace(gpu, total=1 << 50)


def _cpu() -> Gpu:
    """This machine's CPU as an entry of the catalogue; its kernels are predicted as those of an A100."""
    size = memory()
    return Gpu(
        key=CPU,
        name=CPU,
        total=size,
        outside=0,
        compute_capability=(8, 0),
        multiprocessors=108,
        bandwidth=None,
        flops=Flops(),
        sources=Sources("memory of this machine", "none taken off", "estimate: compute capability 8.0 as the A100"),
    )


def memory() -> int:
    """Bytes of memory that this machine has, or its container where that is less; a PiB where nobody tells."""
    sizes = [1 << 50]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        sizes.append(int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes)


def available_memory() -> int:
    """Bytes of `memory` that can be had now; all of it where nobody tells."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(memory(), int(line.split()[1]) * 1024)
    return memory()
