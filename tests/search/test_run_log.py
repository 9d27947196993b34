"""Searches that go on beside each other: which settings are run, and when."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import nn

from memexplore.hardware import catalogue
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.step import Step
from memexplore.run.search.results import Failed
from memexplore.run.search.run_log import RunLog

ONE, TWO, THREE, FOUR = (Knobs(batch=count) for count in (1, 2, 3, 4))
STEP = Step(nn.Linear(8, 8), torch.zeros(2, 8), loss=torch.mean)


def search(*settings: Knobs) -> Generator[list[Knobs], None, int]:
    """A search that wants one setting after the other, and returns their number."""
    for knobs in settings:
        yield [knobs]
    return len(settings)


def run_beside(*searches: Generator[list[Knobs], None, int]) -> tuple[list[Knobs], list[int]]:
    """The settings in the order in which their runs end, the first of them after all others, and the answers."""
    steps = RunLog(STEP, catalogue.find("T4")).run_beside(searches)
    ended: list[Knobs] = []
    try:
        slow, *running = next(steps)
        while True:
            knobs = running.pop(0) if running else slow
            ended.append(knobs)
            running += steps.send(Failed(knobs, RuntimeError("not run")))
    except StopIteration as end:
        return ended, end.value


def test_a_search_goes_on_while_a_run_of_another_one_lasts():
    assert run_beside(search(ONE), search(TWO, THREE, FOUR)) == ([TWO, THREE, FOUR, ONE], [1, 3])


def test_a_setting_that_two_searches_want_is_run_once():
    assert run_beside(search(ONE, TWO), search(ONE, TWO), search(THREE)) == ([THREE, ONE, TWO], [2, 2, 1])


def test_a_search_without_settings_runs_nothing():
    assert run_beside(search(), search()) == ([], [0, 0])


def test_settings_that_are_the_same_on_a_base_are_run_once():
    steps = RunLog(STEP, catalogue.find("T4"), base=TWO).run([Knobs(), TWO, FOUR])
    assert next(steps) == [TWO, FOUR]
