"""Settings of a search as text, and on which GPUs they run."""

from __future__ import annotations

from memexplore.run.knobs.gpus import several
from memexplore.run.knobs.knob import Group
from memexplore.run.knobs.knobs import KNOBS, Knobs

_MAX_NAMES = 3
"""More layers than these are given by the first and the last name."""


def setting_text(knobs: Knobs) -> str:
    """Return a setting as text, with the first and the last name of more than three layers.

    >>> setting_text(Knobs(frozen=["embed", "layers.0", "layers.1", "layers.2"], batch=4))
    'batch 4, frozen embed … layers.2 (4 layers)'
    >>> setting_text(Knobs(gpu="H200", checkpoint="sqrt"))
    'a larger GPU, H200, with checkpoint sqrt'
    >>> setting_text(Knobs(gpus=4, strategy="fsdp2", checkpoint="sqrt"))
    '4 GPUs with strategy fsdp2, with checkpoint sqrt'
    """
    if on_other_gpus(knobs):
        rest = knobs.replace(gpu=None).without(Group.SEVERAL_GPUS)
        return _gpus_text(knobs) + (f", with {setting_text(rest)}" if rest != Knobs() else "")
    short: dict[str, tuple[str, ...]] = {}
    for field in ("frozen", "lora"):
        names = getattr(knobs, field)
        if len(names) > _MAX_NAMES:
            short[field] = (f"{names[0]} … {names[-1]} ({len(names)} layers)",)
    return str(knobs.replace(**short))


def on_other_gpus(knobs: Knobs) -> bool:
    """Return whether a setting is for another GPU than the given one, or for several."""
    return knobs.gpu is not None or several(knobs)


def _gpus_text(knobs: Knobs) -> str:
    if not several(knobs):
        return f"a larger GPU, {knobs.gpu}"
    shared = {name: value for name, value in knobs.changed().items() if KNOBS[name].group is Group.SEVERAL_GPUS}
    return f"{knobs.gpus} GPUs{f', {knobs.gpu},' if knobs.gpu else ''} with {Knobs(**shared).replace(gpus=None)}"


def on_base(knobs: Knobs, base: Knobs) -> Knobs:
    """Return a setting with the GPU, the batch and the input size of another, where it does not name its own.

    >>> str(on_base(Knobs(accumulation=2), Knobs(batch=64, gpu="T4"))), str(on_base(Knobs(batch=8), Knobs(batch=64)))
    ('batch 64, accumulation 2, gpu T4', 'batch 8')
    """
    given = {name: getattr(base, name) for name in ("gpu", "batch", "input_size") if getattr(knobs, name) is None}
    return knobs.replace(**given)
