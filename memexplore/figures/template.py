"""Make a Plotly template for the figures that a notebook draws itself beside those of memexplore.

It is legible on light and on dark pages.
"""

from __future__ import annotations

import plotly.graph_objects as go

from memexplore.figures.palette import FONT, GRID, SERIES, Theme


def plotly_template() -> go.layout.Template:
    """Return a template of Plotly: no background, text that is legible on light and on dark, memexplore's colours.

    >>> import plotly.express, plotly.io
    >>> plotly.io.templates.default = plotly_template()
    >>> plotly.express.bar(x=["fp32", "bf16"], y=[4, 2]).layout.template.layout.paper_bgcolor
    'rgba(0,0,0,0)'
    >>> plotly.io.templates.default = "plotly"
    """
    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}
    # Without a distance from the tick labels, Plotly draws the title of an axis over long ones.
    axis |= {"title": {"standoff": 12}}
    return go.layout.Template(
        layout={
            # Texts such as "1", "2", "4" are names, not places on an axis of numbers; Plotly's own template has it too.
            "autotypenumbers": "strict",
            "colorway": SERIES,
            "font": {"family": FONT, "color": Theme.ANY.value},
            # Above the plot, which has the whole width of a narrow page then.
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "title": {"text": ""}},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "shapedefaults": {"line": {"color": Theme.ANY.value}},
            "xaxis": axis,
            "yaxis": axis,
        }
    )
