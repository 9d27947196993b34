"""Put weights and buffers that an earlier virtual GPU holds on the CPU for a block."""

from __future__ import annotations

import contextlib

import torch

from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.torch_internals.modules import buffers_of
from memexplore.torch_internals.state import contents_key
from memexplore.virtual_gpu.patches.module_moves import swap
from memexplore.virtual_gpu.tensors.tensor import fake_cpu_tensor, is_virtual


def virtual_tensors_on_cpu(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Exchange the virtual tensors of a model for ones on the CPU in the block, whatever virtual GPU they were on.

    What an earlier virtual GPU holds of them costs nothing: it is placed only where it is used. Buffers are not
    restored: enter `preserve_model_state` outside.
    """

    def exchange(log: UndoLog) -> None:
        for weight in model.parameters():
            if is_virtual(weight):
                other: torch.Tensor = torch.nn.Parameter(
                    fake_cpu_tensor(weight.shape, weight.dtype, weight.stride()), requires_grad=weight.requires_grad
                )
                log.add(_swap_back, weight, other, contents_key(weight))
                swap(weight, other)
        for module in model.modules():
            for name, buffer in buffers_of(module).items():
                if is_virtual(buffer):
                    buffers_of(module)[name] = fake_cpu_tensor(buffer.shape, buffer.dtype, buffer.stride())

    return undone_after(exchange)


def _swap_back(weight: torch.Tensor, holder: torch.Tensor, key: int) -> None:
    if contents_key(weight) != key:
        weight.grad = None
        swap(weight, holder)
