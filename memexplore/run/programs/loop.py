"""The training loop of a cell or a script: what runs as written have shown of it, and how knobs act on it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from memexplore.recorder.recording import Recording
from memexplore.run.dropped_prints import without_prints
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.applying.undo import undone_after
from memexplore.run.knobs.knob import Limits
from memexplore.run.knobs.knobs import Knobs, unavailable_in
from memexplore.run.programs.acting import CannotActError, Plan, acting
from memexplore.run.programs.cost import ProgramEnded
from memexplore.run.programs.hooks import OutermostCalls
from memexplore.run.programs.out_of_memory import ending_out_of_memory
from memexplore.run.programs.resized_inputs import Sites, Tracing
from memexplore.run.programs.seen import BATCH_FIELDS, Batch, BatchPlace, Seen, watching

Observe = Callable[[contextlib.AbstractContextManager[Any]], object]
"""Runs a program as written in a block."""
_UPDATES = 2
"""Updates after which a run that only observes is ended: the first step makes what all later ones have."""


class Loop:
    """What is known of the training loop of a program, which `program` names in messages.

    `variables` are the variables of the program that can have another value.
    """

    def __init__(self, program: str, variables: Callable[[Seen], Mapping[str, Any]]) -> None:
        self.seen: Seen | None = None
        """What runs as written have shown, None before the first."""
        self._program, self._variables = program, variables
        self._sites: Sites | None = None

    @contextlib.contextmanager
    def watching(self, updates: int | None = None) -> Iterator[None]:
        """See what the program does in the block, which runs as written; end it after some updates."""
        with watching(updates) as watch:
            try:
                yield
            finally:
                # A run that ends out of memory shows less than one before.
                if self.seen is None or watch.seen.updates >= self.seen.updates:
                    self.seen = watch.seen

    def observe(self, run: Observe) -> Seen:
        """Return what runs as written have shown; where none was seen, run the program until its second update."""
        if self.seen is None:
            run(self.watching(_UPDATES))
        assert self.seen is not None
        return self.seen

    @property
    def batch(self) -> Batch | None:
        """Where the batch can be changed, as far as runs have shown."""
        return None if self.seen is None else self.seen.batch(self._variables(self.seen))

    def unavailable(self, run: Observe) -> dict[str, str]:
        """Return the fields of `Knobs` that cannot act on the program, each with the reason."""
        return self.observe(run).unavailable(self._program)

    def contradiction(self, knobs: Knobs) -> str:
        """Return why knobs contradict each other or what is known of the program, empty if they do not."""
        try:
            Plan(knobs, self._program, self.batch).checked()
        except CannotActError as error:
            return str(error)
        return ""

    def plan(self, knobs: Knobs, run: Observe, *, is_virtual: bool) -> Plan:
        """Return how knobs act on the program.

        Raises ValueError for knobs that cannot act, or that contradict each other or the program.
        """
        changed = knobs.changed().keys()
        self._check(changed, unavailable_in(Limits(self._program, has_own_loop=True)))
        if changed.isdisjoint(Seen().unavailable("")):
            return Plan(knobs, self._program).checked()
        self._check(changed, self.unavailable(run))
        if changed.isdisjoint(BATCH_FIELDS):
            return Plan(knobs, self._program).checked()
        batch = self.batch
        assert batch is not None
        if batch.place is BatchPlace.VARIABLE and batch.name in dict(knobs.variables):
            raise CannotActError(f"batch= and variables= both set {batch.name}: leave out one of them")
        sites: Sites = frozenset()
        if batch.place is BatchPlace.INPUTS:
            reason = f"the inputs are tensors that {self._program} makes, which only a virtual GPU gives another size"
            self._check(changed, {} if is_virtual else dict.fromkeys(BATCH_FIELDS, reason))
            sites = self._traced(batch.size, run)
        return Plan(knobs, self._program, batch, sites).checked()

    def _check(self, changed: Iterable[str], reasons: Mapping[str, str]) -> None:
        for name in changed:
            if name in reasons:
                raise CannotActError(f"{name} cannot be changed: {reasons[name]}; explore a Step instead")

    def _traced(self, size: int, run: Observe) -> Sites:
        """Return where the program makes its batch of some samples."""
        if self._sites is None:
            tracing = Tracing(size)
            run(self._tracing(tracing))
            self._sites = frozenset(tracing.sites)
        return self._sites

    @contextlib.contextmanager
    def _tracing(self, tracing: Tracing) -> Iterator[None]:
        with undone_after(lambda log: OutermostCalls(log, tracing.before_call)) as calls:
            tracing.calls = calls
            with watching(_UPDATES), tracing:
                yield


class Ran(NamedTuple):
    """What a run of a program under knobs has changed."""

    applied: ApplyReport = ApplyReport()
    samples: int = 1
    """Samples in all calls that have trained, 1 where none has."""


def ran(
    program: Callable[[], object],
    plan: Plan,
    names: Mapping[str, Any],
    block: contextlib.AbstractContextManager[Any],
    stack: contextlib.ExitStack,
    device: torch.device,
    recording: Recording,
) -> Ran:
    """Run a program in a block under the knobs of a plan, to its end or out of memory, and drop what it prints.

    `names` are the variables with which the program begins. Closing `stack` ends the block and restores everything.

    Raises what the program raises, and ValueError for a knob that could not act.
    """
    stack.enter_context(block)
    knobs = stack.enter_context(acting(plan, names))
    is_complete = False
    with (
        _signal_handlers_restored(),
        without_prints(),
        ending_out_of_memory(recording),
        contextlib.suppress(ProgramEnded),
        knobs.running(device),
    ):
        program()
        is_complete = True
    return Ran(knobs.report(is_complete=is_complete), knobs.trained or 1)


@contextlib.contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Restore the signal handlers after the block, which only the main thread can set."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that was not set from Python.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
