"""Every notebook runs from its first cell to its last, on a machine without a GPU too."""

from __future__ import annotations

import itertools
import pathlib
import re

import nbclient
import nbformat
import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
GUESS = r"^(guess\w*|\w+_guess)(, guess\w*)* = "
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
    assert any(re.search(GUESS, cell.source, re.MULTILINE) for cell in code)
    solutions = [cell for cell in code if "solution" in cell.metadata.get("tags", [])]
    assert solutions
    for cell in solutions:
        assert cell.metadata.jupyter.source_hidden
        # JupyterLab shows the first line of a hidden cell, which must not be the answer.
        assert cell.source.startswith("# Solution\n")
        assert re.search(r"^ *assert |^check\(", cell.source, re.MULTILINE), cell.source
    assert re.search(r"Read on.*\]\(https://", notebook.cells[-1].source, re.DOTALL)


def open_lines(notebook: nbformat.NotebookNode) -> list[str]:
    """Lines of code in cells that are open; the text of a script in a closed cell may be longer."""
    return [
        line
        for cell in notebook.cells
        if cell.cell_type == "code" and not cell.metadata.get("jupyter")
        for line in cell.source.splitlines()
    ]


def test_code_fits_a_page_of_900_pixels(notebook: nbformat.NotebookNode) -> None:
    assert [line for line in open_lines(notebook) if len(line) > 90] == []


def test_comments_fit_a_page_of_900_pixels_beside_the_file_browser(notebook: nbformat.NotebookNode) -> None:
    lines = [line for line in open_lines(notebook) if re.search(r"(^ *|  )# ", line)]
    assert [line for line in lines if len(line) > 57] == []


def test_no_assertion_below_a_prediction_gives_the_answer_away(notebook: nbformat.NotebookNode) -> None:
    is_open = False
    for before, cell in itertools.pairwise(notebook.cells):
        is_open = (is_open and cell.cell_type == "code") or re.search(GUESS, before.source, re.MULTILINE) is not None
        if is_open and cell.cell_type == "code" and not re.search(GUESS, cell.source, re.MULTILINE):
            assert cell.metadata.get("jupyter") or not re.search(r"^assert ", cell.source, re.MULTILINE), cell.source


def test_figures_are_legible_on_a_dark_page(notebook: nbformat.NotebookNode) -> None:
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    if any("plotly" in source for source in code):
        assert "plotly.io.templates.default = mx.plotly_template()" in code[0]


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


SOLVED = {
    "05_checkpointing": (
        ["class Block(", "def one_block("],
        "return self.join(*maps)  # change this line",
        "return checkpoint(self.join, *maps, use_reentrant=False)",
    ),
    "06_gradient_accumulation": (
        ["def network(", "guess = 1.0", "def gradient("],
        "return 1 / parts  # change this line",
        "return part / total",
    ),
    "07_mixed_precision": (
        ["def autoencoder(", "the share of gradients", "def batches("],
        "        nn.utils.clip_grad_norm_",
        "        scaler.unscale_(optimizer)\n        nn.utils.clip_grad_norm_",
    ),
    "09_the_allocator": (
        [],
        'for number in range(6) for kind in ("goes", "stays")]\nprint(',
        'for kind in ("stays", "goes") for number in range(6)]\nprint(',
    ),
}
"""Texts in cells that an exercise needs, a text of the exercise, and the text of a reader who has solved it."""


@pytest.mark.parametrize("stem", SOLVED)
def test_solution_runs_after_the_exercise_is_solved(
    stem: str, forked_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    needed, unsolved, solved = SOLVED[stem]
    notebook = nbformat.read(REPOSITORY / "notebooks" / f"{stem}.ipynb", as_version=4)
    first, *code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    number = next(number for number, cell in enumerate(code) if unsolved in cell.source)
    exercise, solution = code[number : number + 2]
    assert solution.metadata.tags == ["solution"]
    exercise.source = exercise.source.replace(unsolved, solved)
    notebook.cells = [first, *(cell for cell in code[:number] if any(text in cell.source for text in needed))]
    notebook.cells += [exercise, solution]
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()


MEASURED = (
    "02_in_place_operations",
    "03_fewer_intermediates",
    "05_checkpointing",
    "06_gradient_accumulation",
    "07_mixed_precision",
)
"""Notebooks that say which of their cells measure a real GPU. In the first one, what is alive at the peak is counted by
hand: on an H100 the peak lies elsewhere, where cuDNN takes most scratch memory."""


@pytest.mark.parametrize("stem", MEASURED)
def test_claims_hold_where_convolutions_take_scratch_memory(
    stem: str, forked_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual H100 stands for a real one: its convolutions take scratch memory, those of a T4 nearly none."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    notebook = nbformat.read(REPOSITORY / "notebooks" / f"{stem}.ipynb", as_version=4)
    replaced = 0
    for cell in notebook.cells:
        cell.source, count = re.subn(r"(%memgpu|^%%memprofile --gpu) (T4|A10)\b", r"\1 H100", cell.source)
        replaced += count
    assert replaced
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()


def test_notebook_runs(notebook: nbformat.NotebookNode, forked_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    # Raises where a cell does, a wrong option of a magic included.
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    warnings = [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stderr"
    ]
    assert warnings == []
    # A figure of one view alone would be ten times as much; plotly.js is 5 MB.
    assert len(nbformat.writes(notebook)) < 1_500_000
