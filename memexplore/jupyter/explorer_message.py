"""The message that an explorer sends to its page: `ExplorerState` of ``frontend/types.d.ts`` as a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from memexplore.jupyter.explorer_state import State
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.control import Control
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.knobs.values import AS_WRITTEN
from memexplore.run.programs.outcome import Outcome
from memexplore.run.sentences import percent_text

_MAX_REASON_LENGTH = 400


class SearchState(NamedTuple):
    """The search for settings that fit."""

    state: str = "idle"
    """"idle", "running", "done", "stopped" or "unavailable"."""
    done: int = 0
    planned: int = 0
    """Estimate of all runs."""
    seconds_left: float | None = None
    text: str = ""


class LayerState(NamedTuple):
    """The selected row of layers, and for each knob that names layers why it cannot be set, empty if it can."""

    name: str | None = None
    reasons: Mapping[str, str] = {}
    layers: tuple[str, ...] = ()
    """The layers of the row, as `layer_rows.layers_in` has them: `h.0–11.mlp` stands for 12."""


def message(
    state: State,
    table: Sequence[Control],
    *,
    reasons: Mapping[str, str],
    contradiction: Callable[[Knobs], str],
    hidden: Mapping[str, str],
    against: Mapping[str, str],
    search: SearchState,
    layer: LayerState,
    is_working: bool,
    is_expected: bool = False,
    applied: ApplyReport,
) -> dict[str, Any]:
    """Return the state of an explorer for its page.

    `reasons` say why knobs cannot be set, by name, `contradiction` why a setting cannot be run, empty if it can,
    `hidden` why knobs do not apply, by label. `is_expected` is whether the picture is that of a setting before its run.
    """
    problems = dict(state.problems)
    rows = [
        {
            **_row(control, state),
            "impossible": control.impossible(state.knobs, contradiction),
            "disabled": reasons.get(control.name, ""),
            "problem": problems.get(control.name, ""),
        }
        for control in table
    ]
    return {
        "knobs": rows,
        "hidden": grouped(hidden),
        "changes": changes(table, state.knobs),
        "against": {"written": "", "pinned": "", **against},
        "is_pinned": state.pinned is not None,
        "can_undo": bool(state.undo),
        "can_redo": bool(state.redo),
        "search": search._asdict(),
        "layer": {"name": layer.name, "actions": _actions(state.knobs, layer)},
        "received": dict(state.received),
        "wanted": state.number,
        "shown": state.drawn_number,
        "working": is_working,
        "expected": is_expected,
        "notes": list(applied.notes),
        "skipped": [{"site": site.site, "reason": site.reason} for site in applied.skipped],
        "problem": state.problem,
    }


def _row(control: Control, state: State) -> dict[str, Any]:
    return {
        "field": control.name,
        "label": control.label,
        "kind": control.kind,
        "options": [option.label for option in control.positions(state.knobs)],
        "groups": [{"first": first, "title": title} for first, title in control.groups],
        "index": control.index(state.knobs),
        "value": control.text(state.knobs) if control.kind == "text" else "",
        "written": written_text(control),
        "unit": control.unit,
        "unit_of_one": control.unit_of_one or control.unit,
        "changed": control.is_changed(state.knobs),
        "group": control.group,
        "primary": control.is_primary,
    }


def grouped(hidden: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the labels of knobs that do not apply with their reasons, labels with the same reason together.

    >>> grouped({"Update": "the cell makes it", "Batch": "unknown", "Optimizer": "the cell makes it"})
    [{'label': 'Update, Optimizer', 'reason': 'the cell makes it'}, {'label': 'Batch', 'reason': 'unknown'}]
    """
    labels: dict[str, list[str]] = {}
    for label, reason in hidden.items():
        labels.setdefault(reason, []).append(label)
    return [{"label": ", ".join(same), "reason": reason} for reason, same in labels.items()]


def changes(table: Sequence[Control], knobs: Knobs) -> list[dict[str, str]]:
    """Return the knobs with another value than as written: name and label of the control, and from what to what."""
    listed = []
    for control in table:
        if not control.is_changed(knobs) or not control.is_listed(knobs) or control.field not in knobs.changed():
            continue
        listed.append({"field": control.name, "label": control.label, "text": change_text(control, knobs)})
    # Knobs without a control can be set in code.
    others = {
        field: value for field, value in knobs.changed().items() if field not in {control.field for control in table}
    }
    texts = {field: str(Knobs(**{field: value})) for field, value in others.items()}
    return listed + [{"field": field, "label": "", "text": text} for field, text in texts.items()]


def change_text(control: Control, knobs: Knobs) -> str:
    """Return a changed knob as text: its label, and both values where a text of them exists."""
    after, before = control.text(knobs), written_text(control)
    if control.kind == "text":
        names = after.split()
        return f"{control.label} {after if len(names) < 4 else f'{names[0]} … {names[-1]} ({len(names)} layers)'}"
    if not before or control.kind == "switch":
        return f"{control.label} {after}"
    return f"{control.label} {before} → {after}"


def written_text(control: Control) -> str:
    """Return what the code says, empty if that is unknown."""
    text = "" if control.knob.part_of else control.text(Knobs())  # the code has no LoRA
    return "" if text == AS_WRITTEN else text.removesuffix(f"({AS_WRITTEN})").strip()


def against_text(outcome: Outcome, baseline: Outcome | None) -> str:
    """Return the change of the peak in per cent, empty where there is nothing to compare."""
    if baseline is None or outcome.knobs == baseline.knobs or not baseline.peak_allocated:
        return ""
    return percent_text(outcome.peak_allocated / baseline.peak_allocated)


def turned(control: Control, knobs: Knobs, value: Any, reasons: Mapping[str, str]) -> tuple[Knobs, str]:
    """Return the setting with another value of a knob and "", or `knobs` and the reason why that value is impossible.

    `reasons` say why knobs cannot be set, by name.
    """
    if reason := reasons.get(control.name, ""):
        return knobs, reason
    try:
        return control.updated(knobs, value), ""
    except ValueError as error:
        return knobs, reason_text(error)


def reason_text(error: BaseException) -> str:
    """Return why a setting could not be run, in one line.

    >>> reason_text(ValueError("no layer 'x';  there are 'y'")), reason_text(KeyError("x"))
    ("no layer 'x'; there are 'y'", "KeyError: 'x'")
    """
    text = " ".join((str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}").split())
    return text if len(text) <= _MAX_REASON_LENGTH else text[: _MAX_REASON_LENGTH - 1] + "…"


def toggled(control: Control, knobs: Knobs, layers: Sequence[str]) -> str:
    """Return the text of a control that adds layers to those it names, or removes them if it names all of them.

    >>> from memexplore.run.knobs.control import layer_names
    >>> frozen = layer_names(KNOBS["frozen"])
    >>> toggled(frozen, Knobs(frozen=["a", "b"]), ["a"])
    'b'
    >>> toggled(frozen, Knobs(frozen=["a", "b"]), ["b", "c"])
    'a b c'
    """
    names = control.knob.layers(getattr(knobs, control.field))
    added = [layer for layer in layers if layer not in names]
    return " ".join((*names, *added) if added else (name for name in names if name not in layers))


def of_layers(table: Sequence[Control], field: str) -> Control:
    """Return the control of the names of layers of a knob."""
    return next(control for control in table if control.field == field and control.kind == "text")


def _actions(knobs: Knobs, layer: LayerState) -> list[dict[str, Any]]:
    return [
        {
            "field": name,
            "label": knob.label,
            "is_on": bool(layer.layers) and set(layer.layers) <= set(knob.layers(getattr(knobs, name))),
            "disabled": layer.reasons.get(name, "") if layer.name is not None else "Select a layer first",
        }
        for name, knob in KNOBS.items()
        if knob.names_layers
    ]
