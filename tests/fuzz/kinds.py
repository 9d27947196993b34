"""The kinds of inputs by name: each loads what it needs and returns what makes an input from its number."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from tests.fuzz.runner import Input, Make

PROGRAM = 10_000_000
"""The length that a program counts for: 10 s."""


def _snapshots() -> Make:
    from tests.fuzz import reading, snapshots

    def make(number: int) -> Input:
        data = snapshots.make(number)
        return Input(data, len(data), lambda: reading.read_bytes(data, random.Random(number)))

    return make


def _growing() -> Make:
    from tests.fuzz import growing, reading

    structures = list(growing.STRUCTURES.values())

    def make(number: int) -> Input:
        size = random.Random(number).randrange(1000, 200_000)
        data = structures[number % len(structures)](size)
        return Input(data, max(len(data), size), lambda: reading.read_bytes(data, random.Random(number)))

    return make


def _tapes() -> Make:
    from tests.fuzz import reading, tapes

    def make(number: int) -> Input:
        data = tapes.make(number)
        return Input(data, len(data), lambda: reading.read_bytes(data, random.Random(number)))

    return make


def _programs() -> Make:
    import torch

    from tests.fuzz import programs

    torch.set_num_threads(1)  # threads of the parent do not live in its children
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    programs.check(0)  # what torch imports at the first use

    def make(number: int) -> Input:
        return Input(b"%d" % number, PROGRAM, lambda: programs.check(number))

    return make


def _interruptions() -> Make:
    import torch

    from tests.fuzz import interruptions

    torch.set_num_threads(1)
    interruptions.check(0)

    def make(number: int) -> Input:
        return Input(b"%d" % number, PROGRAM, lambda: interruptions.check(number))

    return make


KINDS: dict[str, Callable[[], Make]] = {
    "snapshots": _snapshots,
    "growing": _growing,
    "tapes": _tapes,
    "programs": _programs,
    "interruptions": _interruptions,
}
