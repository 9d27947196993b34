"""The documentation site: built without a warning, and notebooks whose timelines need no kernel."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest

from tests.documents import REPOSITORY

SHOWN = """
import torch
import memexplore as mx

batch = torch.randn(4, 64), torch.randint(8, (4,))
step = mx.Step(torch.nn.Linear(64, 8), batch, loss=torch.nn.functional.cross_entropy)
mx.explore(step, gpu="T4")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-m", "docs", "--stored", str(folder)]
    ended = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    # Sphinx ends with 1 after a warning, such as a link to a page that does not exist.
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


def test_each_page_and_notebook_has_a_place_in_the_site(site: pathlib.Path) -> None:
    sources = [
        *REPOSITORY.glob("docs/*.md"),
        *(pathlib.Path("course", path.name) for path in REPOSITORY.glob("notebooks/*.ipynb")),
    ]
    pages = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    expected = {path.stem if path.suffix == ".md" else path.with_suffix("").as_posix() for path in sources}
    assert expected <= pages


def test_pages_load_nothing_from_another_host(site: pathlib.Path) -> None:
    loads = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(https?:[^"]*)"')
    assert {path.name: found for path in site.rglob("*.html") if (found := loads.findall(path.read_text()))} == {}


def test_solutions_and_checks_of_the_course_are_closed(site: pathlib.Path) -> None:
    closed = 0
    for path in sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        expected = sum(cell.metadata.get("jupyter", {}).get("source_hidden", False) for cell in cells)
        page = (site / "course" / path.with_suffix(".html").name).read_text()
        assert page.count('<details class="admonition hide ') == expected, path.name
        closed += expected
    assert closed > 100  # 14 notebooks, each with about three solutions and four checks


def test_no_first_sentence_of_the_api_is_read_as_a_type(site: pathlib.Path) -> None:
    # Sphinx takes what stands before a colon in the first line of an attribute's docstring for its type.
    page = (site / "api.html").read_text()
    assert re.findall(r'id="(memexplore[\w.]*)"(?:(?!id=").)*?Type<span', page, re.DOTALL) == []


def test_the_api_has_every_public_name(site: pathlib.Path) -> None:
    import memexplore

    page = (site / "api.html").read_text()
    magics = {"load_ipython_extension", "unload_ipython_extension"}
    missing = [name for name in memexplore.__all__ if f'id="memexplore.{name}"' not in page and name not in magics]
    assert missing == []


def test_figures_of_plotly_need_no_kernel(tmp_path: pathlib.Path) -> None:
    from docs import executed

    source = "import plotly.express as px\npx.bar(x=[1, 2], y=[3, 4])"
    cells = [nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell(source)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "shown.ipynb")
    executed.execute([tmp_path / "shown.ipynb"], tmp_path / "course", tmp_path / "views")
    shown = nbformat.read(tmp_path / "course/shown.ipynb", as_version=4).cells
    texts = [cell.outputs[0].data["text/html"] for cell in shown]
    assert [text.count("Plotly.newPlot") for text in texts] == [1, 1]
    # plotly.js has 5 MB: a page loads it once.
    assert [text.count('src="../views/plotly.min.js"') for text in texts] == [1, 0]


def test_an_executed_notebook_shows_a_page_in_place_of_a_widget(tmp_path: pathlib.Path) -> None:
    from docs import executed

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SHOWN)])
    nbformat.write(notebook, tmp_path / "shown.ipynb")
    executed.execute([tmp_path / "shown.ipynb"], tmp_path / "course", tmp_path / "views")
    (cell,) = nbformat.read(tmp_path / "course/shown.ipynb", as_version=4).cells
    (output,) = [output for output in cell.outputs if "text/html" in output.get("data", {})]
    assert '<iframe src="../views/shown_1.html"' in output.data["text/html"]
    assert set(output.data) == {"text/html", "text/plain"}
    page = (tmp_path / "views/shown_1.html").read_text()
    assert '<script src="plotly.min.js">' in page
    assert (tmp_path / "views/plotly.min.js").stat().st_size > 10**6
