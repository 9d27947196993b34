"""The message that an explorer sends to its page: `ExplorerState` of ``frontend/types.d.ts`` as a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from memexplore.knobs.choices import CheckpointKind
from memexplore.knobs.knobs import Knobs
from memexplore.knobs.report import ApplyReport
from memexplore.notebook.explorer_state import State
from memexplore.notebook.knob import Knob
from memexplore.notebook.knob_table import AS_WRITTEN, CHOSEN_LAYERS, LAYER_FIELDS
from memexplore.steps.outcome import Outcome
from memexplore.steps.sentences import percent_text

_MAX_REASON_LENGTH = 400
_WITHOUT_CONFLICT = ("gpu", "settings", "inplace", "checkpoint")
"""Fields of long lists, whose values contradict no other field."""


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
    """The selected row of layers, and for each of `LAYER_FIELDS` the reason why it cannot be set, empty if it can."""

    name: str | None = None
    reasons: Mapping[str, str] = {}
    layers: tuple[str, ...] = ()
    """The layers of the row, as `layer_rows.layers_in` has them: `h.0–11.mlp` stands for 12."""


def message(
    state: State,
    table: Sequence[Knob],
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
            **_row(knob, state),
            "impossible": [] if knob.field in _WITHOUT_CONFLICT else knob.impossible(state.knobs, contradiction),
            "disabled": reasons.get(knob.name, ""),
            "problem": problems.get(knob.name, ""),
        }
        for knob in table
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
        "notes": list(applied.note_texts),
        "skipped": [{"site": one.site, "reason": one.reason} for one in applied.skipped],
        "problem": state.problem,
    }


def _row(knob: Knob, state: State) -> dict[str, Any]:
    return {
        "field": knob.name,
        "label": knob.label,
        "kind": knob.kind,
        "options": [option.label for option in knob.positions(state.knobs)],
        "groups": [{"first": first, "title": title} for first, title in knob.groups],
        "index": knob.index(state.knobs),
        "value": knob.text(state.knobs) if knob.kind == "text" else "",
        "written": written_text(knob),
        "unit": knob.unit,
        "unit_of_one": knob.unit_of_one or knob.unit,
        "changed": knob.is_changed(state.knobs),
        "group": knob.group,
        "primary": knob.is_primary,
    }


def grouped(hidden: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the labels of knobs that do not apply with their reasons, those with the same reason together.

    >>> grouped({"Update": "the cell makes it", "Batch": "unknown", "Optimizer": "the cell makes it"})
    [{'label': 'Update, Optimizer', 'reason': 'the cell makes it'}, {'label': 'Batch', 'reason': 'unknown'}]
    """
    labels: dict[str, list[str]] = {}
    for label, reason in hidden.items():
        labels.setdefault(reason, []).append(label)
    return [{"label": ", ".join(same), "reason": reason} for reason, same in labels.items()]


def changes(table: Sequence[Knob], knobs: Knobs) -> list[dict[str, str]]:
    """Return the knobs with another value than as written: name and label of the control, and from what to what."""
    found = []
    for knob in table:
        if not knob.is_changed(knobs) or (knob.field == "lora_rank" and not knobs.lora):
            continue
        if knob.name == "checkpoint" and knobs.checkpoint.kind is CheckpointKind.LAYERS:
            continue  # the knob CHOSEN_LAYERS names them
        found.append({"field": knob.name, "label": knob.label, "text": change_text(knob, knobs)})
    # Knobs without a control can be set in code.
    others = {field: value for field, value in knobs.changed().items() if field not in {knob.field for knob in table}}
    texts = {field: str(Knobs(**{field: value})) for field, value in others.items()}
    return found + [{"field": field, "label": "", "text": text} for field, text in texts.items()]


def change_text(knob: Knob, knobs: Knobs) -> str:
    """Return a changed knob as text: its label, and both values where a text of them exists."""
    after, before = knob.text(knobs), written_text(knob)
    if knob.kind == "text":
        names = after.split()
        return f"{knob.label} {after if len(names) < 4 else f'{names[0]} … {names[-1]} ({len(names)} layers)'}"
    if not before or knob.kind == "switch":
        return f"{knob.label} {after}"
    return f"{knob.label} {before} → {after}"


def written_text(knob: Knob) -> str:
    """Return what the code says, empty if that is unknown."""
    text = "" if knob.field == "lora_rank" else knob.text(Knobs())  # the code has no LoRA
    return "" if text == AS_WRITTEN else text.removesuffix(f"({AS_WRITTEN})").strip()


def against_text(outcome: Outcome, baseline: Outcome | None) -> str:
    """Return the change of the peak in per cent, empty where there is nothing to compare."""
    if baseline is None or outcome.knobs == baseline.knobs or not baseline.peak_allocated:
        return ""
    return percent_text(outcome.peak_allocated / baseline.peak_allocated)


def turned(knob: Knob, knobs: Knobs, value: Any, reasons: Mapping[str, str]) -> tuple[Knobs, str]:
    """Return the setting with another value of a knob, and why that is impossible, empty where it is not known to be.

    `reasons` say why knobs cannot be set, by name.
    """
    if reason := reasons.get(knob.name, ""):
        return knobs, reason
    try:
        return knob.updated(knobs, value), ""
    except ValueError as error:
        return knobs, reason_text(error)


def reason_text(error: BaseException) -> str:
    """Return why a setting could not be run, in one line.

    >>> reason_text(ValueError("no layer 'x';  there are 'y'")), reason_text(KeyError("x"))
    ("no layer 'x'; there are 'y'", "KeyError: 'x'")
    """
    text = " ".join((str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}").split())
    return text if len(text) <= _MAX_REASON_LENGTH else text[: _MAX_REASON_LENGTH - 1] + "…"


def toggled(knobs: Knobs, field: str, layers: Sequence[str]) -> tuple[str, str]:
    """Return the knob and the text that add layers to one of `LAYER_FIELDS`, or remove them if it has all of them.

    >>> toggled(Knobs(frozen=["a", "b"]), "frozen", ["a"])
    ('frozen', 'b')
    >>> toggled(Knobs(frozen=["a", "b"]), "frozen", ["b", "c"])
    ('frozen', 'a b c')
    """
    names = _layers_of(knobs, field)
    added = [layer for layer in layers if layer not in names]
    names = (*names, *added) if added else tuple(name for name in names if name not in layers)
    return CHOSEN_LAYERS if field == "checkpoint" else field, " ".join(names)


def _layers_of(knobs: Knobs, field: str) -> tuple[str, ...]:
    names: tuple[str, ...] = knobs.checkpoint.layers if field == "checkpoint" else getattr(knobs, field)
    return names


def _actions(knobs: Knobs, layer: LayerState) -> list[dict[str, Any]]:
    return [
        {
            "field": field,
            "label": label,
            "is_on": bool(layer.layers) and set(layer.layers) <= set(_layers_of(knobs, field)),
            "disabled": layer.reasons.get(field, "") if layer.name is not None else "Select a layer first",
        }
        for field, label in LAYER_FIELDS.items()
    ]
