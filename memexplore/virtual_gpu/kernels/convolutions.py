"""Request the memory of convolutions in cuDNN: copies in its memory format, the result, and a workspace.

The workspace is mostly an estimate, as the tape's notes say: cuDNN's heuristics choose the algorithm, and with it the
workspace, inside the library. From Ampere on, and for 16 bits from Volta on, the rules are in
tensor_core_convolutions.py. Elsewhere recordings in float32 give the workspace to the byte for a 3 x 3 window on Turing
(Winograd), and none for a 1 x 1 window; for other windows the weight's bytes stand for it.

A workspace that does not fit is not an error: cuDNN tries the next algorithm (try_plans and try_configs in
cudnn/Conv_v8.cpp catch OutOfMemoryError).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memexplore.tape import Category
from memexplore.virtual_gpu.kernels import cuda_build, reductions
from memexplore.virtual_gpu.kernels import tensor_core_convolutions as tensor_cores
from memexplore.virtual_gpu.kernels.plan import (
    Free,
    NewTensor,
    OptionalScratch,
    Output,
    PossibleWorkspace,
    Requests,
    Scratch,
    accumulator_bytes,
    nbytes,
)
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.values import notes

_aten = torch.ops.aten

_CONVOLUTIONS = [_aten.convolution.default, _aten.convolution_backward.default]

_NOTE_OF_RULES = (
    "cuDNN's convolution workspaces are estimates, by rules that were fitted on 32 600 measured ones of an H100: there "
    "they give nine in ten workspaces of results and input gradients to the byte, and half of weight gradients"
)

_NOTE = (
    "cuDNN's convolution workspaces are estimates: the weight's bytes each, or what Winograd's algorithm takes "
    "(recorded: 0 to 5 times the weight; with cudnn.benchmark more)"
)


def _has_rules(dtype: torch.dtype) -> bool:
    """Return whether the rules of tensor_core_convolutions hold: from Volta on in 16 bits, from Ampere on in all."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return cuda_build.current().compute_capability >= ((7, 0) if is_half else _AMPERE)


_AMPERE = (8, 0)


@rule(Kind.TF32, "cudnn/ConvShared.cpp", *_CONVOLUTIONS)
def tf32_allowed_in_convolutions() -> bool:
    """Return whether convolutions may: by default they do."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


@rule(Kind.SETTINGS, "Convolution.cpp", *_CONVOLUTIONS)
def settings() -> tuple[bool, ...]:
    """Return the global settings that decide the requests of a convolution."""
    return torch.backends.cudnn.enabled, tf32_allowed_in_convolutions()


def _channels_last(tensor: torch.Tensor) -> bool:
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    if tensor.dim() == 5:
        return tensor.is_contiguous(memory_format=torch.channels_last_3d) and not tensor.is_contiguous()
    return False


def _uses_cudnn(source: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Return whether cuDNN runs: not for depthwise convolutions in float32 and bfloat16, nor in 3-d in float16.

    PyTorch has its own kernels for them. Source: ConvParams in Convolution.cpp.
    """
    depthwise = source.dim() in (4, 5) and groups > 1 and groups == source.shape[1] and weight.shape[0] % groups == 0
    if depthwise and (source.dim() == 5 or source.dtype is not torch.float16):
        return _channels_last(source) and source.dtype is torch.bfloat16
    return torch.backends.cudnn.enabled and source.dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )


def _winograd(weight: torch.Tensor, inputs: int, outputs: int) -> int:
    """Return the bytes of the workspace of a 3 x 3 window by Winograd's F(2 x 2, 3 x 3).

    It holds the weight in another order, its transform (4 x 4 for each pair of channels), and a number for each output
    channel. Derived from six workspaces of a torch 2.2 run on Turing: 30 to 16 channels, 16 to 32, 32 to 64 and back.

    >>> _winograd(torch.empty(16, 30, 3, 3), 30, 16), _winograd(torch.empty(16, 30, 3, 3), 16, 30)
    (82880, 50168)
    """
    return nbytes(weight) + 16 * 4 * (-(-inputs // 8) * 8) * (-(-outputs // 32) * 32) + 4 * outputs


_TRANSPOSED = {
    tensor_cores.Pass.RESULT: tensor_cores.Pass.INPUT_GRADIENT,
    tensor_cores.Pass.INPUT_GRADIENT: tensor_cores.Pass.RESULT,
}


def _workspaces(
    source: torch.Tensor,
    weight: torch.Tensor,
    result: Sequence[int],
    window: tuple[Any, ...],
    of: tensor_cores.Pass,
) -> tuple[int, ...]:
    """Return the bytes of a workspace as recorded or estimated, under each `tensor_cores.Assumption`.

    `result` is the shape of the result, `window` stride, padding, dilation, whether it is transposed, and groups.
    """
    capability = cuda_build.current().compute_capability
    stride, _, dilation, transposed, groups = window
    if not _has_rules(source.dtype):
        return (_workspace_of_cuda_cores(source, weight, window, of),)
    if groups > 1:
        return (0,)  # as measured for four in five
    shapes: tuple[Sequence[int], Sequence[int]] = (source.shape, result)
    if transposed:
        # It is the gradient of the input of the convolution that makes its input of its result.
        shapes, of = (result, source.shape), _TRANSPOSED.get(of, of)
    precision = tensor_cores.precision_of(source.dtype, tf32_allowed_in_convolutions())
    last = _channels_last(source) or _channels_last(weight)
    convolution = tensor_cores.Convolution(
        shapes[0], weight.shape, shapes[1], max(stride), precision, last, max(dilation)
    )
    return tensor_cores.possible_workspaces(convolution, of, capability)


def _workspace_of_cuda_cores(
    source: torch.Tensor, weight: torch.Tensor, window: tuple[Any, ...], of: tensor_cores.Pass
) -> int:
    stride, _, dilation, _, groups = window
    if of is tensor_cores.Pass.RESULT and _is_product(source, weight, window):
        return 0
    # Nothing is recorded of the algorithm for the gradient of the weight.
    unit_window = [set(stride), set(dilation), groups] == [{1}, {1}, 1] and of is not tensor_cores.Pass.WEIGHT_GRADIENT
    if source.dtype is torch.float32 and source.is_contiguous() and weight.shape[2:] == (3, 3) and unit_window:
        channels = (weight.shape[1], weight.shape[0])
        return _winograd(weight, *(channels if of is tensor_cores.Pass.RESULT else channels[::-1]))
    return nbytes(weight)


def _is_product(source: torch.Tensor, weight: torch.Tensor, window: tuple[Any, ...]) -> bool:
    """Return whether a convolution is one matrix product of its operands in memory: it has no workspace.

    As recorded with torch 2.5 on a GPU of 24 GiB: float32, contiguous, a window of one pixel, 7 MB to 7 GB.
    """
    stride, padding, _, _, groups = window
    one_pixel = math.prod(weight.shape[2:]) == 1 and set(stride) == {1} and set(padding) == {0} and groups == 1
    return one_pixel and source.dtype is torch.float32 and source.is_contiguous()


def _copies(tensors: list[torch.Tensor], last: bool) -> Requests:
    """Copies of tensors that are not in the memory format of the convolution (`last`: channels_last)."""
    copies: Requests = []
    for tensor in tensors:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        memory_format = formats.get(tensor.dim(), torch.contiguous_format) if last else torch.contiguous_format
        if not tensor.is_contiguous(memory_format=memory_format):
            copies.append(Scratch(nbytes(tensor)))
    return copies


def _in_channels_last(output: NewTensor) -> NewTensor:
    """Return an output in channels_last, as cuDNN allocates it (backend_memory_format in ConvShared.cpp)."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if len(output.shape) not in formats:
        return output
    meta = torch.empty(output.shape, device="meta", memory_format=formats[len(output.shape)])
    return output._replace(stride=meta.stride())


@rule(Kind.REQUESTS, "cudnn/ConvShared.cpp", _aten.convolution.default)
def forward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Copies, result, workspace; the bias is added in place: cudnn_convolution in cudnn/ConvShared.cpp."""
    source, weight = args[:2]
    groups = args[8]
    if type(outputs[0]) is not NewTensor or not _uses_cudnn(source, weight, groups):
        return None
    notes.add(_NOTE_OF_RULES if _has_rules(source.dtype) else _NOTE)
    last = _channels_last(source) or _channels_last(weight)
    if last:
        outputs[0] = _in_channels_last(outputs[0])
    requests = [*_copies([source, weight], last), Output(0)]
    window = (args[3], args[4], args[5], args[6], groups)
    return requests + _scratch(_workspaces(source, weight, outputs[0].shape, window, tensor_cores.Pass.RESULT))


@rule(Kind.REQUESTS, "Convolution.cpp", _aten.convolution_backward.default)
def backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Gradients of input, weight and bias in this order, the first two with a workspace: Convolution.cpp."""
    gradient, source, weight = args[:3]
    groups, mask = args[9], args[10]
    if not _uses_cudnn(source, weight, groups):
        # As measured, PyTorch's depthwise kernels allocate the gradient of the weight first.
        order = (1, 0) if gradient.dim() == 4 else (0, 1)
        without: Requests = [Output(number) for number in order if type(outputs[number]) is NewTensor]
        return without + (_bias_gradient(gradient) if mask[2] else [])
    notes.add(_NOTE_OF_RULES if _has_rules(source.dtype) else _NOTE)
    last = _channels_last(source) or _channels_last(weight)
    requests = _copies([gradient, source, weight] if mask[1] else [gradient, weight], last)
    for index in range(2):
        if mask[index] and type(outputs[index]) is NewTensor:
            if last:
                outputs[index] = _in_channels_last(outputs[index])
            number = sum(type(entry) in (Scratch, OptionalScratch) for entry in requests)
            of = (tensor_cores.Pass.INPUT_GRADIENT, tensor_cores.Pass.WEIGHT_GRADIENT)[index]
            sizes = _workspaces(source, weight, gradient.shape, (args[4], args[5], args[6], args[7], groups), of)
            requests += [Output(index), *_scratch(sizes)]
            if sizes[0]:
                requests.append(Free(number))
    return requests + (_bias_gradient(gradient) if mask[2] else [])


def _scratch(sizes: tuple[int, ...]) -> Requests:
    """Return the request for a workspace, of the first of the possible sizes; none for 0."""
    possible: Requests = [PossibleWorkspace(sizes)] if len(set(sizes)) > 1 else []
    return possible + ([OptionalScratch(sizes[0], Category.WORKSPACE)] if sizes[0] else [])


def _bias_gradient(gradient: torch.Tensor) -> Requests:
    """The sum of the result's gradient over all dimensions but channels: convolution_backward in Convolution.cpp."""
    reduced = [dim for dim in range(gradient.dim()) if dim != 1]
    return [Output(2), *reductions.requests(gradient, reduced, accumulator_bytes(gradient.dtype))]
