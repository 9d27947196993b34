"""Facts about applied knobs as plain values: changes with counts, skipped sites with reasons, notes."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class Unit(enum.Enum):
    """Unit of a `Count`."""

    WEIGHT = "weight"
    LINEAR_LAYER = "linear layer"
    RANK = "rank of the adapters"
    ACTIVATION = "activation in place"
    BLOCK = "block"
    NAMED_LAYER = "named layer"
    SEGMENT = "segment"
    NORMALISATION = "normalisation"
    ACTIVATION_FUNCTION = "activation function"
    SAMPLE = "sample of a micro-batch"
    GRAD_SCALER = "gradient scaler"


class Count(NamedTuple):
    """How many items of a unit a knob changed, and out of how many candidates (None without candidates)."""

    unit: Unit
    number: int
    total: int | None = None


class Change(NamedTuple):
    """One applied knob: the field of `Knobs`, its value, and counts.

    >>> Change("batch", 16)
    Change(field='batch', value=16, counts=())
    """

    field: str
    value: Any
    counts: tuple[Count, ...] = ()

    def count_of(self, unit: Unit) -> Count | None:
        """Return the count of a unit, None if the change has none."""
        return next((count for count in self.counts if count.unit is unit), None)


class Skipped(NamedTuple):
    """A site that a knob left as written, with the reason as a clause."""

    site: str
    reason: str


class NoteKind(enum.Enum):
    """Subject of a `Note`; the comment after a member names the note's details."""

    LOOP_FIELD = "field of the training loop"  # the field with its value, as text
    BATCH_NORM_PER_MICRO_BATCH = "batch norm per micro-batch"
    NO_IMAGE_WEIGHTS = "no weights of four dimensions"
    OFFLOAD_ON_CPU = "offload of a model on the CPU"
    GRAD_SCALER_NEEDED = "gradient scaler needed"  # device type
    OPTIMIZER_INSIDE_BLOCK = "optimizer inside the block"
    FROZEN_BATCH_NORM = "batch norm in frozen layers"
    ADAPTERS_ARE_TEMPORARY = "adapters are temporary"
    SHARED_WEIGHT = "shared weight"  # layer, names of the other weights
    IN_PLACE_DROPOUT = "random numbers of in-place dropout"
    IN_PLACE_ROUNDING = "rounding of in-place ELU"
    STATISTICS_ONCE = "running statistics move once"
    NO_KEY_VALUE_CACHE = "no key-value cache"
    BUFFERS_WRITTEN_TWICE = "buffers written twice"  # block
    SEPARATE_SEGMENTS = "blocks in segments of their own"  # names of the blocks
    NO_FLOPS = "FLOPs unknown"  # name of the exception, its message


class Note(NamedTuple):
    """Information for the user in addition to the changes, such as that batch norm sees single micro-batches."""

    kind: NoteKind
    details: tuple[str, ...] = ()
