"""A model of PyTorch's CUDA caching allocator (docs/allocator.md): the address of each request, reserved memory, OOM.

- `model`: `Allocator`, one device's allocator with statistics and messages; one request at a time.
- `replay`: a tape's requests under other settings; `restore` builds the state at the start of a late recording.
- `sizes`: the size of the block that each request of a tape received.
- `settings`: the options of `PYTORCH_CUDA_ALLOC_CONF`, constants, and the rounding of requests and segments.
- `placement`: where the GPU driver puts new segments, by operating system.
- `core`: search, retry and free without statistics, on top of
  `cache` (releasing memory), `expandable` (mapping memory), `segments` (the memory held) and `blocks`.
- `stats`: the counters of `torch.cuda.memory_stats()`; `gc_pause`: a pause of Python's garbage collector.
"""

from memexplore.allocator.blocks import PoolOptions
from memexplore.allocator.model import Allocator, OutOfMemory
from memexplore.allocator.replay import assign_addresses, replay
from memexplore.allocator.settings import Settings
from memexplore.allocator.sizes import block_sizes

__all__ = ["Allocator", "OutOfMemory", "PoolOptions", "Settings", "assign_addresses", "block_sizes", "replay"]
