"""The picture that a setting will probably have: drawn before its run, and confirmed or replaced by the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from memexplore.jupyter.cancelled_runs import RunCancelled, cancelling
from memexplore.jupyter.view import View
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.cost import interruptible
from memexplore.run.run import Run
from memexplore.tape import Tape

Expect = Callable[[Knobs], Run | None]


class ExpectedPicture:
    """Draws expected runs in a view; `expect` returns the expected run of a setting, or None."""

    def __init__(self, expect: Expect, view: View) -> None:
        self._expect, self._view = expect, view
        self._drawn: Tape | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether the picture drawn is an expected one."""
        return self._drawn is not None

    @contextlib.contextmanager
    def drawn_during(
        self, knobs: Knobs, before: Tape, is_stale: Callable[[], bool], restore: Callable[[], object]
    ) -> Iterator[None]:
        """Draw what a setting will probably give, with the outline of `before`, while the block runs it.

        Raises RunCancelled where `is_stale` becomes true while it is drawn: it takes the time of a run. `restore` is
        called where the run fails. Where nothing is expected, the block is run alone.
        """
        with interruptible(cancelling(is_stale)):
            is_drawn = self._draw(knobs, before)
        if not is_drawn:
            yield
            return
        try:
            with interruptible(cancelling(is_stale)):
                yield
        except RunCancelled:
            raise
        except BaseException:
            restore()
            raise

    def _draw(self, knobs: Knobs, before: Tape) -> bool:
        # What fails here fails again in the run, with a message.
        with contextlib.suppress(Exception):
            picture = self._expect(knobs)
            if picture is not None:
                with self._view.lock:
                    self._drawn = picture.tape
                    self._view.show(picture.tape, before)
                return True
        return False

    def show(self, tape: Tape, before: Tape | None, on_drawn: Callable[[], None]) -> None:
        """Show a result, as `View.show`; where it equals what is drawn, nothing is drawn again."""
        expected, self._drawn = self._drawn, None
        if expected is not None and self._view.confirm(expected, tape, before):
            on_drawn()
        else:
            self._view.show(tape, before, on_drawn)
