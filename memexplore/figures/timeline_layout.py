"""Lay out a timeline: axes, lines, strips of steps and phases, and labels that do not overlap."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np

from memexplore.analysis.picture import refused
from memexplore.analysis.verdict import failed_request
from memexplore.figures import bands
from memexplore.figures.labels import LINE, Box, Label, Spot, box_of, placed
from memexplore.figures.palette import CAPACITY, FONT, GRID, RESERVED, Theme, byte_ticks
from memexplore.figures.positions import DEFAULT_X, Positions, XChoice, axis_ticks, positions
from memexplore.figures.scale import Scale, scale
from memexplore.tape import Action, Phase, Tape
from memexplore.text.units import size_text

Window = tuple[float, float] | None
"""First and last row shown, None for all rows; the first is rounded down and the last up."""

HEIGHT = 460
VIEW_HEIGHT = 320
"""Pixels of the timeline in the widget, which shows knobs and layers on the same screen."""


class Surface(enum.Enum):
    """What shows a timeline."""

    FIGURE = enum.auto()
    """plotly alone, with its legend."""
    WIDGET = enum.auto()
    """The widget, which has a legend and controls of its own below the axis."""


DEFAULT_WIDTH = 640
"""Pixels of a timeline in a notebook page of 900; assumed when the caller gives no width."""
MARGINS = {"l": 76, "r": 24, "t": 48, "b": 56}
PEAK_LABEL = "peak"
"""Name of the annotation beside the marker of the peak."""
_FROM_LINE_PIXELS = 11.0
"""From the middle of that annotation, which has a ground on a page, to the line of the capacity."""
_STRIP_PIXELS = 16
_BUTTONS_PIXELS = 150
"""Width at the right end of the axes that lies below plotly's buttons."""
_SWATCH_PIXELS, _LEGEND_LINE_PIXELS = 46, 20
"""Width of a legend entry without its text, and height of a line of entries."""
_OWN_SWATCH_PIXELS, _CONTROLS_PIXELS = 30, 48
"""The same for the widget's legend: width of an entry without its text, and height of ticks and controls above it."""
_OWN_STROKE_PIXELS, _STROKES = 46, {"reserved": "reserved", "before": "as written"}
"""Width of an entry of a line without its text, and the entries of lines with their longest texts."""
_REQUEST_SHARE = 0.03
"""Width of a request that failed, as a share of the axis."""
_HEADROOM = 1.2
"""Top of the y axis relative to the highest line, which leaves space for labels."""
_TWO_LABELS_PIXELS = 42
"""Height of the label of the peak above its marker and of another label above that."""
_PHASE_SHADES = {
    Phase.FORWARD: "rgba(128,128,128,0.12)",
    Phase.BACKWARD: "rgba(128,128,128,0.24)",
    Phase.OPTIMIZER: "rgba(128,128,128,0.38)",
    Phase.OTHER: "rgba(213,94,0,0.25)",
}


class Plot(NamedTuple):
    """The part of a tape that is drawn, and the pixels between the axes."""

    tape: Tape
    first: int
    last: int
    places: Positions
    width: float
    height: float
    top: float
    """Bytes at the top of the y axis."""

    @property
    def ends(self) -> tuple[float, float]:
        """Places of the first row and of the right end."""
        low, high = self.places.x([self.first, max(self.last, self.first + 1)]).tolist()
        is_refused = refused(self.tape) is not None and self.last == len(self.tape) - 1
        return low, end_of_request(self.places) if is_refused else high

    def x(self, row: float) -> float:
        """Return the pixels of a row from the left."""
        low, high = self.ends
        return (float(self.places.x([row])[0]) - low) / max(high - low, 1e-9) * self.width

    def y(self, size: float) -> float:
        """Return the pixels of a number of bytes from the top."""
        return (1 - size / self.top) * self.height


def end_of_request(places: Positions) -> float:
    """Return where a request that ended the run is drawn to, to the right of the last row."""
    return float(places.xs[-1]) * (1 + _REQUEST_SHARE)


def window_rows(tape: Tape, window: Window) -> tuple[int, int]:
    """Return the first and last row of a window, cut to the tape."""
    last = max(len(tape) - 1, 0)
    if window is None:
        return 0, last
    low, high = sorted(window)
    first = int(min(max(np.floor(low), 0), last))
    return first, int(min(max(np.ceil(high), first), last))


def window_layout(
    tape: Tape,
    window: Window = None,
    width: int = DEFAULT_WIDTH,
    other_peak: int = 0,
    x: XChoice = DEFAULT_X,
    inner_height: int = HEIGHT - 144,
) -> dict[str, Any]:
    """Return the parts of the layout that depend on the window: `xaxis`, `yaxis`, `shapes` and `annotations`.

    The y axis has the range of what the window shows; `other_peak` is the peak in bytes of a second curve in it. Only
    labels that fit into a figure of `width` pixels, with axes of `inner_height` pixels, are included.
    """
    first, last = window_rows(tape, window)
    heights = scale(tape, other_peak, (first, last))
    inner_width = width - MARGINS["l"] - MARGINS["r"]
    plot = Plot(tape, first, last, positions(tape, x), inner_width, inner_height, heights.ceiling * _HEADROOM)
    if heights.capacity is None and heights.capacity_text and any(shown_bands(plot)):
        # Above the plot, where the label of a far capacity may stand too, are phases.
        for_labels = min(_TWO_LABELS_PIXELS, inner_height / 2)
        plot = plot._replace(top=heights.ceiling * max(_HEADROOM, inner_height / (inner_height - for_labels)))
    values, texts = byte_ticks(heights.ceiling)
    shapes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    _add_bands(plot, shapes, annotations)
    _add_labels(plot, heights, shapes, annotations)
    low, high = plot.ends
    ticks = axis_ticks(tape, plot.places, first, last, inner_width)
    # Without dtick plotly would put ticks between events.
    xaxis: dict[str, Any] = {"range": [low, high], "dtick": 1 if ticks is None and last - first < 8 else None}
    return {
        "xaxis": xaxis | (ticks or {}),
        "yaxis": {"range": [0, plot.top], "tickvals": values, "ticktext": texts},
        "shapes": shapes,
        "annotations": annotations,
    }


class PlacedLabel(NamedTuple):
    """A label of the plot and its place."""

    label: Label
    spot: Spot
    colour: str | None = None
    is_peak: bool = False


def plot_labels(plot: Plot, heights: Scale) -> list[PlacedLabel]:
    """Return the labels of peak, failed request and capacity; they overlap neither each other nor the border."""
    labels: list[Label] = []
    # Where no strip of phases is.
    free_above = 0.0 if any(shown_bands(plot)) else LINE + 2
    lines_here = [Box(x - 2, 0, x + 2, plot.height) for x in map(plot.x, failed_rows(plot))]
    # The reserved bytes may be that high anywhere.
    lines_here.append(Box(0, plot.y(heights.highest) - 1, plot.width, plot.y(heights.highest) + 1))
    if plot.first <= heights.row <= plot.last and heights.allocated:
        # Above the height of its marker, where no area is.
        x, y = plot.x(heights.row), plot.y(heights.allocated)
        beside, above = _clear_of_capacity(plot, heights, y - 9), _clear_of_capacity(plot, heights, y - 15)
        of_peak = (Spot(x + 8, beside, "left"), Spot(x - 8, beside, "right"), Spot(x, above, "center"))
        labels.append(Label(f"peak {size_text(heights.allocated)}", of_peak, 12))
    for row in failed_rows(plot):
        x, lines = plot.x(row), [8.0 + 16 * number for number in range(4)]
        # In a narrow plot neither side of the line has room.
        ends = ((x + 5, "left"), (x - 5, "right"), (plot.width - 2, "right"), (2.0, "left"))
        spots = tuple(Spot(at, y, anchor) for y in lines for at, anchor in ends)
        is_last = row == failed_request(plot.tape)
        lead = ("stops here" if row + 1 < len(plot.tape) else "out of memory") if is_last else "caught out of memory"
        labels.append(Label(f"{lead}: {size_text(int(plot.tape.size[row]))} requested", spots, 12))
    if heights.capacity_text:
        at = 0.0 if heights.capacity is None else plot.y(heights.capacity)
        lines = [10.0, 26.0, 42.0, 58.0] if heights.capacity is None else [at - 10, at + 10, at + 26, at + 42]
        sides = ((plot.width - 4, "right"), (4.0, "left"), (plot.width / 2, "center"))
        places = [Spot(x, y, anchor) for y in lines for x, anchor in sides]
        if free_above and heights.capacity is None:
            # Below the label of the peak, the text would hide the highest part of the curves. At the right are buttons.
            places.insert(len(sides), Spot(4.0, -1 - LINE / 2, "left"))
        labels.append(Label(heights.capacity_text, tuple(places)))
    chosen = placed(labels, plot.width, plot.height, tuple(lines_here), free_above)
    return [
        PlacedLabel(label, spot, is_peak=True) if label.text.startswith("peak ") else PlacedLabel(label, spot, CAPACITY)
        for label, spot in zip(labels, chosen, strict=True)
    ]


def _clear_of_capacity(plot: Plot, heights: Scale, y: float) -> float:
    """Return the height of a label, or one above the line of the capacity if the label would lie on it."""
    if heights.capacity is None or abs(plot.y(heights.capacity) - y) >= _FROM_LINE_PIXELS:
        return y
    return plot.y(heights.capacity) - _FROM_LINE_PIXELS


def _add_labels(plot: Plot, heights: Scale, shapes: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> None:
    """Add capacity, peak and failed request: lines and labels."""
    for row in failed_rows(plot):
        at = float(plot.places.x([row])[0])
        shapes.append(_line(x=(at, at), y=(0, 1), yref="paper", colour=CAPACITY, width=2, dash="dot"))
    if heights.capacity is not None:
        ends = (heights.capacity, heights.capacity)
        shapes.append(_line(x=(0, 1), y=ends, xref="paper", colour=CAPACITY, width=2, dash="solid"))
    for (text, _, size), (x, y, anchor), colour, is_peak in plot_labels(plot, heights):
        # In pixels from the top left corner, whatever the height of the legend.
        place = {"x": 0, "xref": "paper", "xshift": x, "y": 1, "yref": "paper", "yshift": -y}
        if colour and size == 11 and heights.capacity is not None:
            place |= {"y": heights.capacity, "yref": "y", "yshift": plot.y(heights.capacity) - y}
        if is_peak:
            shift = {"left": 8, "right": -8, "center": 0}[anchor]
            at = float(plot.places.x([heights.row])[0])
            place = {"x": at, "xshift": shift, "y": heights.allocated, "name": PEAK_LABEL}
            place["yshift"] = plot.y(heights.allocated) - y
        shown = f"<b>{text}</b>" if size == 12 else text
        annotations.append(_note(shown, colour=colour, size=size, **{"xanchor": anchor, **place}))


def failed_rows(plot: Plot) -> list[int]:
    """Return the last request that failed among the rows shown; an empty list without one."""
    rows = np.flatnonzero(plot.tape.action == Action.OOM)
    last: list[int] = rows[(rows >= plot.first) & (rows <= plot.last)][-1:].tolist()
    return last


def _line(
    *, x: tuple[float, float], y: tuple[float, float], colour: str, width: float, dash: str, **more: Any
) -> dict[str, Any]:
    line = {"color": colour, "width": width, "dash": dash}
    return {"type": "line", "x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1], "line": line, **more}


def _note(text: str, *, colour: str | None = None, size: int = 11, **position: Any) -> dict[str, Any]:
    font = {"size": size, **({"color": colour} if colour else {})}
    return {"text": text, "showarrow": False, "font": font, "xanchor": "center", "yanchor": "middle", **position}


def _add_bands(plot: Plot, shapes: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> None:
    """Add a line at the start of each step, a strip of phases above the plot, and the labels that fit."""
    step_bands, phase_bands = shown_bands(plot)
    x = plot.places.x
    # Lines closer than 8 pixels would merge into a grey area.
    if len(step_bands) * 8 <= plot.width:
        starts = x([band.first for band in step_bands if band.first > plot.first]).tolist()
        shapes += [
            _line(x=(start, start), y=(0, 1), yref="paper", colour=GRID, width=1, dash="dot") for start in starts
        ]
    if len(phase_bands) * 4 <= plot.width:
        for band in phase_bands:
            left, right = x([band.first, band.last]).tolist()
            if band.phase is None or plot.x(band.last) - plot.x(band.first) < 0.5:
                continue
            place = {"x0": left, "x1": right, "y0": 0, "y1": _STRIP_PIXELS, "yref": "paper", "yanchor": 1}
            style = {"ysizemode": "pixel", "fillcolor": _PHASE_SHADES[band.phase], "line": {"width": 0}}
            shapes.append({"type": "rect", **place, **style})
        annotations += [
            _note(band.text, x=_middle(plot, band), y=1, yref="paper", yshift=_STRIP_PIXELS / 2, size=10)
            for band in bands.with_visible_label(phase_bands, plot.x, 6)
        ]
    annotations += [
        _note(
            band.text,
            x=_middle(plot, band),
            xshift=-_under_buttons(plot, band),
            y=1,
            yref="paper",
            yshift=_STRIP_PIXELS + 10,
            size=11,
        )
        for band in bands.with_visible_label(step_bands, plot.x)
    ]


def _under_buttons(plot: Plot, band: bands.Band) -> float:
    """Return the pixels by which the label of a step is moved to the left, so that no button of plotly covers it.

    A label stays where it is if its step has no room for it beside the buttons.
    """
    left, centre = plot.x(band.first), (plot.x(band.first) + plot.x(band.last)) / 2
    box = box_of(Label(band.text, ()), Spot(centre, 0, "center"))
    covered = max(box.right - (plot.width - _BUTTONS_PIXELS), 0.0)
    return covered if left <= box.left - covered else 0.0


def shown_bands(plot: Plot) -> tuple[list[bands.Band], list[bands.Band]]:
    """Return steps and phases; steps that share one place are one band, whose phases are those of the first."""
    window = (plot.first, plot.last)
    step_bands, phase_bands = bands.steps(plot.tape, window), bands.phases(plot.tape, window)
    for fold in plot.places.folds:
        low, high = fold.hidden
        phase_bands = [band for band in phase_bands if not low <= band.first < high]
        step_bands = [
            band._replace(text=fold.text) if band.first == max(fold.row, plot.first) else band
            for band in step_bands
            if not low <= band.first < high
        ]
    return step_bands, phase_bands


def _middle(plot: Plot, band: bands.Band) -> float:
    return float(plot.places.x([band.first, band.last]).mean())


def timeline_layout(
    tape: Tape,
    names: list[str],
    window: Window = None,
    theme: Theme = Theme.ANY,
    width: int = DEFAULT_WIDTH,
    other_peak: int = 0,
    x: XChoice = DEFAULT_X,
    surface: Surface = Surface.FIGURE,
) -> dict[str, Any]:
    """Return the layout of a timeline with a legend of some names; the other arguments are as in `window_layout`."""
    is_widget = surface is Surface.WIDGET
    height = VIEW_HEIGHT if is_widget else HEIGHT
    below = _space_for_legend(names, width) if is_widget else _legend_below(names, width)
    inner_height = height - below["margin"]["t"] - below["margin"]["b"]
    window_parts = window_layout(tape, window, width, other_peak, x, inner_height)
    return {
        "height": height,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": theme.value},
        "hovermode": "x",
        "hoverlabel": {
            "bgcolor": "#222222",
            "bordercolor": "#888888",
            "font": {"color": "#ffffff", "size": 12, "family": FONT},
            "align": "left",
        },
        **below,
        "dragmode": "zoom",
        "shapes": window_parts["shapes"],
        "annotations": window_parts["annotations"],
        "xaxis": {
            "title": {"text": {"time": "time in ms"}.get(x.axis, str(x.axis))},
            "showgrid": False,
            "zeroline": False,
            "tickformat": ",d",
            "showspikes": True,
            "spikemode": "across",
            # plotly draws a border of two more pixels around a spike; -2 removes it and leaves a line of one pixel.
            "spikethickness": -2,
            "spikedash": "solid",
            "spikecolor": RESERVED,
            **window_parts["xaxis"],
        },
        "yaxis": {
            "title": {"text": f"allocated, {tape.meta.source}", "standoff": 6},
            "gridcolor": GRID,
            "zerolinecolor": GRID,
            "fixedrange": True,
            **window_parts["yaxis"],
        },
    }


def _legend_below(names: list[str], width: int) -> dict[str, Any]:
    """Return plotly's legend below the axis title, and margins with space for its lines; sizes in pixels."""
    available, widths = width - MARGINS["l"] - MARGINS["r"], [_SWATCH_PIXELS + 6.5 * len(name) for name in names]
    # plotly gives every entry the width of the longest one as soon as the entries need more than one line.
    lines = 1 if sum(widths) <= available else -(-len(names) // max(int(available // max(widths)), 1))
    bottom = MARGINS["b"] + _LEGEND_LINE_PIXELS * lines
    y = -(MARGINS["b"] - 2) / (HEIGHT - MARGINS["t"] - bottom)
    legend = {"orientation": "h", "x": 0, "y": y, "yanchor": "top", "traceorder": "normal"}
    return {"legend": legend, "margin": {**MARGINS, "b": bottom}}


def _space_for_legend(names: list[str], width: int) -> dict[str, Any]:
    """Return margins with space for the widget's own legend, whose entries have the width of their text."""
    available, lines, used = width - MARGINS["l"] - MARGINS["r"], 1, 0.0
    for name in names:
        swatch = _OWN_STROKE_PIXELS if name in _STROKES else _OWN_SWATCH_PIXELS
        entry = swatch + 6.8 * len(_STROKES.get(name, name))
        lines, used = (lines, used + entry) if used + entry <= available else (lines + 1, entry)
    return {"showlegend": False, "margin": {**MARGINS, "b": _CONTROLS_PIXELS + _LEGEND_LINE_PIXELS * lines}}
