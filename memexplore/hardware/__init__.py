"""GPUs as data, each number with its source. A GPU is added as one row of `catalogue`.

- `catalogue`: the GPUs. `links`: how fast GPUs send to each other.
- `outside_allocator`: readings of the memory that a process takes beside the allocator's.
- `cloud`: instance types of cloud providers. `rented`: sets of GPUs that can be rented, with prices.
"""
