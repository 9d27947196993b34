"""Run CUDA code on tensors without values, whose memory requests the allocator model serves: the virtual GPU.

- `extension_errors.py`: what a compiled extension's error means that reads the memory of a virtual tensor.
- `device.py`: `VirtualGpu`, one GPU of the catalogue under one torch release, and how it is turned on and off.
- `values/`: what is known of the values of virtual tensors, and the numbers that stand for all others.
- `tensors/`: the virtual tensor, a `torch.Tensor` with a shape and a storage without values.
- `kernels/`: the memory that each op of a CUDA build allocates; one table of rules with their sources in PyTorch.
- `dispatch/`: the dispatch mode that runs each op, the plans that it caches, and the requests to the allocator.
- `files/`: files that a program writes, which never replace the user's; safetensors.
- `patches/`: the replacements in torch while a virtual GPU is on; one table, installed completely or not at all.
- `distributed/`: one rank of a distributed run: process groups, DistributedDataParallel, FSDP2.

Imports go in this direction: values, tensors, kernels, dispatch, files, patches, distributed, device.
Tests are in tests/virtual_gpu/.
"""
