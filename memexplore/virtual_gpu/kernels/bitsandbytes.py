"""Run LLM.int8() of bitsandbytes: ops whose outlier columns depend on values, which torch's fake kernels cannot make.

Source: bitsandbytes/backends/cuda/ops.py. The other ops of bitsandbytes have fake kernels of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.torch_internals.dispatch import schema_of
from memexplore.virtual_gpu.kernels.plan import Constant, Free, OpRunner, Output, Plan, Requests, Scratch, new
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.values import notes


def _outliers(source: torch.Tensor, threshold: float) -> tuple[Any, Requests]:
    """Return the outlier columns, of which there are none, and the requests that look for them."""
    if not threshold:
        return Constant(None), []
    notes.assume("no activation exceeds the outlier threshold of LLM.int8()")
    count = source.numel()
    # abs, then the mask, then `any` of it.
    return new((0,), torch.int64), [Scratch(count * source.itemsize), Scratch(count), Free(0), Scratch(1)]


@rule(Kind.PLAN, "bitsandbytes/backends/cuda/ops.py", "bitsandbytes.int8_vectorwise_quant.default")
def vectorwise_quant(args: Any, kwargs: Any) -> Plan:
    """`int8_vectorwise_quant(A, threshold=0)`: rows in int8, a scale for each row, outlier columns."""
    source = args[0]
    threshold = args[1] if len(args) > 1 else kwargs.get("threshold", 0.0)
    columns, search = _outliers(source, threshold)
    rows = source.numel() // source.shape[-1]
    outputs = [new(tuple(source.shape), torch.int8), new((rows,), torch.float32), columns]
    return Plan(outputs, tuple, [Output(1), Output(0), *search])


@rule(Kind.PLAN, "bitsandbytes/backends/cuda/ops.py", "bitsandbytes.int8_double_quant.default")
def double_quant(args: Any, kwargs: Any) -> Plan:
    """`int8_double_quant(A, threshold=0)`: the same by rows and by columns."""
    source = args[0]
    threshold = args[1] if len(args) > 1 else kwargs.get("threshold", 0.0)
    columns, search = _outliers(source, threshold)
    count, size = source.numel(), source.itemsize
    rows, width = count // source.shape[-1], source.shape[-1]
    outputs = [
        *(new(tuple(source.shape), torch.int8), new(tuple(source.shape), torch.int8)),
        *(new((rows,), torch.float32), new((width,), torch.float32), columns),
    ]
    first = sum(type(request) is Scratch for request in search)
    freed = [Free(number) for number in range(first) if not (first and number == 0)]
    by_column: Requests = [
        # abs and its maximum; A * 127, its quotient in fp32, rounded.
        *(Scratch(count * size), Output(3), Free(first)),
        *(Scratch(count * size), Scratch(count * 4), Free(first + 1), Scratch(count * 4), Free(first + 2), Output(1)),
    ]
    return Plan(outputs, tuple, [Output(2), Output(0), *search, *freed, *by_column])


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in schema_of(func).arguments]
    return dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs


@rule(Kind.OPS, "bitsandbytes/backends/cuda/ops.py", "bitsandbytes.int8_scaled_mm.default")
def scaled_mm(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """`int8_scaled_mm`: the product in int32, in fp16, in the dtype (bitsandbytes/backends/default/ops.py)."""
    arguments = _arguments(func, args, kwargs)
    ops, bias, dtype = torch.ops.bitsandbytes, arguments["bias"], arguments["dtype"] or torch.float16
    with runner:
        product = ops.int8_linear_matmul.default(arguments["A"], arguments["B"])
        result = torch.empty_like(product, dtype=torch.float16)
        if bias is not None and bias.dtype is not torch.float16:
            # The kernel adds a bias of fp16 only.
            result.add_(bias)
        return result.to(dtype)


@rule(Kind.OPS, "bitsandbytes/backends/cuda/ops.py", "bitsandbytes.int8_mixed_scaled_mm.default")
def mixed_scaled_mm(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """`int8_mixed_scaled_mm` without outlier columns (bitsandbytes/backends/default/ops.py)."""
    arguments = _arguments(func, args, kwargs)
    source = arguments["A"]
    with runner:
        outliers = torch.empty(0, device=source.device, dtype=source.dtype)
        product = torch.ops.bitsandbytes.int8_scaled_mm.default(
            *(arguments[name] for name in ("CA", "CB", "SCA", "SCB")), bias=arguments["bias"], dtype=source.dtype
        )
        return product, outliers
