"""Name the groups of actions that a tape's segment rows have."""

from __future__ import annotations

from memexplore.tape import Action

SEGMENT_ACTIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
"""Rows about segments, not about blocks."""
GROWTH = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
"""Rows in which the allocator gets memory from the device."""
