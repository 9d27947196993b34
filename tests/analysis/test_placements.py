"""Peaks over placements of segments, on programs that are short enough to be read."""

from __future__ import annotations

import pytest

from memexplore.allocator import Settings, assign_addresses
from memexplore.analysis.placements import peak_ranges, placement_note, summary_ranges
from memexplore.tape import Action, Meta, Os, Source, Tape

MIB = 1024**2


def program(release: str = "2.11", **meta: object) -> Tape:
    """Two segments A and B of 20 MiB with equal holes of 9 MiB; the lower one takes 5 MiB, and 19 MiB need all of A."""
    rows: list[tuple[Action, int, int]] = []

    def alloc(name: int, mebibytes: float) -> None:
        rows.append((Action.ALLOC, name, int(mebibytes * MIB)))

    def free(name: int) -> None:
        size = next(size for action, other, size in rows if action is Action.ALLOC and other == name)
        rows.extend([(Action.FREE_REQUESTED, name, size), (Action.FREE_COMPLETED, name, size)])

    alloc(1, 9)  # A: 9 + 9 of 20 MiB
    alloc(2, 9)
    alloc(3, 9)  # B likewise
    alloc(4, 9)
    free(1)
    free(3)
    alloc(5, 5)  # at the start of A or of B
    free(2)  # A is free but for the 5 MiB, if these are in A
    alloc(6, 19)
    columns = {
        "action": [action for action, _, _ in rows],
        "address": [name for _, name, _ in rows],
        "size": [size for _, _, size in rows],
    }
    values = {"versions": {"torch": release}} | meta
    tape = Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "GPU", **values))  # type: ignore[arg-type]
    return assign_addresses(tape, Settings.parse(tape.meta.settings))


def test_the_range_holds_the_peaks_of_all_placements():
    ranges = peak_ranges(program())
    # Upwards A is lower: 5 goes into A, and 19 MiB need a segment of 20 of their own: 60 MiB. Downwards B is lower: 40.
    assert ranges is not None
    assert ranges.reserved == (40 * MIB, 60 * MIB)
    # 4 · 9 = 36; at the end 9 + 5 + 20 = 34, as the remaining 1 MiB of a segment of 20 is not split off
    assert ranges.allocated == (36 * MIB, 36 * MIB)


@pytest.mark.parametrize(("system", "reserved"), [(Os.LINUX, 40), (Os.WSL, 60), (Os.WINDOWS, 60)])
def test_the_operating_system_decides_the_peak_of_the_tape(system: Os, reserved: int) -> None:
    tape = program(os=system)
    assert tape.peak("reserved")[0] == reserved * MIB
    assert peak_ranges(tape).reserved == (40 * MIB, 60 * MIB)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes", [{"release": "2.12"}, {"release": "2.13"}, {"settings": "expandable_segments:True"}]
)
def test_placement_has_no_effect_on_other_releases_and_expandable_segments(changes):
    tapes = [program(**changes, os=system) for system in (Os.LINUX, Os.WSL)]
    assert tapes[0].peak("reserved")[0] == tapes[1].peak("reserved")[0]
    assert placement_note(tapes[0]) is None


def test_the_note_says_how_far_the_peak_can_differ():
    assert placement_note(program()) == (
        "The driver of a real GPU may place segments at other addresses. The peaks can differ: the reserved one by "
        "0 B to +20.0 MiB."
    )


def test_a_run_that_fits_under_some_placements_only_says_so():
    ranges = peak_ranges(program(capacity=50 * MIB, total=50 * MIB))
    assert ranges is not None
    assert (ranges.fits, ranges.runs_out) == (True, True)
    assert "it can fit and can run out of memory" in str(placement_note(program(capacity=50 * MIB, total=50 * MIB)))


def test_the_range_of_a_tape_that_begins_with_blocks_is_unknown():
    rows = {
        "action": [Action.SEGMENT_ALLOC, Action.PREEXISTING, Action.ALLOC],
        "address": [0, 0, 512],
        "size": [2 * MIB, 512, 512],
    }
    tape = Tape.from_columns(rows, meta=Meta(Source.PREDICTED, "GPU", versions={"torch": "2.11"}))
    assert peak_ranges(tape) is None
    assert summary_ranges(tape) == {"peak_allocated_range": None, "peak_reserved_range": None}


def test_a_measured_tape_has_one_placement():
    tape = program()
    measured = tape.replace(meta=tape.meta._replace(source=Source.MEASURED))
    assert summary_ranges(measured)["peak_reserved_range"] == [40 * MIB, 40 * MIB]
