"""Layers of a model that an explorer can checkpoint, freeze or give LoRA; for the others the reason why it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from memexplore.analysis.layer_rows import layers_in
from memexplore.knobs.adapters import is_linear
from memexplore.notebook.explorer_message import LayerState
from memexplore.notebook.knob_table import LAYER_FIELDS
from memexplore.steps.step import Step
from memexplore.steps.step_record import built_model
from memexplore.tape import Tape

NO_LINEAR = (
    "This layer contains no linear layer, which LoRA needs. Select a linear layer, or a layer that contains one."
)


class Layers(NamedTuple):
    """Names of layers, taken once: a run changes the model meanwhile."""

    names: frozenset[str]
    with_weights: frozenset[str]
    with_linear: frozenset[str]
    """Linear layers, and layers with one below them."""
    reasons: Mapping[str, str]
    """Why a field cannot be set for any layer."""

    @classmethod
    def of(cls, step: Step | None, tape: Tape, reasons: Mapping[str, str]) -> Layers:
        """Return the layers of a step's model; of a cell, whose models are unknown, those of its tape."""
        if step is None:
            names = frozenset(filter(None, tape.modules))
            return cls(names, names, names, reasons)
        modules = {name: module for name, module in built_model(step).named_modules(remove_duplicate=False) if name}
        with_weights = _with_parents(name for name, module in modules.items() if any(True for _ in module.parameters()))
        with_linear = _with_parents(name for name, module in modules.items() if is_linear(module))
        return cls(frozenset(modules), with_weights, with_linear, reasons)

    def state(self, layer: str | None) -> LayerState:
        """Return what can be set for the selected row of layers."""
        layers = () if layer is None else tuple(sorted(layers_in(self.names, layer), key=_by_number))
        if not layers:
            # A row of the whole model, or of memory outside of layers.
            return LayerState(None)
        found = {field: self.reasons.get(field, "") for field in LAYER_FIELDS}
        # Layers of one row have the same structure.
        if layers[0] not in self.with_weights:
            found["frozen"] = found["frozen"] or "This layer has no weights"
        if layers[0] not in self.with_linear:
            found["lora"] = found["lora"] or NO_LINEAR
        return LayerState(layer, found, layers)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort key of a layer: its numbers count as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _with_parents(names: Iterable[str]) -> frozenset[str]:
    found: set[str] = set()
    for name in names:
        while name and name not in found:
            found.add(name)
            name = name.rpartition(".")[0]
    return frozenset(found)
