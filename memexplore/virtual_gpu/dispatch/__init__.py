"""Dispatch: runs every op of user code on the virtual GPU.

In: an op and its arguments, from torch's dispatcher. Out: virtual tensors; requests to the allocator, events to the
observer (a recorder).

- mode.py: `VirtualMode`, where every op arrives. Decides which ops stay on the CPU, and looks up or makes the plan.
- op_traits.py: facts that the mode reads from an op's schema and from kernels/table.py, resolved once per op.
- planning.py: makes the plan of an op that has none yet; shape_rules.py: faster ways to outputs than torch's fake
  kernels; fake_kernels.py: torch's fake kernels; unsupported.py: the error for what cannot be simulated.
- plans.py: cache key of a call, description of fake results, construction of outputs.
- runner.py: carries out a plan: allocates, builds outputs, frees, and reports them to an `Observer` (observer.py).
- shrunk_storages.py: storages that `resize_` has made smaller than their tensors.
- value_errors.py: errors of values, which end the program. sent_values.py: notes where values of other ranks are read.
- autograd_engine.py: gradients that the engine accumulates in place. device_mixing.py: errors for tensors of two
  devices. work.py: FLOPs and bytes of an op.

To change what an op allocates, edit kernels/, not this package. To change when a storage is allocated or freed, edit
runner.py. Plans are cached by arguments: a global setting of torch that a rule reads, and that the program may change
while it runs, belongs in a row of kind SETTINGS in the table of kernels.
"""
