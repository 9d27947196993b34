"""The knob `tensor_parallel`: layers that several GPUs share, by the plan of a model.

Models of transformers have a plan (`tp_plan`, from `base_model_tp_plan` of the configuration).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from memexplore.run.knobs.control import Control, Explored, counter, numbers
from memexplore.run.knobs.gpus import COUNTS
from memexplore.run.knobs.knob import Group, Knob, Stage
from memexplore.run.knobs.precision import CASTS
from memexplore.run.knobs.strategy import FIRST_SEVERAL, FSDP, PROCESSES_RUN, Strategy, hidden_on_cpu, strategy_of
from memexplore.run.knobs.values import Number

if TYPE_CHECKING:
    from memexplore.run.knobs.knobs import Knobs


STYLES: dict[str, tuple[str, str]] = {
    "colwise": ("ColwiseParallel", ""),
    "rowwise": ("RowwiseParallel", ""),
    "colwise_rep": ("ColwiseParallel", "output_layouts"),
    "colwise_gather_output": ("ColwiseParallel", "output_layouts"),
    "embedding_rowwise": ("RowwiseParallel", "input_layouts"),
}
"""Style of a plan of transformers -> class of torch.distributed.tensor.parallel and its replicated argument."""
_HEADS = ("num_key_value_heads", "num_attention_heads")


class TensorParallelKnob(Knob):
    """The number of GPUs that share each layer of a model with a plan (`tp_plan`, as in transformers)."""

    name = "tensor_parallel"
    costs = "equal results but for rounding, more communication"
    values = Number()
    place = 200
    group = Group.SEVERAL_GPUS
    needs_step = "{} wraps its model itself"
    locked = PROCESSES_RUN
    stage = Stage.PROCESS
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return where each layer is."""
        return f"each layer on {value} GPUs"

    def conflicts(self, value: Any, knobs: Knobs, explored: Explored) -> Iterator[str]:
        """Yield sentences for groups that do not fit the number of GPUs or the strategy, and for autocast."""
        gpus, strategy = knobs.gpus or 1, strategy_of(knobs)
        if gpus % value:
            yield f"tensor_parallel={value} does not divide gpus={gpus}: write one of its divisors"
            return
        if 1 < value < gpus and strategy not in FSDP:
            yield (
                f"tensor_parallel={value} on {gpus} GPUs needs a strategy for the {gpus // value} groups that shards: "
                "write strategy='fsdp2'"
            )
        if 1 < value == gpus and knobs.strategy is not Strategy.AS_WRITTEN:
            yield (
                f"tensor_parallel={value} leaves no GPUs for strategy={strategy.value!r}: take more GPUs, or no "
                "strategy"
            )
        if value > 1 and knobs.precision in CASTS:
            yield (
                "autocast in layers that several GPUs share is not simulated: write precision='all bf16', or "
                "fsdp_precision='bf16' with strategy='fsdp2'"
            )

    def controls(self, explored: Explored) -> list[Control]:
        """Return a slider over divisors of the number of GPUs."""
        slider = counter(
            self,
            1,
            lambda knobs: numbers(size for size in COUNTS if (knobs.gpus or 1) % size == 0),
            unit="GPUs",
            unit_of_one="GPU, which has whole layers",
        )
        return [] if explored.machine is None else [slider]

    def hidden(self, explored: Explored) -> str:
        """Return that the machine or the model cannot share layers."""
        why = "" if explored.model is None else why_not_shared(explored.model)
        return hidden_on_cpu(explored) or why

    def not_now(self, knobs: Knobs) -> str:
        """Return that several GPUs come first."""
        return FIRST_SEVERAL if (knobs.gpus or 1) == 1 else ""


def plan_of(model: nn.Module) -> dict[str, str]:
    """Return the plan of a model: the style of each pattern of layer names, empty without one.

    Only patterns of layers that the model has are listed.
    """
    plan = getattr(model, "tp_plan", None) or {}
    if not isinstance(plan, Mapping):
        return {}
    names = [name for name, _ in model.named_modules()]
    return {pattern: str(style) for pattern, style in plan.items() if fnmatch.filter(names, pattern)}


def why_not_shared(model: nn.Module, size: int | None = None) -> str:
    """Return why the layers of a model cannot be shared by `size` GPUs, as a clause; empty if they can.

    >>> why_not_shared(nn.Linear(2, 2))
    'the model has no tensor-parallel plan (tp_plan), which models of transformers have'
    """
    plan = plan_of(model)
    if not plan:
        return "the model has no tensor-parallel plan (tp_plan), which models of transformers have"
    others = sorted(set(plan.values()) - STYLES.keys())
    if others:
        return f"the model's plan has the style {others[0]}, which torch's tensor parallelism does not have"
    config = getattr(model, "config", None)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and size is not None and heads % size:
            return f"its {heads} {'key and value' if 'key' in name else 'attention'} heads cannot be divided by {size}"
    return ""
