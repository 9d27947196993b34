"""Show a watched run on its page while the run goes on.

Messages are sent by the thread that trains, at the end of a step and at most every `SECONDS`: of the steps in between
only their rows are sent, together. A second thread sends new notes, and what is left when no further step ends.
Requests of the page come in any thread; they change what is shown, and never wait for the training.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from IPython.display import display

from memexplore.figures.history import history_figure
from memexplore.figures.layer_history import layer_history
from memexplore.jupyter import live_message
from memexplore.jupyter.live_knobs import LiveKnobs
from memexplore.jupyter.live_leak import ShownLeak
from memexplore.jupyter.live_message import Following
from memexplore.jupyter.receiving import reads_while_busy
from memexplore.jupyter.reopened_pages import offer
from memexplore.jupyter.view import View
from memexplore.live.live import State
from memexplore.live.recording import Recording
from memexplore.live.watch import Session
from memexplore.ranks.rows import StepRow
from memexplore.tape import Meta, Source, Tape

SECONDS = 0.1
"""Least time between two messages with steps."""
_SECONDS_OF_NOTES = 0.25
"""Time between two looks for notes and a leak that no step has sent: where no step ends, a note says why."""
_SECONDS_OF_TAPES = 0.5
"""Least time between two tapes that the timeline follows."""
_SECONDS_OF_TABS = 2.0
_SECONDS_WITHOUT_REQUEST = 2.0
"""Time after which a page gets everything unasked, where its kernel reads no message while a cell runs."""
_MOST_NEW_STEPS = 512
"""New steps that are sent one by one; of more, all steps are sent in bins."""
_REMARKED = 3
"""Newest steps whose marks are sent again, because the reason of a rise is found a step later."""
LAYERS, RISES, SETTINGS = "Layers × steps", "Rises of the peak", "Settings"
_clock = time.perf_counter


class LivePage:
    """Shows a watched run in a `View`, whose page gets a bar and the history of all steps (`Controls`)."""

    name = "live"

    def __init__(self, session: Session, form: Literal["page", "line"] = "page") -> None:
        self._session = session
        self._live, self._store = session.live, session.watcher.store
        self._following = Following(form=form)
        self._sent = 0
        """The last step whose row was sent."""
        self._rows_since_base = 0
        self._next = self._next_tabs = self._next_tape = 0.0
        self._leak = ShownLeak(self._live)
        self._notes_sent: Any = None  # what `_notes` returned when the bar was last sent
        self._visible: dict[str, bool] = {}
        """Id of a view of the page -> whether it is on the screen."""
        self._began = _clock()
        self._pushes = 0
        self._waiting = threading.Event()
        """Set while a row or a tape waits for a message."""
        self._causes: dict[int, str] = {}
        """Recorded step -> why it was recorded."""
        self._handle: Any = None
        self._knobs = LiveKnobs(self._live)
        self._knobs_sent: Any = None
        """Version of the knobs that was sent."""
        # What plotly loads at first use is loaded before the first step.
        _template()
        layer_history(np.zeros((1, 1), dtype=np.int64), [""], [0])
        meta = Meta(Source.MEASURED, self._live.device, capacity=self._live.capacity)
        self.view = View(Tape.from_columns({}, meta=meta))
        self.view.attach(self)
        self._store.on_row.append(self._on_row)
        self._store.on_recorded.append(self._on_recorded)
        session.on_state.append(self._on_state)
        weakref.finalize(self, self._waiting.set)
        threading.Thread(target=_flush_late_rows, args=(weakref.ref(self), self._waiting), daemon=True).start()

    # -- the run: called in the thread that trains

    def _on_row(self, row: StepRow) -> None:
        if row.recorded:
            kept = self._store.recorded.steps()
            self._causes = {step: why for step, why in self._causes.items() if step in kept} | {row.step: row.recorded}
        if _clock() >= self._next and self._is_seen:
            self._now_or_later(self.send_steps)
        else:
            self._waiting.set()

    def _on_recorded(self, recording: Recording) -> None:
        self._now_or_later(self._follow_newest)

    def _now_or_later(self, send: Callable[[], None]) -> None:
        """Call `send`, or leave it to the second thread: the training never waits for a request being answered."""
        if self.view.lock.acquire(blocking=False):
            try:
                send()
            finally:
                self.view.lock.release()
        else:
            self._waiting.set()

    def _follow_newest(self) -> None:
        """Show the newest recorded step, if the time for the next tape has come."""
        steps = self._store.recorded.steps()
        if not steps or not self._following.newest or not self._draws or steps[-1] == self._following.step:
            return
        began = _clock()
        if began >= self._next_tape:
            self._show(steps[-1])
            share = live_message.share_of_pictures(self._live.overhead.share)
            self._next_tape = _clock() + max(_SECONDS_OF_TAPES, (_clock() - began) / share)

    def _on_state(self) -> None:
        """Show a pause, and at the end the newest steps, the newest tape and who holds a leak."""
        if self._is_over:
            self._next_tape = 0.0
            self._follow_newest()
            self._leak.end()
            self._put_tabs()
        self.send_steps()
        if self._is_over:
            self._waiting.set()  # the second thread ends
        if self._is_over and self._handle is not None:
            self._handle.update(self._static_output(), raw=True)

    @property
    def _is_over(self) -> bool:
        return self._session.state in (State.ENDED, State.FAILED)

    @property
    def _is_seen(self) -> bool:
        return not self._visible or any(self._visible.values())

    @property
    def _draws(self) -> bool:
        """Whether timeline and tabs are drawn: in a page that is seen, and at the end, as it may be seen later."""
        return self._is_over or (self._is_seen and self._following.form == "page")

    # -- messages

    def send_steps(self) -> None:
        """Send the bar and the steps since the last message. May be called in any thread."""
        with self.view.lock:
            self._waiting.clear()
            self._follow_newest()
            self._next = _clock() + SECONDS
            self._push_unasked()
            self.view.send_packed("live", live=self.message_of_new_steps())
            if _clock() >= self._next_tabs and self._draws:
                began = _clock()
                self._put_tabs()
                share = live_message.share_of_pictures(self._live.overhead.share)
                self._next_tabs = _clock() + max(_SECONDS_OF_TABS, (_clock() - began) / share)

    def flush(self) -> None:
        """Send what waits, and notes that are new, if their time has come and the page is seen."""
        if self._is_seen and _clock() >= self._next and (self._waiting.is_set() or self._notes() != self._notes_sent):
            self.send_steps()

    def message(self) -> dict[str, Any]:
        """Return the bar and all steps, in bins (`Controls`)."""
        bins = self._store.history.bins()
        base = live_message.columns(bins)
        marks = live_message.marks([step_bin.row for step_bin in bins]) + self._knobs.marks()
        return {**self._bar(), "template": _template(), "base": base, "marks": marks, "explorer": self._knobs_message()}

    def message_of_new_steps(self) -> dict[str, Any]:
        """Return the bar and the steps not sent yet, or all steps if these are too many."""
        history, first = self._store.history, self._sent
        rows = history.after(first)
        if rows is None or len(rows) > _MOST_NEW_STEPS or self._rows_since_base > 2 * _MOST_NEW_STEPS:
            newest = history.newest
            self._sent, self._rows_since_base = (newest.step if newest is not None else 0), 0
            return self.message()
        recent = history.after(first - _REMARKED - 1) or rows
        before = recent[0] if len(recent) > len(rows) and recent[0].step > 1 else None
        marked = recent if before is None else recent[1:]
        self._sent = rows[-1].step if rows else first
        self._rows_since_base += len(rows)
        new = live_message.columns(live_message.single_bins(rows))
        marks = live_message.marks(marked, before) + self._knobs.marks()[-_REMARKED:]
        message = {**self._bar(), "new": new, "marks": marks, "first_step": first}
        if self._knobs_sent != (self._knobs.version, self.view.selection):
            self._knobs_sent = self._knobs.version, self.view.selection
            message["explorer"] = self._knobs_message()
        return message

    def _knobs_message(self) -> dict[str, Any]:
        return self._knobs.message(self.view.tape, self.view.selection)

    def _notes(self) -> tuple[Any, ...]:
        return self._live.notes, self._leak.find(), tuple(self._leak.held_by)

    def _bar(self) -> dict[str, Any]:
        self._notes_sent = self._notes()
        history, live, following = self._store.history, self._live, self._following
        recorded = self._store.recorded.steps()
        bar = live_message.words(
            live.state,
            history.newest_rows(20),
            self._store.worst,
            capacity=live.capacity,
            device=live.device,
            overhead=live.overhead.share,
            leak=None if following.is_leak_ignored else self._leak.find(),
            held_by=self._leak.held_by,
            error=live.error,
            notes=live.notes,
            pending=self._knobs.pending,
        )
        return {
            **bar,
            "recorded": recorded,
            "shown": following.step,
            "before": following.before,
            "pinned": following.pinned,
            "follows": following.newest,
            "form": following.form,
            "steps_text": live_message.steps_text(following, self._causes),
            "wants_pause": self._session.wants_pause,
        }

    def _push_unasked(self) -> None:
        """Send everything, and plotly.js, to a page whose requests the kernel cannot read now, ever more rarely."""
        if (
            not self._visible
            and not reads_while_busy()
            and _clock() > self._began + _SECONDS_WITHOUT_REQUEST * 4**self._pushes
        ):
            self._pushes += 1
            self.view.send_unasked()

    def _put_tabs(self) -> None:
        table = self._live.layers()
        tabs: dict[str, Any] = {}
        if table.size:
            figure = layer_history(table.to_numpy(np.int64), list(table.index), list(table.columns))
            tabs[LAYERS] = {"kind": "figure", "figure": figure.to_plotly_json()}
        rows = [row for row in self._store.history.rows() if row.rose_because]
        if rows:
            tabs[RISES] = live_message.rises(rows[-100:], self._following.step)
        settings = self._knobs.table()
        if settings is not None:
            tabs[SETTINGS] = settings
        if tabs:
            self.view.put_tabs(tabs)

    # -- what is shown

    def _show(self, step: int) -> None:
        """Show the tape of a recorded step over the outline of the pinned one, or of the recorded one before it."""
        steps = self._store.recorded.steps()
        earlier = [recorded for recorded in steps if recorded < step]
        pinned = self._following.pinned
        before = pinned if pinned in steps else earlier[-1] if earlier else None
        self._draw(step, None if before == step else before)

    def _draw(self, step: int, before: int | None) -> None:
        tapes = {drawn: self._store.recorded.tape(drawn) for drawn in (step, before) if drawn is not None}
        tape = tapes.get(step)
        if tape is None:
            return
        with self.view.lock:
            self._following = self._following._replace(step=step, before=before if tapes.get(before or 0) else None)
            # A page that draws slower than tapes come asks for the details of the newest one only.
            self.view.show(tape, tapes.get(before or 0), self.view.send_details)

    def _nearest(self, step: float) -> int | None:
        return min(self._store.recorded.steps(), key=lambda recorded: abs(recorded - step), default=None)

    # -- requests

    def receive(self, request: dict[str, Any]) -> bool:
        """Take a request of the page (`Controls`). Called in any thread."""
        handlers: dict[str, Callable[[dict[str, Any]], object]] = {
            "live visible": lambda request: None,
            "live pause": lambda _: self._live.pause(),
            "live resume": lambda _: self._live.resume(),
            "live step": self._on_step,
            "live compare": self._on_compare,
            "live newest": self._on_newest,
            "live pin": self._on_pin,
            "live form": self._on_form,
            "live ignore": lambda _: self._set(is_leak_ignored=True),
            "live holders": lambda _: self._leak.find_holders(),
            "live everything": lambda _: self._set_unsent(),
            "tab click": self._on_tab_click,
        }
        view = request.get("view", "")
        self._visible[view] = request["visible"] if request["type"] == "live visible" else self._visible.get(view, True)
        if request["type"] in handlers:
            handlers[request["type"]](request)
        elif not self._knobs.receive(request, self.view.tape):
            return False
        else:
            self._knobs_sent = None
            self._put_tabs()
        self.view.send_packed("live", live=self.message_of_new_steps())
        return True

    def _set_unsent(self) -> None:
        """Send all steps in bins next, to a page that misses some."""
        self._rows_since_base = 3 * _MOST_NEW_STEPS

    def _set(self, **changes: Any) -> None:
        self._following = self._following._replace(**changes)

    def _on_step(self, request: dict[str, Any]) -> None:
        """Show the recorded step nearest to the clicked step, and follow the newest step no longer."""
        step = self._nearest(request["step"])
        if step is not None:
            self._set(newest=False)
            self._show(step)

    def _on_compare(self, request: dict[str, Any]) -> None:
        """Show the later of two steps over the outline of the earlier one."""
        first, last = self._nearest(request["first"]), self._nearest(request["last"])
        if first is not None and last is not None:
            self._set(newest=False)
            self._draw(last, None if first == last else first)

    def _on_newest(self, _: dict[str, Any]) -> None:
        self._set(newest=True)
        steps = self._store.recorded.steps()
        if steps:
            self._show(steps[-1])

    def _on_form(self, request: dict[str, Any]) -> None:
        """Show the run as a page or as a line, in all its views."""
        self._set(form="line" if request["form"] == "line" else "page")
        if self._following.form == "page":
            self._next_tape = 0.0
            self._follow_newest()
            self._put_tabs()

    def _on_pin(self, _: dict[str, Any]) -> None:
        """Draw the step shown as the outline of later ones from now on, or take that back."""
        pinned = self._following.pinned
        self._set(pinned=self._following.step if pinned is None else None)
        if self._following.step is not None and pinned is not None:
            self._show(self._following.step)

    def _on_tab_click(self, request: dict[str, Any]) -> None:
        """Show the step of a cell of the heat map, or of a row of the table."""
        if request["tab"] == LAYERS:
            self._on_step({"step": request["row"]})
        elif request["tab"] == RISES:
            rows = [row for row in self._store.history.rows() if row.rose_because][-100:]
            if request["row"] < len(rows):
                self._on_step({"step": rows[request["row"]].step})

    # -- display

    def _sentence(self) -> str:
        bar = self._bar()
        peak = "; ".join(filter(None, (bar["peak"], bar["worst"])))
        return ". ".join(filter(None, (bar["headline"], peak, (bar["leak"] or {}).get("text"))))

    def show(self) -> None:
        """Display the page, and an image of it that is updated at the end, for notebooks without a kernel."""
        data, metadata = self.view.live_bundle(repr(self._live))
        display(data, raw=True, metadata=metadata)
        self._handle = display(self._static_output(), raw=True, display_id=True)
        image = (self._handle.display_id, self.view.picture)
        offer.put(self.view, lambda: [self.view.live_bundle(repr(self._live)), (self._static_output(), {})], image)

    def _static_output(self) -> dict[str, str]:
        return self.view.static_output(self._sentence())


@functools.cache
def _template() -> dict[str, Any]:
    """Return the figure of the history without steps."""
    figure: dict[str, Any] = history_figure(live_message.columns([])).to_plotly_json()
    return figure


def _flush_late_rows(page: weakref.ref[LivePage], waiting: threading.Event) -> None:
    """Send rows and notes that no later step has sent, until the page is gone or its run is over."""
    while True:
        waiting.wait(_SECONDS_OF_NOTES)
        time.sleep(SECONDS)
        shown = page()
        if shown is None or shown._is_over:
            return
        shown.flush()
        del shown
