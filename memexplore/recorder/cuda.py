"""Read the facts about a CUDA device that a tape has: its catalogue entry, its memory, the operating system."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Mapping

import torch

from memexplore.hardware import catalogue, mig
from memexplore.hardware.catalogue import Gpu
from memexplore.hardware.outside_allocator import LOADING
from memexplore.recorder.driver_memory import driver_version
from memexplore.tape import Meta, Os, Source
from memexplore.tape.allocator_settings import settings_of_environment
from memexplore.tape.process_limit import limited


def meta(device: torch.device, versions: Mapping[str, str]) -> Meta:
    """Return the metadata of a recording on a CUDA device."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    result = Meta(
        source=Source.MEASURED,
        device=torch.cuda.get_device_name(device),
        gpu=catalogue_gpu(device).key,
        capacity=free + reserved,
        total=total,
        settings=settings_of_environment(),
        versions={**versions, **of_cuda()},
        os=operating_system(sys.platform, platform.release()),
    )
    return limited(result, memory_limit(device))


def of_cuda() -> dict[str, str]:
    """Return what else decides about memory on a CUDA device: releases of CUDA, cuDNN, driver; module loading."""
    known = {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver_version(),
        LOADING: os.environ.get("CUDA_MODULE_LOADING"),
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def memory_limit(device: torch.device) -> int | None:
    """Return the bytes that this process may reserve on a CUDA device, None without a limit.

    `torch.cuda.set_per_process_memory_fraction` and the allocator setting of that name set the limit.
    """
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return int(fraction * torch.cuda.get_device_properties(device).total_memory) if fraction < 1 else None


def operating_system(system: str, kernel: str) -> Os:
    """Return the operating system from `sys.platform` and `platform.release()`; the kernel of WSL names Microsoft.

    >>> operating_system("linux", "5.15.167.4-microsoft-standard-WSL2").value, operating_system("win32", "11").value
    ('wsl', 'windows')
    """
    if system == "win32":
        return Os.WINDOWS
    return Os.WSL if "microsoft" in kernel.lower() else Os.LINUX


def catalogue_gpu(device: torch.device) -> Gpu:
    """Return the catalogue entry of a CUDA device, with the memory of this device and the limit of this process.

    A GPU missing in the catalogue is a `Gpu` of its size and compute capability.
    """
    properties, limit = torch.cuda.get_device_properties(device), memory_limit(device)
    entry = _entry(properties.name, properties.total_memory)
    if entry is not None:
        return dataclasses.replace(entry, total=properties.total_memory, limit=limit)
    return dataclasses.replace(
        catalogue.find(f"{properties.total_memory}B"),
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        note="This GPU is not in the catalogue: its memory outside the allocator and its speed are unknown.",
        limit=limit,
    )


def _entry(name: str, total: int) -> Gpu | None:
    """Return the catalogue entry with a name of torch and the nearest total memory, or the MIG slice of that name."""
    table = catalogue.gpus()
    # The RTX 3060 was sold with 8 and with 12 GB under one name.
    named = (table[table["name"] == name]["total"] - total).abs()
    if len(named):
        return catalogue.find(str(named.idxmin()))
    if mig.parts_of(name) is None:
        return None
    try:
        return catalogue.find(name)
    except ValueError:  # a GPU or a profile that is not known
        return None
