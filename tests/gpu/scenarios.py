"""Training steps whose memory is recorded on a real GPU and predicted on the virtual one: ordinary CUDA code.

They need torch only, and memexplore for the scenarios with knobs. Each scenario is a function without arguments;
`SCENARIOS` maps its name to the function and its allocator settings. No scenario makes a reference cycle with a tensor,
so that memory is freed at the same point in every run.
"""

from tests.gpu import scenarios_allocator, scenarios_knobs, scenarios_models
from tests.gpu.training import SCENARIOS

__all__ = ["SCENARIOS", "scenarios_allocator", "scenarios_knobs", "scenarios_models"]
