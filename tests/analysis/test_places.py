"""Names, source lines and paths of places in code."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest

from memexplore.analysis import places
from memexplore.tape import Frame


@pytest.mark.parametrize(
    ("filename", "text"),
    [
        ("/env/lib/python3.12/site-packages/torch/nn/modules/linear.py", "torch/nn/modules/linear.py"),
        ("C:\\env\\Lib\\site-packages\\torch\\functional.py", "torch/functional.py"),
        ("/usr/lib/python3.12/contextlib.py", "contextlib.py"),
        ("/src/pytorch/torch/nn/functional.py", "torch/nn/functional.py"),
        ("/home/me/models/net.py", "net.py"),
        ("/tmp/ipykernel_12/345.py", "Cell"),
        ("<ipython-input-7-0a1b>", "Cell In[7]"),
        (str(Path(places.__file__)), "memexplore/analysis/places.py"),
        (str(Path(places.__file__).parents[2] / ".venv/lib/python3.12/site-packages/torch/hub.py"), "torch/hub.py"),
    ],
)
def test_files_have_short_names(filename: str, text: str) -> None:
    assert places.file_text(filename) == text


def test_file_below_the_working_directory_is_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert places.file_text(str(tmp_path / "models" / "net.py")) == "models/net.py"


def test_calls_of_modules_are_left_out() -> None:
    module = "/env/site-packages/torch/nn/modules/module.py"
    stack = (
        Frame("net.py", 7, "forward"),
        # as a recording and as a snapshot name them
        Frame(module, 1832, "Module._call_impl.<locals>.inner"),
        Frame(module, 1884, "Module._call_impl"),
        Frame(module, 1778, "_wrapped_call_impl"),
        Frame(module, 930, "_apply"),
        Frame("train.py", 3, "<module>"),
    )
    # a person did not call them, unlike `model.cuda()`, which calls `_apply`
    texts = [place.text for place in places.places(stack)]
    assert texts == ["net.py, line 7", "torch/nn/modules/module.py, line 930", "train.py, line 3"]


def test_own_frame_is_first_and_frames_of_c_are_left_out() -> None:
    stack = (
        Frame("??", 0, "at::empty"),
        Frame("Linear.cpp", 40, "linear"),
        Frame("/env/site-packages/torch/nn/functional.py", 10, "linear"),
        Frame("net.py", 7, "forward"),
        Frame("train.py", 3, "<module>"),
    )
    assert [place.text for place in places.places(stack)] == [
        "net.py, line 7",
        "torch/nn/functional.py, line 10",
        "train.py, line 3",
    ]


def test_what_calls_the_cell_is_left_out_and_memexplore_between() -> None:
    stack = (
        Frame("/env/site-packages/torch/nn/functional.py", 10, "linear"),
        Frame("<ipython-input-1-0a1b>", 6, "compute_loss"),
        Frame(str(Path(places.__file__)), 20, "run"),
        Frame("<ipython-input-1-0a1b>", 9, "<module>"),
        Frame("/env/site-packages/IPython/core/interactiveshell.py", 3670, "run_code"),
        Frame("/home/me/start_kernel.py", 18, "<module>"),
    )
    assert [place.text for place in places.places(stack)] == [
        "Cell In[1], line 6",
        "torch/nn/functional.py, line 10",
        "Cell In[1], line 9",
    ]


def test_stack_of_the_autograd_engine_has_the_name_of_its_node() -> None:
    stack = (Frame("??", 0, "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)"),)
    assert places.places(stack) == (places.Place("MulBackward0 (autograd)", "", ""),)


def test_place_has_its_line_of_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("a = 1\n    b = 2\n")
    assert places.place(f"{tmp_path}/train.py:2").code == "b = 2"


def test_a_tape_cannot_name_a_file_that_is_not_python(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret\n")
    assert places.place(f"{tmp_path}/secret.txt:1").code == ""
    assert places.place("/dev/stdin:1").code == ""
    assert places.place("a\0b.py:1").code == ""


def test_cell_of_this_process_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "<ipython-input-3-0a1b>"
    monkeypatch.setitem(linecache.cache, name, (5, None, ["x = 1\n"], name))
    assert places.place(f"{name}:1") == places.Place("Cell In[3], line 1", "x = 1", f"{name}:1")
