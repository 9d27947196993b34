"""Run `torch.distributed.pipelining` on one rank: stages that are moved to the GPU, and the vote on given shapes.

The shapes that a stage receives from its neighbours are objects: messages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import Pipe

from memexplore.torch_internals.pipelines import FAKE_TENSOR, IS_FAKE_TENSOR, VOTE, has_own_shapes
from memexplore.virtual_gpu.distributed.groups import is_ours
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor

_TRACES = (2, 13)
"""The first of the tested releases whose `torch.export` does not abort the process on tensors of a virtual GPU."""


def patches() -> list[Patch]:
    """Return the patches of pipelines, for names that the installed torch has."""
    replacements: list[Patch] = []
    if hasattr(*VOTE):
        replacements.append(Replace(VOTE.owner, VOTE.name, _vote(VOTE.value)))
    if hasattr(*FAKE_TENSOR):
        replacements.append(Replace(FAKE_TENSOR.owner, FAKE_TENSOR.name, _other_than_virtual(FAKE_TENSOR.value)))
    if hasattr(*IS_FAKE_TENSOR):
        replacements.append(Replace(IS_FAKE_TENSOR.owner, IS_FAKE_TENSOR.name, _not_of_virtual(IS_FAKE_TENSOR.value)))
    if tuple(map(int, torch.__version__.split(".")[:2])) < _TRACES:
        replacements.append(Replace(Pipe, "from_tracing", staticmethod(_refuse_to_trace)))
    return replacements


def _refuse_to_trace(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"torch {torch.__version__} cannot trace a model on a virtual GPU: install torch 2.13 or newer, or split the "
        "model yourself and make each PipelineStage from its part"
    )


def _not_of_virtual(is_fake_tensor: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: is_fake_tensor(value) and not isinstance(value, VirtualTensor)


def _vote(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the end of the vote: the stages of other ranks know their shapes if those of this rank do."""

    def result(stage: Any, *args: Any, **kwargs: Any) -> Any:
        votes = original(stage, *args, **kwargs)
        return votes.fill_(int(has_own_shapes(stage))) if is_ours(stage.group) else votes

    return result


def _other_than_virtual(fake_tensor: type) -> type:
    """Return a class for `isinstance` with the fake tensors that are not of the virtual GPU."""

    class Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, fake_tensor) and not isinstance(instance, VirtualTensor)

    return Meta("FakeTensor", (), {})
