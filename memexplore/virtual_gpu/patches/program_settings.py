"""Take the allocator settings that a program makes itself, when and as PyTorch reads them.

PyTorch reads the environment variable once, when CUDA is initialised (the constructor of `DeviceCachingAllocator` in
c10/cuda/CUDACachingAllocator.cpp), and `_accelerator_setAllocatorSettings` changes the settings at any time.
"""

from __future__ import annotations

import enum
from typing import Protocol

from memexplore.allocator import Allocator, Settings
from memexplore.hardware.catalogue import Gpu
from memexplore.tape.allocator_settings import settings_of_environment
from memexplore.torch_internals.cuda import GET_ALLOCATOR_SETTINGS, SET_ALLOCATOR_SETTINGS
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.values import notes


class ChosenBy(enum.Enum):
    """Who has chosen the allocator settings that a virtual GPU begins with."""

    ENVIRONMENT = "the environment, which the program may change before PyTorch reads it"
    USER = "the user of memexplore: they hold whatever the program sets"


class Device(Protocol):
    """The part of a virtual GPU that the program's settings change."""

    gpu: Gpu
    allocator: Allocator
    properties_read: bool


class ProgramSettings:
    """The allocator settings of one virtual GPU while a program runs on it."""

    def __init__(self, device: Device, chosen_by: ChosenBy) -> None:
        self._device = device
        self._chosen_by = chosen_by
        self._environment = settings_of_environment()
        """The settings of the environment as PyTorch has read them, before that as they were at the start."""
        self._text = str(device.allocator.settings)
        """The settings as they were written last."""
        self._is_read = self._is_initialized = False
        device.allocator.before_first_request = self.initialize

    def initialize(self) -> None:
        """Read the environment, as the first use of CUDA does. Raises ValueError for settings that PyTorch refuses."""
        if self._is_initialized:
            return
        self._read()
        if self._device.gpu.limit is None:
            # Only now: PyTorch reads `per_process_memory_fraction` when it makes the allocator.
            self._device.allocator.limit_to(self._device.allocator.settings.limit(self._device.gpu.total))
        self._is_initialized = True

    def set(self, text: str) -> None:
        """`torch._C._accelerator_setAllocatorSettings`. Raises as `initialize`."""
        self._read()
        changed = self._device.allocator.settings.changed_by(text)
        if self._chosen_by is ChosenBy.USER:
            notes.add(self._left_out(text))
            return
        if self._device.allocator.reserved and changed != self._device.allocator.settings:
            notes.add(
                f"the program changed the allocator settings to {text} while it had memory: "
                "figures and numbers that repeat its requests take them from the start"
            )
        self._take(changed, text)

    def get(self) -> str:
        """`torch._C._accelerator_getAllocatorSettings`."""
        self._read()
        return self._text

    def without_effect(self, before: str) -> tuple[str, ...]:
        """Return a note where the environment has settings that were not read, other ones than those `before`."""
        text = settings_of_environment()
        if text in ("", before, self._environment):
            return ()
        if self._chosen_by is ChosenBy.USER:
            return (self._left_out(text),)
        if not self._is_read:
            return ()
        return (
            f"the program set PYTORCH_CUDA_ALLOC_CONF to {text}, too late: PyTorch reads it once, at the first use",
        )

    def rows(self) -> list[Replace]:
        """Return the replacements in torch's C++ module."""
        return [Replace(*SET_ALLOCATOR_SETTINGS, self.set), Replace(*GET_ALLOCATOR_SETTINGS, self.get)]

    def _read(self) -> None:
        if self._is_read:
            return
        text = settings_of_environment()
        if text != self._environment and self._chosen_by is ChosenBy.ENVIRONMENT:
            self._take(Settings.parse(text), text)
            self._environment = text
        self._is_read = True

    def _take(self, settings: Settings, text: str) -> None:
        # A step that is run again elsewhere would begin with the settings of its machine.
        self._device.properties_read = True
        self._device.allocator.change_settings(settings)
        self._text = text

    def _left_out(self, text: str) -> str:
        own = str(self._device.allocator.settings) or "the defaults"
        return f"the program's own allocator settings, {text}, were left out: this run was asked for {own}"
