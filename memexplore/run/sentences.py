"""Sentences about runs: the effect of changed knobs on peak and FLOPs, and where the numbers come from.

Whether a setting fits is said by `analysis.verdict_content` alone.
"""

from __future__ import annotations

import math
from typing import Any

from memexplore.hardware import catalogue
from memexplore.hardware.links import links_of
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.knobs.values import AS_WRITTEN
from memexplore.run.programs.outcome import Outcome, flops_of_sample
from memexplore.run.run import Run
from memexplore.tape import Source
from memexplore.text.units import size_text
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE


def sentence(before: Run, after: Run) -> str:
    """Return the effect of changed knobs on peak and FLOPs as one sentence; the peaks are those of the whole runs.

    If one of the two runs was measured, the sentence says how the second was obtained.

    >>> import torch
    >>> from memexplore.run.machine import machine_of
    >>> from memexplore.run.programs.step import Step
    >>> from memexplore.run.run import run
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(8192, 1024), loss=torch.mean)
    >>> sentence(*(run(step, knobs, machine_of("T4")) for knobs in (Knobs(), Knobs(batch=4096))))
    'Batch of 4096: peak 116 → 84.3 MiB (−28 %)'
    """
    parts = [_peaks(before.outcome, after.outcome), _flops(before, after)]
    text = f"{change(before, after)}: " + ", ".join(filter(None, parts))
    measured = Source.MEASURED in (before.tape.meta.source, after.tape.meta.source)
    return " · ".join(filter(None, (text, link_sentence(after.outcome), origin(after) if measured else "")))


def first_sentence(result: Run) -> str:
    """Return the setting of a run as a sentence, with the device and the time of a measured one."""
    text = str(result.knobs)
    measured = f" · {origin(result)}" if result.tape.meta.source is Source.MEASURED else ""
    return f"{text[0].upper()}{text[1:]}{measured}"


def origin(result: Run) -> str:
    """Return how the numbers of a run were obtained: measured, and on which device, or predicted."""
    meta = result.tape.meta
    if meta.source is not Source.MEASURED:
        return str(meta.source)
    where = f"this machine's {'CPU' if meta.device == 'cpu' else meta.device}"
    if not result.fits:
        return f"measured on {where} up to there, what it would need is predicted"
    if math.isnan(result.seconds):
        return f"measured on {where}"
    return f"measured on {where}, {_time_text(result.seconds)} a step"


def change(before: Run, after: Run) -> str:
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
    >>> one = Outcome(Knobs(gpus=2), "H100 SXM", 0, True, 0, 0, 0, 0, 0.002, 1, gpus=2, sent=450 * 10**6,
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


def _peaks(before: Outcome, after: Outcome) -> str:
    first, second = before.peak_allocated, after.peak_allocated
    if first == second:
        return f"peak {size_text(second)} as before"
    numbers, units = zip(*(size_text(size).split(" ") for size in (first, second)), strict=True)
    shown = numbers[0] if units[0] == units[1] else size_text(first)
    percent = f" ({percent_text(second / first)})" if first else ""
    return f"peak {shown} → {size_text(second)}{percent}"


def percent_text(ratio: float) -> str:
    """Return a ratio as a change in per cent, with its sign.

    >>> percent_text(0.47), percent_text(1.3), percent_text(1.001), percent_text(20)
    ('−53 %', '+30 %', '+0.1 %', '+1,900 %')
    """
    share = (ratio - 1) * 100
    digits = 0 if abs(share) >= 0.95 or not share else 1 if abs(share) >= 0.05 else 2
    return f"{'−' if share < 0 else '+'}{abs(share):,.{digits}f} %"


def _flops(before: Run, after: Run) -> str:
    # Per sample: a larger batch is more work in any case.
    first, second = flops_of_sample(before.outcome), flops_of_sample(after.outcome)
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
