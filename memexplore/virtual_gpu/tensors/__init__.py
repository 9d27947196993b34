"""Tensors: the virtual tensor, and the known facts about its values.

In: meta tensors. Out: tensors that user code reads as CUDA tensors, and Python numbers that stand for their values.

- tensor.py: `VirtualTensor`, its storages on the device (`live_storages`), and the state all of them read.
- copying.py: copies by `copy.copy` and `copy.deepcopy`.
- known_values.py: the storages whose contents are known, each with a copy on the CPU.
- values.py: the value that user code gets (`item()`, `if tensor:`, printing): the known one, or a number that counts
  as 1.
- value_hints.py: facts about values: the result of a test such as `isnan`, the share of a mask that is true. Add
  an op to `RULES` when code after it depends on its values.
- value_loops.py: finds `while` loops whose end depends on a value.

A tensor's hints are in its `__dict__`, read with `value_hints.of` and written with `value_hints.put` after each op
(`Plan.set_hints`).
"""
