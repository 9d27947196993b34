"""Layers of a model that an explorer can checkpoint, freeze or give LoRA; for the others the reason why it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from memexplore.analysis.layer_rows import layers_in
from memexplore.jupyter.explorer_message import LayerState
from memexplore.run.knobs.knob import Knob
from memexplore.run.knobs.knobs import KNOBS
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_record import built_model
from memexplore.tape import Tape

if TYPE_CHECKING:
    from torch import nn


class Layers(NamedTuple):
    """Names of layers, taken once: a run changes the model meanwhile."""

    names: frozenset[str]
    not_for: Mapping[str, Mapping[str, str]]
    """Name of a knob that names layers -> the layers that it cannot have, with the reason."""
    reasons: Mapping[str, str]
    """Why a knob cannot be set for any layer."""

    @classmethod
    def of(cls, step: Step | None, tape: Tape, reasons: Mapping[str, str]) -> Layers:
        """Return the layers of a step's model; of a cell, whose models are unknown, the layers of its tape."""
        if step is None:
            return cls(frozenset(filter(None, tape.modules)), {knob: {} for knob in _naming_layers()}, reasons)
        modules = {name: module for name, module in built_model(step).named_modules(remove_duplicate=False) if name}
        return cls(frozenset(modules), {knob: _not_for(KNOBS[knob], modules) for knob in _naming_layers()}, reasons)

    def state(self, layer: str | None) -> LayerState:
        """Return what can be set for the selected row of layers."""
        layers = () if layer is None else tuple(sorted(layers_in(self.names, layer), key=_by_number))
        if not layers:
            # A row of the whole model, or of memory outside of layers.
            return LayerState(None)
        # Layers of one row have the same structure.
        reasons = {knob: self.reasons.get(knob) or not_for.get(layers[0], "") for knob, not_for in self.not_for.items()}
        return LayerState(layer, reasons, layers)


def _naming_layers() -> list[str]:
    return [name for name, knob in KNOBS.items() if knob.names_layers]


def _not_for(knob: Knob, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the layers that neither a knob can name nor one of the layers below them, with the reason."""
    reasons = {name: knob.why_not_layer(module) for name, module in modules.items()}
    possible = _with_parents(name for name, reason in reasons.items() if not reason)
    return {name: reason for name, reason in reasons.items() if name not in possible}


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort key of a layer: its numbers count as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _with_parents(names: Iterable[str]) -> frozenset[str]:
    with_parents: set[str] = set()
    for name in names:
        while name and name not in with_parents:
            with_parents.add(name)
            name = name.rpartition(".")[0]
    return frozenset(with_parents)
