"""Private names of `torch.distributed.pipelining`. Importing this module takes 0.1 s."""

from __future__ import annotations

from typing import Any

import torch.distributed.pipelining.stage as stages

from memexplore.torch_internals.table import TABLE, Attribute, Internal

_NO_SHAPES = "pipeline stages without `input_args` and `output_args` on a virtual GPU"

stages_module: Any = stages

VOTE = Attribute(stages.PipelineStage, "_warmup_backward_result")
"""Of torch 2.12 to 2.14: receives whether all stages were given their shapes."""
TABLE.append(
    Internal(
        "torch.distributed.pipelining.stage.PipelineStage._warmup_backward_result",
        "receives whether all stages know their shapes",
        _NO_SHAPES,
        # Later releases ask by an all_reduce, earlier ones not at all.
        lambda: not hasattr(stages.PipelineStage, VOTE.name) or hasattr(stages, "InferenceMode"),
    )
)


def has_own_shapes(stage: Any) -> bool:
    """Return whether a stage was given all shapes that it needs."""
    return not stages.InferenceMode.needs_dynamic(stage._user_meta, stage.has_backward)
