"""Run `torch.distributed.pipelining` on one rank: the vote on given shapes.

The shapes that a stage receives from its neighbours are objects: messages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import Pipe

from memexplore.torch_internals.pipelines import VOTE, has_own_shapes
from memexplore.virtual_gpu.distributed.groups import is_ours
from memexplore.virtual_gpu.patches.install import Patch, Replace

_TRACES = (2, 13)
"""The first of the tested releases whose `torch.export` does not abort the process on tensors of a virtual GPU."""


def patches() -> list[Patch]:
    """Return the patches of pipelines, for names that the installed torch has."""
    replacements: list[Patch] = []
    if hasattr(*VOTE):
        replacements.append(Replace(VOTE.owner, VOTE.name, _vote(VOTE.value)))
    if tuple(map(int, torch.__version__.split(".")[:2])) < _TRACES:
        replacements.append(Replace(Pipe, "from_tracing", staticmethod(_refuse_to_trace)))
    return replacements


def _refuse_to_trace(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"torch {torch.__version__} cannot trace a model on a virtual GPU: install torch 2.13 or newer, or split the "
        "model yourself and make each PipelineStage from its part"
    )


def _vote(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the end of the vote: the stages of other ranks know their shapes if those of this rank do."""

    def result(stage: Any, *args: Any, **kwargs: Any) -> Any:
        votes = original(stage, *args, **kwargs)
        return votes.fill_(int(has_own_shapes(stage))) if is_ours(stage.group) else votes

    return result
