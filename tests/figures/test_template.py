"""The template of Plotly for figures that a notebook draws itself."""

from __future__ import annotations

import plotly.io

from memexplore.figures.palette import Theme
from memexplore.figures.template import plotly_template


def test_texts_of_numbers_are_names_as_in_the_template_of_plotly() -> None:
    layout = plotly_template().layout
    assert layout.autotypenumbers == plotly.io.templates["plotly"].layout.autotypenumbers == "strict"


def test_a_figure_has_no_background_and_text_for_light_and_dark() -> None:
    layout = plotly_template().layout
    assert (layout.paper_bgcolor, layout.plot_bgcolor) == ("rgba(0,0,0,0)", "rgba(0,0,0,0)")
    assert layout.font.color == layout.shapedefaults.line.color == Theme.ANY.value


def test_a_legend_leaves_the_width_to_the_plot() -> None:
    legend = plotly_template().layout.legend
    assert (legend.orientation, legend.yanchor) == ("h", "bottom")
    assert legend.y > 1  # above the plot


def test_titles_of_axes_keep_a_distance_from_long_labels() -> None:
    layout = plotly_template().layout
    assert layout.xaxis.title.standoff == layout.yaxis.title.standoff > 0
