"""Say what memory each op of a CUDA build requests: one rule for each kernel, entered in one table.

To add or change what a kernel allocates, write its rule in the file of its library below. All of it is in one place:

    @rule(Kind.REQUESTS, "cudnn/ConvShared.cpp", _aten.convolution.default)
    def forward(args, kwargs, outputs): ...

A new file is also imported below. Then run ``pytest tests/virtual_gpu/test_kernel_table.py`` and the test of the file.
cufft.py is a short example.

The decorator enters the rule in the table (table.py): its kind, the file of PyTorch that it follows, its ops. A rule
takes the arguments of an op (shapes, dtypes, flags) and returns the memory requests of its kernel in order, as
`Requests` or with the outputs as a `Plan` (plan.py); the docstring says which, in the words of the C++ function. An op
without a rule requests the storages of its outputs, in order, and nothing else. `cuda_build.current()` has the torch
release and the GPU.

- cuBLAS: cublas.py, cublas_workspace.py (workspaces that handles keep); cuSOLVER and MAGMA: linear_algebra.py.
- cuDNN: convolutions.py, tensor_core_convolutions.py (workspaces on tensor cores, fitted on those of an H100),
  recurrent.py; its kernels of other subjects are in normalization.py, attention.py, images.py (grid_sample) and ctc.py.
- cuFFT: cufft.py. cub: cub.py (scratch of sorts, scans and selections), sorting.py, indexing.py, random_numbers.py.
- NCCL: collectives.py, collective_values.py (their values), traffic.py (the bytes that they send).
- bitsandbytes: bitsandbytes.py (LLM.int8()).
- Kernels of PyTorch's own: attention.py, encoder.py (fast path of nn.TransformerEncoderLayer), normalization.py,
  softmax.py, reductions.py, elementwise.py, losses.py, images.py, distances.py, transfers.py (copies between CPU and
  GPU), sparse.py.
- data_dependent.py: ops whose output shape depends on values; without_fake_kernel.py: shapes of outputs that torch
  cannot tell.
- refusals.py: arguments that kernels refuse, and torch's fake kernels accept.
- autograd_in_place.py: ops that autograd's formulas run in place on a real GPU; composite_dispatch.py: registers the
  rules of composite ops with torch.
"""

from memexplore.virtual_gpu.kernels import (  # noqa: F401
    attention,
    autograd_in_place,
    bitsandbytes,
    collectives,
    convolutions,
    ctc,
    cublas,
    cufft,
    data_dependent,
    distances,
    elementwise,
    encoder,
    images,
    indexing,
    linear_algebra,
    losses,
    normalization,
    random_numbers,
    recurrent,
    reductions,
    refusals,
    softmax,
    sorting,
    sparse,
    transfers,
    without_fake_kernel,
)
