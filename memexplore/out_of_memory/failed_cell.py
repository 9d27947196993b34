"""Pack a cell that failed, or has begun, for a run in another process, with what is assumed of it as sentences."""

from __future__ import annotations

import dis
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from memexplore.live.model_pickler import ModelPickler
from memexplore.out_of_memory.failed_step import FailedStep, Model, hidden_settings
from memexplore.run.code.variables import names_in, names_read
from memexplore.run.programs.cell import Cell
from memexplore.run.programs.packing import CellPickler, UnsendableCellError

_RUN_AGAIN = (
    "The cell was run again in a copy of its names, from its first line and without gradients of earlier cells; files "
    "that it writes may be written again."
)
_ADVANCED = "{} is where the cell has left it: the copy goes on from there."
_CHANGED = "{} has the value that the cell has given it."
_OF_IPYTHON = ("get_ipython",)
_OF_STDIN = ("input", "getpass", "breakpoint")


class CannotRunAgainError(Exception):
    """The reason why a cell cannot be run again."""


class _Pickler(CellPickler, ModelPickler):
    """Pickles the names of a cell, and models as they were before they were watched."""


def failed_cell(code: str, namespace: dict[str, Any], models: list[torch.nn.Module], reason: str) -> FailedStep | str:
    """Return a failed cell, or a sentence that says why it cannot be run again.

    `models` are the models that the cell has called, `reason` is why its step cannot be rebuilt.
    """
    try:
        cell = begun_cell(code, namespace)
    except (CannotRunAgainError, UnsendableCellError) as failure:
        return f"The cell cannot be run again: {failure}."
    except Exception as failure:
        return f"The cell cannot be run again: {type(failure).__name__}: {failure}".splitlines()[0]
    live: list[Model] = [*map(weakref.ref, models)]
    first = live[0] if live else lambda: None
    return FailedStep(cell.packed, (reason, cell.run_again, *cell.changed), hidden_settings(), first, tuple(live[1:]))


class BegunCell(NamedTuple):
    """A cell that has begun, with a copy of its names as they are now."""

    packed: bytes
    run_again: str
    """What running it means, as a sentence."""
    changed: tuple[str, ...]
    """Which of its names it has changed, as sentences."""


def begun_cell(code: str, namespace: dict[str, Any], most_steps: int | None = None) -> BegunCell:
    """Return a cell that has begun. Raises an exception with the reason where it cannot be run again.

    Each of its runs ends after `most_steps` of all optimizers.
    """
    program = _compiled(code)
    packed = Cell(code, namespace).packed(_Pickler, most_steps)
    return BegunCell(packed, _RUN_AGAIN, tuple(_assumed(program, names_read(code, namespace))))


def _compiled(code: str) -> types.CodeType:
    try:
        program = compile(code, "<cell>", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise CannotRunAgainError("it awaits" if "await" in code else str(error)) from None
    called = set(names_in(program))
    if called.intersection(_OF_IPYTHON):
        raise CannotRunAgainError("it has a magic or a shell command")
    if called.intersection(_OF_STDIN):
        raise CannotRunAgainError("it reads from the keyboard")
    return program


def _assumed(program: types.CodeType, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the run of the cell has changed so far, as sentences."""
    read: set[str] = set()
    changed: dict[str, None] = {}
    for instruction in dis.get_instructions(program):
        if instruction.opname == "LOAD_NAME":
            read.add(instruction.argval)
        elif instruction.opname in ("STORE_NAME", "STORE_GLOBAL") and instruction.argval in read & names.keys():
            changed[instruction.argval] = None
    for name in changed:
        yield _CHANGED.format(name)
    for name, value in names.items():
        if name not in changed and hasattr(type(value), "__next__"):
            yield _ADVANCED.format(name)
