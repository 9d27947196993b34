"""Decide the categories of blocks after the recording, from certain facts about each and from its lifetime."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memexplore.tape import Category, Phase


def decide(
    phase: NDArray[np.int64],
    grad: NDArray[np.int64],
    certain: NDArray[np.int64],
    copied: NDArray[np.int64],
    born: NDArray[np.int64],
    dies: NDArray[np.int64],
    call_end: NDArray[np.int64],
    marks: NDArray[np.int64],
    mark_phase: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """Return the category of each allocated block, shape (blocks,).

    All arguments but the marks have one entry per block: the phase in which it was made, whether gradients were
    enabled, its category if that is certain (else UNKNOWN), the category of the blocks that it is a copy of (else
    UNKNOWN), the event that made it, the event that frees it (the number of events if none does), and the event at
    which the call of the module that made it ends (-1 outside any module). `marks` are the events at which a phase
    begins, in order, with that phase in `mark_phase`.

    A block made in a forward pass (recomputation included) with gradients enabled is an **activation** if it outlives
    the call of the module that made it, or outside any module the forward pass itself; else a **temporary**. A block
    made in a forward pass without gradients is a temporary too, as it is not kept for a backward pass.

    >>> one = lambda value: np.array([value])
    >>> Category(int(decide(one(Phase.FORWARD), one(1), one(Category.UNKNOWN), one(Category.UNKNOWN),
    ...                     one(3), one(9), one(5),
    ...                     np.array([0, 7]), np.array([Phase.FORWARD, Phase.BACKWARD]))[0])).text
    'activation'
    """
    result = certain.copy()
    following = np.searchsorted(marks, born, side="right")
    events = int(dies.max(initial=0)) + 1
    ends = np.append(marks, events)
    phase_end = ends[following]
    undecided = certain == Category.UNKNOWN

    outlives_phase = dies > phase_end
    outlives_call = np.where(call_end >= 0, dies >= call_end, dies >= phase_end)
    forward = undecided & ((phase == Phase.FORWARD) | ((phase == Phase.BACKWARD) & (grad == 1)))
    result[forward] = Category.TEMPORARY
    result[forward & (grad == 1) & outlives_call] = Category.ACTIVATION
    result[undecided & (phase == Phase.BACKWARD) & (grad == 0)] = Category.TEMPORARY

    optimizer = undecided & (phase == Phase.OPTIMIZER)
    result[optimizer] = np.where(outlives_phase, Category.OPTIMIZER_STATE, Category.TEMPORARY)[optimizer]

    # A block made between steps that is alive when the next forward pass begins is its input.
    forwards = np.append(marks[mark_phase == Phase.FORWARD], events)
    next_forward = forwards[np.searchsorted(forwards[:-1], born, side="right")]
    other = undecided & (phase == Phase.OTHER)
    waits = (next_forward < events) & (dies > next_forward)
    result[other & waits] = Category.INPUT
    result[other & ~waits & (dies < events - 1)] = Category.TEMPORARY

    # A copy of weights that outlives its step is no input of the next one, and no activation of this one.
    steps = np.append(marks[mark_phase == Phase.OPTIMIZER], events)
    next_step = steps[np.searchsorted(steps[:-1], born, side="right")]
    outlives_step = (next_step < events) & (dies > forwards[np.searchsorted(forwards[:-1], next_step, side="right")])
    is_copy = undecided & (copied != Category.UNKNOWN)
    kept = (other & (waits | (dies >= events - 1))) | (forward & outlives_step & (call_end < 0))
    result[is_copy & kept] = copied[is_copy & kept]
    return result.astype(np.uint8)
