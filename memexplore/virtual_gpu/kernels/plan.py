"""Plans: the outputs and the memory requests of one op with given shapes, as plain data.

In: shapes, dtypes and sizes in bytes. Out: `Plan`, which `PlanRunner.run_plan` carries out on a virtual GPU
(dispatch/runner.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from memexplore.tape import Category
from memexplore.tensor_text import tensor_text
from memexplore.virtual_gpu.tensors.value_hints import SetHints


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


class Free(NamedTuple):
    """A free, before the kernel ends, of the scratch memory that scratch request number `number` of the op got."""

    number: int


class Kept(NamedTuple):
    """A request for the block that a `cublas_workspace.Library` keeps, where it does not have it yet."""

    library: Any


Requests = list[Output | Scratch | OptionalScratch | Free | Kept]
"""Requests and frees of one op, in order."""


class Plan:
    """Outputs and memory requests of an op."""

    __slots__ = (
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
