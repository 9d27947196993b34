"""The notebooks, executed for the site: widgets become pages that need no kernel, and figures of plotly HTML.

In: the notebooks and folders to write to. Out: notebooks with outputs, and a page for each timeline that they show.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import pathlib

import nbclient
import nbformat
import plotly.io
from plotly.offline import get_plotlyjs

REPOSITORY = pathlib.Path(__file__).parent.parent
_HEIGHT = 720
_LIBRARY = "plotly.min.js"
_WIDGET = "application/vnd.jupyter.widget-view+json"
_FIGURE = "application/vnd.plotly.v1+json"


def execute(notebooks: list[pathlib.Path], course: pathlib.Path, views: pathlib.Path) -> None:
    """Execute notebooks, two at a time, and write them with their outputs into `course`, their pages into `views`.

    Raises nbclient.exceptions.CellExecutionError where a cell raises an error that it is not marked to raise.
    """
    views.mkdir(parents=True)
    course.mkdir(parents=True)
    (views / _LIBRARY).write_text(get_plotlyjs())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for written in pool.map(lambda path: _execute(path, course, views), notebooks):
            print(written.name, flush=True)


def copy(notebooks: list[pathlib.Path], course: pathlib.Path) -> None:
    """Write notebooks into `course` without executing them."""
    course.mkdir(parents=True)
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        _close(notebook)
        nbformat.write(notebook, course / path.name)


def show_pages(views: str, stem: str) -> None:
    """Show each view and explorer of this kernel as a page of its tape, written into `views`, not as a widget."""
    from IPython import get_ipython
    from IPython.display import display

    from memexplore.jupyter.explorer import Explorer
    from memexplore.jupyter.view import View
    from memexplore.page.report import html

    numbers = itertools.count(1)

    def show(widget: View | Explorer) -> None:
        tape = (widget.view if isinstance(widget, Explorer) else widget).tape
        name = f"{stem}_{next(numbers)}.html"
        pathlib.Path(views, name).write_text(html(tape, plotly=_LIBRARY))
        style = f"width: 100%; height: {_HEIGHT}px; border: 1px solid #8886; border-radius: 4px"
        frame = f'<iframe src="../views/{name}" loading="lazy" title="Timeline and tables" style="{style}"></iframe>'
        display({"text/html": frame, "text/plain": repr(tape)}, raw=True)

    formatter = get_ipython().display_formatter.ipython_display_formatter
    formatter.for_type(View, show)
    formatter.for_type(Explorer, show)


def _execute(path: pathlib.Path, course: pathlib.Path, views: pathlib.Path) -> pathlib.Path:
    notebook = nbformat.read(path, as_version=4)
    prepare = f"import docs.executed as _executed\n_executed.show_pages({str(views)!r}, {path.stem!r})\ndel _executed"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(prepare))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(env=environment)
    del notebook.cells[0]
    # Each stored widget has the scripts of its page, which the site does not show.
    notebook.metadata.pop("widgets", None)
    library: str | bool = f"../views/{_LIBRARY}"
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        # A widget is followed by its still picture, an output of its own.
        cell.outputs = [output for output in cell.outputs if _WIDGET not in output.get("data", {})]
        for output in cell.outputs:
            figure = output.get("data", {}).pop(_FIGURE, None)
            if figure is not None:
                text = plotly.io.to_html(figure, include_plotlyjs=library, full_html=False, validate=False)
                output.data["text/html"] = text
                library = False  # a page needs it once
    _close(notebook)
    written = course / path.name
    nbformat.write(notebook, written)
    return written


def _close(notebook: nbformat.NotebookNode) -> None:
    """Tag the cells that JupyterLab shows closed, solutions and checks, for myst-nb."""
    for cell in notebook.cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]
