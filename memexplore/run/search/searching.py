"""A search and the runs that it asks for: what `advise`, the process of a search and an idle kernel go through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from memexplore.run.search.advice import Advice
from memexplore.run.search.progress import Progress
from memexplore.run.search.results import Result
from memexplore.run.search.run_log import Wanted
from memexplore.run.search.runners import Runner


class Search(Protocol):
    """A search for settings that fit; it runs nothing itself."""

    def steps(self) -> Wanted[None]:
        """Search: yield settings to run, and go on with the result of one of those yielded so far."""

    def progress(self) -> Progress:
        """Return how far the search is, after its first run."""

    def advice(self) -> Advice | None:
        """Return the advice so far, in the end all of it; None before the program as written was run."""


def run_all(search: Search, runner: Runner) -> Iterator[None]:
    """Run what a search asks for, and yield after each run. Raises what the search raises."""
    steps = search.steps()

    def go_on(result: Result | None) -> bool:
        try:
            settings = next(steps) if result is None else steps.send(result)
        except StopIteration:
            return False
        runner.submit(settings)
        return True

    is_going_on = go_on(None)
    while is_going_on:
        is_going_on = go_on(runner.next_result())
        yield
