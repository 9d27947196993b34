"""`watch` as `memexplore.watch`: in a notebook a watched run has a page, elsewhere it is a value only."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, get_args

from memexplore.text import ipython_shell

if TYPE_CHECKING:
    import torch
    from IPython.core.interactiveshell import InteractiveShell

    from memexplore.live.forecasts import Packed
    from memexplore.live.watch import Session, Watching
    from memexplore.out_of_memory.evidence_types import Evidence
    from memexplore.run.programs.step import Step

Form = Literal["page", "line"]
"""Form in which a notebook shows a watched run: its page, or one line beside other outputs."""
_MOST_STEPS = 6
"""Steps of all optimizers that a prediction runs a cell for: optimizer state exists from the second step on."""


def watch(
    model: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    device: str | torch.device | None = None,
    first: int = 3,
    every: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    step: Step | None = None,
    form: Form = "page",
) -> Watching:
    """Watch the training steps of a block: memory and time of every step, complete tapes of some.

    A notebook shows the page of the run at once, which moves with the training; see `memexplore.live.Live` for the
    value of the block. With the `form` ``line`` the page is a single line at first, which a button opens.

    `model` is the model that trains, or several, and None for every model that is called. A step ends when the
    optimizer has stepped: `optimizer`, or all of several, by default each one that updates the model. Micro-batches of
    an accumulated step belong to it. `device` is the real device to watch, by default the virtual GPU that is on, else
    the GPU, else the CPU.

    The `first` steps, every `every`-th, the next one after the peak rose, and those whose inputs have new shapes are
    recorded completely. With `every` None, and for new shapes, as many are recorded as fit into 2 % of the time.

    `folder` names a folder that is written while the run goes on: rows of steps every few seconds, and the tapes, in a
    sub-folder for the rank that `torchrun` gives this process. `memexplore.load` reads it, also while it is written.

    `step` is the training step as a value, with the model. It is what predicts settings, on the virtual GPU and before
    the loop gets them; without it, `Live.knobs` takes only settings that cannot raise the peak or were measured before.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> with watch(model, optimizer) as live:
    ...     for _ in range(2):
    ...         model(torch.ones(2, 4)).sum().backward()
    ...         optimizer.step()
    >>> live.steps()["step"].tolist(), live.recorded
    ([1, 2], [1, 2])

    Raises RuntimeError if another run is being watched, ValueError for another form.
    """
    from memexplore.live import watch as live

    if form not in get_args(Form):
        raise ValueError(f"form is 'page' or 'line', not {form!r}")
    shown = [functools.partial(_show_page, form=form)] if ipython_shell.is_notebook() else []
    return live.watch(
        model, optimizer, device=device, first=first, every=every, folder=folder, step=step, on_begin=shown
    )


def _show_page(session: Session, form: Form) -> None:
    from memexplore.jupyter.live_page import LivePage

    LivePage(session, form).show()
    shell = ipython_shell.running_shell()
    if shell is None:
        return
    if session.live.capacity is not None:
        session.predict_with(functools.partial(_packed_cell, shell))
    _show_post_mortem(session, shell)


def _packed_cell(shell: InteractiveShell) -> Packed:
    """Return the running cell where it has changed none of its names. Raises CannotPredictError for another cell."""
    from memexplore.jupyter.memoom import of_shell
    from memexplore.live.forecasts import NO_STEP, CannotPredictError, Packed
    from memexplore.out_of_memory.failed_program import CannotRunAgainError, begun_cell

    cells = of_shell(shell)
    try:
        cell = begun_cell(cells.running_code(), shell.user_ns, cells.names_before, _MOST_STEPS)
    except CannotRunAgainError as error:
        raise CannotPredictError(f"{NO_STEP} The cell cannot be run again instead: {error}.") from None
    if cell.changed:
        raise CannotPredictError(f"{NO_STEP} The cell cannot be run again instead: {cell.changed[0]}")
    return Packed(cell.packed, (cell.run_again,), is_cell=True)


def _show_post_mortem(session: Session, shell: InteractiveShell) -> None:
    """Show a post-mortem when the cell has ended, if the block runs out of memory."""
    from memexplore.jupyter.memoom import of_shell

    shown = of_shell(shell)
    known: list[Evidence] = []

    def failed(error: BaseException) -> None:
        evidence = shown.evidence(error)
        known.extend([] if evidence is None else [evidence])

    def ended() -> None:
        from memexplore.live.live import State

        live = session.live
        if known and live.state is State.FAILED:
            tape = live.tape(live.recorded[-1]) if live.recorded else None
            shown.show_after_cell(shown.post_mortem(tape, known.pop()))

    session.on_error = failed
    session.on_state.append(ended)
