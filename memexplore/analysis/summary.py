"""Summary of a Tape: the object of ``memexplore run --json``, and the two-line sentence shown above a figure."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from memexplore.analysis.curves import category_bytes, curve, peak
from memexplore.analysis.tables import user_line
from memexplore.tape import Action, Category, Phase, Tape
from memexplore.units import size_text


def _where(tape: Tape, row: int) -> dict[str, Any]:
    """Return step, phase, layer, op and line of a row, None for columns without a value."""
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


def summary(tape: Tape) -> dict[str, Any]:
    """Return the object of ``memexplore run --json``; sizes in bytes.

    Keys `source`, `gpu`, `capacity` (None on a CPU), `outcome` ("fits" or "oom"), `peak_requested`, `peak_allocated`,
    `peak_reserved`, `steps` (training steps that began) and `at_peak` with `step`, `phase`, `layer`, `op`, `line` of
    the row that reaches the peak allocated and `by_category`, allocated bytes by category, which sum to the peak.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [40]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> summary(tape)["outcome"], summary(tape)["peak_allocated"]
    ('fits', 40)

    Raises ValueError for a tape that is not placed.
    """
    allocated, row = peak(tape)
    shares = category_bytes(tape, row)
    return {
        "source": tape.meta.source.value,
        "gpu": tape.meta.gpu or tape.meta.device,
        "capacity": tape.meta.capacity,
        "outcome": "oom" if np.any(tape.action == Action.OOM) else "fits",
        "peak_requested": peak(tape, "requested")[0],
        "peak_allocated": allocated,
        "peak_reserved": peak(tape, "reserved")[0],
        "steps": int(np.count_nonzero(np.unique(tape.step) > 0)),
        "at_peak": _where(tape, row) | {"by_category": {kind.text: int(shares[kind]) for kind in Category}},
    }


def _location(where: dict[str, Any]) -> str:
    """Return a location in the run as text: ``step 2, backward of layer3.5.conv2``."""
    step, phase, layer = where["step"], where["phase"], where["layer"]
    words = [f"step {step}"] if step else []
    if phase != Phase.OTHER.text:
        words.append(f"{phase} of {layer}" if layer and phase != Phase.OPTIMIZER.text else phase)
    elif layer:
        words.append(layer)
    return ", ".join(words)


def location_text(tape: Tape, row: int) -> str:
    """Return the location of a row as text: ``step 2, backward of layer3.5.conv2``; empty without step and layer.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [40], "step": [1], "phase": [Phase.OPTIMIZER]},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> location_text(tape, 0)
    'step 1, optimizer'
    """
    return _location(_where(tape, row))


def with_article(name: str) -> str:
    """Return the name of a device with its article.

    >>> [with_article(name) for name in ("Tesla T4", "NVIDIA A100", "8 GiB GPU", "8.00 GiB")]
    ['a Tesla T4', 'an NVIDIA A100', 'an 8 GiB GPU', 'a GPU with 8.00 GiB']
    """
    if name.startswith("cuda:"):
        return name
    if re.fullmatch(r"[\d.]+ \w+", name):
        return f"a GPU with {name}"
    first = name.split()[0] if name.split() else name
    spelled = first.isupper() and not first.isdigit()
    vowel = first[:1] in "AEFHILMNORSX" if spelled else first[:1] in "AEIOaeio" or first.startswith(("8", "11", "18"))
    return f"{'an' if vowel else 'a'} {name}"


def _source(tape: Tape) -> str:
    torch = tape.meta.versions.get("torch", "")
    release = ".".join(torch.split("+")[0].split(".")[:2])
    return f"{tape.meta.source}, torch {release}" if release else str(tape.meta.source)


def _fit_line(tape: Tape) -> str:
    """Return the second line of a run that fits: device, capacity, free bytes, origin of the numbers."""
    capacity, device = tape.meta.capacity, tape.meta.device
    source = _source(tape)
    if capacity is None:
        return f"On {'the CPU' if device == 'cpu' else device} · {source}"
    spare = capacity - peak(tape, "reserved")[0]
    return f"Fits {with_article(device)} ({size_text(capacity)} usable) with {size_text(spare)} to spare · {source}"


def sentence(tape: Tape) -> str:
    """Return two lines: the peak (or the request that failed), and whether the run fits.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [4096], "category": [Category.ACTIVATION], "step": [1],
    ...     "phase": [Phase.FORWARD], "module": [0]}, modules=["conv1"],
    ...     meta=Meta(Source.MEASURED, "cpu", versions={"torch": "2.13.0"}))
    >>> print(sentence(tape))
    Peak 4.00 KiB allocated in step 1, forward of conv1 · 100 % activations
    On the CPU · measured, torch 2.13

    Raises ValueError for a tape that is not placed.
    """
    result = summary(tape)
    allocated, reserved = result["peak_allocated"], result["peak_reserved"]
    share = result["at_peak"]["by_category"][Category.ACTIVATION.text] / allocated if allocated else 0.0
    activations = f"{share * 100:.0f} % activations"
    held = f"{size_text(allocated)} allocated"
    if tape.meta.capacity is not None or reserved != peak(tape, "active")[0]:
        held += f" ({_in_unit_of(reserved, allocated)} reserved)"
    if result["outcome"] == "fits":
        location = _location(result["at_peak"])
        first = f"Peak {held}{' in ' + location if location else ''} · {activations}"
        return f"{first}\n{_fit_line(tape)}"
    row = int(np.flatnonzero(tape.action == Action.OOM)[-1])
    where, request, capacity = _where(tape, row), int(tape.size[row]), tape.meta.capacity
    location, op = _location(where), where["op"]
    first = f"Out of memory{' in ' + location if location else ''}: {op or 'the run'} requested {size_text(request)}"
    if capacity is None:
        return f"{first}\nPeak {held} · {activations} · {_source(tape)}"
    missing = request + int(curve(tape, "reserved")[row]) - capacity
    if missing > 0:
        first += f", {size_text(missing)} more than was free"
    usable = f"{with_article(tape.meta.device)} has {size_text(capacity)} usable"
    return f"{first}\n{usable[0].upper()}{usable[1:]}; peak {held} · {activations} · {_source(tape)}"


def _in_unit_of(size: int, other: int) -> str:
    """Return a size as text, without its unit if `other` has the same unit: 9.13 GiB allocated (9.54 reserved)."""
    text = size_text(size)
    number, unit = text.split(" ")
    return number if unit == size_text(other).split(" ")[1] else text
