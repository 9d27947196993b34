"""Locate a row of a Tape in the run: step, phase, layer, op and line, as values and as text."""

from __future__ import annotations

from typing import Any

from memexplore.analysis.tables import user_line
from memexplore.tape import Phase, Tape


def where(tape: Tape, row: int) -> dict[str, Any]:
    """Return step, phase, layer, op and line of a row, None for columns without a value; row -1 is no row.

    >>> from memexplore.tape import Meta, Source
    >>> where(Tape.from_columns({"size": [8], "step": [2]}, meta=Meta(Source.MEASURED, "cpu")), 0)
    {'step': 2, 'phase': 'other', 'layer': None, 'op': None, 'line': None}
    """
    if row < 0:
        return {"step": 0, "phase": Phase.OTHER.text, "layer": None, "op": None, "line": None}
    op, module, stack = int(tape.op[row]), int(tape.module[row]), int(tape.stack[row])
    return {
        "step": int(tape.step[row]),
        "phase": Phase(int(tape.phase[row])).text,
        "layer": (tape.modules[module] or None) if module >= 0 else None,
        "op": tape.ops[op] if op >= 0 else None,
        "line": (user_line(tape.stacks[stack]) or None) if stack >= 0 else None,
    }


def location_text(tape: Tape, row: int) -> str:
    """Return the location of a row as text: ``step 2, backward of layer3.5.conv2``; empty without step and layer.

    A layer whose name is a number has its class, if it is known: ``step 1, forward of features.0 (Conv2d)``.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [40], "step": [1], "phase": [Phase.OPTIMIZER]},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> location_text(tape, 0)
    'step 1, optimizer'
    """
    place = where(tape, row)
    step, phase, layer = place["step"], place["phase"], _with_class(tape, row, place["layer"])
    words = [f"step {step}"] if step else []
    if phase != Phase.OTHER.text:
        words.append(f"{phase} of {layer}" if layer and phase != Phase.OPTIMIZER.text else phase)
    elif layer:
        words.append(layer)
    return ", ".join(words)


def _with_class(tape: Tape, row: int, layer: str | None) -> str | None:
    if layer is None or not tape.classes or not layer.rpartition(".")[2].isdecimal():
        return layer
    kind = tape.classes[int(tape.module[row])]
    return f"{layer} ({kind})" if kind else layer
