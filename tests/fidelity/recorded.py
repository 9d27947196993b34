"""Recorded runs: the tape of a kept recording, and the tape of the same script on the virtual GPU."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from memexplore.hardware.catalogue import Gpu
from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Action, Os, Tape
from tests.data import kept
from tests.fidelity import models

Recording = Callable[[], contextlib.AbstractContextManager]


class RecordedRun(NamedTuple):
    name: str
    """Name of the recording in `tests.data.kept`."""
    gpu: str | Gpu
    torch: str
    run: Callable[[Recording], None]
    """Warms up, then runs what was recorded inside the context of its argument."""
    segment_addresses: Callable[[Tape], Callable[[int, int], int]] | None = None
    """From the measured tape to the recorded address of each new segment, if the addresses decide what is split."""
    absorbed_before: int = 0
    """Bytes at the peak that the file lacks: blocks freed in it had absorbed them before its history."""
    os: Os = Os.LINUX
    """The system of the recording, by its addresses."""


def requests(tape: Tape) -> list[int]:
    """Return the bytes of every alloc and, as negative numbers, of every free in order; empty ones are left out."""
    selected = (tape.action == Action.ALLOC) | (tape.action == Action.FREE_REQUESTED)
    rows = np.flatnonzero(selected & (tape.size > 0))
    sign = np.where(tape.action[rows] == Action.ALLOC, 1, -1)
    return (sign * tape.size[rows]).tolist()


def without_hash_order(sizes: list[int]) -> list[int]:
    """Return the requests with the last run of frees sorted.

    A run that ends with its autocast context empties the cache of cast weights, a hash table keyed by addresses
    (cached_casts in ATen/autocast_mode.cpp), so that order is not predictable.
    """
    start = len(sizes)
    while start and sizes[start - 1] < 0:
        start -= 1
    return sizes[:start] + sorted(sizes[start:])


def measured(case: RecordedRun) -> Tape:
    return kept.tape(case.name)


@contextlib.contextmanager
def virtual_gpu(case: RecordedRun) -> Iterator[None]:
    """Switch on a virtual GPU like the recorded one."""
    with virtual(case.gpu, release=case.torch, os=case.os) as gpu:
        if case.segment_addresses is not None:
            gpu.allocator.segments.choose_address = case.segment_addresses(measured(case))
        yield


def predicted(case: RecordedRun) -> Tape:
    tapes = []

    @contextlib.contextmanager
    def recording() -> Iterator[None]:
        with record() as result:
            yield
        tapes.append(result.tape)

    try:
        with virtual_gpu(case):
            case.run(recording)
        return tapes.pop()
    finally:
        gc.collect()


def peak(case: RecordedRun) -> int:
    """Return the peak allocated bytes of the recorded part, as `torch.cuda` reports them."""
    peaks = []

    @contextlib.contextmanager
    def counting() -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        yield
        peaks.append(torch.cuda.max_memory_allocated())

    case.run(counting)
    return peaks.pop()


def _lm_forward(recording: Recording, context: int = 2048, dtype: torch.dtype = torch.bfloat16) -> None:
    model = models.DecoderLm(context).to("cuda")
    # From its start the snapshot has a second tensor of the tokens' size: the targets, which no forward needs.
    tokens, _targets = (torch.randint(0, 10_000, (4, context), device="cuda") for _ in range(2))

    def step():
        with torch.no_grad(), models.autocast(dtype):
            logits = model(tokens)
        return logits.shape

    step()
    with recording():
        step()


def _lm_step(recording: Recording, context: int = 512, dtype: torch.dtype = torch.bfloat16) -> None:
    model = models.DecoderLm(context).to("cuda")
    tokens, targets = (torch.randint(0, 10_000, (4, context), device="cuda") for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with models.autocast(dtype):
            logits = model(tokens)
        # The snapshot's script takes the loss in float32 outside autocast.
        loss = F.cross_entropy(logits.reshape(-1, 10_000).float(), targets.reshape(-1))
        loss.backward()
        optimizer.step()

    step()
    step()
    with recording():
        step()


def _softmax(x):
    largest = torch.max(x, dim=-1, keepdim=True).values
    exponentials = torch.exp(x - largest)
    total = torch.sum(exponentials, dim=-1, keepdim=True)
    return exponentials / total


def _attend(query, key, value):
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    scores = scores / 4.0
    weights = _softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


def _attention(recording: Recording) -> None:
    """Run attention of one head as the snapshot's script does, from the first allocation on."""
    with recording():
        query, key, value = (torch.randn(8, 4096, 16, device="cuda", requires_grad=True) for _ in range(3))
        out = _attend(query, key, value)
        loss = out.sum()
        loss.backward()


RECORDED = [
    RecordedRun("attention-forward-backward", "A100 80GB", "2.6", _attention),
    RecordedRun(
        "lm-xl-forward-seq2048-bf16",
        "RTX PRO 6000",
        "2.11",
        _lm_forward,
    ),
    RecordedRun("lm-xl-train-seq512-bf16", "RTX PRO 6000", "2.11", _lm_step),
]
