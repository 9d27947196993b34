"""The kinds of inputs by name: each loads what it needs and returns what makes an input from its number."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from tests.fuzz.runner import Input, Make

PROGRAM = 10_000_000
"""The length that a program counts for: 10 s."""

GROWTH = 4
"""How many times larger the second of two files of one structure is."""


def check_growth(small: float, large: float) -> None:
    """Raise AssertionError if the CPU time of a file `GROWTH` times larger grows as the square of its size.

    A linear cost grows 4 times, a quadratic one 16 times; below 50 ms the costs of every file hide the growth.
    """
    assert large < 12 * max(small, 0.05), f"{small:.2f} s, and {large:.2f} s for a file {GROWTH} times larger"


def _timed(read: Callable[[], str]) -> tuple[str, float]:
    """Return the outcome of a read, and its CPU time in seconds."""
    start = time.process_time()
    return read(), time.process_time() - start


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
        structure = structures[number % len(structures)]
        smaller, data = structure(size // GROWTH), structure(size)

        def run() -> str:
            _, small = _timed(lambda: reading.read_bytes(smaller, random.Random(number)))
            outcome, large = _timed(lambda: reading.read_bytes(data, random.Random(number)))
            check_growth(small, large)
            return outcome

        # How long a linear cost takes depends on the machine: the limit ends only what is ten times slower.
        return Input(data, 10 * max(len(data), size), run)

    return make


def _tapes() -> Make:
    from tests.fuzz import reading, tapes

    def make(number: int) -> Input:
        data = tapes.make(number)
        return Input(data, len(data), lambda: reading.read_bytes(data, random.Random(number)))

    return make


def _programs() -> Make:
    from tests.fuzz import programs

    return _checked(programs.check)


def _values() -> Make:
    from tests.fuzz import value_programs

    return _checked(value_programs.check)


def _memory() -> Make:
    from tests.fuzz import memory_limits

    return _checked(memory_limits.check)


def _checked(check: Callable[[int], str]) -> Make:
    """Return what makes an input of the program of a number, which `check` runs."""
    import torch

    torch.set_num_threads(1)  # threads of the parent do not live in its children
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    check(0)  # what torch imports at the first use

    def make(number: int) -> Input:
        return Input(b"%d" % number, PROGRAM, lambda: check(number))

    return make


def _interruptions() -> Make:
    import torch

    from tests.fuzz import interruptions

    torch.set_num_threads(1)
    interruptions.check(0)

    def make(number: int) -> Input:
        return Input(b"%d" % number, PROGRAM, lambda: interruptions.check(number))

    return make


def _files() -> Make:
    from tests.fuzz import files

    files.check(0)

    def make(number: int) -> Input:
        return Input(b"%d" % number, PROGRAM, lambda: files.check(number))

    return make


KINDS: dict[str, Callable[[], Make]] = {
    "snapshots": _snapshots,
    "growing": _growing,
    "tapes": _tapes,
    "programs": _programs,
    "values": _values,
    "memory": _memory,
    "interruptions": _interruptions,
    "files": _files,
}
