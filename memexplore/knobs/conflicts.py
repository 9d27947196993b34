"""Contradictions in a setting, as sentences that say what to write instead."""

from __future__ import annotations

from memexplore.knobs import layouts
from memexplore.knobs.choices import Mode, Optimizer, Precision, Update, ZeroGrad
from memexplore.knobs.knobs import Knobs


def refuse_conflicts(knobs: Knobs) -> None:
    """Raise ValueError with a sentence for each contradiction in a setting."""
    wrong = conflicts(knobs)
    if wrong:
        raise ValueError("; ".join(wrong))


def conflicts(knobs: Knobs) -> list[str]:
    """Return a sentence for each contradiction in a setting; an empty list if it can run.

    >>> conflicts(Knobs(update="in backward", accumulation=2))
    ['update in backward frees each gradient at once: accumulation=2 needs them until the last micro-batch']
    >>> conflicts(Knobs(update="in backward", accumulation=1))
    []
    """
    found = list(layouts.layout_conflicts(knobs))
    count = knobs.accumulation or 1
    if knobs.batch is not None and knobs.batch % count:
        found.append(f"accumulation={count} does not divide batch={knobs.batch}; write one of its divisors")
    if knobs.mode is Mode.INFERENCE:
        return found
    if knobs.update is Update.IN_BACKWARD:
        frees = "update in backward frees each gradient at once"
        if count > 1:
            found.append(f"{frees}: accumulation={count} needs them until the last micro-batch")
        if knobs.precision is Precision.FP16:
            found.append(f"{frees}: fp16's GradScaler looks at all of them before the step, bf16 needs none")
        if knobs.zero_grad is ZeroGrad.TO_ZERO:
            found.append(f"{frees}: zero_grad='set to zero' finds none")
    if knobs.update is Update.FUSED and knobs.optimizer is Optimizer.ADAFACTOR:
        found.append("Adafactor has no fused update; write update= one of 'foreach', 'per tensor', 'in backward'")
    return found
