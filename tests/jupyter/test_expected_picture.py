"""Expected pictures: what is drawn before the run of a setting, and what its result changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from memexplore.jupyter.explore import explore
from memexplore.jupyter.explorer import Explorer
from memexplore.jupyter.main_thread import MainThread
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.out_of_memory import fits
from memexplore.run.run import Run
from memexplore.tape import Tape
from tests.jupyter.explorer_actions import Loop, send, step, turn


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Explorer:
    """An explorer that has run two batches, with an event loop that a test drives."""
    explorer = explore(step(), gpu="T4")
    turn(explorer, "batch", "32")
    monkeypatch.setattr(explorer._thread, "_loop", Loop())
    return explorer


@pytest.fixture
def sent(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the messages to the page, and "run" where a setting is run."""
    kinds: list[str] = []
    monkeypatch.setattr(shown.view, "send", lambda message, *_: kinds.append(message["type"]))
    before_run(shown, lambda: kinds.append("run"), monkeypatch)
    return kinds


def before_run(shown: Explorer, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    run = shown._run_step

    def wrapped(knobs: Knobs) -> Any:
        action()
        return run(knobs)

    monkeypatch.setattr(shown, "_run_step", wrapped)


def run_all(shown: Explorer) -> None:
    shown._thread._loop.run()


def other(shown: Explorer) -> Run:
    result = shown._results[Knobs()]
    tape = result.tape.replace(size=result.tape.size * 2)
    return dataclasses.replace(result, execution=result.execution._replace(tape=tape))


def test_it_is_drawn_before_the_run_and_confirmed_by_the_result(shown: Explorer, sent: list[str]) -> None:
    turn(shown, "batch", "128")
    run_all(shown)
    assert [kind for kind in sent if kind in ("tape", "run")] == ["tape", "run"]
    assert shown.view.tape is shown._shown.tape
    assert shown.run.knobs == Knobs(batch=128)


def test_another_result_is_drawn_over_it(shown: Explorer, sent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown._expected, "_expect", lambda knobs: other(shown))
    turn(shown, "batch", "128")
    run_all(shown)
    assert [kind for kind in sent if kind in ("tape", "run")] == ["tape", "run", "tape"]
    assert shown.view.tape is shown._shown.tape


def test_the_state_names_the_setting_that_was_run_until_the_result(
    shown: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[tuple[int, int, bool, bool]] = []

    def note() -> None:
        message = shown.message()
        number = message["wanted"] - message["shown"]
        states.append((number, len(shown.history), message["working"], message["expected"]))

    before_run(shown, note, monkeypatch)
    turn(shown, "batch", "128")
    run_all(shown)
    note()
    assert states == [(1, 2, True, True), (0, 3, False, False)]


def test_a_setting_without_expected_picture_is_not_said_to_be_drawn(
    shown: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[bool] = []
    before_run(shown, lambda: states.append(shown.message()["expected"]), monkeypatch)
    turn(shown, "precision", "bf16 autocast")
    run_all(shown)
    assert states == [False]


def test_a_setting_with_one_other_batch_is_drawn_after_its_run(shown: Explorer, sent: list[str]) -> None:
    turn(shown, "precision", "bf16 autocast")
    run_all(shown)
    assert [kind for kind in sent if kind in ("tape", "run")] == ["run", "tape"]


def test_a_setting_that_does_not_fit_is_drawn_from_one_other_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = explore(step(), gpu="22MiB")
    monkeypatch.setattr(explorer._thread, "_loop", Loop())
    kinds: list[str] = []
    tapes: list[Tape] = []
    monkeypatch.setattr(explorer.view, "send", lambda message, *_: kinds.append(message["type"]))
    before_run(explorer, lambda: tapes.append(explorer.view.tape), monkeypatch)
    turn(explorer, "batch", "1024")
    run_all(explorer)
    (tape,) = tapes
    # The expected tape ends with the failed request; the run goes on, and is drawn alike: as if there were room.
    assert not fits(tape)
    assert len(tape) < len(explorer.run.tape)
    assert explorer.view.tape is explorer.run.tape
    assert kinds.count("tape") == 1


def test_a_setting_that_was_run_is_drawn_once(shown: Explorer, sent: list[str]) -> None:
    turn(shown, "batch", "64")
    run_all(shown)
    assert [kind for kind in sent if kind in ("tape", "run")] == ["tape"]


def test_a_failed_run_brings_the_picture_before_back(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        assert shown.view.tape is not shown._shown.tape
        raise ValueError("no such batch")

    before_run(shown, fail, monkeypatch)
    turn(shown, "batch", "128")
    run_all(shown)
    assert shown.view.tape is shown._shown.tape
    assert shown.knobs == shown.run.knobs == Knobs(batch=32)


def test_an_interrupt_of_the_run_brings_the_picture_before_back(
    shown: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    before_run(shown, interrupt, monkeypatch)
    turn(shown, "batch", "128")
    with pytest.raises(KeyboardInterrupt):
        run_all(shown)
    assert shown.view.tape is shown._shown.tape


def test_another_change_ends_the_run_and_is_drawn_at_once(
    shown: Explorer, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drag_on() -> None:
        if shown.knobs == Knobs(batch=128):
            turn(shown, "batch", "256", drag="first")  # as a message in another thread during the run

    before_run(shown, drag_on, monkeypatch)
    turn(shown, "batch", "128", drag="first")
    run_all(shown)
    assert [kind for kind in sent if kind in ("tape", "run")] == ["tape", "run", "tape", "run"]
    assert Knobs(batch=128) not in shown._results
    assert shown.history == (Knobs(), Knobs(batch=32), Knobs(batch=256))


def test_a_baseline_that_is_pinned_during_the_run_is_drawn(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    before_run(shown, lambda: send(shown, "pin"), monkeypatch)
    turn(shown, "batch", "128")
    run_all(shown)
    assert shown.view.before is shown._results[Knobs(batch=32)].tape


def test_the_batches_beside_the_one_shown_are_run_ahead(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MainThread, "has_pending_events", lambda _: False)
    shown.knobs = Knobs(precision="bf16")
    for _ in range(3):
        shown._prefetch(shown._shown)
    beside = {knobs.batch for knobs in shown._results if knobs.precision == Knobs(precision="bf16").precision}
    assert beside == {None, 32, 128}
