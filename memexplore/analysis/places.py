"""Name places in code: the frames of a stack as text, their source lines and their paths."""

from __future__ import annotations

import linecache
import os
import re
from typing import NamedTuple

from memexplore.analysis.tables import is_native, is_users, user_line
from memexplore.tape import Frame
from memexplore.text.ipython_shell import cell_name

_MAX_PLACES = 30
_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl", "inner")
_MAX_SOURCE_BYTES = 5_000_000
_PACKAGE = re.compile(r".*/(?:site-packages|dist-packages)/|.*/lib/python3\.\d+/|.*/(?=torch/)", re.IGNORECASE)
"""The part of an installed file's path before its package."""
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))).replace("\\", "/") + "/"
_CELL_FILE = re.compile(r"<ipython-input-(?P<number>\d+)-[^>]*>$|(^|[\\/])ipykernel_\d+[\\/]\d+\.py$")
_CELL_IN_TEXT = re.compile(r"<ipython-input-[^>\s]*>:\d+|[^\s(;:]*ipykernel_\d+[^\s(;:]*\.py:\d+")


class Place(NamedTuple):
    """One line of code."""

    text: str
    """Such as ``Cell In[3], line 4``, ``train.py, line 12`` or ``torch/nn/functional.py, line 9``."""
    code: str
    """The line itself; empty where its file cannot be read."""
    path: str
    """``file:line`` with the whole path; empty for a node of the autograd engine."""


def file_text(filename: str) -> str:
    """Return the name of a file for people: a cell as in tracebacks, an installed file from its package on.

    A file below the working directory is relative to it; of any other the folder is left out.

    >>> file_text("/env/lib/python3.12/site-packages/torch/nn/functional.py"), file_text("/home/me/train.py")
    ('torch/nn/functional.py', 'train.py')
    >>> file_text("/tmp/ipykernel_7/123.py"), file_text("<ipython-input-3-0a1b>")
    ('Cell', 'Cell In[3]')
    """
    cell = _CELL_FILE.search(filename)
    if name := cell_name(filename) or (cell and (f"Cell In[{cell['number']}]" if cell["number"] else "Cell")):
        return name
    path = filename.replace("\\", "/")
    if not is_users(filename):
        # A virtual environment may be in the checkout of memexplore.
        return path.removeprefix(_HERE) if path.startswith(f"{_HERE}memexplore/") else _PACKAGE.sub("", path, count=1)
    here = os.getcwd().replace("\\", "/").rstrip("/") + "/"
    return path.removeprefix(here) if path.startswith(here) else path.rsplit("/", 1)[-1]


def source_line(filename: str, number: int) -> str:
    """Return a line of a Python file or cell without its indentation; empty if it cannot be read.

    A tape can come from anyone, so only regular files of Python code of moderate size are opened.
    """
    if filename not in linecache.cache:
        try:
            if not filename.endswith((".py", ".pyw")) or not os.path.isfile(filename):
                return ""
            if os.path.getsize(filename) > _MAX_SOURCE_BYTES:
                return ""
        except (OSError, ValueError):
            return ""
    return linecache.getline(filename, number).strip()


def place(line: str) -> Place:
    """Return the place at ``file:line``; a node of the autograd engine has only its name, and "" only empty fields.

    >>> place("train.py:7")
    Place(text='train.py, line 7', code='', path='train.py:7')
    >>> place("MulBackward0 (autograd)")
    Place(text='MulBackward0 (autograd)', code='', path='')
    """
    filename, _, number = line.rpartition(":")
    if not number.isdecimal():
        return Place(line, "", "")
    return Place(f"{file_text(filename)}, line {number}", source_line(filename, int(number)), line)


def places(stack: tuple[Frame, ...]) -> tuple[Place, ...]:
    """Return the places of a stack: the innermost line of the user's code first, then the others, innermost first.

    Left out are frames of C++ and of memexplore, calls of modules by `Module.__call__`, frames outside of the user's
    code, such as IPython's, and frames beyond the thirtieth.

    >>> stack = (Frame("/env/site-packages/torch/nn/functional.py", 10, "relu"), Frame("train.py", 7, "forward"))
    >>> [place.text for place in places(stack)]
    ['train.py, line 7', 'torch/nn/functional.py, line 10']
    """
    first = user_line(stack)
    # A cell is called by code of the notebook, of which some may not be installed.
    users = [number for number, frame in enumerate(stack) if _is_cell(frame.filename)]
    users = users or [number for number, frame in enumerate(stack) if is_users(frame.filename)]
    lines = [
        f"{frame.filename}:{frame.line}"
        for frame in stack[: users[-1] + 1 if users else len(stack)]
        if not (is_native(frame.filename) or _is_own(frame) or _is_module_call(frame))
    ]
    if first in lines:
        lines.remove(first)
    return tuple(place(line) for line in ([first, *lines] if first else [])[:_MAX_PLACES])


def _is_cell(filename: str) -> bool:
    return bool(cell_name(filename) or _CELL_FILE.search(filename))


def _is_own(frame: Frame) -> bool:
    path = frame.filename.replace("\\", "/")
    return path.startswith(f"{_HERE}memexplore/") or "site-packages/memexplore/" in path


def _is_module_call(frame: Frame) -> bool:
    """Return whether a frame calls a module or its hooks: three such frames for each level of the model say nothing."""
    name = frame.function.rpartition(".")[2]
    return name in _MODULE_CALLS and frame.filename.replace("\\", "/").endswith("torch/nn/modules/module.py")


def name_cells(text: str) -> str:
    """Return a text with the lines of cells named as in tracebacks: ``Cell In[3], line 2``.

    >>> name_cells("too small (train.py:7)"), name_cells("no (<ipython-input-3-0a>:2)")
    ('too small (train.py:7)', 'no (Cell In[3], line 2)')
    """
    return _CELL_IN_TEXT.sub(lambda match: place(match[0]).text, text)
