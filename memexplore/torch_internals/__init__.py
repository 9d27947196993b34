"""Name every private name of torch that memexplore relies on, once: why it is needed and what fails without it.

`dispatch`, `tensors`, `memory_access`, `modules`, `state` and `cuda` hold the names, which other modules import from
there; a test finds private names elsewhere. Operators such as `torch.ops.aten._softmax` are not private API. `table`
has the rows, and `check` runs their probes.
"""
