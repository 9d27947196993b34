"""The virtual GPU of a whole notebook, which `%memgpu` turns on and off, safely under an interrupt at any line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.virtual_gpu.device import VirtualGpu
    from memexplore.virtual_gpu.patches.install import Patched


class NotebookGpu:
    """The GPU of a notebook and the block that is on for it, if any."""

    def __init__(self) -> None:
        self._on: tuple[Gpu, Patched[VirtualGpu]] | None = None

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that is on; None while it is off. Follows torch: it cannot differ from the installed patches."""
        return self._on[0] if self._on is not None and self._on[1].running else None

    def turn_on(self, gpu: Gpu, block: Patched[VirtualGpu]) -> None:
        """Begin the block that turns a GPU on."""
        try:
            self._on = (gpu, block)
            block.__enter__()
        except BaseException:
            block.close()
            raise

    def cell_begins(self) -> None:
        """Defer Ctrl-C again: Jupyter sets a handler of its own before each cell."""
        if self.gpu is not None:
            from memexplore.virtual_gpu import device

            active = device.active()
            if active is not None:
                active.deferral.install()

    def turn_off(self) -> str | None:
        """End the block and return the GPU's name; None if it was off."""
        gpu = self.gpu
        if self._on is not None:
            self._on[1].close()
        return None if gpu is None else gpu.name


def restore_torch() -> str | None:
    """Turn off any virtual GPU, also one that an interrupt left on, and return its name; None if none was on."""
    from memexplore.virtual_gpu import device

    active = device.active()
    device.turn_off()
    return None if active is None else active.gpu.name
