"""Pickle models as they were before they were watched, for another process without a GPU."""

from __future__ import annotations

import types
from typing import Any

import torch

from memexplore.run.programs.packing import WATCHED_CALL, StepPickler


class ModelPickler(StepPickler):
    """Pickles models as they were before they were watched, without Lightning's trainer and without GPU memory."""

    def _by_shape(self, tensor: torch.Tensor) -> bool:
        # Also tensors that are no parameters and no buffers: the process of a search has no GPU.
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized
        return super()._by_shape(tensor) or (is_plain and tensor.device.type not in ("cpu", "meta"))

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is rebuilt, NotImplemented for the way of cloudpickle."""
        if isinstance(obj, types.FunctionType) and WATCHED_CALL in vars(obj):
            return _same, (vars(obj)[WATCHED_CALL],)
        kind = type(obj)
        if kind.__name__ == "Trainer" and kind.__module__.split(".")[0] in ("lightning", "pytorch_lightning"):
            return types.NoneType, ()
        return super().reducer_override(obj)


def _same(value: Any) -> Any:
    return value
