"""Compare the shapes of the inputs of a model's calls, and put them into words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

Shape = tuple[tuple[int, ...], torch.dtype]
Shapes = tuple[Shape, ...]

_DEPTH = 3
_MOST = 64
_PLAIN = (int, float, str, bool, type(None))


def shapes_of(*values: Any) -> Shapes:
    """Return shape and type of the tensors among values, in tuples, lists and mappings too; 64 at most.

    >>> shapes_of((torch.zeros(2, 3),), {"mask": torch.ones(2, dtype=torch.bool)})
    (((2, 3), torch.float32), ((2,), torch.bool))
    """
    shapes: list[Shape] = []
    _collect(values, shapes, _DEPTH)
    return tuple(shapes)


def _collect(values: Any, shapes: list[Shape], depth: int) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            if len(shapes) < _MOST:
                shapes.append((tuple(value.shape), value.dtype))
        elif not depth or isinstance(value, _PLAIN):
            continue
        elif isinstance(value, tuple | list):
            _collect(value, shapes, depth - 1)
        elif isinstance(value, Mapping):
            _collect(value.values(), shapes, depth - 1)


def text(shape: Shape) -> str:
    """Return a shape as text.

    >>> text(((8, 512), torch.int64))
    '8×512 int64'
    """
    return f"{'×'.join(map(str, shape[0])) or 'scalar'} {str(shape[1]).removeprefix('torch.')}"


def difference(now: Shapes, before: Shapes) -> str:
    """Return what differs between the inputs of two steps, "" if nothing does.

    >>> short, long = shapes_of(torch.zeros(8, 256)), shapes_of(torch.zeros(8, 512))
    >>> difference(long, short)
    'longer batch: 8×512 float32 instead of 8×256 float32'
    >>> difference(shapes_of(torch.zeros(16, 256)), short)
    'larger batch: 16×256 float32 instead of 8×256 float32'
    >>> difference(shapes_of(torch.zeros(8, 2, 2)), short)
    'new tensor shape: 8×2×2 float32 instead of 8×256 float32'
    """
    if len(now) != len(before):
        return f"new tensor shape: {len(now)} input tensors instead of {len(before)}"
    changed = [(new, old) for new, old in zip(now, before, strict=True) if new != old]
    if not changed:
        return ""
    new, old = max(changed, key=lambda pair: byte_size((pair[0],)))
    return f"{_kind(new, old)}: {text(new)} instead of {text(old)}"


def _kind(new: Shape, old: Shape) -> str:
    if new[1] == old[1] and len(new[0]) == len(old[0]) and all(a >= b for a, b in zip(new[0], old[0], strict=True)):
        return "larger batch" if new[0][0] > old[0][0] else "longer batch"
    return "new tensor shape"


def byte_size(shapes: Shapes) -> int:
    """Return the bytes of tensors of these shapes.

    >>> byte_size(shapes_of(torch.zeros(2, 3)))
    24
    """
    return sum(math.prod(lengths) * kind.itemsize for lengths, kind in shapes)
