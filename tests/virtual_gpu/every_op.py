"""Every op of torch's own op database, with small inputs, on the virtual GPU and on the CPU.

For each op the inputs are found that differ in shape, dtype or stride of results and gradients, with a result on the
meta device, or that fail: with gradients, without them, and in inference mode. `python -m tests.virtual_gpu.every_op
[NAME ...]` takes some minutes and prints them, of all ops by default; what is expected is in `EXPECTED`.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memexplore.run.machine import virtual

SAMPLES = 4
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "with gradients": torch.enable_grad,
    "without gradients": torch.no_grad,
    "in inference mode": torch.inference_mode,
}
_VALUES = "the shape of the result depends on values"
EXPECTED = {
    **dict.fromkeys(("combinations", "masked_select", "nonzero", "argwhere", "bincount", "unique"), _VALUES),
    **dict.fromkeys(("nn.functional.one_hot", "unique_consecutive", "repeat_interleave"), _VALUES),
    **dict.fromkeys(("histogram", "histogramdd"), "CUDA has no kernel"),
    **dict.fromkeys(("linalg.lstsq",), "CUDA has one driver, which gives no rank and other residuals"),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), "CUDA saves statistics in eval mode too"),
    **dict.fromkeys(("sparse.sampled_addmm", "sparse.mm", "to_sparse"), "sparse layouts other than COO, or values"),
    "tensor_split": "the database puts the indices on the CPU",
    "to": "the database names the CPU",
}
"""Ops whose results differ, or that end in one sentence, with the reason."""


def database() -> list[Any]:
    """Return torch's op database. Its module imports expecttest, which the inputs do not use.

    The module also forbids assignments to `torch.backends.cudnn` in the whole process; here they stay allowed.
    """
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = _stand_in()
    with mock.patch.object(torch.backends, "disable_global_flags", lambda: None):
        from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.dtypes]


def _stand_in() -> types.ModuleType:
    module = types.ModuleType("expecttest")
    module.TestCase = type("TestCase", (), {})  # type: ignore[attr-defined]
    return module


def failures(op: Any, samples: int = SAMPLES) -> Iterator[str]:
    """Yield a line for each of the first inputs of an op whose result differs or fails on the virtual GPU."""
    dtype = torch.float32 if torch.float32 in op.dtypes else sorted(op.dtypes, key=str)[0]
    gradient = op.supports_autograd and dtype.is_floating_point
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradient), samples):
        for mode in MODES:
            try:
                expected = _run(op, sample, "cpu", mode)
            except Exception:  # inputs that the CPU refuses say nothing about the virtual GPU
                continue
            try:
                with virtual("A100"):
                    found = _run(op, sample, "cuda", mode)
            except Exception as error:
                yield f"{mode}: {type(error).__name__}: {str(error)[:200]}"
            else:
                if found != expected:
                    yield f"{mode}: CPU {expected}, virtual GPU {found}"


def _run(op: Any, sample: Any, device: str, mode: str) -> Any:
    """Return the metadata of an op's results and of the gradients of its inputs."""
    source, args, kwargs = tree_map(lambda value: _on(value, device), (sample.input, sample.args, sample.kwargs))
    if "device" in kwargs:
        kwargs["device"] = device
    with MODES[mode]():
        result = op(source, *args, **kwargs)
    inputs = [leaf for leaf in tree_leaves((source, args, kwargs)) if _is_tensor(leaf) and leaf.requires_grad]
    outputs = [leaf for leaf in tree_leaves(sample.output_process_fn_grad(result)) if _is_tensor(leaf)]
    outputs = [leaf for leaf in outputs if leaf.requires_grad and not leaf.dtype.is_complex]
    gradients: Any = ()
    if inputs and outputs and mode == "with gradients":
        gradients = torch.autograd.grad([leaf.sum() for leaf in outputs], inputs, allow_unused=True)
    return tree_map(_metadata, result), [None if leaf is None else _metadata(leaf)[:2] for leaf in gradients]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _on(value: Any, device: str) -> Any:
    if not _is_tensor(value):
        return value
    source = value.detach()
    if device == "cpu" or source.layout is not torch.strided:
        moved = source.clone().to(device)
    else:
        moved = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device).copy_(source)
    return moved.requires_grad_(value.requires_grad)


def _metadata(value: Any) -> Any:
    if not _is_tensor(value):
        return type(value).__name__
    if value.layout is not torch.strided:
        return tuple(value.shape), value.dtype, value.layout
    assert not value.is_meta
    strides = [step for step, extent in zip(value.stride(), value.shape, strict=True) if extent > 1]
    return tuple(value.shape), value.dtype, tuple(strides) if value.numel() else ()


def main(names: list[str]) -> int:
    """Print the ops that fail unexpectedly; return their number."""
    warnings.simplefilter("ignore")
    unexpected = count = 0
    for op in database():
        if names and op.name not in names:
            continue
        count += 1
        found = list(failures(op))
        if found and op.name not in EXPECTED:
            unexpected += 1
            print(f"{op.name}: {len(found)} inputs; {found[0]}")
    print(f"{count} ops, {unexpected} fail unexpectedly")
    return unexpected


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
