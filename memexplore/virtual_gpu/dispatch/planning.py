"""Make the plan of an op that the cache does not hold: outputs, memory requests and work.

The outputs come from the table of kernels, from a shape rule or from torch's fake kernel, in this order; the requests
from the table.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.virtual_gpu.dispatch import argument_checks, fake_kernels, plans, shape_rules, unsupported, work
from memexplore.virtual_gpu.kernels import table
from memexplore.virtual_gpu.kernels.cublas_workspace import NONE, Library, Workspaces
from memexplore.virtual_gpu.kernels.plan import NewTensor, Plan, Requests
from memexplore.virtual_gpu.kernels.table import Kind
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu
from memexplore.virtual_gpu.values import value_hints


def make_plan(
    func: Any, types: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], workspaces: Workspaces
) -> Plan:
    """Return the plan of an op.

    Raises torch's error for tensors of two devices and for arguments that the op refuses, and what the fake kernel
    raises.
    """
    argument_checks.check_devices(func, tensors)
    argument_checks.check_values(func, args, kwargs)
    if any(isinstance(value, torch.dtype) and value in unsupported.QUANTIZED for value in (*args, *kwargs.values())):
        raise unsupported.not_simulated(func, "a quantized tensor")
    rule = table.find(func, Kind.PLAN)
    if rule is not None:
        plan: Plan = rule(args, kwargs)
        plan.work = work.of(func, args, kwargs, tensors, plan.outputs)
        return plan
    described = shape_rules.outputs(func, args, kwargs, tensors)
    outputs, returns = described or plans.describe(*fake_kernels.run(func, types, args, kwargs, tensors))
    requests, libraries = _requests(func, args, kwargs, outputs, workspaces)
    set_hints = value_hints.rule(func, args)
    plan = Plan(outputs, returns, requests, libraries, set_hints, plans.real_targets(func, args, kwargs, tensors))
    plan.work = work.of(func, args, kwargs, tensors, outputs)
    to_host = bool(plan.real_targets) or any(type(output) is NewTensor and output.host for output in outputs)
    is_copy = plan.work is not None and plan.work.rate is work.Rate.LINK
    plan.waits = to_host and is_copy and not kwargs.get("non_blocking", False)
    return plan


def _requests(
    func: Any, args: Any, kwargs: Any, outputs: list[Any], workspaces: Workspaces
) -> tuple[Requests | None, tuple[Library, ...]]:
    """Return an op's requests (None: its outputs only), and the libraries whose workspaces its thread must have."""
    new_on_device = any(type(output) is NewTensor and not output.host for output in outputs)
    requests = None
    rule = table.find(func, Kind.REQUESTS)
    if rule is not None and (new_on_device or any(_is_on_device(value) for value in (*args, *kwargs.values()))):
        requests = rule(args, kwargs, outputs)
    cublas = table.find(func, Kind.CUBLAS)
    if cublas is None or not new_on_device:
        return requests, NONE
    return cublas(args, kwargs, requests, outputs, workspaces)


def _is_on_device(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return is_on_gpu(value)
    return isinstance(value, list | tuple) and any(_is_on_device(entry) for entry in value)
