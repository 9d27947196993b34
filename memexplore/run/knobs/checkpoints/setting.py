"""The value of the checkpoint knob: which activations are recomputed in backward."""

from __future__ import annotations

import dataclasses
import enum


class CheckpointKind(enum.Enum):
    """Which activations are freed after forward and recomputed in backward."""

    AS_WRITTEN = "as written"
    NONE = "none"
    EVERY = "every"
    SQRT = "sqrt"
    LAYERS = "layers"
    KEEP_MATMULS = "keep matmuls"
    NORMS = "norms"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An activation-checkpointing setting.

    As text: `as written`, `none`, `every 2`, `sqrt`, `layers encoder.0 encoder.1`, `keep matmuls` or `norms`.

    `every k` recomputes every k-th repeated block, `sqrt` splits the N blocks into √N segments, `layers` recomputes the
    named layers, `keep matmuls` recomputes all blocks except their matrix products and convolutions, `norms` recomputes
    only normalisations and activation functions.

    >>> Checkpoint.parse("every 2")
    Checkpoint(kind=<CheckpointKind.EVERY: 'every'>, every=2, layers=())
    >>> str(Checkpoint.parse("layers b a"))
    'layers b a'
    """

    kind: CheckpointKind = CheckpointKind.AS_WRITTEN
    every: int = 1
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every={self.every!r} is not a positive integer; write 1 or more")
        if (self.kind is CheckpointKind.LAYERS) != bool(self.layers):
            raise ValueError("layers= and kind LAYERS go together; name at least one layer, or choose another kind")

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """Return the setting of a text. Raises ValueError, with the possible texts, for any other text."""
        first, *rest = text.split() or [""]
        if first == "every" and len(rest) == 1 and rest[0].isdecimal() and int(rest[0]) > 0:
            return cls(CheckpointKind.EVERY, int(rest[0]))
        if first == "layers" and rest:
            return cls(CheckpointKind.LAYERS, layers=tuple(rest))
        plain = {
            kind.value: kind for kind in CheckpointKind if kind not in (CheckpointKind.EVERY, CheckpointKind.LAYERS)
        }
        if text not in plain:
            raise ValueError(
                f"checkpoint={text!r} is not a setting; write one of {', '.join(plain)}, 'every 2', 'layers NAME NAME'"
            )
        return cls(plain[text])

    def __str__(self) -> str:
        if self.kind is CheckpointKind.EVERY:
            return f"every {self.every}"
        return " ".join([self.kind.value, *self.layers])
