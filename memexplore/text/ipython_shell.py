"""Find the running IPython shell, names of its cells, and outputs that change in place, without importing IPython."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def running_shell() -> Any:
    """Return the IPython shell of this process; None where no IPython runs.

    >>> running_shell() is None
    True
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython() if get_ipython is not None else None


def cell_name(filename: str) -> str:
    """Return the name of a cell as tracebacks give it, ``Cell In[3]``; empty for a file that is no cell of this shell.

    >>> cell_name("train.py")
    ''
    """
    name_of = getattr(getattr(running_shell(), "compile", None), "format_code_name", None)
    name = name_of(filename) if name_of is not None else None
    return " ".join(name) if name else ""


def cell_magic(source: str) -> tuple[str, str]:
    """Return the first line of a cell if it is a cell's magic, else "", and the code below it.

    >>> cell_magic("%%memprofile --gpu T4\\ntrain()"), cell_magic("train()")
    (('%%memprofile --gpu T4', 'train()'), ('', 'train()'))
    """
    source = source.lstrip()
    magic, _, body = source.partition("\n") if source.startswith("%%") else ("", "", source)
    return magic, body


def is_notebook() -> bool:
    """Return whether a Jupyter kernel runs this process: its output can be HTML that changes in place."""
    return getattr(running_shell(), "kernel", None) is not None


def most_important_first(*shows: Callable[[], object]) -> None:
    """Call functions that show something, the most important one where it is read first.

    A notebook is read from the top, a terminal from the end.
    """
    for show in shows if is_notebook() else reversed(shows):
        show()


def display_in_place(value: Any) -> Any:
    """Show a value in an output area of its own. Return the handle whose `update` replaces it. For `is_notebook` only.

    Raises KeyError outside IPython.
    """
    return sys.modules["IPython.display"].display(value, display_id=True)
