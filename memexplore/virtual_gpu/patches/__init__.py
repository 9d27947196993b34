"""Replace names of torch while a virtual GPU is on, so that code for `cuda` runs unchanged.

- `table.py`: **the table** of replaced names (owner, name, replacement). Start here to replace another name.
- `install.py`: the kinds of patches, and the context that installs all of them or none and restores in reverse order.
- `cuda_api.py`, `cuda_objects.py`, `streams.py`: the functions and objects of `torch.cuda` and `torch.accelerator`.
- `torch_names.py`: `torch.device(0)`, `torch.Stream` and other names of `torch` and `torch._C`.
- `bitsandbytes.py`: the native library and the parameters of bitsandbytes.
- `device_names.py`: the function mode that replaces `cuda` in arguments. `modes.py`: restored modes of torch.
- `module_moves.py`: modules moved to the virtual device, and their tensors restored afterwards. `lazy_modules.py`: lazy
  modules. `contents_elsewhere.py`: tensors that `tensor.data = other` moves.
- `serialization.py`: `torch.save` and `torch.load`. `autocast.py`: CUDA's op lists. `compile.py`: `torch.compile`.
- `refusals.py`: functions that end in one sentence. `profiling.py`: `torch.profiler`. `extensions.py`: compiled ones.
- `higher_order.py`: `torch.cond`, loops and flex_attention. `storages.py`: methods of `torch.UntypedStorage`.
- `triton_kernels.py`: launches of Triton kernels. `indexing.py`: indexing with lists and numpy arrays, and as in older
  releases. `user_classes.py`: tensors of classes of the user. `wrappers.py`: nested and quantized tensors.
- `line_search.py`, `truncated_normal.py`: loops of torch that end by a value. `failed_backward.py`: the queue of the
  autograd engine after an error.
- `nvidia_smi.py`, `nvml.py`: the command `nvidia-smi` in child processes, and `pynvml`.
- `threads.py`: the modes in every thread. `processes.py`: child processes, which are not measured.

`VirtualGpu.patches` in device.py joins them in order. Tests interrupt switching at every line
(tests/virtual_gpu/test_interrupts.py) and let each patch fail (test_install.py).
"""
