"""Model PyTorch's CUDA caching allocator (docs/allocator.md): the address of each request, reserved memory, OOM.

- `allocator`: `Allocator`, one device's allocator with addresses, statistics (`stats`) and messages.
- `block_allocator`: which block each request gets, and when memory is released; `Allocator` and `replay` use it, with
  `segments` (the memory held), `blocks`, `cache` (releasing memory) and `expandable` (mapping memory).
- `replay`: a tape's requests under other settings; `restore` builds the state at the start of a late recording.
- `smallest`: the smallest capacity with which the requests of a tape go through, by replays.
- `sizes`: the size of the block that each request of a tape received.
- `placement`: where the GPU driver puts new segments, by operating system.

The options of `PYTORCH_CUDA_ALLOC_CONF` are in `memexplore.tape.allocator_settings`.
"""

from memexplore.allocator.allocator import Allocator, OutOfMemory
from memexplore.allocator.blocks import PoolOptions
from memexplore.allocator.replay import assign_addresses, replay
from memexplore.allocator.sizes import block_sizes
from memexplore.tape.allocator_settings import Settings

__all__ = ["Allocator", "OutOfMemory", "PoolOptions", "Settings", "assign_addresses", "block_sizes", "replay"]
