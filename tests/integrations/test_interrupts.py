"""An interrupt at any line of beginning and ending a fit leaves no fit open and nothing changed."""

from __future__ import annotations

import gc

import pytest

from memexplore.integrations import fits
from memexplore.integrations.fits import Fits
from memexplore.live.live import State
from tests.interrupts import LAST, interrupts
from tests.live.test_watch_ended import state
from tests.live.training import Loop


class Trainer:
    """A trainer that calls its callback, and does not say that an exception ended the fit."""

    def fit(self, callback, loop):
        callback.begin(loop.model, loop.optimizer)
        callback.end()


class Callback(Fits):
    methods = ("fit",)

    @staticmethod
    def trainers():
        return (Trainer,)


@pytest.fixture(autouse=True)
def no_collection():
    gc.collect()
    gc.disable()
    yield
    LAST.clear()
    gc.enable()


def test_an_interrupt_at_any_line_of_a_fit_leaves_nothing_changed():
    loop, callback, trainer = Loop(), Callback(), Trainer()
    trainer.fit(callback, loop)
    before = state(loop)
    left = []
    for line in interrupts(lambda: trainer.fit(callback, loop)):
        running = callback._live is not None and callback.live.state in (State.WATCHING, State.PAUSED)
        if running or fits._open is not None or fits.fitting() is not None or state(loop) != before:
            left.append(line)
    assert left == []


def test_methods_are_replaced_while_a_callback_exists():
    original = Trainer.fit
    callback = Callback()
    assert Trainer.fit is not original
    assert Trainer.fit.__wrapped__ is original
    del callback
    assert Trainer.fit is original


def test_what_another_library_puts_in_place_of_a_method_stays():
    original = Trainer.fit
    callback = Callback()
    ours = Trainer.fit

    def theirs(self, *args):
        return ours(self, *args)

    try:
        Trainer.fit = theirs
        del callback
        assert Trainer.fit is theirs
    finally:
        Trainer.fit = original
