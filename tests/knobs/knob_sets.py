"""Knobs that change no result, and knobs that do."""

from __future__ import annotations

from memexplore.run.knobs.knobs import Knobs

SAME = [
    Knobs(),
    Knobs(inplace="on"),
    Knobs(inplace="off"),
    Knobs(checkpoint="none"),
    Knobs(checkpoint="every 1"),
    Knobs(checkpoint="every 2"),
    Knobs(checkpoint="sqrt"),
    Knobs(checkpoint="keep matmuls"),
    Knobs(checkpoint="norms"),
    Knobs(precision="off"),
    Knobs(offload="saved tensors on the CPU"),
    Knobs(checkpoint="sqrt", offload="saved tensors on the CPU", inplace="on"),
    Knobs(checkpoint="norms", offload="saved tensors on the CPU"),
    Knobs(checkpoint="keep matmuls", inplace="on"),
    Knobs(memory_format="channels last"),
]
"""Knobs that change the memory or the time of tensors, and no result."""
OTHER = [
    Knobs(precision="bf16"),
    Knobs(precision="fp16"),
    Knobs(precision="all bf16"),
    Knobs(mode="inference"),
    Knobs(frozen="0"),
    Knobs(lora="", lora_rank=2),
]
"""Knobs that change results; `lora=""` adapts every linear layer."""
