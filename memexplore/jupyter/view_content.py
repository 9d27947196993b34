"""Content that a view sends to the browser about a Tape: dictionaries of text, plotly figures and table rows."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from memexplore.analysis import curves
from memexplore.analysis.addresses import fragmentation_text
from memexplore.analysis.layer_rows import held_layers, highest_layers
from memexplore.analysis.picture import picture
from memexplore.analysis.placements import placement_note
from memexplore.analysis.places import name_cells
from memexplore.analysis.verdict_content import verdict_content
from memexplore.figures import timeline
from memexplore.figures.blocks import blocks_figure
from memexplore.figures.highlight import highlight
from memexplore.figures.positions import DEFAULT_X, EqualSteps, XAxis, XChoice, equal_steps, has_clock, positions
from memexplore.figures.timeline import hover_fields, outline_trace, timeline_traces, trace_by_name
from memexplore.figures.timeline_layout import DEFAULT_WIDTH, Surface, Window
from memexplore.jupyter.cursor_details import cursor_text, growth_table, layer_tree, live_lines, live_tensors
from memexplore.jupyter.packing import pack
from memexplore.tape import Tape


class Scene(NamedTuple):
    """The state that determines the content of a view."""

    tape: Tape
    cursor: int
    """Row of the cursor, -1 on an empty tape."""
    selection: str | None = None
    before: Tape | None = None
    """The tape drawn as an outline."""
    window: Window = None
    width: int | None = None
    """Width of the timeline in pixels, None if unknown."""
    happened: Tape | None = None
    """The tape of the run as it happened, if another one is drawn (`analysis.picture`)."""
    x: XChoice = DEFAULT_X


def tape_content(scene: Scene) -> dict[str, Any]:
    """Return verdict, notes and timeline traces of the tape."""
    happened = scene.tape if scene.happened is None else scene.happened
    verdict = verdict_content(happened)
    places = [place._asdict() for place in verdict.where]
    grows = None if verdict.grows is None else verdict.grows._asdict()
    return {
        "verdict": {**verdict._asdict(), "where": places, "grows": grows},
        "notes": [name_cells(note) for note in (*happened.meta.notes, placement_note(happened)) if note],
        "pictures": _pictures(scene, happened),
        "data": _traces(scene),
    }


def scene_content(scene: Scene) -> dict[str, Any]:
    """Return the content that depends on more than the tape: outline, axes, cursor row, selection and window."""
    return {
        "outline": _outline(scene),
        "layout": _layout(scene),
        "axis": _axis(scene),
        "row": scene.cursor,
        "selection": scene.selection,
        "window": scene.window,
    }


def details_content(scene: Scene) -> dict[str, Any]:
    """Return tables, layers and hover texts, which are sent after the timeline."""
    rows = trace_by_name(_traces(scene), "allocated")["customdata"]
    hover = {"window": scene.window, **hover_fields(scene.tape, rows)}
    return {"growth": growth_table(scene.tape), "hover": hover, **cursor_content(scene)}


def timeline_content(scene: Scene) -> dict[str, Any]:
    """Return the figure of the timeline with its hover texts."""
    traces = _traces(scene)
    allocated = trace_by_name(traces, "allocated")
    allocated |= hover_fields(scene.tape, allocated["customdata"])
    return {"data": [*traces, *_outline(scene)], "layout": _layout(scene), "axis": _axis(scene)}


def cursor_content(scene: Scene) -> dict[str, Any]:
    """Return text and tables of the cursor's row."""
    return {
        "row": scene.cursor,
        "text": cursor_text(scene.tape, scene.cursor),
        "layers": layer_tree(held_layers(scene.tape, scene.cursor)),
        "tensors": live_tensors(scene.tape, scene.cursor),
        "lines": live_lines(scene.tape, scene.cursor),
    }


def highest_layers_content(scene: Scene) -> dict[str, Any]:
    """Return the layers with the maximum of each, whenever it was."""
    return {"layers": layer_tree(highest_layers(scene.tape))}


def blocks_content(scene: Scene) -> dict[str, Any]:
    """Return the map of blocks at the cursor's row, and its fragmentation as text."""
    figure = blocks_figure(scene.tape, max(scene.cursor, 0) if len(scene.tape) else None, scene.selection)
    text = fragmentation_text(scene.tape, scene.cursor) if scene.cursor >= 0 else ""
    return {"blocks": json.loads(figure.to_json()), "text": text}


_packed: weakref.WeakKeyDictionary[Tape, dict[str, list[bytes]]] = weakref.WeakKeyDictionary()


def packed_tape_content(scene: Scene) -> list[bytes]:
    """Return `tape_content` packed; cached per tape without window and selection, so that a tape is redrawn at once."""
    is_cached = scene.window is None and scene.selection is None and scene.x == DEFAULT_X
    return _cached("tape", tape_content, scene, is_cached)


def packed_details_content(scene: Scene) -> list[bytes]:
    """Return `details_content` packed; cached per tape without window and with the cursor at the peak."""
    is_cached = scene.window is None and scene.x == DEFAULT_X and scene.cursor == curves.peak(scene.tape)[1]
    return _cached("details", details_content, scene, is_cached)


def _cached(name: str, content: Callable[[Scene], dict[str, Any]], scene: Scene, is_cached: bool) -> list[bytes]:
    if not is_cached:
        return pack(content(scene))
    cache = _packed.setdefault(scene.tape, {})
    if name not in cache:
        cache[name] = pack(content(scene))
    return cache[name]


def _pictures(scene: Scene, happened: Tape) -> dict[str, Any] | None:
    """Return the two pictures of a run that did not fit, and the number of the one drawn; None for other runs."""
    if picture(happened) is happened:
        return None
    first = "Up to where it stops" if happened.whole is None else "As if there were room"
    return {"labels": [first, "What happened"], "drawn": int(scene.tape is happened)}


def _traces(scene: Scene) -> list[dict[str, Any]]:
    traces = timeline_traces(scene.tape, scene.window, x=scene.x)
    return traces if scene.selection is None else highlight(traces, scene.tape, scene.selection)


def _outline(scene: Scene) -> list[dict[str, Any]]:
    return [] if scene.before is None else [outline_trace(scene.before, scene.tape, scene.window, x=scene.x)]


_NO_CLOCK = "a prediction has no clock"


def _axis(scene: Scene) -> dict[str, Any]:
    """Return the places of rows on the horizontal axis, and the choices of axis."""
    places = positions(scene.tape, scene.x)
    return {
        "rows": places.rows,
        "xs": places.xs,
        "chosen": str(places.choice.axis),
        "choices": [
            {"value": str(axis), "disabled": _NO_CLOCK if axis is XAxis.TIME and not has_clock(scene.tape) else ""}
            for axis in XAxis
        ],
        "is_folded": scene.x.equal is EqualSteps.FOLDED,
        "can_fold": places.choice.axis is not XAxis.TIME and bool(equal_steps(scene.tape)),
    }


def _layout(scene: Scene) -> dict[str, Any]:
    width = scene.width or DEFAULT_WIDTH
    layout = timeline.layout(
        scene.tape, scene.window, width=width, before=scene.before, x=scene.x, surface=Surface.WIDGET
    )
    # A click selects the nearest event, however far from the mouse.
    return {**layout, "hoverdistance": -1, "spikedistance": -1}
