"""Change a cell that failed so that it fits, and run it below: the end of a post-mortem in a notebook."""

from __future__ import annotations

import pathlib
import uuid
from typing import Any, NamedTuple

import anywidget
import traitlets

from memexplore.jupyter.bundle import bundle
from memexplore.out_of_memory.changed_code import changed_codes
from memexplore.out_of_memory.what_fits import WhatFits
from memexplore.run.code.own_code import OwnCode
from memexplore.text import ipython_shell

_FRONTEND = pathlib.Path(__file__).parent / "frontend"
_CANNOT_BE_WRITTEN = (
    "None of the settings that fit can be written into this cell: it has no training loop of its own, or it is not "
    "clear what to change. %memoom apply changes the live model.\n"
)


class ChangedCell(NamedTuple):
    """A cell with the lines of a setting with which it fits."""

    source: str
    """It frees first what the failed cell holds."""
    text: str
    """What is changed, as a sentence."""
    diff: str


def changed_cell(source: str, names: dict[str, Any], what_fits: WhatFits) -> ChangedCell | str:
    """Return a failed cell with the smallest change with which it fits, or the reason why there is none."""
    if what_fits.fits or not what_fits.options:
        return what_fits.text
    magic, body = ipython_shell.cell_magic(source)
    codes = changed_codes(OwnCode(body, names, "this cell"), what_fits)
    if not codes:
        return _CANNOT_BE_WRITTEN + what_fits.text
    code = codes[0]
    return ChangedCell(
        "\n".join(filter(None, (magic, "%memoom free", code.source.strip("\n")))),
        f"The failed cell with setting {code.number}, {code.option}. It first frees what the failed cell holds.",
        code.diff,
    )


class RunBelow(anywidget.AnyWidget):
    """A button that puts a cell below its own and runs it, as its user would. Only the page that is clicked does so."""

    _esm = bundle(_FRONTEND / "run_below.js")

    source = traitlets.Unicode().tag(sync=True)
    comm_id = traitlets.Unicode().tag(sync=True)  # also the model's: by it the page finds the model

    def __init__(self, source: str) -> None:
        number = uuid.uuid4().hex
        super().__init__(source=source, model_id=number, comm_id=number)
