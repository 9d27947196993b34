"""The knob `inplace`: activation functions that overwrite their input."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from memexplore.run.knobs.applying.layer_names import for_layers
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.inplace_sites.activations import Form
from memexplore.run.knobs.inplace_sites.in_place import set_in_place
from memexplore.run.knobs.knob import Application, Group, Knob, ModelCode, Stage, Untouched
from memexplore.run.knobs.values import OneOf

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu


class InPlace(enum.Enum):
    """Whether activation functions overwrite their input."""

    AS_WRITTEN = "as written"
    OFF = "off"
    ON = "on"


class InPlaceKnob(Knob):
    """Activation functions overwrite their input, wherever nothing reads it again, or nowhere."""

    name, word = "inplace", "in place"
    costs = "equal results"
    values = OneOf(InPlace)
    place = 10
    group = Group.MODEL
    saves_little = True
    leaves = Untouched.ALL_BUT_ACTIVATIONS
    stage = Stage.ACTIVATIONS
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return whether they do."""
        return "In-place activations" if value is InPlace.ON else "Activations not in place"

    def apply(self, value: Any, application: Application) -> ApplyReport:
        """Give all activations that can have it the one form or the other."""
        form = Form.IN_PLACE if value is InPlace.ON else Form.OUT_OF_PLACE
        return set_in_place(application.log, application.model, form, application.sites, application.in_place_failed)

    def cannot_raise_peak(self, value: Any) -> bool:
        """Return whether results take the memory of their inputs."""
        return value is InPlace.ON

    def written(self, explored: Explored) -> str:
        """Return whether the activations of the model overwrite their input.

        >>> from torch import nn
        >>> InPlaceKnob().written(Explored(model=nn.Sequential(nn.ReLU(inplace=True), nn.ReLU())))
        '1 of 2 on'
        """
        if explored.model is None:
            return ""
        values = [getattr(module, "inplace", None) for module in explored.model.modules()]
        flags = [value for value in values if isinstance(value, bool)]
        if not any(flags):
            return "off"
        return "on" if all(flags) else f"{sum(flags)} of {len(flags)} on"

    def model_lines(self, value: Any, code: ModelCode) -> Iterator[str]:
        """Yield flags of modules, and comments for calls of functions in the model's code."""
        on = value is InPlace.ON
        if code.sites is None:
            yield (
                "for module in model.modules():\n"
                '    if hasattr(module, "inplace"):\n'
                f"        module.inplace = {on}{'  # only where nothing reads its input afterwards' if on else ''}"
            )
            return
        form = Form.IN_PLACE if on else Form.OUT_OF_PLACE
        changed = [site.call for site in code.sites.sites if not site.reason and site.written is not form]
        modules = tuple(call.module for call in changed if not call.file)
        if modules:
            yield for_layers(modules, f"model.get_submodule(name).inplace = {on}")
        for call in changed:
            if call.file:
                yield f"# {call}: use the form of {call.function} that {'overwrites' if on else 'keeps'} its input."

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return in place."""
        return (InPlace.ON,)
