"""Keep the cell or the script that ran out of memory, or a cell that runs, as a program for another process."""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import cloudpickle
import torch

from memexplore.out_of_memory.attempts import one_line
from memexplore.out_of_memory.names_before import Changed, NamesBefore
from memexplore.run.code.variables import names_in, names_read, names_used
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import Machine
from memexplore.run.programs.cell import Cell
from memexplore.run.programs.limit import SECONDS, FailureLimit
from memexplore.run.programs.names import PackedNames
from memexplore.run.programs.packing import UnsendableCellError, pack_names
from memexplore.run.programs.script import Script
from memexplore.run.search.process_settings import ProcessSettings, process_settings

INSTEAD = "Search with mx.advise(mx.Step(model, batch, loss, optimizer))."
"""What to do where a program cannot be run again."""
_CELL_RUN_AGAIN = (
    "The cell was run again from its first line, in a copy of the names that it reads: objects that the first run has "
    "changed in place stay changed, gradients of earlier cells are left out, and files that it writes may be written "
    "again."
)
_ADVANCED = "{} is where the cell has left it: the copy goes on from there."
_CHANGED = "{} has the value that the cell has given it."
_HELD_BESIDES = (
    "What the failed cell's process held besides is what did not fit: the post-mortem names it, and %memoom free gives "
    "back what failed cells hold."
)
_ANOTHER_RUN = (
    "What failed was another run of the script: with other random numbers or data, or beside what other processes had "
    "of the GPU."
)
_OF_IPYTHON = ("get_ipython",)
_OF_STDIN = ("input", "getpass", "breakpoint")
Model = Callable[[], torch.nn.Module | None]


class FailedProgram(NamedTuple):
    """A program that ran out of memory and can be run in another process; holds no tensor."""

    kind: str
    """``cell`` or ``script``."""
    packed: bytes
    """The program, as it packs itself."""
    settings: ProcessSettings
    if_it_fits: str
    """Why the program may fit when it is run again as it is written, as sentences."""
    assumed: tuple[str, ...] = ()
    """What is not the same when the program is run again, as sentences."""
    models: tuple[Model, ...] = ()
    """Return the live models of the program, None for each that is gone."""
    base: Knobs = Knobs()
    """The knobs that the program had."""
    machine: Machine | None = None
    """The virtual machine on which it failed; None where the tape says all of it."""


def cannot_run(kind: str, reason: str) -> str:
    """Return the sentences for a program that cannot be run again.

    >>> print(cannot_run("cell", "it awaits"))
    The cell cannot be run again: it awaits. Search with mx.advise(mx.Step(model, batch, loss, optimizer)).
    """
    return f"The {kind} cannot be run again: {reason}. {INSTEAD}"


def settings_without_gpu() -> ProcessSettings:
    """Return the settings of a process that finds the modules of this one, and no real GPU."""
    settings = process_settings()
    # No memory of the real GPU is needed, and it may have none left for another process.
    hidden = ("CUDA_VISIBLE_DEVICES", "")
    return settings._replace(environment=(*settings.environment, hidden), path=tuple(sys.path))


def models_in(names: Mapping[str, Any]) -> list[torch.nn.Module]:
    """Return the models among the values of names and among attributes of their instances, such as of a trainer.

    No code of the values runs.
    """
    values = list(names.values())
    for value in list(values):
        if not issubclass(type(value), type | types.ModuleType | torch.nn.Module | torch.Tensor):
            with contextlib.suppress(AttributeError):
                own = object.__getattribute__(value, "__dict__")
                values += own.values() if type(own) is dict else ()
    return [value for value in values if issubclass(type(value), torch.nn.Module)]


def _live(names: Mapping[str, Any]) -> tuple[Model, ...]:
    """Return references to the models among the values of names that are no layers of another, once each."""
    models = {id(model): model for model in models_in(names) if next(model.parameters(), None) is not None}
    inner = {id(layer) for model in models.values() for layer in model.modules() if layer is not model}
    return tuple(weakref.ref(model) for model in models.values() if id(model) not in inner)


def failed_script(
    script: Script,
    names: Mapping[str, Any],
    knobs: Knobs,
    machine: Machine,
    settings: ProcessSettings,
    seconds: float,
) -> FailedProgram:
    """Return a script that has failed on a machine after some seconds; `settings` are those with which it began.

    `names` are those of the script when it failed.
    """
    # The tape says how much of a real GPU there was.
    failed_on = machine if machine.is_virtual else None
    packed = script.packed(max(SECONDS, 2 * seconds))
    return FailedProgram("script", packed, settings, _ANOTHER_RUN, (), _live(names), knobs, failed_on)


def failed_cell(code: str, namespace: dict[str, Any], before: NamesBefore | None) -> FailedProgram | str:
    """Return a failed cell, or why it cannot be run again and what to do.

    `before` is what the names meant when the cell began, None where it is not known.
    """
    try:
        cell = begun_cell(code, namespace, before)
    except CannotRunAgainError as error:
        return cannot_run("cell", str(error))
    models = _live(names_used(code, namespace))
    assumed = (cell.run_again, *cell.changed)
    return FailedProgram("cell", cell.packed, settings_without_gpu(), _HELD_BESIDES, assumed, models)


class CannotRunAgainError(ValueError):
    """Why a program cannot be run again."""


class BegunCell(NamedTuple):
    """A cell that has begun, with a copy of its names as they were before, as far as that is known."""

    packed: bytes
    run_again: str
    """What running it again means, as a sentence."""
    changed: tuple[str, ...]
    """The names that are not as they were, as sentences."""


def begun_cell(
    code: str, namespace: dict[str, Any], before: NamesBefore | None, most_steps: int | None = None
) -> BegunCell:
    """Return a cell that has begun, as a program for another process. Raises CannotRunAgainError.

    Each of its runs ends after `most_steps` of all optimizers.
    """
    try:
        program = compile(code, "<cell>", "exec", dont_inherit=True)
        reason = _why_not(program)
        if reason:
            raise CannotRunAgainError(reason)
        names = names_read(code, namespace)
        changed = Changed({}, ()) if before is None else before.changed(names)
        limit = FailureLimit(most_steps=most_steps)
        cell = Cell(code, PackedNames(pack_names(code, namespace, changed.restored), limit))
        return BegunCell(cloudpickle.dumps(cell), _CELL_RUN_AGAIN, tuple(_assumed(names, changed)))
    except (CannotRunAgainError, UnsendableCellError) as error:
        raise CannotRunAgainError(str(error)) from None
    except SyntaxError as error:
        raise CannotRunAgainError("it awaits" if "await" in code else str(error)) from None
    except Exception as error:
        raise CannotRunAgainError(one_line(error)) from None


def _why_not(program: types.CodeType) -> str:
    called = set(names_in(program))
    if called.intersection(_OF_IPYTHON):
        return "it has a magic or a shell command"
    return "it reads from the keyboard" if called.intersection(_OF_STDIN) else ""


def _assumed(names: Mapping[str, Any], changed: Changed) -> Iterator[str]:
    """Yield what the run of a cell has changed, as sentences."""
    for name in changed.lost:
        yield _CHANGED.format(name)
    for name, value in names.items():
        if name not in changed.lost and hasattr(type(value), "__next__"):
            yield _ADVANCED.format(name)
