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
