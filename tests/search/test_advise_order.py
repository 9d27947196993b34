"""Advice: what is run first, what is not run, what an interrupt keeps, and how an option trains differently."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from memexplore.run.machine import machine_of
from memexplore.run.run import run
from memexplore.run.search.advice import Advice
from memexplore.run.search.advise import advise
from memexplore.text import ipython_shell
from memexplore.text.units import size_text
from tests.search.advise_steps import need, nowhere, step, tight

# -- few bytes missing


@functools.cache
def nearly() -> Advice:
    """Advice for a GPU that lacks one per cent of the bytes that the step has allocated at its peak."""
    return advise(
        step(), f"{run(step(), machine=machine_of('80GiB')).outcome.peak_allocated * 99 // 100}B", progress=None
    )


def test_the_few_bytes_that_are_missing_are_printed():
    allocated = run(step(), machine=machine_of("80GiB")).outcome.peak_allocated
    missing = allocated - allocated * 99 // 100
    # 1 / 99 of the GPU's memory
    sentence = f"Its peak allocated is only {size_text(missing)} (1.0 %) more than the GPU has: small changes were run"
    assert sentence in str(nearly())


def test_nothing_is_said_of_small_changes_where_half_of_the_memory_is_missing():
    assert "small changes" not in str(advise(step(), f"{need() // 2}B", budget=1, progress=None))


def test_small_changes_are_run_first_where_few_bytes_are_missing():
    alone = [outcome.knobs for outcome in nearly().tried[1:] if len(outcome.knobs.changed()) == 1]
    small = ["settings" in one.changed() or "update" in one.changed() or "inplace" in one.changed() for one in alone]
    small = [known or bool(one.checkpoint.layers) for known, one in zip(small, alone, strict=True)]
    # True before False; one block recomputed is among them.
    assert small == sorted(small, reverse=True)
    assert any(one.checkpoint.layers for one in alone[: small.count(True)])


def test_the_first_option_costs_less_than_two_hundredths_of_the_time():
    assert not nearly().options[0].alters
    assert nearly().options[0].slow_down < 1.02


# -- settings that cannot fit


def test_activations_are_not_saved_alone_where_weights_and_states_are_too_large():
    alone = [outcome.knobs for outcome in nowhere().tried if len(outcome.knobs.changed()) == 1]
    assert not {"checkpoint", "offload", "inplace", "accumulation"} & {next(iter(one.changed())) for one in alone}


# -- an interrupted search


def test_an_interrupted_search_keeps_what_it_has_found():
    seen = []

    def interrupt(progress):
        seen.append(progress.done)
        if len(seen) == 6:
            raise KeyboardInterrupt

    found = advise(step(), f"{need() * 3 // 4}B", progress=interrupt)
    assert found.cancelled
    assert len(found.tried) == 6
    assert "The search was stopped: there may be better settings." in str(found)
    assert not tight().cancelled


def test_an_interrupt_before_the_first_result_is_raised():
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        advise(dataclasses.replace(step(), loss=interrupt), "T4", progress=None)


# -- other trainings in words


def test_each_option_that_changes_the_training_has_a_sentence_that_says_how():
    advice = advise(step(), f"{need() * 2 // 5}B", budget=1, progress=None)
    (smaller,) = (option for option in advice.options if option.knobs.batch)
    number = advice.options.index(smaller) + 1
    sentence = f"A step of {smaller.knobs.batch} samples has a noisier gradient"
    assert smaller.training.startswith(sentence)
    assert f"Setting {number} trains differently: {sentence}" in str(advice)
    assert f">Setting {number} trains differently: {sentence}" in advice._repr_html_()
    assert all(bool(option.training) == option.alters for one in (tight(), nowhere()) for option in one.options)


# -- shown in a notebook


def test_a_notebook_shows_the_options_found_so_far_until_the_end(monkeypatch):
    shown: list[str] = []

    class Output:
        def update(self, value):
            shown.append(value._repr_html_())

    def display(value):
        shown.append(value._repr_html_())
        return Output()

    monkeypatch.setattr(ipython_shell, "is_notebook", lambda: True)
    monkeypatch.setattr(ipython_shell, "display_in_place", display)
    advise(step(), f"{need() * 3 // 4}B", budget=6)
    tables = [page for page in shown if "These fit, cheapest first" in page]
    assert len(tables) > 1
    assert shown[-1] == "" or 'role="progressbar"' in shown[-1]
    assert "" in shown
