"""`python -m tests.fidelity.checkpointed` prints peaks of checkpointed training under several placements of segments.

The model is the published language model on the GPU that it was measured on, under torch 2.11, the last release in
which the placement has an effect. Three training steps are recorded once and replayed under each placement.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memexplore.allocator.placement import Downwards, LinuxPlacement, placement_on
from memexplore.allocator.replay import replay_placed
from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Os, Tape
from tests.fidelity import models
from tests.fidelity.placement import Upwards

MIB, GIB = 1024**2, 1024**3
PLACEMENTS = {
    "upwards": Upwards,
    "WSL, Windows": lambda: placement_on(Os.WSL),
    "Linux": LinuxPlacement,
    "downwards": Downwards,
}
RUNS = [
    (context, dtype, count) for dtype in (None, torch.bfloat16) for context in (512, 1024) for count in (1, 2, 4, 8)
]
"""Tokens, autocast's dtype or None for float32, and layers in a checkpoint."""


class Checkpointed(nn.Module):
    """Some layers whose activations are computed again in the backward pass."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.run = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False)


def training(context: int, dtype: torch.dtype | None, count: int) -> Tape:
    """Return the tape of three training steps with a checkpoint around every `count` layers."""
    with virtual("RTX PRO 6000", release="2.11"), record() as recording:
        model = models.DecoderLm(context).to("cuda")
        layers = list(model.layers)
        groups = [Checkpointed(layers[start : start + count]) for start in range(0, len(layers), count)]
        model.layers = nn.ModuleList(groups)
        tokens, targets = (torch.randint(0, 10_000, (4, context), device="cuda") for _ in range(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            with models.autocast(dtype):
                logits = model(tokens)
            F.cross_entropy(logits.reshape(-1, 10_000).float(), targets.reshape(-1)).backward()
            optimizer.step()
    return recording.tape


def rows() -> Iterator[list[str]]:
    """Yield the cells of each run: peak allocated and, in brackets, reserved, in MiB."""
    for context, dtype, count in RUNS:
        tape = training(context, dtype, count)
        gc.collect()
        tapes = [replay_placed(tape, make()) for make in PLACEMENTS.values()]  # type: ignore[operator]
        peaks = [f"{each.peak()[0] / MIB:.2f} ({each.peak('reserved')[0] // MIB})" for each in tapes]
        printed = [f"{each.peak()[0] / GIB:.2f}" for each in tapes]
        name = "float32" if dtype is None else "bfloat16"
        digits = " or ".join(dict.fromkeys(printed))
        yield [name, str(context), str(count), *peaks, digits]


if __name__ == "__main__":
    heads = ["precision", "tokens", "layers in a checkpoint", *PLACEMENTS, "GiB"]
    print(f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", sep="\n")
    for cells in rows():
        print(f"| {' | '.join(cells)} |", flush=True)
