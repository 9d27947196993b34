"""Every notebook runs from its first cell to its last, on a machine without a GPU too."""

from __future__ import annotations

import pathlib

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


def test_notebook_runs(notebook: nbformat.NotebookNode, monkeypatch: pytest.MonkeyPatch) -> None:
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
