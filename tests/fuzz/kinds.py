"""The kinds of inputs by name: each loads what it needs and returns what makes an input from its number."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.fuzz.runner import Input, Make


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


KINDS: dict[str, Callable[[], Make]] = {"snapshots": _snapshots, "growing": _growing, "tapes": _tapes}
