"""A GPU that is not there: code that says `cuda` runs on fake tensors, and the allocator model answers it."""
