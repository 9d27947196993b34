"""Time to the answer after an out-of-memory error among many objects: `python -m tests.bench.bench_references`.

Prints the processor time from the error to the text of the answer beside the goal, and the time of the walk over the
program's objects beside that of a bare walk with `gc.get_referents` over the same ones.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch
from torch import nn

from memexplore.out_of_memory.evidence import collect
from memexplore.out_of_memory.reach import reached_from
from memexplore.out_of_memory.value import of_failure
from memexplore.recorder.recording import record
from memexplore.run.machine import virtual

GOAL = 2.0


class Sample:
    """A sample of a data set as programs keep it: two numbers, a list and a dictionary."""

    def __init__(self, number: int) -> None:
        self.number, self.weight = number, number / 7
        self.tags = [str(number), (number, [number])]
        self.fields = {"first": number, "second": [number]}


def bare_walk(root: Any) -> int:
    """Return the number of objects that a root leads to, without modules and what they have."""
    waiting, seen = [root], {id(root)}
    while waiting:
        for inner in gc.get_referents(waiting.pop()):
            if id(inner) not in seen and gc.is_tracked(inner) and not isinstance(inner, type):
                seen.add(id(inner))
                waiting.append(inner)
    return len(seen)


def answer(samples: list[Sample]) -> float:
    """Return the seconds from an error in a function that has the samples to the text of the answer."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32)))
    start = time.thread_time()
    try:
        with virtual("256MiB"), record() as recording:
            try:
                model.cuda()
                for _ in samples[:1000]:
                    model(torch.zeros(4096, 1024, device="cuda")).sum().backward()
            except torch.OutOfMemoryError as error:
                start = time.thread_time()
                evidence = collect(error)
                recording.ended_by(error)
                raise
    except torch.OutOfMemoryError:
        failure = of_failure(recording.tape, evidence)
        assert failure is not None
        print(failure.sentences[-1], f"(complete: {failure.complete})")
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=1_000_000)
    asked = parser.parse_args()
    each = bare_walk(Sample(1))
    samples = [
        [Sample(number) for number in range(first, first + 1000)] for first in range(0, asked.objects // each, 1000)
    ]
    flat: Any = {"train": samples}
    start = time.thread_time()
    count = bare_walk(flat)
    bare = time.thread_time() - start
    start = time.thread_time()
    complete = reached_from(flat, start + 600).complete
    ours = time.thread_time() - start
    print(
        f"{count:,} objects: walk {ours:.2f} s, bare walk {bare:.2f} s, ratio {ours / bare:.2f}, complete: {complete}"
    )
    seconds = answer(flat["train"])
    print(f"answer after {seconds:.2f} s, goal {GOAL:.0f} s")


if __name__ == "__main__":
    main()
