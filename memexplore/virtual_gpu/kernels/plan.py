"""Describe the outputs and the memory requests of one op with given shapes, as plain data, and help rules to do so.

`PlanRunner.run_plan` carries a `Plan` out on a virtual GPU (dispatch/runner.py).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch

from memexplore.tape import Category
from memexplore.text.tensor_text import tensor_text
from memexplore.virtual_gpu.values.value_hints import SetHints


class NewTensor(NamedTuple):
    """An output with a storage of its own; `size` is the storage's size in bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    size: int
    host: bool
    """Whether the storage is on the CPU."""


class View(NamedTuple):
    """An output in the storage of a tensor argument (`source` >= 0) or of an earlier output (`~source`)."""

    source: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    host: bool
    conjugated: bool = False
    negated: bool = False


class Argument(NamedTuple):
    """An output that is one of the tensor arguments, as an in-place op returns it."""

    source: int


class Constant(NamedTuple):
    """An output that is not a tensor."""

    value: Any


PlannedOutput = NewTensor | View | Argument | Constant


class Output(NamedTuple):
    """A request for the storage of output number `number`."""

    number: int


class Scratch(NamedTuple):
    """A request for `size` bytes that the kernel frees when it ends."""

    size: int
    category: Category = Category.TEMPORARY


class OptionalScratch(NamedTuple):
    """A request for scratch memory without which the kernel can run: if it does not fit, nothing is allocated."""

    size: int
    category: Category


class PossibleWorkspace(NamedTuple):
    """Bytes of the workspace that may be requested after the request in front, under each of a few assumptions.

    The first is what the plan itself requests, 0 for none. This requests nothing: it stands right behind the `Output`
    to which the workspace belongs, in front of the `OptionalScratch`, which is missing where the first is 0.
    """

    sizes: tuple[int, ...]


class Free(NamedTuple):
    """A free, before the kernel ends, of the scratch memory that scratch request number `number` of the op got."""

    number: int


class Kept(NamedTuple):
    """A request for the block that a `cublas_workspace.Library` keeps, where it does not have it yet."""

    library: Any


Requests = list[Output | Scratch | OptionalScratch | PossibleWorkspace | Free | Kept]
"""Requests and frees of one op, in order."""


class Plan:
    """Outputs and memory requests of an op."""

    __slots__ = (
        "allocates",
        "libraries",
        "notes",
        "outputs",
        "real_targets",
        "requests",
        "returns",
        "set_hints",
        "texts",
        "waits",
        "work",
    )

    def __init__(
        self,
        outputs: list[Any],
        returns: type | None,
        requests: Requests | None = None,
        libraries: tuple[Any, ...] = (),
        set_hints: SetHints | None = None,
        real_targets: tuple[int, ...] = (),
    ) -> None:
        self.outputs: list[PlannedOutput] = outputs
        self.texts = [
            tensor_text(output.shape, output.dtype) if type(output) is NewTensor else "" for output in outputs
        ]
        """Shape and dtype of each output that gets a storage, for the tape."""
        self.returns = returns
        """The container of the outputs: tuple, list, or None for a single output."""
        self.requests = requests
        """None: the storages of the outputs in order, and nothing else."""
        self.libraries = libraries
        """The `cublas_workspace.Library`s whose workspaces the thread must have when the op has run."""
        self.allocates = bool(requests or libraries) or any(type(output) is NewTensor for output in outputs)
        """Whether the op may request memory: one that returns views and arguments does not."""
        self.set_hints = set_hints
        self.real_targets = real_targets
        """Positions of the real tensor arguments that the op writes to: they are filled with the virtual value 1."""
        self.notes: tuple[str, ...] = ()
        """Notes for the tape, such as that a workspace is an estimate."""
        self.waits = False
        """Whether the program waits until the stream of the op has finished."""
        self.work: Any = None
        """The op's `Work` (dispatch/work.py), None without a formula."""


class OpRunner(Protocol):
    """Runner of ops for rules of kind OPS or DATA_DEPENDENT: the dispatch mode of the virtual GPU.

    Ops called inside ``with runner:`` run on the virtual GPU.
    """

    def run_plan(self, plan: Plan, func: Any, args: Any, tensors: list[torch.Tensor]) -> Any:
        """Allocate the memory of a plan and return its outputs."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


# --- helpers of the rules: planned outputs, sizes in bytes, arguments by position or name ---------------------------


def new(
    shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...] | None = None, host: bool = False
) -> NewTensor:
    """Return a planned output without gaps, its dimensions laid out in `order` (outermost first; default: as given)."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return NewTensor(shape, tuple(strides), 0, dtype, math.prod(shape) * dtype.itemsize, host)


def like(tensor: torch.Tensor, width: int | None = None) -> NewTensor:
    """Return the planned output of `empty_like`, which keeps the order of dimensions in memory.

    `width` replaces the extent of the last dimension.
    """
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim)))
    shape = tuple(tensor.shape) if width is None else (*tensor.shape[:-1], width)
    return new(shape, tensor.dtype, order)


def is_contiguous(tensor: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Return whether a tensor is contiguous after its dimensions are permuted to `order`."""
    step = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != step:
            return False
        step *= tensor.shape[dim]
    return True


def new_outputs(outputs: list[PlannedOutput]) -> list[Any]:
    """Return the requests for the storages of all new outputs, in order."""
    return [Output(index) for index, output in enumerate(outputs) if type(output) is NewTensor]


def nbytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a tensor's elements, in its own dtype or another."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def argument(args: Any, kwargs: Any, position: int, name: str, default: Any = None) -> Any:
    """Return an op's argument, passed by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def accumulator_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of the type in which CUDA sums a dtype: float32 for half precision, int64 for integers."""
    if dtype in (torch.float16, torch.bfloat16):
        return 4
    return dtype.itemsize if dtype.is_floating_point or dtype.is_complex else 8
