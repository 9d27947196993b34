"""Steps and an executor that tests of sweeps share."""

from __future__ import annotations

from concurrent.futures import Executor, Future

import torch
from torch import nn

from memexplore.run.programs.step import Step

MIB = 1024**2


def step(width=1024, batch=8) -> Step:
    return Step(nn.Linear(width, width), torch.zeros(batch, width), loss=torch.mean, optimizer=torch.optim.SGD)


def same(one, other) -> bool:
    """Return whether tapes are equal but for their stacks, which name the caller."""
    return one.replace(stack=one.stack * 0 - 1, stacks=()).equals(other.replace(stack=other.stack * 0 - 1, stacks=()))


class SameThread(Executor):
    """Runs every task at once in the calling thread; keeps the arguments."""

    def __init__(self):
        self.sent = []

    def submit(self, function, /, *args, **kwargs):
        self.sent.append(args)
        future: Future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future
