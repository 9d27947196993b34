"""Patches: replacements in torch while a virtual GPU is on, so that code for `cuda` runs unchanged.

- `table.py`: **the table** of replaced names (owner, name, replacement). Start here to replace another name.
- `install.py`: the kinds of patches, and the context that installs all of them or none and restores in reverse order.
- `cuda_api.py`, `cuda_objects.py`, `streams.py`: the functions and objects of `torch.cuda` and `torch.accelerator`.
- `torch_names.py`: `torch.device(0)`, `torch.Stream` and other names of `torch`; `torch_c.py`: those of `torch._C`.
- `bitsandbytes.py`: the native library and the parameters of bitsandbytes.
- `device_names.py`: the function mode that replaces `cuda` in arguments. `modes.py`: restored modes of torch.
- `module_moves.py`: modules moved to the virtual device, and their tensors restored afterwards. `lazy_modules.py`: lazy
  modules.
- `serialization.py`: `torch.save` and `torch.load`. `autocast.py`: CUDA's op lists. `compile.py`: `torch.compile`.
- `profiling.py`: `torch.profiler`.
- `refusals.py`: functions that end in one sentence.
- `higher_order.py`: `torch.cond`, loops and flex_attention. `storages.py`: methods of `torch.UntypedStorage`.
- `triton_kernels.py`: launches of Triton kernels. `getitem.py`: indexing as in older releases. `index_lists.py`:
  indexing with lists and numpy arrays. `threads.py`: the modes in every thread. `processes.py`: child processes, which
  are not measured.

`VirtualGpu.patches` in device.py joins them in order. Tests interrupt switching at every line
(tests/virtual_gpu/test_interrupts.py) and let each patch fail (test_install.py).
"""
