"""GPUs as data, each number with its source.

To add a GPU, add one row to `_CATALOGUE` in `catalogue.py`: its name, memory, compute capability and speed with their
sources, and further names that users write. What is not in the row has a default: memory outside the allocator is
estimated, and links are PCIe. Then run ``pytest tests/test_gpu_catalogue.py``.

- `catalogue`: the GPUs. `mig`: parts of them. `links`: how fast GPUs send to each other.
- `outside_allocator`: readings of the memory that a process takes beside the allocator's.
- `nvidia_smi`: what `nvidia-smi` prints for them.
- `cloud`: instance types of cloud providers. `rented`: sets of GPUs that can be rented, with prices.
"""
