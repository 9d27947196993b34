"""Tensors: the virtual tensor, and the known facts about its values.

In: meta tensors. Out: tensors that user code reads as CUDA tensors, and Python numbers that stand for their values.

- tensor.py: `VirtualTensor` and the state that all of them read. live_storages.py: their storages on the device.
- user_classes.py: virtual tensors of a class of the user. local_device.py: names such as `cuda:3` in one rank.
- copying.py: copies by `copy.copy` and `copy.deepcopy`.
- known_values.py: the storages whose contents are known, each with a copy on the CPU.
- values.py: the value that user code gets (`item()`, `if tensor:`, printing): the known one, or a number that counts
  as 1.
- virtual_numbers.py, virtual_array.py, percent_format.py: numbers and arrays that stand for unknown values and print
  as virtual.
- value_hints.py: facts about values: the result of a test such as `isnan`, the share of a mask that is true. Add
  an op to `RULES` when code after it depends on its values.
- value_loops.py: finds `while` loops whose end depends on a value.

A tensor's hints are in its `__dict__`, read with `value_hints.of` and written with `value_hints.put` after each op
(`Plan.set_hints`).
"""
