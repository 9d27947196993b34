"""Join the allocator's history of a watched step with the recorder's tape of it.

The joined tape has a note on requests that the recorder did not see.
"""

from __future__ import annotations

from typing import Any

from memexplore.recorder.annotation import annotate
from memexplore.recorder.earlier_blocks import NOTHING_EARLIER, Earlier
from memexplore.recorder.matching import Numbers
from memexplore.tape import Action, Tape
from memexplore.text.units import size_text


def joined(history: Tape, recorded: Tape, numbers: Numbers | None = None, earlier: Earlier = NOTHING_EARLIER) -> Tape:
    """Return the allocator's rows with op, layer, phase, step and category of the recorder (`recorder.annotation`).

    A note of the tape says how much was requested by code that the recorder did not see, such as compiled regions, CUDA
    graphs and other threads.
    """
    tape = annotate(history, recorded, numbers, earlier)
    unseen = (tape.action == Action.ALLOC) & (tape.op < 0)
    if not unseen.any():
        return tape
    meta: Any = tape.meta
    note = (
        f"{int(unseen.sum())} of {int((tape.action == Action.ALLOC).sum())} requests "
        f"({size_text(int(tape.size[unseen].sum()))}) are attributed to no op: code that PyTorch's dispatcher does not "
        "run made them, such as compiled regions, CUDA graphs or other threads."
    )
    return tape.replace(meta=meta._replace(notes=(*meta.notes, note)))
