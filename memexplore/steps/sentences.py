"""Sentences about trials: the effect of changed knobs on peak and FLOPs, and where the numbers come from.

Whether a setting fits is said by `analysis.verdict_content` alone.
"""

from __future__ import annotations

import enum
import math
from typing import Any

from memexplore import gpu_catalogue
from memexplore.analysis import curves
from memexplore.analysis.verdict import failed_request
from memexplore.gpu_links import links_of
from memexplore.knobs.choices import CheckpointKind, FsdpOffload, FsdpPrecision, InPlace, Mode, Precision
from memexplore.knobs.facts import Change
from memexplore.knobs.knobs import Knobs
from memexplore.knobs.layouts import ON_ONE_GPU
from memexplore.knobs.report_text import STRATEGY_NAMES, change_text
from memexplore.steps.out_of_memory import fits
from memexplore.steps.outcome import Outcome, flops_of_sample
from memexplore.steps.trial import Trial
from memexplore.tape import Source, Tape
from memexplore.units import size_text
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE

_FIELDS_THAT_KEEP_FLOPS = {
    "gpu",
    "settings",
    "optimizer",
    "update",
    "zero_grad",
    "inplace",
    "memory_format",
    "offload",
} | {*ON_ONE_GPU}
"""Fields that leave the FLOPs of forward and backward as they are; additional FLOPs then come from recomputation."""
_VALUE_TEXTS: dict[enum.Enum, str] = {
    InPlace.ON: "In-place activations",
    InPlace.OFF: "Activations not in place",
    Precision.OFF: "No mixed precision",
    Precision.FP16: "Mixed precision in fp16",
    Precision.BF16: "Mixed precision in bf16",
    Precision.ALL_BF16: "Everything in bf16",
    Mode.INFERENCE: "Inference only",
    **STRATEGY_NAMES,
    FsdpPrecision.REDUCED_IN_FP32: "FSDP2 in bf16, gradients reduced in fp32",
    FsdpPrecision.BF16: "FSDP2 in bf16",
    FsdpOffload.SHARDS: "Shards on the CPU",
}
_FIELD_NOUNS = {
    "inplace": "in-place activations",
    "checkpoint": "checkpointing",
    "gpu": "GPU",
    "lora": "LoRA",
    "zero_grad": "zero_grad",
    "settings": "allocator settings",
    "accumulation": "micro-batches",
    "mode": "training",
    "gpus": "GPUs",
    "fsdp_precision": "precision of FSDP2",
    "fsdp_offload": "offload of FSDP2",
}


def sentence(before: Trial, after: Trial, whole: tuple[Outcome, Outcome] | None = None) -> str:
    """Return the effect of changed knobs on peak and FLOPs as one sentence.

    `whole` are the outcomes of both settings with unlimited memory; without them, the peak of a step that ran out of
    memory is given as "over" what it reached, and what several GPUs send is left out. If one of the two trials was
    measured, the sentence says how the second was obtained.

    >>> from memexplore.knobs.report import ApplyReport
    >>> from memexplore.steps.cost import Cost
    >>> from memexplore.tape import Meta, Source
    >>> meta = Meta(Source.PREDICTED, "Tesla T4", gpu="T4", capacity=16384)
    >>> before, after = (Tape.from_columns({"address": [0], "size": [size]}, meta=meta) for size in (8192, 4096))
    >>> sentence(Trial(Knobs(), before, ApplyReport(), Cost()), Trial(Knobs(batch=4), after, ApplyReport(), Cost()))
    'Batch 4: peak 8.00 → 4.00 KiB (−50 %)'

    Raises ValueError for a tape without addresses.
    """
    parts = [_peaks(before.tape, after.tape, whole), _flops(before, after, whole)]
    text = f"{change(before, after)}: " + ", ".join(part for part in parts if part)
    measured = Source.MEASURED in (before.tape.meta.source, after.tape.meta.source)
    link = link_sentence(whole[1]) if whole else ""
    return " · ".join(filter(None, (text, link, origin(after) if measured else "")))


def first_sentence(trial: Trial) -> str:
    """Return the setting of a trial as a sentence, with the device and the time of a measured one.

    >>> from memexplore.knobs.report import ApplyReport
    >>> from memexplore.steps.cost import Cost
    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [512]}, meta=Meta(Source.PREDICTED, "Tesla T4"))
    >>> first_sentence(Trial(Knobs(), tape, ApplyReport(), Cost()))
    'As written'
    """
    text = str(trial.knobs)
    measured = f" · {origin(trial)}" if trial.tape.meta.source is Source.MEASURED else ""
    return f"{text[0].upper()}{text[1:]}{measured}"


def origin(trial: Trial) -> str:
    """Return how the numbers of a trial were obtained: measured, and on which device, or predicted.

    >>> from memexplore.knobs.report import ApplyReport
    >>> from memexplore.steps.cost import Cost
    >>> from memexplore.tape import Meta
    >>> tape = Tape.from_columns({"address": [0], "size": [512]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> origin(Trial(Knobs(), tape, ApplyReport(), Cost(), seconds=0.0123))
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


def change(before: Trial, after: Trial) -> str:
    """Return the difference between two settings as text: applied changes first, then other changed knobs."""
    texts = set(before.applied.texts)
    changes = [change for change in after.applied.changes if change_text(change) not in texts]
    uncovered = [
        name
        for name in _changed_fields(before.knobs, after.knobs)
        if getattr(after.knobs, name) == getattr(Knobs(), name) or name not in _fields_of(changes)
    ]
    phrases = [change_text(change) for change in changes]
    phrases += [knob_text(name, getattr(after.knobs, name)) for name in uncovered]
    text = ", ".join(phrases) or "The same setting"
    return text[0].upper() + text[1:]


def _fields_of(changes: list[Change]) -> set[str]:
    """Return the fields of `Knobs` that changes cover."""
    fields = {change.field for change in changes}
    return fields | {"lora_rank"} if "lora" in fields else fields


def knob_text(name: str, value: Any) -> str:
    """Return the value of one knob as a phrase.

    >>> knob_text("accumulation", 4), knob_text("precision", Precision.BF16), knob_text("batch", None)
    ('4 micro-batches', 'Mixed precision in bf16', 'batch as written')
    """
    noun = _FIELD_NOUNS.get(name, name.replace("_", " "))
    if value == getattr(Knobs(), name):
        return f"{noun} as written"
    if isinstance(value, enum.Enum):
        return str(_VALUE_TEXTS.get(value, value.value))
    if name == "gpus":
        return f"{value} GPU{'s' if value > 1 else ''}"
    if name == "accumulation":
        return f"{value} micro-batch{'es' if value > 1 else ''}"
    if name == "variables":
        return ", ".join(f"{variable} = {assigned!r}" for variable, assigned in value)
    if name == "settings":
        return str(value)
    if name == "checkpoint" and value.kind is CheckpointKind.NONE:
        return "no checkpointing"
    if name in ("frozen", "lora"):
        return f"{noun} on {len(value)} layer{'s' if len(value) > 1 else ''}"
    return f"{noun} {value}"


def _changed_fields(before: Knobs, after: Knobs) -> list[str]:
    names = [name for name in before.changed() | after.changed() if getattr(before, name) != getattr(after, name)]
    return [*names, "lora_rank"] if before.lora_rank != after.lora_rank and after.lora else names


def link_sentence(outcome: Outcome) -> str:
    """Return what each GPU sends in a step and how long that takes beside the computing; empty on one GPU.

    >>> from memexplore.steps.outcome import Outcome
    >>> one = Outcome(Knobs(gpus=2), "H100 SXM", 0, True, 0, 0, 0, 0.002, 1, gpus=2, sent=450 * 10**6,
    ...               compute_seconds=0.002, link_seconds=0.001)
    >>> link_sentence(one)
    'Each of 2 GPUs sends 429 MiB a step: 1 ms by NVLink at full rate, beside 2 ms of computing'
    """
    if outcome.gpus == 1:
        return ""
    gpu = gpu_catalogue.find(outcome.gpu)
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


def _flops(before: Trial, after: Trial, whole: tuple[Outcome, Outcome] | None) -> str:
    if not whole and not (fits(before.tape) and fits(after.tape)):
        return ""
    # Per sample if the number of samples is given: a larger batch is more work in any case.
    first, second = map(flops_of_sample, whole) if whole else (before.cost.flops, after.cost.flops)
    if not first or not second:
        return ""
    ratio = second / first
    if abs(ratio - 1) < 0.005:
        return ""
    only = set(_changed_fields(before.knobs, after.knobs)) <= {"checkpoint", *_FIELDS_THAT_KEEP_FLOPS}
    if ratio >= 1.995:
        return f"{ratio:.{1 if ratio < 9.95 else 0}f} times the FLOPs"
    share = abs(ratio - 1) * 100
    if ratio < 1:
        return f"{share:.0f} % fewer FLOPs"
    return f"recomputes {share:.0f} % more FLOPs" if only else f"{share:.0f} % more FLOPs"
