"""Plans: what one op with given shapes returns and requests, worked out once and then reused.

torch's fake mode works out an op's outputs in 60 to 160 us. A training step repeats the same op on the same shapes
again and again, so the answer is kept under a key of the arguments' metadata and given again in a few us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memexplore.tape import Category
from memexplore.torch_internals.dispatch import FakeTensor, fake_dispatch, schema_of
from memexplore.torch_internals.tensors import set_conj, storage_key, untyped_storage
from memexplore.virtual_gpu.tensors import values
from memexplore.virtual_gpu.tensors.tensor import DeviceState, VirtualTensor, fake_mode, wrap

_empty_strided = torch.empty_strided
_META = "meta"


NO_VIEW = (
    "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
    "contiguous subspaces). Use .reshape(...) instead."
)
"""What torch says where its fake kernels say it in other words: aten/src/ATen/native/TensorShape.cpp."""


class New(NamedTuple):
    """An output with memory of its own; `size` is what its storage asks for, in bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    size: int
    host: bool


class View(NamedTuple):
    """An output in the memory of a tensor argument (`source` ≥ 0) or of an earlier output (`~source`)."""

    source: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    host: bool


class Same(NamedTuple):
    """An output that is one of the tensor arguments."""

    source: int


class Constant(NamedTuple):
    """An output that is no tensor."""

    value: Any


class Scratch(NamedTuple):
    """Memory that a kernel takes while it runs, beside its outputs."""

    size: int
    category: Category = Category.TEMPORARY


class Wanted(NamedTuple):
    """Scratch memory that a kernel does without where it does not fit: another algorithm is taken then."""

    size: int
    category: Category


class Output(NamedTuple):
    """The place of one output's memory request among a kernel's requests."""

    number: int


class Free(NamedTuple):
    """A kernel gives back the scratch memory it took as `number`-th."""

    number: int


class Plan:
    """What an op returns and the memory it requests, in order."""

    __slots__ = ("after", "fills", "gemm", "notes", "outputs", "requests", "returns", "work")

    def __init__(
        self,
        outputs: list[New | View | Same | Constant],
        returns: type | None,
        requests: list[Scratch | Wanted | Output | Free] | None,
        gemm: bool,
        after: Callable[[list[torch.Tensor], list[Any]], None] | None,
        fills: tuple[int, ...] = (),
    ) -> None:
        self.outputs = outputs
        self.returns = returns
        """The container of the outputs: tuple, list, or None for a single one."""
        self.requests = requests
        """None: the outputs' memory in order, and nothing else."""
        self.gemm = gemm
        self.after = after
        self.notes: tuple[str, ...] = ()
        """What a reader of the tape has to know, such as that a workspace is an estimate."""
        self.work: Any = None
        """The op's `Work`, None where nobody can say."""
        self.fills = fills
        """Which of the tensor arguments are real and written to: they get the value that stands for a virtual one."""


def read(key: list[Any], tensors: list[torch.Tensor], arguments: Any) -> None:
    """Append to `key` what tells an op's arguments from others of another shape, and the tensors among them."""
    for argument in arguments:
        kind = type(argument)
        if kind is VirtualTensor:
            tensors.append(argument)
            key += (argument.shape, argument.stride(), argument.storage_offset(), argument.dtype, argument.host)
            if argument.dtype.is_complex:
                key.append(argument.is_conj())
        elif kind is int or argument is None or kind is torch.dtype:
            key.append(argument)
        elif kind is list or kind is tuple:
            key.append(-len(argument) - 1)
            read(key, tensors, argument)
        elif isinstance(argument, torch.Tensor):
            tensors.append(argument)
            key += (argument.shape, argument.stride(), argument.storage_offset(), argument.dtype, "real")
        elif isinstance(argument, torch.Generator):
            key.append(kind)
        else:
            # 1, 1.0 and True are equal and give outputs of different types.
            key += (kind, argument)


def execute(
    func: Any, types: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
) -> tuple[Any, list[torch.Tensor]]:
    """Run an op on torch's own fake kernels; the answer is its result and what stood in for each tensor argument.

    Real tensors go in as fake ones of the same shape: torch's own conversion would keep weak references to them, and a
    parameter that has one cannot be moved any more.
    """
    stand_ins = tensors
    if any(_is_real(tensor) for tensor in tensors):
        stand_ins = [_stand_in(tensor) if _is_real(tensor) else tensor for tensor in tensors]
        args, kwargs = exchange(args, kwargs, tensors, stand_ins)
    previous = DeviceState.in_fake_kernel
    DeviceState.in_fake_kernel = True
    try:
        return fake_dispatch(fake_mode(), func, types, args, kwargs), stand_ins  # type: ignore[attr-defined]
    finally:
        DeviceState.in_fake_kernel = previous


def _is_real(tensor: torch.Tensor) -> bool:
    return (
        not isinstance(tensor, FakeTensor)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
    )


def _stand_in(tensor: torch.Tensor) -> VirtualTensor:
    elem = _empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
    return wrap(elem, host=True)


def exchange(args: Any, kwargs: Any, tensors: list[torch.Tensor], stand_ins: list[torch.Tensor]) -> tuple[Any, Any]:
    """Arguments with what stands in for each tensor in its place."""
    changed = {id(tensor): stand_in for tensor, stand_in in zip(tensors, stand_ins, strict=True)}
    return _exchanged(args, changed), {name: _exchanged(value, changed) for name, value in kwargs.items()}


def _exchanged(value: Any, changed: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return changed.get(id(value), value)
    if isinstance(value, list | tuple):
        return type(value)(_exchanged(entry, changed) for entry in value)
    return value


def refuse_layouts(result: Any) -> None:
    """Raise NotImplementedError for tensors that are not strided: they have no storage to count."""
    for value in result if isinstance(result, list | tuple) else (result,):
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise NotImplementedError(f"a tensor of layout {value.layout}")


def on_meta(args: Any) -> Any:
    """Arguments with plain meta tensors in place of virtual ones."""
    changed: dict[int, torch.Tensor] = {
        id(value): _empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
        for value in args
        if type(value) is VirtualTensor
    }
    return _exchanged(args, changed) if changed else args


def written(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Which of the tensor arguments are real and written to by the op."""
    real = {id(tensor): number for number, tensor in enumerate(tensors) if _is_real(tensor)}
    if not real:
        return ()
    found: list[int] = []
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            entries = value if isinstance(value, list | tuple) else [value]
            found += [real[id(entry)] for entry in entries if id(entry) in real]
    return tuple(found)


def describe(result: Any, tensors: list[torch.Tensor]) -> tuple[list[New | View | Same | Constant], type | None]:
    """What the outputs of a fake kernel are: new memory, or a view of what."""
    returns = type(result) if isinstance(result, list | tuple) else None
    if returns is not None and returns not in (list, tuple):
        returns = tuple
    arguments = {id(tensor): number for number, tensor in enumerate(tensors)}
    storages: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, VirtualTensor) or tensor.is_meta:
            storages.setdefault(storage_key(untyped_storage(tensor)), number)
    outputs: list[New | View | Same | Constant] = []
    flat = result if returns is not None else (result,)
    for index, value in enumerate(flat):
        if not isinstance(value, torch.Tensor):
            outputs.append(Constant(value))
        elif id(value) in arguments:
            outputs.append(Same(arguments[id(value)]))
        else:
            host = isinstance(value, FakeTensor) and value.fake_device.type == "cpu"
            storage = untyped_storage(value)
            shape, stride, offset = tuple(value.shape), value.stride(), int(value.storage_offset())
            source = storages.get(storage_key(storage))
            if source is None:
                outputs.append(New(shape, stride, offset, value.dtype, storage.nbytes(), host))
                storages[storage_key(storage)] = ~index
            else:
                outputs.append(View(source, shape, stride, offset, value.dtype, host))
    return outputs, returns


def build(output: New) -> VirtualTensor:
    """Make an output with new memory."""
    elem = _empty_strided(output.shape, output.stride, dtype=output.dtype, device=_META)
    if output.offset:
        elem = elem.set_(untyped_storage(elem), output.offset, output.shape, output.stride)
    return wrap(elem, output.host)


def build_view(output: View, source: torch.Tensor) -> VirtualTensor:
    """Make an output in the memory of another tensor."""
    elem = torch.empty(0, dtype=output.dtype, device=_META)
    elem.set_(untyped_storage(source), output.offset, output.shape, output.stride)  # type: ignore[call-overload]
    if elem.dtype.is_complex and source.dtype.is_complex and source.is_conj():
        set_conj(elem, True)
    return wrap(elem, output.host)


def unsupported(func: Any, error: Exception) -> values.NotSimulated:
    """The one error for an op that cannot be simulated, with the line of the user's code."""
    frame = values.user_frame()
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}: " if frame is not None else ""
    return values.NotSimulated(
        f"{where}{func} cannot be simulated on a virtual GPU ({type(error).__name__}: {error}); profile it on a real "
        "GPU, or replace it by an op whose output shape does not depend on values"
    )
