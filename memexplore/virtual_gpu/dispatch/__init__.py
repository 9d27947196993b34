"""Run every op of user code on the virtual GPU.

- mode.py: `VirtualMode`, where every op arrives. Decides which ops stay on the CPU, and looks up or makes the plan.
- op_traits.py: facts that the mode reads from an op's schema and from kernels/table.py, resolved once per op.
- planning.py: makes the plan of an op that has none yet; shape_rules.py: faster ways to outputs than torch's fake
  kernels; fake_kernels.py: torch's fake kernels; argument_checks.py: arguments that CUDA refuses; unsupported.py: the
  error for what cannot be simulated.
- plans.py: cache key of a call, description of fake results, construction of outputs.
- runner.py: `PlanRunner` carries out a plan: allocates, builds outputs, frees, and reports them to an `Observer`.
- value_lane.py: computes what an op does to known values, by cpu_ops.py for ops that only CUDA has;
  assumed_values.py: marks what is made of assumed values, and notes where it is read.
- shrunk_storages.py: storages that `resize_` has made smaller than their tensors. inference.py: tensors of
  `torch.inference_mode`. autograd_engine.py: gradients that the engine accumulates in place. streams.py: the current
  stream of each thread. interrupts.py: Ctrl-C in what must complete. work.py: FLOPs and bytes of an op.

To change what an op allocates, edit kernels/, not this package. To change when a storage is allocated or freed, edit
runner.py. Plans are cached by arguments: a global setting of torch that a rule reads, and that the program may change
while it runs, belongs in a rule of kind SETTINGS (kernels/table.py).
"""
