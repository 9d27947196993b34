"""Summary of a Tape: the object of ``memexplore run --json``, and the two-line sentence shown above a figure."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from memexplore.analysis.curves import category_bytes, curve, peak
from memexplore.analysis.location import location_text, where
from memexplore.analysis.verdict import Verdict, caught_requests, errors_text, failed_request, verdict
from memexplore.tape import Category, Tape
from memexplore.units import size_text


def summary(tape: Tape) -> dict[str, Any]:
    """Return the object of ``memexplore run --json``; sizes in bytes.

    Keys `source`, `gpu`, `capacity` (None on a CPU), `outcome` (a `Verdict`), `error` (what ended the program, or
    None), `peak_requested`, `peak_allocated`, `peak_reserved`, `steps` (training steps that began), `at_peak` with
    `step`, `phase`, `layer`, `op`, `line` of the row that reaches the peak allocated and `by_category`, allocated bytes
    by category, which sum to the peak; `failed_request`, the request that ended the program out of memory, or None, and
    `caught_requests`, a list of those after which the program went on, each with `requested` and its location; `notes`.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [40]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> summary(tape)["outcome"], summary(tape)["peak_allocated"]
    ('fits', 40)

    Raises ValueError for a tape that is not placed.
    """
    allocated, row = peak(tape)
    shares = category_bytes(tape, row)
    failed = failed_request(tape)
    return {
        "source": tape.meta.source.value,
        "gpu": tape.meta.gpu or tape.meta.device,
        "capacity": tape.meta.capacity,
        "outcome": verdict(tape).value,
        "error": tape.meta.error or None,
        "peak_requested": peak(tape, "requested")[0],
        "peak_allocated": allocated,
        "peak_reserved": peak(tape, "reserved")[0],
        "steps": int(np.count_nonzero(np.unique(tape.step) > 0)),
        "at_peak": where(tape, row) | {"by_category": {kind.text: int(shares[kind]) for kind in Category}},
        "failed_request": _request(tape, failed) if failed >= 0 else None,
        "caught_requests": [_request(tape, caught) for caught in caught_requests(tape)],
        "notes": [*filter(None, (tape.meta.unmeasured,)), *tape.meta.notes],
    }


def _request(tape: Tape, row: int) -> dict[str, Any]:
    return {"requested": int(tape.size[row])} | where(tape, row)


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
    fits = f"Fits {with_article(device)} ({size_text(capacity)} usable) with {size_text(spare)} to spare"
    if caught := caught_requests(tape):
        fits += f", after {errors_text(len(caught))} that the program caught"
    return f"{fits} · {source}"


def sentence(tape: Tape) -> str:
    """Return two lines: the peak (or what ended the program), and whether the run fits.

    >>> from memexplore.tape import Meta, Phase, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [4096], "category": [Category.ACTIVATION], "step": [1],
    ...     "phase": [Phase.FORWARD], "module": [0]}, modules=["conv1"],
    ...     meta=Meta(Source.MEASURED, "cpu", versions={"torch": "2.13.0"}))
    >>> print(sentence(tape))
    Peak 4.00 KiB allocated in step 1, forward of conv1 · 100 % activations
    On the CPU · measured, torch 2.13

    Raises ValueError for a tape that is not placed.
    """
    match verdict(tape):
        case Verdict.OOM:
            return _out_of_memory(tape)
        case Verdict.NOT_ON_GPU:
            return _not_on_gpu(tape)
        case Verdict.PARTLY_MEASURED:
            return _partly_measured(tape)
        case Verdict.ERROR | Verdict.INTERRUPTED:
            return _ended_early(tape)
        case _:
            return f"Peak {_at_peak(tape)}\n{_fit_line(tape)}"


def _held(tape: Tape) -> str:
    """Return the peak allocated, and the peak reserved where it says more."""
    allocated, reserved = peak(tape)[0], peak(tape, "reserved")[0]
    held = f"{size_text(allocated)} allocated"
    if tape.meta.capacity is not None or reserved != peak(tape, "active")[0]:
        held += f" ({_in_unit_of(reserved, allocated)} reserved)"
    return held


def _activations(tape: Tape) -> str:
    allocated, row = peak(tape)
    share = int(category_bytes(tape, row)[Category.ACTIVATION]) / allocated if allocated else 0.0
    return f"{share * 100:.0f} % activations"


def _at_peak(tape: Tape) -> str:
    location = location_text(tape, peak(tape)[1])
    return f"{_held(tape)}{' in ' + location if location else ''} · {_activations(tape)}"


def _out_of_memory(tape: Tape) -> str:
    row = failed_request(tape)
    request, capacity = int(tape.size[row]), tape.meta.capacity
    location, op = location_text(tape, row), where(tape, row)["op"]
    first = f"Out of memory{' in ' + location if location else ''}: {op or 'the run'} requested {size_text(request)}"
    if capacity is None:
        return f"{first}\nPeak {_held(tape)} · {_activations(tape)} · {_source(tape)}"
    missing = request + int(curve(tape, "reserved")[row]) - capacity
    if missing > 0:
        first += f", {size_text(missing)} more than was free"
    return f"{first}\n{_usable(tape)}; peak {_held(tape)} · {_activations(tape)} · {_source(tape)}"


def _usable(tape: Tape) -> str:
    """Return the capacity as a clause with a capital: ``A Tesla T4 has 14.4 GiB usable``."""
    usable = f"{with_article(tape.meta.device)} has {size_text(tape.meta.capacity or 0)} usable"
    return f"{usable[0].upper()}{usable[1:]}"


def _ended_early(tape: Tape) -> str:
    """Return the sentence for a program that an error or an interrupt ended."""
    interrupted = verdict(tape) is Verdict.INTERRUPTED
    first = f"{'Interrupted' if interrupted else 'Ended by an error'}: {tape.meta.error}".removesuffix(": ")
    so_far = f"Peak so far {_at_peak(tape)}" if peak(tape)[0] else "Nothing was allocated on the GPU so far"
    if tape.meta.capacity is None:
        return f"{first}\nPeak so far {_at_peak(tape)} · {_source(tape)}"
    return f"{first}\n{so_far} · {_usable(tape)} · {_source(tape)}"


def _not_on_gpu(tape: Tape) -> str:
    """Return the sentence for a program that came to its end without the GPU."""
    device, models = tape.meta.device, tape.meta.trained_on_cpu
    if models:
        trained = models[0] if len(models) == 1 else f"{models[0]} and {len(models) - 1} more"
        first = f"Nothing trained on the {device}: {trained} trained on the CPU"
    else:
        first = f"Nothing ran on the {device}: the code put no tensor on it"
    if peak(tape)[0]:
        first += f"; peak of the rest {_held(tape)}"
    advice = tape.meta.advice or 'Put the model and its batches on "cuda"'
    return f"{first}\n{advice} · {_source(tape)}"


def _partly_measured(tape: Tape) -> str:
    """Return the sentence for a program with child processes that were not measured."""
    text = tape.meta.unmeasured
    own = (
        f"Peak of the program's own process {_at_peak(tape)}" if peak(tape)[0] else "Its own process put nothing there"
    )
    return f"Not all was measured: {text}\n{own} · {_usable(tape)} · {_source(tape)}"


def _in_unit_of(size: int, other: int) -> str:
    """Return a size as text, without its unit if `other` has the same unit: 9.13 GiB allocated (9.54 reserved)."""
    text = size_text(size)
    number, unit = text.split(" ")
    return number if unit == size_text(other).split(" ")[1] else text
