"""The time of a search for advice: until the first setting that fits, and until the complete list.

`python -m tests.bench.bench_advise [MODEL ...] [--gpu NAME]` searches for GPT-2 with 48 sequences of 1 024 tokens and
for Llama 7B with one of 512, as `mx.advise` does in this process, and as the button "What would fit?" does in a process
of its own: in one that was started some seconds before, as an explorer does when it appears, and from its start. The
ratio is that of the time to one run of a setting that was not run before, in this process, taken before and after each
search; seconds are printed beside it. A larger GPU does not count as fitting.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.run import Want, run
from memexplore.run.search.advice import Advice
from memexplore.run.search.advise import advise
from memexplore.run.search.search_process import Ended, Found, SearchProcess, prepare
from memexplore.run.search.workers import processor_count
from tests.models import MODELS

SECONDS_BEFORE_BUTTON = 20
"""Time for the process to start, on a slow machine."""
SHAPES = {"gpt2": (48, 1024), "llama7b": (1, 512)}
OF_ONE_RUN = Knobs(precision="off"), Knobs(zero_grad="set to zero")
"""Settings that no search runs and that take as long as the step as written."""


def new_step(name: str) -> Step:
    """A step of a model, of which nothing is recorded yet."""
    build, _, loss = MODELS[name]
    return Step(build, (torch.zeros(SHAPES[name], dtype=torch.long),), compute_loss=loss)


def seconds_of_one_run(step: Step, knobs: Knobs, gpu: str) -> float:
    start = time.perf_counter()
    run(step, knobs, machine_of(gpu), want=Want.NUMBERS)
    return time.perf_counter() - start


def fits(advice: Advice | None) -> bool:
    return advice is not None and any(option.knobs.gpu is None for option in advice.options)


def here(step: Step, gpu: str) -> tuple[float, float, Advice]:
    """Seconds to the first setting that fits and to the end of `advise`."""
    first: list[float] = []
    start = time.perf_counter()

    def found(so_far: Advice) -> None:
        if not first and fits(so_far):
            first.append(time.perf_counter() - start)

    advice = advise(step, gpu, progress=None, found=found)
    end = time.perf_counter() - start
    return first[0] if first else end, end, advice


def prepared(step: Step, gpu: str) -> tuple[float, float, Advice]:
    """The same of a search in a process that waits for it."""
    prepare()
    time.sleep(SECONDS_BEFORE_BUTTON)
    return beside(step, gpu)


def beside(step: Step, gpu: str) -> tuple[float, float, Advice]:
    """The same of a search in a process of its own, from the start of the process."""
    events: queue.Queue[tuple[float, Found | Ended]] = queue.Queue()
    start = time.perf_counter()
    SearchProcess(step, machine_of(gpu), lambda event: events.put((time.perf_counter() - start, event)))
    first = None
    for seconds, event in iter(events.get, None):
        if first is None and fits(event.advice):
            first = seconds
        if isinstance(event, Ended):
            assert event.advice is not None, event.error
            return seconds if first is None else first, seconds, event.advice
    raise AssertionError


SEARCHES: dict[str, Callable[[Step, str], tuple[float, float, Advice]]] = {
    "advise": here,
    "button": prepared,
    "button at once": beside,
}


def measured(name: str, gpu: str) -> Iterator[str]:
    for kind, search in SEARCHES.items():
        step = new_step(name)
        before, after = OF_ONE_RUN
        one_run = [seconds_of_one_run(step, Knobs(), gpu), seconds_of_one_run(step, before, gpu)][1:]
        first, end, advice = search(new_step(name), gpu)
        one_run.append(seconds_of_one_run(step, after, gpu))
        unit = statistics.mean(one_run)
        yield (
            f"{name} on {gpu}, {kind}: first fit {first:.1f} s, all {end:.1f} s; one run {unit * 1e3:.0f} ms, "
            f"so {first / unit:.0f} and {end / unit:.0f} runs; {len(advice.tried)} settings, "
            f"{len(advice.options)} options, first {advice.text_of(advice.options[0])}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES))
    parser.add_argument("--gpu", default="A100")
    asked = parser.parse_args()
    print(f"{processor_count()} processors")
    for name in asked.models:
        for line in measured(name, asked.gpu):
            print(line, flush=True)


if __name__ == "__main__":
    main()
