"""Memory requests of each op of a CUDA build: one table of rules, each with its source file in PyTorch.

A rule takes the arguments of an op (shapes, dtypes, flags) and returns the outputs of the op and its memory requests in
order, as a `Plan` or as `Requests` (plan.py). `cuda_build.current()` has the torch release and the GPU.

- table.py: **the table**, op -> entries (kind of rule, rule, source file). Start here to add or to look up an op.
- plan.py: the values that rules return; shapes.py: helpers to make them.
- cublas_workspace.py: size and lifetime of workspaces that libraries keep, by compute capability and torch release.
- hopper_convolutions.py: workspaces of convolutions on Hopper GPUs, fitted on measured ones.
- One file per subject: products, grouped_mm, convolutions, attention (choice of the kernel) and attention_memory,
  reductions, normalization, batch_norm, losses, indexing, sorting, elementwise, random_numbers, rnn, ctc, sampling
  (grid_sample), transfers, collectives (of torch.distributed; collective_values has their values).
- composed.py: ops that call other ops in C++; cub.py: scratch of cub's sorts, scans and selections.
- sparse.py: sparse tensors and their ops.
- without_fake_kernel.py: ops for which torch has no fake kernel, and the note on solvers.
- composites.py: composite ops that branch on the device in C++; composite_dispatch.py registers them with torch.
- encoder.py: nn.TransformerEncoderLayer's fast path; data_dependent.py: ops whose output shape depends on values.
- autograd_in_place.py: ops that autograd's formulas run in place on a real GPU.
- bitsandbytes.py: ops of LLM.int8().
- cuda_build.py: the torch release and GPU of the CUDA build that the virtual GPU imitates.

To change the cuBLAS workspace rule, edit cublas_workspace.py. To add an op: write its rule in the file of its subject,
name the C++ function in the docstring, and add an entry with the C++ file to table.py. An op without an entry requests
the storages of its outputs, in order, and nothing else. Tests are in tests/virtual_gpu/test_<file>.py.
"""
