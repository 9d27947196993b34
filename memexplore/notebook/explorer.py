"""The knobs beside the picture: turn one, and the step is run again with it."""

from __future__ import annotations

import contextlib
import html
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ipywidgets as widgets
from IPython.display import display

from memexplore.analysis import groups
from memexplore.knobs.knobs import Checkpoint, CheckpointKind, Knobs
from memexplore.notebook import tabs
from memexplore.notebook.controls import Control
from memexplore.notebook.main_thread import MainThread
from memexplore.notebook.view import View, keep_live
from memexplore.search.advise import Advice
from memexplore.search.sweep import Progress
from memexplore.steps import sentences
from memexplore.steps.cost import interruptible
from memexplore.steps.outcome import Outcome
from memexplore.steps.step import Step
from memexplore.steps.step_record import built_model
from memexplore.steps.trial import Trial

_PATIENCE = 0.3
"""Seconds of rest before neighbours of the present setting are prepared."""
_REST = 0.1
"""Seconds after the drawing in which another turn of a knob finds the kernel idle."""
_UNSEEN = 1.0
"""Seconds after which a browser that has drawn nothing is not waited for."""
OF_LAYERS = {"checkpoint": "Checkpoint", "frozen": "Freeze", "lora": "LoRA"}
"""Fields of `Knobs` that name layers, and what is done to those."""
_ASK = "What would fit?"
_CLICK = "Click a layer in the chart of layers to choose it."


class Tried(NamedTuple):
    """One setting that was run."""

    trial: Trial
    outcome: Outcome


Run = Callable[[Knobs], tuple[Trial, Outcome]]
Search = Callable[[Knobs, Callable[[Progress], object]], Advice]
"""Finds what fits the GPU of some knobs, and tells its progress."""


class _Wanted(BaseException):
    """Somebody wants the main thread; no handler of errors may take this for one."""


class Explorer(widgets.VBox):
    """The widget of `explore`: knobs to the left, the view to the right, the sentence above.

    `knobs` are the present setting and can be set: the widgets move, and the step is run. `trial` is what came of the
    last setting that ran, `view` the view of its tape, `history` every setting that was on the screen. `neighbours` of
    the setting on the screen are run while nobody turns a knob.
    """

    def __init__(
        self,
        run: Run,
        panels: dict[str, list[Control]],
        *,
        step: Step | None = None,
        search: Search | None = None,
        greyed: Mapping[str, str],
        neighbours: Callable[[Control, Knobs], list[Knobs]] = Control.neighbours,
    ) -> None:
        self._run_step, self._step, self._greyed, self._search = run, step, greyed, search
        self._neighbours = neighbours
        self._thread = MainThread()
        self._lock = threading.Lock()
        self._knobs = Knobs()
        # What was run, also ahead of being wanted; of these, what was on the screen.
        self._tried: dict[Knobs, Tried] = {self._knobs: Tried(*run(self._knobs))}
        self._history = [self._knobs]
        self._shown = self._tried[self._knobs]
        self._before: Tried | None = None
        self._advice: Advice | None = None
        self._error = ""
        self._pending = False
        self._writer: int | None = None
        self._turned: Control | None = None
        self._chores: Iterator[None] = iter(())
        self._display: Any = None
        self._controls = [control for panel in panels.values() for control in panel]
        self.view = View(self._shown.trial.tape)
        self.view.on_pick(self._picked)
        self.view.observe(self._layer_selected, "selection")
        self._headline, self._hints, self._selected = _words("headline"), _words("hints"), _words("selected")
        self._asks = widgets.Button(description=_ASK, tooltip="Search the settings for those that fit this GPU")
        self._asks.disabled, self._asks.tooltip = search is None, greyed.get("advise", self._asks.tooltip)
        self._asks.on_click(lambda _: self._thread.run(self._advise))
        self._takers = {field: widgets.Button(description=text) for field, text in OF_LAYERS.items()}
        for field, button in self._takers.items():
            button.tooltip = f"{OF_LAYERS[field]} the selected layer, or leave it alone again"
            button.on_click(lambda _, field=field: self._take_selected(field))
        for control in self._controls:
            control.widget.observe(self._listener(control), "value")
        body = widgets.Box([self._column(panels), self.view])
        body.add_class("memexplore-body")
        super().__init__([self._headline, body])
        self.add_class("memexplore-explorer")
        keep_live(*(control.widget for control in self._controls), self._asks, *self._takers.values())
        self._layer_selected(None)
        self._write_headline()
        self._begin_chores()

    # -- what a person reads and sets

    @property
    def knobs(self) -> Knobs:
        """The present setting: on the screen, or on its way there."""
        return self._knobs

    @knobs.setter
    def knobs(self, knobs: Knobs) -> None:
        if not isinstance(knobs, Knobs):
            raise TypeError(f"knobs must be mx.Knobs(...), not {type(knobs).__name__}")
        with self._lock:
            self._knobs, self._turned = knobs, None
        self._sync()
        error = self._draw_wanted()
        if error is not None:
            raise error

    @property
    def trial(self) -> Trial:
        """What came of the setting on the screen: knobs, tape, what was applied, and cost."""
        return self._shown.trial

    @property
    def history(self) -> tuple[Knobs, ...]:
        """Every setting that was on the screen, in order."""
        return tuple(self._history)

    # -- from a widget to a run: callbacks only store what is wanted

    def _listener(self, control: Control) -> Callable[[Any], None]:
        def changed(change: Any) -> None:
            # What this thread writes into the widgets itself is not news; the browser speaks in another, or later.
            if self._writer != threading.get_ident():
                self._turn(lambda knobs: control.turned(knobs, change["new"]), control)

        return changed

    def _turn(self, turned: Callable[[Knobs], Knobs], control: Control | None = None) -> None:
        """Change what is wanted, and have it drawn when the main thread is idle: the last of several, and no other."""
        with self._lock:
            try:
                self._knobs, self._turned = turned(self._knobs), control
            except ValueError as error:
                self._error = str(error)
            asked, self._pending = self._pending, True
        if not asked:
            self._thread.run(self._draw_wanted)

    def _draw_wanted(self) -> Exception | None:
        """Run and draw what is wanted by now; the answer is what went wrong."""
        with self._lock:
            self._pending, wanted, wrong, self._error = False, self._knobs, self._error, ""
        if wrong:
            self._fail(wrong)
            return None
        try:
            if wanted not in self._tried:
                self.view.working(True)
                self._tried[wanted] = Tried(*self._run_step(wanted))
        except Exception as error:
            self.view.working(False)
            self._fail(f"{wanted}: {error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            return error
        self._draw(self._tried[wanted])
        return None

    def _fail(self, text: str) -> None:
        kept = "The picture is still that of the setting before: "
        self._headline.value = (
            f'<p class="memexplore-problem">{html.escape(_short(text))}</p><p>{kept}{html.escape(self._said())}</p>'
        )
        self._sync()

    def _draw(self, tried: Tried) -> None:
        if tried is not self._shown:
            self._before, self._shown = self._shown, tried
            if tried.trial.knobs not in self._history:
                self._history.append(tried.trial.knobs)
        self._chores = unseen = iter(())

        def begin() -> None:
            if self._chores is unseen:
                self._begin_chores()

        before = self._before.trial.tape if self._before else None
        # Until it has drawn, the browser needs the machine more; and where there is none, it is not waited for.
        self.view.show(tried.trial.tape, before, lambda: self._thread.run_after(_REST, begin))
        self._write_headline()
        if self._thread.is_kernel:
            self._thread.run_after(_UNSEEN, begin)
        else:
            begin()

    # -- what follows when the picture stands

    def _begin_chores(self) -> None:
        self._chores = chores = self._chores_of(self._shown)
        if self._thread.is_kernel:
            self._thread.run(lambda: self._next_chore(chores))
        else:
            for _ in chores:
                pass

    def _next_chore(self, chores: Iterator[None]) -> None:
        """Do one thing and let messages through before the next; none where another setting is wanted by now."""
        if chores is self._chores and not self._pending and next(chores, self) is None:
            self._thread.run(lambda: self._next_chore(chores))

    def _chores_of(self, tried: Tried) -> Iterator[None]:
        self._sync()
        self._write_hints()
        self.view.tell_details()
        yield
        known = [self._tried[knobs].outcome for knobs in self._history]
        self.view.put_sheets(tabs.sheets(self._step, known, self._others(), tried.trial.knobs))
        yield
        if self._display is not None:
            self._display.update(self._still(), raw=True)
            yield
        self._thread.run_after(_PATIENCE, lambda: self._prepare(tried))

    def _prepare(self, tried: Tried) -> None:
        """Run a neighbour of the setting on the screen, for as long as nobody wants anything else."""
        turned = self._turned
        if tried is not self._shown or turned is None or self._pending or self._thread.is_wanted():
            return
        for knobs in self._neighbours(turned, tried.trial.knobs):
            if knobs not in self._tried:
                # What fails here will fail again, and be told, when it is wanted.
                with contextlib.suppress(_Wanted, Exception), interruptible(self._give_way):
                    self._tried[knobs] = Tried(*self._run_step(knobs))
                    self._thread.run_after(_PATIENCE / 10, lambda: self._prepare(tried))
                return

    def _give_way(self) -> None:
        if self._thread.is_wanted():
            raise _Wanted

    # -- words

    def _said(self) -> str:
        before, after = self._before, self._shown
        if before is None:
            return sentences.first_sentence(after.trial, whole=after.outcome)
        return sentences.sentence(before.trial, after.trial, whole=(before.outcome, after.outcome))

    def _write_headline(self) -> None:
        self._headline.value = f"<p>{html.escape(self._said())}</p>"

    def _write_hints(self) -> None:
        applied, oom = self._shown.outcome.applied, groups.oom_text(self._shown.trial.tape)
        told = [f"<p>{html.escape(note)}</p>" for note in (*applied.notes, *([oom] if oom else []))]
        left = "".join(
            f"<li><b>{html.escape(one.where)}</b>: {html.escape(one.reason)}</li>" for one in applied.left_out
        )
        if left:
            told.append(f"<p>Left as {'it was' if len(applied.left_out) == 1 else 'they were'}:</p><ul>{left}</ul>")
        self._hints.value = "".join(told)

    # -- layers

    def _layer_selected(self, _: Any) -> None:
        layer = self.view.selection
        usable = layer is not None and layer in self._layers()
        self._selected.value = f"Selected: <b>{html.escape(layer or '')}</b>" if usable else _CLICK
        for field, button in self._takers.items():
            button.disabled = not usable or field in self._greyed

    def _layers(self) -> frozenset[str]:
        model = built_model(self._step) if self._step is not None else None
        if model is None:
            return frozenset(self.view.tape.modules)
        return frozenset(name for name, _ in model.named_modules() if name)

    def _take_selected(self, field: str) -> None:
        layer = self.view.selection
        if layer is None:
            return

        def turned(knobs: Knobs) -> Knobs:
            names = knobs.checkpoint.layers if field == "checkpoint" else getattr(knobs, field)
            names = tuple(name for name in names if name != layer) if layer in names else (*names, layer)
            if field != "checkpoint":
                return knobs.replace(**{field: names})
            return knobs.replace(checkpoint=Checkpoint(CheckpointKind.LAYERS, layers=names) if names else Checkpoint())

        self._turn(turned)

    # -- tabs that lead back to a setting

    def _picked(self, sheet: str, number: int) -> None:
        wanted = [*self._history, *(one.knobs for one in self._others())]
        if sheet == tabs.ADVICE and self._advice is not None:
            wanted = [option.knobs for option in self._advice.options]
        self._turn(lambda _: wanted[number])

    def _others(self) -> list[Outcome]:
        """What was run for the advice, trains the same, and was not on the screen."""
        found = self._advice
        return [one for one in found.tried if one.knobs in found.same - set(self._history)] if found else []

    def _advise(self) -> None:
        """Search for what fits, until it is found, a knob is turned, or the kernel is interrupted."""
        if self._search is None:
            return

        def told(progress: Progress) -> None:
            if self._pending:
                raise _Wanted
            rest = f", at most {progress.left:.0f} s more" if progress.left else ""
            self._asks.description = f"{progress.done} tried{rest}"

        self.view.working(True)
        # A kernel ignores interrupts outside of cells.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self._advice = self._search(self._knobs, told)
            self.view.put_sheets({tabs.ADVICE: tabs.advice(self._advice)})
            self.view.open_tab(tabs.ADVICE)
            self._begin_chores()
        except (_Wanted, KeyboardInterrupt):
            pass
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            signal.signal(signal.SIGINT, before)
            self._asks.description = _ASK
            self.view.working(False)

    # -- widgets

    def _sync(self) -> None:
        """Have all widgets show the present setting."""
        self._writer = threading.get_ident()
        try:
            for control in self._controls:
                control.show(self._knobs)
        finally:
            self._writer = None

    def _column(self, panels: dict[str, list[Control]]) -> Any:
        children = []
        for title, panel in panels.items():
            inside = [control.widget for control in panel]
            if any(control.field in OF_LAYERS for control in panel if hasattr(control.widget, "placeholder")):
                inside = [self._selected, widgets.HBox(list(self._takers.values())), *inside]
            group = widgets.VBox([widgets.HTML(f"<h4>{title}</h4>"), *inside])
            group.add_class("memexplore-group")
            children.append(group)
        for control in self._controls:
            if control.field in self._greyed:
                control.widget.disabled = True
                control.widget.tooltip = self._greyed[control.field]
        column = widgets.Box([*children, self._asks, self._hints])
        column.add_class("memexplore-knobs")
        return column

    # -- where no kernel is alive

    def _still(self) -> dict[str, str]:
        still = self.view.still()
        said = self._said()
        return {
            "text/plain": f"{said}\n\n{still['text/plain']}",
            "text/html": still["text/html"].replace("<img", f"<p>{html.escape(said)}</p><img", 1),
        }

    def _ipython_display_(self) -> None:
        data = self._repr_mimebundle_() or {}
        text = f"An explorer of {len(self.view.tape):,} events"
        display({**data, "text/plain": text}, raw=True)
        self._display = display(self._still(), raw=True, display_id=True)


def _words(name: str) -> Any:
    made = widgets.HTML()
    made.add_class(f"memexplore-{name}")
    return made


def _short(text: str, most: int = 400) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
