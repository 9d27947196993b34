"""Tensor parallelism by the plan of a model: torch's own styles for the layers that the plan names.

In: a model with a plan, as those of transformers have (`tp_plan`, from `base_model_tp_plan` of the configuration). Out:
its parameters as DTensors, or one sentence that says why it has no plan that can be followed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn

from memexplore.torch_internals.modules import buffers_of, parameters_of

STYLES: dict[str, tuple[str, str]] = {
    "colwise": ("ColwiseParallel", ""),
    "rowwise": ("RowwiseParallel", ""),
    "colwise_rep": ("ColwiseParallel", "output_layouts"),
    "colwise_gather_output": ("ColwiseParallel", "output_layouts"),
    "embedding_rowwise": ("RowwiseParallel", "input_layouts"),
}
"""Style of a plan of transformers -> class of torch.distributed.tensor.parallel and its replicated argument."""
_HEADS = ("num_key_value_heads", "num_attention_heads")


def plan_of(model: nn.Module) -> dict[str, str]:
    """Return the plan of a model: the style of each pattern of layer names, empty without one.

    Only patterns of layers that the model has are listed.
    """
    plan = getattr(model, "tp_plan", None) or {}
    if not isinstance(plan, Mapping):
        return {}
    names = [name for name, _ in model.named_modules()]
    return {pattern: str(style) for pattern, style in plan.items() if fnmatch.filter(names, pattern)}


def why_not(model: nn.Module, size: int | None = None) -> str:
    """Return why the layers of a model cannot be shared by `size` GPUs, as a clause; empty if they can.

    >>> why_not(nn.Linear(2, 2))
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


def share_layers(model: nn.Module, mesh: Any) -> None:
    """Make the parameters of the layers of a model's plan DTensors on a mesh; tied ones stay tied.

    Raises ValueError for a model without a plan that can be followed.
    """
    from torch.distributed.tensor import Replicate, parallel

    reason = why_not(model, mesh.size())
    if reason:
        raise ValueError(f"tensor_parallel={mesh.size()}: {reason}")

    def style(name: str) -> Any:
        kind, replicated = STYLES[name]
        return getattr(parallel, kind)(**({replicated: Replicate()} if replicated else {}))

    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    parallel.parallelize_module(model, mesh, {pattern: style(name) for pattern, name in plan_of(model).items()})
    for (first, name), *others in places.values():
        for module, other in others:
            parameters_of(module)[other] = parameters_of(first)[name]


def is_shared(parameter: nn.Parameter) -> bool:
    """Return whether several GPUs share a parameter."""
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def move_others(model: nn.Module) -> None:
    """Move the parameters and buffers that no GPU shares to the GPU."""
    shared = {id(parameter) for parameter in model.parameters() if is_shared(parameter)}
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None and id(parameter) not in shared:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(parameter.detach().cuda(), parameter.requires_grad)
                parameters_of(module)[name] = moved[id(parameter)]
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                buffers_of(module)[name] = buffer.cuda()
