"""PyTorch's caching allocator, modelled: where each request goes, what is reserved, when memory runs out."""

from memexplore.allocator.blocks import PoolUse
from memexplore.allocator.model import Allocator, OutOfMemory
from memexplore.allocator.replay import place, replay
from memexplore.allocator.settings import Settings
from memexplore.allocator.sizes import block_sizes

__all__ = ["Allocator", "OutOfMemory", "PoolUse", "Settings", "block_sizes", "place", "replay"]
