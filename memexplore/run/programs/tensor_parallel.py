"""Layers that several GPUs share, by torch's own styles for the layers that the plan of a model names."""

from __future__ import annotations

from typing import Any

from torch import nn

from memexplore.run.knobs.tensor_parallel import STYLES, plan_of, why_not_shared
from memexplore.torch_internals.modules import buffers_of, parameters_of


def share_layers(model: nn.Module, mesh: Any) -> None:
    """Make the parameters of the layers of a model's plan DTensors on a mesh; tied ones stay tied.

    Raises ValueError for a model without a plan that can be followed.
    """
    from torch.distributed.tensor import Replicate, parallel

    reason = why_not_shared(model, mesh.size())
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
