"""The knob `checkpoint`: activations that are recomputed in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from memexplore.analysis.levers import recomputes
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.applying.scope import CHECKPOINTS, Feature
from memexplore.run.knobs.checkpoints.checkpointing import set_checkpoints
from memexplore.run.knobs.checkpoints.lines import checkpoint_lines
from memexplore.run.knobs.checkpoints.setting import Checkpoint, CheckpointKind
from memexplore.run.knobs.control import Control, Explored, Option, layer_names, written_option
from memexplore.run.knobs.knob import Application, Estimate, Group, Knob, ModelCode, Stage, Untouched

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.run.knobs.knobs import Knobs

_EFFECTS = {
    "keep matmuls": (1.05, 0.6),
    "norms": (1.03, 0.75),
    "every 2": (1.17, 0.65),
    "sqrt": (1.3, 0.45),
    "every 1": (1.3, 0.3),
}
"""Time and share of the activations, about, as seen on transformers."""
_OPTIONS = {
    "none": "none",
    "every 1": "every block",
    "every 2": "every 2nd block",
    "every 3": "every 3rd block",
    "every 4": "every 4th block",
    "sqrt": "√N segments",
    "layers": "chosen layers",
    "keep matmuls": "keep matmuls",
    "norms": "norms, activations",
}
"""Settings and their texts in a list."""


class CheckpointValues:
    """The settings of `Checkpoint`, given as such or as text."""

    default = Checkpoint()
    examples = tuple(map(Checkpoint.parse, ("none", "every 1", "every 2", "sqrt", "keep matmuls", "norms", "layers 0")))
    listed = "`none`, `every 2`, `sqrt`, `layers NAME NAME`, `keep matmuls`, `norms`"

    def parsed(self, name: str, value: Any) -> Checkpoint:
        """Return the setting of a text."""
        if isinstance(value, str):
            return Checkpoint.parse(value)
        if not isinstance(value, Checkpoint):
            raise ValueError(f"{name}={value!r} is not a setting; write one such as 'every 2' or 'sqrt'")
        return value

    def text(self, value: Any) -> str:
        """Return the text of a setting."""
        return str(value)

    def code(self, value: Any) -> str:
        """Return the text in quotation marks, or the call that makes a setting of layers with spaces in their names."""
        if " ".join(value.layers).split() == list(value.layers):
            return repr(str(value))
        return f"Checkpoint(CheckpointKind.LAYERS, layers={value.layers!r})"


class CheckpointKnob(Knob):
    """Activations are freed after the forward pass and recomputed in the backward pass.

    Those of every k-th repeated block, of the N blocks in √N segments, of named layers, of all blocks except their
    matrix products and convolutions, or of normalisations and activation functions alone.
    """

    name = "checkpoint"
    costs = "equal results, up to a third slower"
    values = CheckpointValues()
    place = 20
    group = Group.MODEL
    leaves = Untouched.ALL_BUT_ACTIVATIONS
    is_primary = True
    stage = Stage.RECOMPUTATION
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return the setting."""
        return "No checkpointing" if value.kind is CheckpointKind.NONE else super().phrase(value)

    def apply(self, value: Any, application: Application) -> ApplyReport:
        """Wrap `torch.utils.checkpoint` around blocks or layers."""
        return set_checkpoints(application.log, application.model, value, application.reach)

    def off(self, value: Any) -> tuple[Feature, ...]:
        """Return the checkpoints that the program makes itself."""
        return (CHECKPOINTS,)

    def layers(self, value: Any) -> tuple[str, ...]:
        """Return the named layers."""
        names: tuple[str, ...] = value.layers
        return names

    def written(self, explored: Explored) -> str:
        """Return whether the program recomputes activations itself."""
        if explored.tape is None:
            return ""
        return "as in the model" if recomputes(explored.tape) else "none"

    def controls(self, explored: Explored) -> list[Control]:
        """Return a list of the settings, and a text for the names of layers."""
        written = self.written(explored)
        options = [written_option("as written", written), *(Option(text, value) for value, text in _OPTIONS.items())]

        def updated(knobs: Knobs, text: str) -> Knobs:
            if text == "layers" and knobs.checkpoint.kind is not CheckpointKind.LAYERS:
                raise ValueError("No layer is chosen: select a layer, then its Checkpoint button")
            return knobs if text == "layers" else knobs.replace(checkpoint=Checkpoint.parse(text))

        def value_of(knobs: Knobs) -> str:
            kind = knobs.checkpoint.kind
            return str(kind.value if kind is CheckpointKind.LAYERS else knobs.checkpoint)

        def options_of(knobs: Knobs) -> list[Option]:
            # What is written is listed a second time only while it is set, as by code.
            return [option for option in options if option.label != written or option.value == value_of(knobs)]

        def with_layers(knobs: Knobs, text: str) -> Knobs:
            names = tuple(text.split())
            return knobs.replace(checkpoint=Checkpoint(CheckpointKind.LAYERS, layers=names) if names else Checkpoint())

        names = dataclasses.replace(
            layer_names(self),
            name=f"{self.name} layers",
            label="Checkpoint layers",
            other_group=Group.LAYERS.value,
            updated=with_layers,
            value_of=lambda knobs: " ".join(knobs.checkpoint.layers),
        )
        # The names of the layers say more than "chosen layers".
        is_listed = lambda knobs: knobs.checkpoint.kind is not CheckpointKind.LAYERS  # noqa: E731
        settings = Control(
            self.name, self, self.label, "choice", updated, value_of, options_of, is_primary=True, is_listed=is_listed
        )
        return [settings, names]

    def model_lines(self, value: Any, code: ModelCode) -> Iterator[str]:
        """Yield the lines of `checkpoints.lines`."""
        yield from checkpoint_lines(code.model, value)

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return the settings of repeated blocks, the cheapest first."""
        return map(Checkpoint.parse, _EFFECTS)

    def estimate(self, value: Any, estimate: Estimate) -> None:
        """Free activations for the time to recompute them."""
        time, share = _EFFECTS.get(str(value), (1.05, 0.95))
        estimate.time = time
        estimate.activations *= share
