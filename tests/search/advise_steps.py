"""Small steps and the advice for them, found once for all tests."""

from __future__ import annotations

import functools

import torch
from torch import nn

from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.run.search.advice import Advice
from memexplore.run.search.advise import advise


def block(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def step(batch=4096) -> Step:
    """Six blocks of width 256: 13 MiB of weights, and activations that grow with the batch."""
    return Step(nn.Sequential(*(block(256) for _ in range(6))), torch.zeros(batch, 256), loss=torch.mean)


@functools.cache
def need() -> int:
    return run(step(), machine=machine_of("80GiB")).outcome.needed


@functools.cache
def tight() -> Advice:
    """Advice for a GPU with three quarters of the memory that the step needs."""
    return advise(step(), f"{need() * 3 // 4}B", progress=None)


@functools.cache
def roomy() -> Advice:
    return advise(step(), "T4", budget=30, progress=None)


@functools.cache
def nowhere() -> Advice:
    """One weight of 64 GiB, with its gradient and two states 256 GiB: more than the largest GPU has."""
    wide = Step(lambda: nn.Linear(1 << 17, 1 << 17, bias=False), torch.zeros(2, 1 << 17), loss=torch.mean)
    return advise(wide, "T4", budget=30, progress=None)
