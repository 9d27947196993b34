"""Settings of torch and of the environment that change what a run takes, for another process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from memexplore.tape.allocator_settings import SETTINGS_VARIABLES, settings_of_environment


class ProcessSettings(NamedTuple):
    """Global settings of torch and of the environment that change a run, to be repeated in a worker."""

    dtype: torch.dtype
    deterministic: bool
    cudnn: tuple[bool, bool, bool, bool]
    tf32: bool
    attention: tuple[bool, bool, bool, bool]
    environment: tuple[tuple[str, str | None], ...]
    path: tuple[str, ...] = ()
    """Folders of modules that the process searches after its own."""

    @property
    def allocator(self) -> str:
        """The settings of the allocator, as in ``PYTORCH_CUDA_ALLOC_CONF``."""
        return settings_of_environment(dict(self.environment))


def process_settings() -> ProcessSettings:
    """Return the settings of this process."""
    cudnn = torch.backends.cudnn
    return ProcessSettings(
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        (cudnn.enabled, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark),
        torch.backends.cuda.matmul.allow_tf32,
        (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        tuple((name, os.environ.get(name)) for name in SETTINGS_VARIABLES),
    )


def set_process_settings(wanted: ProcessSettings) -> None:
    """Give this process the settings of another one."""
    torch.set_default_dtype(wanted.dtype)
    torch.use_deterministic_algorithms(wanted.deterministic)
    enabled, allow_tf32, deterministic, benchmark = wanted.cudnn
    # Assignments to `torch.backends.cudnn` raise as soon as any module has imported torch's own test utilities.
    torch.backends.cudnn.set_flags(enabled, benchmark, None, deterministic, allow_tf32, None)
    torch.backends.cuda.matmul.allow_tf32 = wanted.tf32
    flash, efficient, of_cudnn, math = wanted.attention
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_cudnn_sdp(of_cudnn)
    torch.backends.cuda.enable_math_sdp(math)
    sys.path += [folder for folder in wanted.path if folder not in sys.path]
    for name, value in wanted.environment:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def with_process_settings(wanted: ProcessSettings) -> Iterator[None]:
    """Give this process the settings of another one for the block."""
    before = process_settings()
    try:
        set_process_settings(wanted)
        yield
    finally:
        set_process_settings(before)
