"""What the mouse is told over a timeline."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import by_category, lifetimes
from memexplore.figures.palette import escaped
from memexplore.tape import Action, Category, Phase, Source, Tape
from memexplore.units import size_text


def hover_texts(tape: Tape, rows: NDArray[Any]) -> list[str]:
    """What the mouse is told at each of these rising rows: the event, its layer and op, and every category's bytes.

    A free tells of the layer and the op that made the block. The time is told where it was measured.
    """
    rows = np.asarray(rows, dtype=np.int64)
    if not len(rows):
        return []
    span = slice(int(rows[0]), int(rows[-1]) + 1)
    by_kind = by_category(tape, window=span)[:, rows - span.start]
    # A clock that only counts rows is none, and the time that a prediction took is not the time that the run takes.
    clocked = tape.meta.source is not Source.PREDICTED and not np.array_equal(tape.time, np.arange(len(tape)))
    makers = _makers(tape)[rows].tolist()
    # What holds parameters and the like is as large on most rows.
    told, kinds = functools.cache(size_text), [(kind, kind.text) for kind in reversed(Category)]
    modules, ops = [escaped(name) for name in tape.modules], [escaped(name) for name in tape.ops]
    texts = []
    for row, maker, sizes in zip(rows.tolist(), makers, by_kind.T.tolist(), strict=True):
        step, phase = int(tape.step[row]), Phase(int(tape.phase[row]))
        place = [f"step {step}" if step else "set-up", *([phase.text] if phase is not Phase.OTHER else [])]
        if clocked:
            place.append(f"{tape.time[row] / 1e6:.1f} ms")
        lines = [", ".join(place), _event_text(tape, row, maker)]
        for name, table, number in (("layer", modules, tape.module[maker]), ("op", ops, tape.op[maker])):
            if number >= 0 and table[number]:
                lines.append(f"{name}: {table[number]}")
        lines.append(f"<b>{told(sum(sizes))} allocated</b>")
        lines += [f"{told(sizes[kind])} {text}" for kind, text in kinds if sizes[kind]]
        texts.append("<br>".join(lines))
    return texts


def _makers(tape: Tape) -> NDArray[np.int64]:
    """For each free the row that made its block, for each other row the row itself."""
    life = lifetimes(tape)
    makers = np.arange(len(tape) + 1)
    for gone in (life.completed, life.requested):
        is_free = np.isin(tape.action[np.minimum(gone, len(tape) - 1)], (Action.FREE_REQUESTED, Action.FREE_COMPLETED))
        makers[gone[is_free]] = life.born[is_free]
    return makers[:-1]


def _event_text(tape: Tape, row: int, maker: int) -> str:
    action, size = Action(int(tape.action[row])), size_text(int(tape.size[maker]))
    kind = Category(int(tape.category[maker])).text
    words = {
        Action.ALLOC: f"+{size} {kind}",
        Action.PREEXISTING: f"{size} {kind}, there before",
        Action.FREE_REQUESTED: f"−{size} {kind}",
        Action.FREE_COMPLETED: f"free of {size} {kind} completed",
        Action.OOM: f"out of memory: {size} asked for",
        Action.MARK: "border",
    }
    return words.get(action, f"{action.name.lower().replace('_', ' ')} of {size}")
