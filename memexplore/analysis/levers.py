"""Name what lowers a category of memory in a run, in words for the verdict."""

from __future__ import annotations

import numpy as np

from memexplore.analysis.curves import Rows, block_bytes, live_rows
from memexplore.tape import Action, Category, Phase, Tape
from memexplore.text.tensor_text import dtype_of

_LEVERS = {
    Category.PARAMETER: "weights in 16 bits",
    Category.OPTIMIZER_STATE: "an optimizer with less state, such as 8-bit AdamW or SGD",
    Category.GRADIENT: "an update in the backward pass, frozen layers or LoRA",
    Category.INPUT: "a smaller batch",
    Category.TEMPORARY: "a smaller batch or micro-batches",
    Category.GATHERED_PARAMETER: "fully_shard on smaller blocks, with reshard_after_forward",
}
"""The categories without an entry depend on the code alone; activations depend on what the run does already."""
_SHORT_TYPES = ("float16", "bfloat16", "float8")
_USED = 0.1
"""Share of the bytes of a category from which a run is said to use 16 bits."""


def lever(tape: Tape, category: Category) -> str:
    """Return what lowers the bytes of a category at the peak and is not in use in the run; empty if nothing is known.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [64], "category": [Category.ACTIVATION], "tensor": [0]},
    ...                          meta=Meta(Source.PREDICTED, "T4"), tensor_texts=["float16[32]"])
    >>> lever(tape, Category.ACTIVATION), lever(tape, Category.INPUT), lever(tape, Category.WORKSPACE)
    ('checkpointing', 'a smaller batch', '')
    """
    if category is Category.ACTIVATION:
        ways = [] if recomputes(tape) else ["checkpointing"]
        ways += [] if is_short(tape, live_rows(tape), category) else ["mixed precision"]
        return " or ".join(ways) or "a smaller batch or micro-batches"
    if category is Category.PARAMETER and is_short(tape, live_rows(tape), category):
        return ""
    return _LEVERS.get(category, "")


def recomputes(tape: Tape) -> bool:
    """Return whether a checkpoint recomputes activations in the backward pass."""
    made = (tape.action == Action.ALLOC) & (tape.category == Category.ACTIVATION)
    return bool(np.any(made & (tape.phase == Phase.BACKWARD)))


def is_short(tape: Tape, rows: Rows, category: Category) -> bool:
    """Return whether a part of a category among blocks has 16 bits or fewer per number."""
    rows = rows[(tape.category[rows] == category) & (tape.tensor[rows] >= 0)]
    short = np.array([dtype_of(text).startswith(_SHORT_TYPES) for text in tape.tensor_texts] or [False])
    sizes = block_bytes(tape)[rows]
    return bool(sizes[short[tape.tensor[rows]]].sum() > _USED * sizes.sum())
