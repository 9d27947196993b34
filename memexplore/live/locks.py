"""Knobs that cannot be switched while a loop runs: facts about the run go in, one sentence for each knob comes out."""

from __future__ import annotations

from typing import NamedTuple

from memexplore.knobs.choices import Precision
from memexplore.knobs.conflicts import conflicts
from memexplore.knobs.knobs import Knobs
from memexplore.knobs.layouts import ON_ONE_GPU
from memexplore.knobs.precision import AUTOCAST

_LOADER = "comes from the loop's data loader"
_ALWAYS = {
    "batch": f"The batch {_LOADER}: change it there and start again.",
    "input_size": f"The size of the inputs {_LOADER}: change it there and start again.",
    "optimizer": "The optimizer holds state for its weights: make another one and start again.",
    "update": "The optimizer was made with its implementation of the update: make another one and start again.",
    "zero_grad": "The loop itself calls zero_grad: change its argument there.",
    "frozen": "Frozen layers need an optimizer without their weights: freeze them and start again.",
    "lora": "Adapters are new weights, which need an optimizer of their own: add them and start again.",
    "mode": "A loop that trains cannot switch to inference: its backward pass would have nothing to do.",
    "settings": "The allocator reads its settings once in a process: set PYTORCH_CUDA_ALLOC_CONF and start again.",
    "gpu": "The model is on its device: choose another one and start again.",
    **dict.fromkeys(
        ON_ONE_GPU,
        "The processes of the loop are running: start it again on other GPUs with torchrun.",
    ),
    "variables": "Variables belong to a notebook cell: run the cell again with other values.",
}
_ALL_BF16 = "Weights in bf16 need a new optimizer: cast the model and start again."
_LOOP = {
    "precision": "The loop does not use live.autocast(), live.backward(loss) and live.step(optimizer): write them in "
    "the loop, see help(live.autocast).",
    "accumulation": "The loop does not use live.micro_batches(batch) and live.backward(loss): write them in the loop, "
    "see help(live.micro_batches).",
}
_MODEL_FIELDS = ("inplace", "checkpoint", "offload", "memory_format")
_LAYOUT = "{} needs weights and its own tensors in one memory format: set it before, and start again."


class Facts(NamedTuple):
    """Facts about a watched run that lock knobs."""

    no_model: str = ""
    """Why the run has no model that can be changed, as a sentence, "" if it has one."""
    loop: frozenset[str] = frozenset()
    """Fields and settings of the training loop that it follows, as `needs` names them."""
    layout_kept_by: str = ""
    """What needs the memory format of the weights as it is, "" if nothing does."""


def needs(knobs: Knobs) -> dict[str, str]:
    """Return what a training loop must follow for a setting: a field, or ``fp16``; and the field that it belongs to.

    >>> needs(Knobs(precision="fp16", accumulation=2))
    {'precision': 'precision', 'fp16': 'precision', 'accumulation': 'accumulation'}
    """
    found = {}
    if knobs.precision in AUTOCAST:
        found["precision"] = "precision"
    if knobs.precision is Precision.FP16:
        found["fp16"] = "precision"
    if knobs.accumulation is not None:
        found["accumulation"] = "accumulation"
    return found


def why_locked(knobs: Knobs, facts: Facts) -> str:
    """Return why a setting cannot be switched on while the loop runs, as one sentence, "" if it can.

    >>> why_locked(Knobs(batch=8), Facts())
    "The batch comes from the loop's data loader: change it there and start again."
    >>> why_locked(Knobs(checkpoint="sqrt"), Facts())
    ''
    """
    changed = knobs.changed()
    for field in changed:
        if field in _ALWAYS:
            return _ALWAYS[field]
    if knobs.precision is Precision.ALL_BF16:
        return _ALL_BF16
    of_model = [field for field in _MODEL_FIELDS if field in changed]
    if of_model or knobs.precision is Precision.OFF:
        if facts.no_model:
            return facts.no_model
        if "memory_format" in of_model and facts.layout_kept_by:
            return _LAYOUT.format(facts.layout_kept_by)
    for need, field in needs(knobs).items():
        if need not in facts.loop:
            return _LOOP[field]
    return "; ".join(conflicts(knobs))


def locked(facts: Facts) -> dict[str, str]:
    """Return the sentence for each locked field of `Knobs`, and for each locked precision as ``precision fp16``.

    >>> sorted(name for name in locked(Facts()) if name not in _ALWAYS)
    ['accumulation', 'precision all bf16', 'precision bf16', 'precision fp16']
    """
    tried = {
        "inplace": Knobs(inplace="on"),
        "checkpoint": Knobs(checkpoint="sqrt"),
        "offload": Knobs(offload="saved tensors on the CPU"),
        "memory_format": Knobs(memory_format="channels last"),
        "accumulation": Knobs(accumulation=2),
        **{str(Knobs(precision=each)): Knobs(precision=each) for each in Precision if each is not Precision.AS_WRITTEN},
    }
    found = {name: why_locked(knobs, facts) for name, knobs in tried.items()}
    return _ALWAYS | {name: sentence for name, sentence in found.items() if sentence}
