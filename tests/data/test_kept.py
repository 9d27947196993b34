"""The kept recordings against the collection that they were made from."""

from __future__ import annotations

import filecmp
import os

import numpy as np
import pytest

from memexplore.snapshot import read
from memexplore.snapshot.history import tape_of
from memexplore.snapshot.recorded import Recorded
from tests.data import kept
from tests.data.make import COLLECTION
from tests.fidelity.compared import freed_by_autocast

NAMES = sorted(path.name.removesuffix(".json.gz") for path in kept.RECORDINGS.glob("*.json.gz"))
with_collection = pytest.mark.skipif(
    not COLLECTION.is_dir() and not os.environ.get("CI"), reason="the collection is not beside this checkout"
)


def layout(recorded: Recorded) -> list[tuple]:
    """The final segments and blocks without the numbers of their stacks."""
    return [(*segment[:-1], [block[:-1] for block in segment.blocks]) for segment in recorded.segments]


def test_kept_files_take_less_than_a_megabyte() -> None:
    assert len(NAMES) == 28
    assert sum(path.stat().st_size for path in kept.RECORDINGS.iterdir()) < 1_000_000


@with_collection
def test_every_recording_is_kept() -> None:
    collected = sorted(path.name.removesuffix(".pickle.gz") for path in (COLLECTION / "recordings").glob("*.pickle.gz"))
    assert collected == NAMES


@with_collection
@pytest.mark.parametrize(
    ("copy", "original"), [(kept.INDEX, "recordings/index.csv"), (kept.PUBLISHED_PEAKS, "published_peaks.csv")]
)
def test_tables_are_copies(copy, original) -> None:
    assert filecmp.cmp(copy, COLLECTION / original, shallow=False)


@with_collection
@pytest.mark.parametrize("name", NAMES)
def test_kept_columns_equal_the_recording(name: str) -> None:
    originals = read(COLLECTION / "recordings" / f"{name}.pickle.gz")
    assert [original.device for original in originals] == list(kept.devices(name))
    for original, copy in zip(originals, kept.devices(name).values(), strict=True):
        for column in kept.COLUMNS:
            assert np.array_equal(getattr(original, column), getattr(copy, column)), column
        assert layout(original) == layout(copy)
        assert (original.settings, original.device_free) == (copy.settings, copy.device_free)


@with_collection
@pytest.mark.parametrize("name", NAMES)
def test_kept_stacks_lead_to_the_same_phases_steps_and_categories(name: str) -> None:
    for original in read(COLLECTION / "recordings" / f"{name}.pickle.gz"):
        tape, copy = tape_of(original), kept.tape(name, original.device)
        for column in ("phase", "step", "category"):
            assert np.array_equal(getattr(tape, column), getattr(copy, column)), column
        assert freed_by_autocast(tape) == freed_by_autocast(copy)
