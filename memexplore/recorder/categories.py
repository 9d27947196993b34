"""What kind of memory each row is, decided afterwards: who was certain, and how long the block lived."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memexplore.tape import Category, Phase


def decide(
    phase: NDArray[np.int64],
    grad: NDArray[np.int64],
    given: NDArray[np.int64],
    born: NDArray[np.int64],
    dies: NDArray[np.int64],
    call_end: NDArray[np.int64],
    marks: NDArray[np.int64],
    mark_phase: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """The category of each allocated block.

    All arguments but the marks have one entry a block: the phase it was made in, whether gradients were enabled, what
    was known of it (UNKNOWN for nothing), the event that made it, the event that frees it (the number of events where
    none does), and the event at which the call of the module that made it ends (-1 outside any module). `marks` are
    the events at which a phase begins, in order, with that phase in `mark_phase`.

    A block made in a forward pass (recomputation included) with gradients enabled is an **activation** where it
    outlives the call of the module that made it, or outside any module the forward pass itself; else a **temporary**.
    What a forward pass makes without gradients is a temporary too: nothing of it is kept for a backward pass.

    >>> one = lambda value: np.array([value])
    >>> Category(int(decide(one(Phase.FORWARD), one(1), one(Category.UNKNOWN), one(3), one(9), one(5),
    ...                     np.array([0, 7]), np.array([Phase.FORWARD, Phase.BACKWARD]))[0])).text
    'activation'
    """
    result = given.copy()
    following = np.searchsorted(marks, born, side="right")
    events = int(dies.max(initial=0)) + 1
    ends = np.append(marks, events)
    phase_end = ends[following]
    open_ = given == Category.UNKNOWN

    outlives_phase = dies > phase_end
    outlives_call = np.where(call_end >= 0, dies >= call_end, dies >= phase_end)
    forward = open_ & ((phase == Phase.FORWARD) | ((phase == Phase.BACKWARD) & (grad == 1)))
    result[forward] = Category.TEMPORARY
    result[forward & (grad == 1) & outlives_call] = Category.ACTIVATION
    result[open_ & (phase == Phase.BACKWARD) & (grad == 0)] = Category.TEMPORARY

    optimizer = open_ & (phase == Phase.OPTIMIZER)
    result[optimizer] = np.where(outlives_phase, Category.OPTIMIZER_STATE, Category.TEMPORARY)[optimizer]

    # Outside forward, backward and optimizer: what the next forward pass finds was made for it.
    forwards = np.append(marks[mark_phase == Phase.FORWARD], events)
    next_forward = forwards[np.searchsorted(forwards[:-1], born, side="right")]
    other = open_ & (phase == Phase.OTHER)
    waits = (next_forward < events) & (dies > next_forward)
    result[other & waits] = Category.INPUT
    result[other & ~waits & (dies < events - 1)] = Category.TEMPORARY
    return result.astype(np.uint8)
