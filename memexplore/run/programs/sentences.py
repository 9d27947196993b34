"""Sentences about trials: the effect of changed knobs on peak and FLOPs, and where the numbers come from.

Whether a setting fits is said by `analysis.verdict_content` alone.
"""

from __future__ import annotations

import math
from typing import Any

from memexplore.analysis import curves
from memexplore.analysis.verdict import failed_request
from memexplore.hardware import catalogue
from memexplore.hardware.links import links_of
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.knobs.values import AS_WRITTEN
from memexplore.run.programs.execution import Execution
from memexplore.run.programs.out_of_memory import fits
from memexplore.run.programs.outcome import Outcome, flops_of_sample
from memexplore.tape import Source, Tape
from memexplore.text.units import size_text
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE


def sentence(before: Execution, after: Execution, whole: tuple[Outcome, Outcome] | None = None) -> str:
    """Return the effect of changed knobs on peak and FLOPs as one sentence.

    `whole` are the outcomes of both settings with unlimited memory; without them, the peak of a step that ran out of
    memory is given as "over" what it reached, and what several GPUs send is left out. If one of the two trials was
    measured, the sentence says how the second was obtained.

    >>> from memexplore.run.knobs.applying.report import ApplyReport
    >>> from memexplore.run.programs.cost import Cost
    >>> from memexplore.tape import Meta, Source
    >>> meta = Meta(Source.PREDICTED, "Tesla T4", gpu="T4", capacity=16384)
    >>> before, after = (Tape.from_columns({"address": [0], "size": [size]}, meta=meta) for size in (8192, 4096))
    >>> rest = ApplyReport(), Cost()
    >>> sentence(Execution(Knobs(), before, *rest), Execution(Knobs(batch=4), after, *rest))
    'Batch of 4: peak 8.00 → 4.00 KiB (−50 %)'

    Raises ValueError for a tape without addresses.
    """
    parts = [_peaks(before.tape, after.tape, whole), _flops(before, after, whole)]
    text = f"{change(before, after)}: " + ", ".join(part for part in parts if part)
    measured = Source.MEASURED in (before.tape.meta.source, after.tape.meta.source)
    link = link_sentence(whole[1]) if whole else ""
    return " · ".join(filter(None, (text, link, origin(after) if measured else "")))


def first_sentence(trial: Execution) -> str:
    """Return the setting of a trial as a sentence, with the device and the time of a measured one.

    >>> from memexplore.run.knobs.applying.report import ApplyReport
    >>> from memexplore.run.programs.cost import Cost
    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [512]}, meta=Meta(Source.PREDICTED, "Tesla T4"))
    >>> first_sentence(Execution(Knobs(), tape, ApplyReport(), Cost()))
    'As written'
    """
    text = str(trial.knobs)
    measured = f" · {origin(trial)}" if trial.tape.meta.source is Source.MEASURED else ""
    return f"{text[0].upper()}{text[1:]}{measured}"


def origin(trial: Execution) -> str:
    """Return how the numbers of a trial were obtained: measured, and on which device, or predicted.

    >>> from memexplore.run.knobs.applying.report import ApplyReport
    >>> from memexplore.run.programs.cost import Cost
    >>> from memexplore.tape import Meta
    >>> tape = Tape.from_columns({"address": [0], "size": [512]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> origin(Execution(Knobs(), tape, ApplyReport(), Cost(), seconds=0.0123))
    "measured on this machine's CPU, 12.3 ms a step"
    """
    meta = trial.tape.meta
    if meta.source is not Source.MEASURED:
        return str(meta.source)
    where = f"this machine's {'CPU' if meta.device == 'cpu' else meta.device}"
    if not fits(trial.tape):
        return f"measured on {where} up to there, what it would need is predicted"
    if math.isnan(trial.seconds):
        return f"measured on {where}"
    return f"measured on {where}, {_time_text(trial.seconds)} a step"


def change(before: Execution, after: Execution) -> str:
    """Return the difference between two settings as text: applied changes first, then other changed knobs."""
    texts = set(before.applied.texts)
    changes = [change for change in after.applied.changes if change.text not in texts]
    covered = {change.field for change in changes}
    uncovered = [
        name
        for name in _changed_fields(before.knobs, after.knobs)
        if getattr(after.knobs, name) == KNOBS[name].values.default or not {name, KNOBS[name].part_of} & covered
    ]
    phrases = [change.text for change in changes]
    phrases += [knob_text(name, getattr(after.knobs, name)) for name in uncovered]
    text = ", ".join(phrases) or "The same setting"
    return text[0].upper() + text[1:]


def knob_text(name: str, value: Any) -> str:
    """Return the value of one knob as a phrase.

    >>> from memexplore.run.knobs.precision import Precision
    >>> knob_text("accumulation", 4), knob_text("precision", Precision.BF16), knob_text("batch", None)
    ('accumulation over 4 micro-batches', 'bf16 autocast', 'batch as written')
    """
    knob = KNOBS[name]
    return f"{knob.noun} {AS_WRITTEN}" if value == knob.values.default else knob.phrase(value)


def _changed_fields(before: Knobs, after: Knobs) -> list[str]:
    changed = before.changed() | after.changed()
    return [name for name in changed if getattr(before, name) != getattr(after, name)]


def link_sentence(outcome: Outcome) -> str:
    """Return what each GPU sends in a step and how long that takes beside the computing; empty on one GPU.

    >>> from memexplore.run.programs.outcome import Outcome
    >>> one = Outcome(Knobs(gpus=2), "H100 SXM", 0, True, 0, 0, 0, 0.002, 1, gpus=2, sent=450 * 10**6,
    ...               compute_seconds=0.002, link_seconds=0.001)
    >>> link_sentence(one)
    'Each of 2 GPUs sends 429 MiB a step: 1 ms by NVLink at full rate, beside 2 ms of computing'
    """
    if outcome.gpus == 1:
        return ""
    gpu = catalogue.find(outcome.gpu)
    links = links_of(gpu.key, gpu.compute_capability)
    names = links.node.name if outcome.gpus <= GPUS_OF_A_NODE else f"{links.node.name} and {links.network.name}"
    return (
        f"Each of {outcome.gpus} GPUs sends {size_text(outcome.sent)} a step: {_time_text(outcome.link_seconds)} by "
        f"{names} at full rate, beside {_time_text(outcome.compute_seconds)} of computing"
    )


def _time_text(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def out_of_memory(tape: Tape) -> int:
    """Return the bytes that a step out of memory needed at least: allocated plus requested; 0 if it fits.

    >>> from memexplore.tape import Meta, Source
    >>> from memexplore.tape import Action
    >>> tape = Tape.from_columns({"action": [Action.ALLOC, Action.OOM], "address": [0, -1], "size": [1024, 4096]},
    ...                          meta=Meta(Source.PREDICTED, "Tesla T4"))
    >>> out_of_memory(tape)
    5120
    """
    row = failed_request(tape)
    if row < 0:
        return 0
    return int(curves.curve(tape, "allocated")[row]) + int(tape.size[row])


def _peaks(before: Tape, after: Tape, whole: tuple[Outcome, Outcome] | None) -> str:
    needed = [0, 0] if whole else [out_of_memory(tape) for tape in (before, after)]
    peaks = [more or curves.peak(tape)[0] for more, tape in zip(needed, (before, after), strict=True)]
    if whole:
        peaks = [measured.peak_allocated for measured in whole]
    sizes = [size_text(size) for size in peaks]
    numbers, units = zip(*(text.split(" ") for text in sizes), strict=True)
    first = numbers[0] if units[0] == units[1] else sizes[0]
    over = ["over " if more else "" for more in needed]
    if peaks[0] == peaks[1]:
        return f"peak {over[1]}{sizes[1]} as before"
    percent = f" ({percent_text(peaks[1] / peaks[0])})" if peaks[0] and not any(needed) else ""
    return f"peak {over[0]}{first} → {over[1]}{sizes[1]}{percent}"


def percent_text(ratio: float) -> str:
    """Return a ratio as a change in per cent, with its sign.

    >>> percent_text(0.47), percent_text(1.3), percent_text(1.001), percent_text(20)
    ('−53 %', '+30 %', '+0.1 %', '+1,900 %')
    """
    share = (ratio - 1) * 100
    digits = 0 if abs(share) >= 0.95 or not share else 1 if abs(share) >= 0.05 else 2
    return f"{'−' if share < 0 else '+'}{abs(share):,.{digits}f} %"


def _flops(before: Execution, after: Execution, whole: tuple[Outcome, Outcome] | None) -> str:
    if not whole and not (fits(before.tape) and fits(after.tape)):
        return ""
    # Per sample if the number of samples is given: a larger batch is more work in any case.
    first, second = map(flops_of_sample, whole) if whole else (before.cost.flops, after.cost.flops)
    if not first or not second:
        return ""
    ratio = second / first
    if abs(ratio - 1) < 0.005:
        return ""
    only_recomputes = all(KNOBS[name].adds_only_recomputation for name in _changed_fields(before.knobs, after.knobs))
    if ratio >= 1.995:
        return f"{ratio:.{1 if ratio < 9.95 else 0}f} times the FLOPs"
    share = abs(ratio - 1) * 100
    if ratio < 1:
        return f"{share:.0f} % fewer FLOPs"
    return f"recomputes {share:.0f} % more FLOPs" if only_recomputes else f"{share:.0f} % more FLOPs"
