"""Expected tapes: the tape of a batch that was not run, from the traces of two others.

In: a `Step`, `Knobs` and a virtual GPU. Out: the tape that a run will probably give, in a hundredth of its time. Every
size and shape is extrapolated linearly in the batch, and the requests are placed by the allocator of the GPU. It is a
picture until the run has ended, never a result: ops may take another path from some size on.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from memexplore import capture, targets
from memexplore.analysis.picture import with_whole
from memexplore.gpu_catalogue import Gpu
from memexplore.knobs.knobs import Knobs
from memexplore.steps.step import Step
from memexplore.steps.step_record import TracedSetting, record_of
from memexplore.steps.trace_reuse import Trace
from memexplore.steps.trial import target_of, virtual_gpu
from memexplore.tape import Os, Tape
from memexplore.tensor_text import dtype_of, shape_of, tensor_text

_NEAREST = 4
"""Batches among which two are sought that make the same requests but for their sizes."""


def expected_tape(
    step: Step, knobs: Knobs, *, gpu: str | Gpu | None = None, release: str | None = None, os: str = Os.LINUX
) -> Tape | None:
    """Return the tape that a setting will probably have, from runs of two other batches with the same other knobs.

    `gpu`, `release` and `os` are as in `trial.run`. None where no two of the nearest batches that were traced make the
    same requests but for their sizes, for a setting that was traced itself, and on a real device.

    >>> import torch
    >>> from memexplore.analysis.curves import peak
    >>> from memexplore.steps.trial import run
    >>> step = Step(torch.nn.Linear(64, 64), torch.zeros(8, 64), loss=torch.mean, optimizer=torch.optim.SGD)
    >>> for batch in (10, 12):
    ...     trial = run(step, Knobs(batch=batch), gpu="T4")
    >>> expected = expected_tape(step, Knobs(batch=20), gpu="T4")
    >>> peak(expected) == peak(run(step, Knobs(batch=20), gpu="T4").tape)
    True
    """
    name = target_of(knobs, gpu)
    if isinstance(name, str) and targets.is_real(name):
        return None
    target, batch = virtual_gpu(knobs, gpu, release, os), knobs.batch or step.batch_size
    by_batch = record_of(step).settings_by_batch(knobs, target, step.batch_size)
    if batch in by_batch or len(by_batch) < 2:
        return None
    nearest = sorted(by_batch, key=lambda one: abs(one - batch))[:_NEAREST]
    found = (_between(by_batch, batch, *pair) for pair in itertools.combinations(nearest, 2))
    setting = next(filter(None, found), None)
    if setting is None:
        return None
    tape = setting.tape_on(target)
    if tape is not None:
        return tape
    tape = setting.tape_until_failure(target)
    unlimited = virtual_gpu(knobs.replace(gpu=None), capture.unlimited(target.gpu), release, os)
    whole = setting.tape_on(unlimited)
    return None if tape is None or whole is None else with_whole(tape, whole)


def _between(by_batch: dict[int, TracedSetting], batch: int, near: int, other: int) -> TracedSetting | None:
    share = (batch - near) / (other - near)
    one, another = by_batch[near].trace, by_batch[other].trace
    trace = extrapolated(one, another, share) if isinstance(one, Trace) and isinstance(another, Trace) else None
    return None if trace is None else by_batch[near]._replace(trace=trace)


def extrapolated(one: Trace, other: Trace, share: float) -> Trace | None:
    """Return the trace whose sizes and shapes are those of `one` plus a share of the difference to `other`.

    None where the traces differ in more than sizes and shapes, and where a size would be negative.
    """
    first, second = one.first, other.first
    if first.compared.shape != second.compared.shape or not np.array_equal(first.compared, second.compared):
        return None
    size = np.rint(first.size + share * (second.size - first.size)).astype(np.int64)
    if (size < 0).any():
        return None
    tensor = _extrapolated_texts(first.tensor, second.tensor, share)
    return None if tensor is None else one.resized(first._replace(size=size, tensor=tensor))


def _extrapolated_texts(
    one: NDArray[np.object_], other: NDArray[np.object_], share: float
) -> NDArray[np.object_] | None:
    if np.array_equal(one, other):
        return one
    pairs = list(zip(one.tolist(), other.tolist(), strict=True))
    texts = {pair: _extrapolated_text(*pair, share) for pair in set(pairs)}
    result = np.empty(len(pairs), dtype=object)
    result[:] = [texts[pair] for pair in pairs]
    return None if None in texts.values() else result


def _extrapolated_text(one: str, other: str, share: float) -> str | None:
    if one == other:
        return one
    shape, longer = shape_of(one), shape_of(other)
    if shape is None or longer is None or len(shape) != len(longer) or dtype_of(one) != dtype_of(other):
        return None
    extents = [round(low + share * (high - low)) for low, high in zip(shape, longer, strict=True)]
    return tensor_text(tuple(extents), dtype_of(one))
