"""English text of the facts in an `ApplyReport`: a phrase for each change, a sentence for each note."""

from __future__ import annotations

import enum
from collections.abc import Callable

from memexplore.knobs.choices import CheckpointKind, InPlace, Mode, Precision, Strategy, Update
from memexplore.knobs.facts import Change, Note, NoteKind, Unit


def change_text(change: Change) -> str:
    """Return a phrase for a change, such as "Checkpointing 16 of 16 blocks".

    >>> from memexplore.knobs.facts import Count
    >>> change_text(Change("frozen", ("0",), (Count(Unit.WEIGHT, 2),)))
    '2 weights frozen'
    >>> change_text(Change("optimizer", "Adam"))
    'Adam'
    """
    write = _WRITERS.get(change.field)
    if write is not None:
        return write(change)
    return str(change.value.value if isinstance(change.value, enum.Enum) else change.value)


def note_text(note: Note) -> str:
    """Return a note as a sentence.

    >>> note_text(Note(NoteKind.FROZEN_BATCH_NORM))
    'Batch norm in frozen layers still updates its running statistics.'
    """
    if note.kind is NoteKind.SHARED_WEIGHT:
        layer, *weights = note.details
        return f"{layer} shares its weight with {', '.join(weights)}: that weight is frozen there too."
    if note.kind is NoteKind.SEPARATE_SEGMENTS:
        names = ", ".join(note.details[:3]) + ", …" * (len(note.details) > 3)
        return f"Blocks not called with the result of the block before begin a segment of their own: {names}."
    return _NOTES[note.kind].format(*note.details)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural.

    >>> counted(1, "layer"), counted(2, "layer"), counted(3, "micro-batch")
    ('1 layer', '2 layers', '3 micro-batches')
    """
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def _checkpoint(change: Change) -> str:
    kind = change.value.kind
    if kind is CheckpointKind.NONE:
        return "No checkpointing"
    if kind is CheckpointKind.NORMS:
        units = Unit.NORMALISATION, Unit.ACTIVATION_FUNCTION
        counts = [count for unit in units if (count := change.count_of(unit)) is not None]
        return "Recomputing " + (" and ".join(counted(count.number, count.unit.value) for count in counts) or "nothing")
    named = kind is CheckpointKind.LAYERS
    count = change.count_of(Unit.NAMED_LAYER if named else Unit.BLOCK)
    number, total = (count.number, count.total) if count is not None else (0, 0)
    noun = f"named layer{'' if total == 1 else 's'}" if named else "blocks"
    text = f"Checkpointing {number} of {total} {noun}"
    segments = change.count_of(Unit.SEGMENT)
    if kind is CheckpointKind.KEEP_MATMULS and total:
        text += ", keeping the results of matrix products"
    return f"{text} in {counted(segments.number, 'segment')}" if segments is not None else text


def _in_place(change: Change) -> str:
    count = change.count_of(Unit.ACTIVATION)
    if count is not None:
        return f"In-place at {count.number} of {count.total} activations"
    words = "In-place activations" if change.value is InPlace.ON else "No in-place activations"
    return f"{words}, chosen at the first call"


def _precision(change: Change) -> str:
    if change.value is Precision.ALL_BF16:
        return "all in bf16"
    if change.value is Precision.OFF:
        return "no autocast"
    return f"{change.value.value} autocast" + " with GradScaler" * (change.count_of(Unit.GRAD_SCALER) is not None)


STRATEGY_NAMES: dict[enum.Enum, str] = {
    Strategy.DDP: "DDP",
    Strategy.FSDP2: "FSDP2",
    Strategy.FSDP2_NO_RESHARD: "FSDP2 without resharding after forward",
    Strategy.HSDP: "HSDP",
    Strategy.ZERO_1: "DDP with ZeRO-1",
}


def _strategy(change: Change) -> str:
    count = change.count_of(Unit.BLOCK)
    return STRATEGY_NAMES[change.value] + (f" of {counted(count.number, 'block')}" if count and count.number else "")


def _number(change: Change, unit: Unit) -> int:
    count = change.count_of(unit)
    return count.number if count is not None else 0


_WRITERS: dict[str, Callable[[Change], str]] = {
    "checkpoint": _checkpoint,
    "inplace": _in_place,
    "precision": _precision,
    "frozen": lambda change: f"{counted(_number(change, Unit.WEIGHT), 'weight')} frozen",
    "lora": lambda change: (
        f"LoRA of rank {_number(change, Unit.RANK)} on {counted(_number(change, Unit.LINEAR_LAYER), 'linear layer')}"
    ),
    "batch": lambda change: f"batch of {change.value}",
    "accumulation": lambda change: f"{change.value} micro-batches of {_number(change, Unit.SAMPLE)}",
    "input_size": lambda change: f"input size {change.value}",
    "update": lambda change: (
        "optimizer step in backward" if change.value is Update.IN_BACKWARD else f"{change.value.value} update"
    ),
    "zero_grad": lambda change: f"gradients {change.value.value}",
    "gpus": lambda change: f"{change.value} GPUs",
    "strategy": _strategy,
    "tensor_parallel": lambda change: f"each layer on {change.value} GPUs",
    "fsdp_precision": lambda change: f"FSDP2 in {change.value.value}",
    "mode": lambda change: "inference" if change.value is Mode.INFERENCE else str(change.value.value),
}
"""Field of `Knobs` -> its phrase; other fields are written as their value."""

_NOTES = {
    NoteKind.LOOP_FIELD: "{} belongs to the training loop: apply changes only the model.",
    NoteKind.BATCH_NORM_PER_MICRO_BATCH: (
        "Batch norm sees one micro-batch at a time: losses and gradients differ from those of the whole batch."
    ),
    NoteKind.NO_IMAGE_WEIGHTS: "No weight has four dimensions: only inputs change their memory format.",
    NoteKind.OFFLOAD_ON_CPU: "The model is on the CPU: no tensor had to be moved there.",
    NoteKind.GRAD_SCALER_NEEDED: (
        'fp16 needs torch.amp.GradScaler("{}") for the loss and the optimizer of the loop, or small gradients become '
        "zero."
    ),
    NoteKind.OPTIMIZER_INSIDE_BLOCK: (
        "Make the optimizer inside the block: one made before has a state of another type than the weights."
    ),
    NoteKind.FROZEN_BATCH_NORM: "Batch norm in frozen layers still updates its running statistics.",
    NoteKind.ADAPTERS_ARE_TEMPORARY: (
        "The adapters are new weights and removed after the block: make the optimizer inside it, and save "
        "model.state_dict() before it ends."
    ),
    NoteKind.IN_PLACE_DROPOUT: (
        "In-place dropout draws other random numbers on a GPU than the kernel that runs out of place."
    ),
    NoteKind.IN_PLACE_ROUNDING: (
        "In-place ELU, SELU and CELU compute their gradient from their output: its last bits differ."
    ),
    NoteKind.STATISTICS_ONCE: (
        "Batch norm's running statistics move once a step, as without checkpoints; plain torch.utils.checkpoint moves "
        "them twice."
    ),
    NoteKind.NO_KEY_VALUE_CACHE: "Recomputed blocks get no key-value cache, as in transformers.",
    NoteKind.BUFFERS_WRITTEN_TWICE: (
        "{} writes to its buffers in forward and again in the recomputation: gradients may differ, as with plain "
        "torch.utils.checkpoint."
    ),
    NoteKind.NO_FLOPS: "FLOPs are unknown, since no virtual GPU can run this step: {}: {}",
}
