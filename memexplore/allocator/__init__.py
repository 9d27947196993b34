"""PyTorch's caching allocator, modelled: where each request goes, what is reserved, when memory runs out."""

from memexplore.allocator.blocks import PoolOptions
from memexplore.allocator.model import Allocator, OutOfMemory
from memexplore.allocator.replay import assign_addresses, replay
from memexplore.allocator.settings import Settings
from memexplore.allocator.sizes import block_sizes

__all__ = ["Allocator", "OutOfMemory", "PoolOptions", "Settings", "assign_addresses", "block_sizes", "replay"]
