"""Every notebook runs from its first cell to its last, on a machine without a GPU too."""

from __future__ import annotations

import pathlib
import re

import nbclient
import nbformat
import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> nbformat.NotebookNode:
    return nbformat.read(request.param, as_version=4)


def test_notebook_is_stored_without_outputs(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_notebook_asks_solves_and_links(notebook: nbformat.NotebookNode) -> None:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(re.search(r"^guess\w*(, guess\w*)* = ", cell.source, re.MULTILINE) for cell in code)
    solutions = [cell for cell in code if "solution" in cell.metadata.get("tags", [])]
    assert solutions
    for cell in solutions:
        assert cell.metadata.jupyter.source_hidden
        assert re.search(r"^ *assert |^check\(", cell.source, re.MULTILINE), cell.source
    assert re.search(r"Read on.*\]\(https://", notebook.cells[-1].source, re.DOTALL)


def test_notebook_says_how_a_front_end_without_memexplore_gets_it(notebook: nbformat.NotebookNode) -> None:
    packages = "memexplore-*.whl"
    if any("from sklearn" in cell.source for cell in notebook.cells):
        packages += " scikit-learn"
    assert f"`%pip install {packages}`" in notebook.cells[0].source


def test_notebook_has_no_metadata_of_one_front_end(notebook: nbformat.NotebookNode) -> None:
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    # Cell metadata that the format itself defines.
    assert {name for cell in notebook.cells for name in cell.metadata} <= {"tags", "jupyter"}


def test_notebook_runs(notebook: nbformat.NotebookNode, forked_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    # Raises where a cell does, a wrong option of a magic included.
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    warnings = [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stderr"
    ]
    assert warnings == []
    # A figure of one view alone would be ten times as much; plotly.js is 5 MB.
    assert len(nbformat.writes(notebook)) < 1_500_000
