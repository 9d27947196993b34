"""Number the virtual GPU: 0, and in one rank of a distributed run the number of the rank on its machine.

LOCAL_RANK, LOCAL_WORLD_SIZE and WORLD_SIZE, as torchrun sets them, and what code says (`cuda:3`, `set_device(3)`) give
the index and the number of GPUs of the machine. One process has one virtual GPU, whatever its index.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from memexplore.virtual_gpu.tensors.tensor import CUDA, DeviceState

GPUS_OF_A_NODE = 8
"""GPUs of one machine where nothing says how many there are: a node of DGX or HGX systems has eight."""


def from_environment(others: Mapping[str, str]) -> torch.device:
    """Return the device of this rank: by LOCAL_RANK of `others`, else of the environment, else ``cuda:0``."""
    return torch.device("cuda", _number("LOCAL_RANK", {**os.environ, **others}) or 0)


def count() -> int:
    """Return the number of GPUs that code finds: LOCAL_WORLD_SIZE, else the size of the group up to 8; at least 1."""
    ranks = max(_number("WORLD_SIZE") or 1, DeviceState.ranks)
    return max(_number("LOCAL_WORLD_SIZE") or min(ranks, GPUS_OF_A_NODE), DeviceState.cuda.index + 1)


def check(index: int) -> None:
    """Raise RuntimeError for the index of a GPU that the machine does not have."""
    if index >= count():
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: the code uses cuda:{index}, and a virtual GPU is one device, "
            f"{DeviceState.cuda}"
        )


def set_index(index: int) -> None:
    """Give the virtual GPU an index, as `torch.cuda.set_device` does.

    Raises RuntimeError for the index of a GPU that the machine does not have.
    """
    check(index)
    DeviceState.cuda = torch.device("cuda", index)


def use(index: int) -> None:
    """Use the GPU of an index: the virtual GPU's own index, or the first that a rank without LOCAL_RANK names.

    Raises RuntimeError for another GPU.
    """
    if index == DeviceState.cuda.index:
        return
    check(index)
    if DeviceState.cuda != CUDA or _number("LOCAL_RANK") is not None:
        raise RuntimeError(
            f"the code uses cuda:{index}, and the virtual GPU of this process is {DeviceState.cuda}: one process has "
            "one virtual GPU, as one rank of a distributed run has"
        )
    set_index(index)


def _number(name: str, variables: Mapping[str, str] = os.environ) -> int | None:
    text = variables.get(name, "").strip()
    return int(text) if text.isdecimal() else None
