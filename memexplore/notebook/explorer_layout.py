"""Layout of the explorer's controls: one column of titled groups, with buttons for the selected layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from memexplore.notebook.controls import Control

LAYER_FIELDS = {"checkpoint": "Checkpoint", "frozen": "Freeze", "lora": "LoRA"}
"""Fields of `Knobs` that hold layer names, and the labels of their controls."""


def html_widget(name: str) -> Any:
    """Return an empty HTML widget with the CSS class ``memexplore-NAME``."""
    widget = widgets.HTML()
    widget.add_class(f"memexplore-{name}")
    return widget


def layer_buttons(toggle: Callable[[str], None]) -> dict[str, Any]:
    """Return a button for each of `LAYER_FIELDS`; a click calls `toggle` with the field."""
    buttons = {field: widgets.Button(description=label) for field, label in LAYER_FIELDS.items()}
    for field, button in buttons.items():
        button.tooltip = f"{LAYER_FIELDS[field]}: add the selected layer, or remove it"
        button.on_click(lambda _, field=field: toggle(field))
    return buttons


def column(
    panels: Mapping[str, Sequence[Control]],
    disabled: Mapping[str, str],
    selection: Sequence[Any],
    below: Sequence[Any],
) -> Any:
    """Return all controls in titled groups, with the widgets of the selection above the lines of layer names.

    `disabled` maps fields of `Knobs` to the reason why their controls are disabled.
    """
    groups = []
    for title, panel in panels.items():
        children = [control.widget for control in panel]
        if any(control.field in LAYER_FIELDS and hasattr(control.widget, "placeholder") for control in panel):
            children = [*selection, *children]
        group = widgets.VBox([widgets.HTML(f"<h4>{title}</h4>"), *children])
        group.add_class("memexplore-group")
        groups.append(group)
        for control in panel:
            if control.field in disabled:
                control.widget.disabled = True
                control.widget.tooltip = disabled[control.field]
    box = widgets.Box([*groups, *below])
    box.add_class("memexplore-knobs")
    return box
