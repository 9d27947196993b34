"""torch's functions that make tensors, for real ones on the CPU: as they were before a program could replace them.

DeepSpeed's `zero.Init` replaces `torch.zeros` and the others by functions that put every tensor on the GPU.
"""

from __future__ import annotations

import functools

import torch

arange = functools.partial(torch.arange, device="cpu")
empty = functools.partial(torch.empty, device="cpu")
full = functools.partial(torch.full, device="cpu")
ones = functools.partial(torch.ones, device="cpu")
tensor = functools.partial(torch.tensor, device="cpu")
zeros = functools.partial(torch.zeros, device="cpu")
