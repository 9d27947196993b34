"""Hover texts of a timeline: one HTML text per row."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import by_category, lifetimes
from memexplore.analysis.streams import has_streams, stream_text
from memexplore.figures.palette import escaped
from memexplore.figures.positions import has_clock
from memexplore.tape import Action, Category, Phase, Tape
from memexplore.units import size_text

_BLOCKS = (Action.ALLOC, Action.PREEXISTING, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.OOM)
"""Rows of blocks, which have a stream."""


def hover_texts(tape: Tape, rows: NDArray[Any]) -> list[str]:
    """Return a text for each of some ascending rows: the event, tensor, layer and op, and the bytes of each category.

    The text of a free has the tensor, layer and op that its block was allocated for. Only measured tapes with a clock
    have times.
    """
    rows = np.asarray(rows, dtype=np.int64)
    if not len(rows):
        return []
    span = slice(int(rows[0]), int(rows[-1]) + 1)
    by_kind = by_category(tape, window=span)[:, rows - span.start]
    is_timed = has_clock(tape)
    alloc_rows = _alloc_rows(tape)[rows].tolist()
    # Sizes such as those of the parameters repeat in most rows.
    cached_size_text, kinds = functools.cache(size_text), [(kind, kind.text) for kind in reversed(Category)]
    modules, ops, tensors = ([*map(escaped, names)] for names in (tape.modules, tape.ops, tape.tensor_texts))
    texts = []
    for row, alloc_row, sizes in zip(rows.tolist(), alloc_rows, by_kind.T.tolist(), strict=True):
        step, phase = int(tape.step[row]), Phase(int(tape.phase[row]))
        location = [f"step {step}" if step else "set-up", *([phase.text] if phase is not Phase.OTHER else [])]
        if is_timed:
            location.append(f"{tape.time[row] / 1e6:.1f} ms")
        lines = [", ".join(location), _event_text(tape, row, alloc_row)]
        if tape.tensor[alloc_row] >= 0:
            lines.append(tensors[tape.tensor[alloc_row]])
        for name, table, number in (("layer", modules, tape.module[alloc_row]), ("op", ops, tape.op[alloc_row])):
            if number >= 0 and table[number]:
                lines.append(f"{name}: {table[number]}")
        if has_streams(tape) and tape.action[alloc_row] in _BLOCKS:
            lines.append(stream_text(int(tape.stream[alloc_row])))
        lines.append(f"<b>{cached_size_text(sum(sizes))} allocated</b>")
        lines += [f"{cached_size_text(sizes[kind])} {text}" for kind, text in kinds if sizes[kind]]
        texts.append("<br>".join(lines))
    return texts


def _alloc_rows(tape: Tape) -> NDArray[np.int64]:
    """Return for each free the row that allocated its block, for each other row the row itself."""
    life = lifetimes(tape)
    alloc_rows = np.arange(len(tape) + 1)
    for freed in (life.completed, life.requested):
        is_free = np.isin(tape.action[np.minimum(freed, len(tape) - 1)], (Action.FREE_REQUESTED, Action.FREE_COMPLETED))
        alloc_rows[freed[is_free]] = life.born[is_free]
    return alloc_rows[:-1]


def _event_text(tape: Tape, row: int, alloc_row: int) -> str:
    action, size = Action(int(tape.action[row])), size_text(int(tape.size[alloc_row]))
    kind = Category(int(tape.category[alloc_row])).text
    texts = {
        Action.ALLOC: f"+{size} {kind}",
        Action.PREEXISTING: f"{size} {kind}, allocated before recording",
        Action.FREE_REQUESTED: f"−{size} {kind}",
        Action.FREE_COMPLETED: f"free of {size} {kind} completed",
        Action.OOM: f"out of memory: {size} requested",
        Action.MARK: "start of step or phase",
    }
    return texts.get(action, f"{action.name.lower().replace('_', ' ')} of {size}")
