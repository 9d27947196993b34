"""Byte ranges: the bytes of its storage that a tensor covers, and whether two tensors may share a byte."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ByteRange(NamedTuple):
    """The bytes of a storage that a tensor covers: first byte, and (size, stride in bytes), largest stride first."""

    offset: int
    dims: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + sum((size - 1) * stride for size, stride in self.dims) + 1


def byte_range(tensor: torch.Tensor) -> ByteRange | None:
    """Return the bytes that a tensor covers, None if it has no elements.

    >>> byte_range(torch.zeros(2, 3))
    ByteRange(offset=0, dims=((2, 12), (3, 4), (4, 1)))
    """
    if not tensor.numel():
        return None
    width = tensor.element_size()
    dims = [
        (int(size), int(stride) * width) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ]
    dims.append((width, 1))
    return ByteRange(int(tensor.storage_offset()) * width, tuple(sorted(dims, key=lambda dim: -dim[1])))


def overlaps_itself(elements: ByteRange) -> bool:
    """Return whether two elements may share a byte, as in an expanded tensor.

    >>> overlaps_itself(byte_range(torch.zeros(3, 1).expand(3, 2)))
    True
    >>> overlaps_itself(byte_range(torch.zeros(4, 4)[:, ::2]))
    False
    """
    reach = 0
    for size, stride in reversed(elements.dims):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def overlap(left: ByteRange, right: ByteRange) -> bool:
    """Return whether two tensors of one storage may share a byte; False is certain.

    >>> left, right = torch.zeros(4, 6).chunk(2, 1)
    >>> overlap(byte_range(left), byte_range(right)), overlap(byte_range(left), byte_range(right.T))
    (False, False)
    >>> overlap(byte_range(left), byte_range(torch.zeros(4, 6)[:, 2:]))
    True
    """
    if left.end <= right.offset or right.end <= left.offset:
        return False
    strides = sorted({stride for _, stride in (*left.dims, *right.dims)}, reverse=True)
    # If each stride divides the stride before, an address has one digit per stride, as in a mixed-radix number.
    ones, others = _digits(left, strides), _digits(right, strides)
    if ones is None or others is None:
        return True
    return all(first < beyond and begin < last for (first, last), (begin, beyond) in zip(ones, others, strict=True))


def _digits(elements: ByteRange, strides: list[int]) -> list[tuple[int, int]] | None:
    """Return the first and one past the last digit for each stride, None if addresses have no unique digits."""
    sizes: dict[int, int] = {}
    for size, stride in elements.dims:
        if stride in sizes:
            return None
        sizes[stride] = size
    rest, digits, larger = elements.offset, [], 0
    for stride in strides:
        if not stride or larger % stride:
            return None
        first, rest = divmod(rest, stride)
        last = first + sizes.get(stride, 1)
        if larger and last > larger // stride:
            return None
        digits.append((first, last))
        larger = stride
    return None if rest else digits
