"""Searches that go on beside each other: which settings are run, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator

import torch
from torch import nn

from memexplore import gpu_catalogue
from memexplore.knobs.knobs import Knobs
from memexplore.search.executors import open_runner
from memexplore.search.run_log import RunLog
from memexplore.search.workers import Done, Failed, Result
from memexplore.steps.step import Step

ONE, TWO, THREE, FOUR = (Knobs(batch=count) for count in (1, 2, 3, 4))
STEP = Step(nn.Linear(8, 8), torch.zeros(2, 8), loss=torch.mean)


class FirstEndsLast:
    """Runs settings whose first ends after all others, also after those that are added meanwhile."""

    def __init__(self) -> None:
        self.ended: list[Knobs] = []

    def __call__(self, settings: deque[Knobs]) -> Iterator[Result]:
        slow = settings.popleft()
        while settings:
            yield self._end(settings.popleft())
        yield self._end(slow)
        while settings:
            yield self._end(settings.popleft())

    def _end(self, knobs: Knobs) -> Failed:
        self.ended.append(knobs)
        return Failed(knobs, RuntimeError("not run"))


def search(*settings: Knobs) -> Generator[list[Knobs], None, int]:
    """A search that wants one setting after the other, and returns their number."""
    for knobs in settings:
        yield [knobs]
    return len(settings)


def run_beside(*searches: Generator[list[Knobs], None, int]) -> tuple[list[Knobs], list[int]]:
    """The settings in the order in which their runs ended, and the answers."""
    run_all = FirstEndsLast()
    log = RunLog(run_all, STEP, gpu_catalogue.find("T4"), None)
    answers = log.run_beside(searches)
    return run_all.ended, answers


def test_a_search_goes_on_while_a_run_of_another_one_lasts():
    assert run_beside(search(ONE), search(TWO, THREE, FOUR)) == ([TWO, THREE, FOUR, ONE], [1, 3])


def test_a_setting_that_two_searches_want_is_run_once():
    assert run_beside(search(ONE, TWO), search(ONE, TWO), search(THREE)) == ([THREE, ONE, TWO], [2, 2, 1])


def test_a_search_without_settings_runs_nothing():
    assert run_beside(search(), search()) == ([], [0, 0])


def test_settings_added_during_a_run_are_run_too():
    waiting = deque([ONE])
    ended = []
    with open_runner(STEP, gpu="T4", release=None, os="linux", executor=None, expected_runs=1) as run_all:
        for result in run_all(waiting):
            assert isinstance(result, Done)
            ended.append(result.outcome.knobs)
            if len(ended) == 1:
                waiting.append(TWO)
    assert ended == [ONE, TWO]
