"""Recorded runs of small language models, an image regressor and cellular automata.

The scripts were written for this project, after the snapshots' frames and sizes and the sources of the original ones.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from memexplore.hardware import catalogue
from memexplore.tape import Action, Os, Tape
from tests.fidelity import cellular, models, norm_lm, paired_lm, regressor, small_lm
from tests.fidelity.recorded import RecordedRun, Recording

# Turing with 72 multiprocessors (Quadro RTX 6000 or 8000): a reduction to one result left 144 blocks' results.
TURING_72 = dataclasses.replace(catalogue.find("T4"), multiprocessors=72)


def _small_forward(recording: Recording, context: int, dtype: torch.dtype | None) -> None:
    """Three forward passes with gradients, from the first allocation on."""
    with recording():
        with torch.device("cuda"):
            model = small_lm.SmallLm()
        tokens = torch.randint(0, 10_000, (10, context)).to("cuda")
        for _ in range(3):
            with models.autocast(dtype):
                model(tokens)


def _small_train(recording: Recording, context: int) -> None:
    """Three training steps on the last token, from the first allocation on."""
    with recording():
        with torch.device("cuda"):
            model = small_lm.SmallLm()
        optimizer = small_lm.Adam(model.parameters())
        tokens = torch.randint(0, 10_000, (10, context)).to("cuda")
        targets = torch.randint(0, 10_000, (10,)).to("cuda")
        for _ in range(3):
            optimizer.zero_grad()
            logits = model(tokens)
            last = logits[:, -1, :]
            loss = small_lm.cross_entropy(last, targets)
            loss.backward()
            optimizer.step()


def _xl_forward(recording: Recording) -> None:
    """Forward pass with gradients, as in a training step; the graph is freed when the step returns."""
    model = models.DecoderLm(128).to("cuda")
    tokens, _targets = (torch.randint(0, 10_000, (4, 128), device="cuda") for _ in range(2))

    def step():
        logits = model(tokens)
        return logits.shape

    step()
    with recording():
        step()


def _norm_forward(recording: Recording) -> None:
    model = norm_lm.NormLm(128).to("cuda")
    tokens = torch.randint(0, 10_000, (4, 128)).to("cuda")

    def step():
        with torch.no_grad():
            logits = model(tokens)
        return logits.shape

    step()
    with recording():
        step()


def _paired_forward(recording: Recording) -> None:
    """Forward pass of a later step: gradients, moments, loss and logits of the step before are still allocated."""
    model = paired_lm.PairedLm().to("cuda")
    tokens = torch.randint(0, 10_000, (4, 256), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    logits = model(tokens)
    loss = logits.sum()
    loss.backward()
    optimizer.step()
    with recording():
        logits = model(tokens)


def _counterfactual(recording: Recording) -> None:
    """Ten steps on the input with anomaly detection."""
    model = regressor.Regressor().to("cuda")
    for parameter in model.parameters():
        parameter.requires_grad = False
    before = torch.randn(1, 30, 256, 256)
    original = model(before.to("cuda"))
    with torch.autograd.set_detect_anomaly(True), recording():
        after = before + torch.randn_like(before)
        before, after = before.to("cuda"), after.to("cuda")
        after.requires_grad = True
        optimizer = torch.optim.Adam([after], lr=0.1)
        loss_function = regressor.Counterfactual()
        history = [torch.tensor([])] * 3
        for _ in range(10):
            output = model(after)
            loss = loss_function(original, output, before, after)
            input_loss = regressor.distance(after, before).detach()
            label_loss = -regressor.contrast(output, original).detach()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
            each = (loss, input_loss, label_loss)
            history = [torch.cat((kept, new.cpu().view(1))) for kept, new in zip(history, each, strict=True)]
            del each


def _octree(recording: Recording) -> None:
    """The forward pass of a training step: one pass over all of the input, one over patches of it."""
    model = cellular.Octree().to("cuda")
    x, y = (torch.zeros(3, *cellular.Octree.SIZES[0], 1, device="cuda") for _ in range(2))
    with recording():
        out = model(x, y)
    del out


def _slide(recording: Recording) -> None:
    """Inference on an image of 5280 x 5440 pixels on a GPU that its last level fills, so the cache is released."""
    with torch.no_grad():
        automata = [cellular.Automaton2d().to("cuda") for _ in range(15)]
        sizes = [(330 * 2**level, 340 * 2**level) for level in range(5)]
        slide = torch.zeros(1, *sizes[-1], 3)
        seed = torch.zeros(1, *sizes[0], 16)
        with recording():
            state = automata[4](seed.cuda(), 20)
            # The script runs the third level twice, and the last one itself, below.
            for level in (1, 2, 2, 3, 4):
                state = state.permute(0, 3, 1, 2)
                state = nn.Upsample(size=sizes[level], mode="nearest")(state)
                small = F.interpolate(slide.permute(0, 3, 1, 2), size=sizes[level])
                state[0, :3] = small[0]
                state = state.permute(0, 2, 3, 1)
                if level < 4:
                    state = automata[4 - level](state, 10)
            state = state.permute(0, 3, 1, 2)
            kept = state[:, :3].clone()
            for _ in range(10):
                change = automata[0].seen(state)
                change = torch.cat([state, change], dim=1)
                change = automata[0].widen(change)
                change = F.relu(change)
                change = automata[0].narrow(change)
                alive = cellular.awake(change)
                change = change * alive
                new = state[:, 3:] + change
                state = torch.cat([kept, new], dim=1)


def as_recorded(tape: Tape) -> Callable[[int, int], int]:
    """Return a function that gives new segments their recorded addresses; the tape must begin with the first segment.

    Free blocks of equal size are ordered by address.
    """
    rows = np.flatnonzero(tape.action == Action.SEGMENT_ALLOC)
    following = zip(tape.size[rows].tolist(), tape.address[rows].tolist(), strict=True)

    def choose_address(size: int, stream: int) -> int:
        recorded, address = next(following)
        if recorded != size:
            raise ValueError(f"a segment has {size} bytes, the recorded one {recorded}")
        return address

    return choose_address


# For recordings without a named GPU: a large enough one with the recorded cuBLAS workspace.
RECORDED = [
    RecordedRun(
        "small-lm-forward-seq100",
        "RTX 3090",
        "2.6",
        functools.partial(_small_forward, context=100, dtype=None),
        as_recorded,
        os=Os.WSL,
    ),
    RecordedRun(
        "small-lm-forward-seq200-bf16",
        "RTX 3090",
        "2.6",
        functools.partial(_small_forward, context=200, dtype=torch.bfloat16),
        as_recorded,
        os=Os.WSL,
    ),
    RecordedRun(
        "small-lm-train-seq100", "RTX 3090", "2.6", functools.partial(_small_train, context=100), as_recorded, os=Os.WSL
    ),
    RecordedRun(
        "small-lm-train-seq200", "RTX 3090", "2.6", functools.partial(_small_train, context=200), as_recorded, os=Os.WSL
    ),
    RecordedRun("lm-forward-fp32-seq128", "RTX 3090", "2.6", _norm_forward),
    RecordedRun("lm-xl-forward-seq128", "RTX PRO 6000", "2.11", _xl_forward),
    # The releases of the next three follow from the line numbers in their frames.
    RecordedRun("cnn-torch21-no-time", TURING_72, "2.2", _counterfactual),
    RecordedRun("conv3d-train-a", "RTX 3090", "2.3", _octree),
    RecordedRun("conv3d-inference-empty-cache", "RTX 3090", "2.5", _slide),
]
LATE = RecordedRun("lm-forward-fp32", "A100 80GB", "2.6", _paired_forward)
"""Its blocks use room left by earlier steps, which the file lacks: only its requests can be compared."""
