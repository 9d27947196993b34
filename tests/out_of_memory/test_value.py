"""Post-mortems of tapes alone: what a file says, and what it does not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from memexplore import snapshot
from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.value import of_tape
from memexplore.tape import Action, Category, Ending, Meta, Phase, Source, Tape

MIB = 1 << 20
RECORDINGS = Path(__file__).resolve().parents[3] / "shared" / "recordings"
needs_recordings = pytest.mark.skipif(
    not RECORDINGS.is_dir() and not os.environ.get("CI"), reason="the recordings are not here"
)


def _meta(mib: int) -> Meta:
    return Meta(Source.PREDICTED, f"{mib} MiB GPU", capacity=mib * MIB, ending=Ending.OUT_OF_MEMORY)


def test_tape_that_fits_has_none() -> None:
    tape = Tape.from_columns({"address": [0], "size": [MIB]}, meta=Meta(Source.PREDICTED, "T4", capacity=2 * MIB))
    assert of_tape(tape) is None


def test_memory_of_the_device_at_the_failure() -> None:
    meta = _meta(100)._replace(total=110 * MIB)
    actions = [Action.SEGMENT_ALLOC, Action.ALLOC, Action.SEGMENT_ALLOC, Action.ALLOC, Action.FREE_REQUESTED]
    actions += [Action.FREE_COMPLETED, Action.OOM]
    tape = Tape.from_columns(
        {
            "action": actions,
            "address": [0, 0, 40 * MIB, 40 * MIB, 40 * MIB, 40 * MIB, -1],
            "size": [size * MIB for size in (40, 40, 30, 30, 30, 30, 80)],
        },
        meta=meta,
    )
    found = of_tape(tape)
    assert found is not None
    assert found.request is not None
    assert found.request.size == 80 * MIB
    # 40 + 30 MiB reserved, 40 allocated; 100 − 70 free, 110 − 100 outside the allocator; 40 + 80 − 100 missing
    memory = found.memory
    assert (memory.allocated, memory.reserved, memory.gaps) == (40 * MIB, 70 * MIB, 30 * MIB)
    assert (memory.free, memory.outside, found.missing) == (30 * MIB, 10 * MIB, 20 * MIB)
    assert found.cause is Cause.TOO_MUCH
    assert json.loads(json.dumps(found.as_dict()))["memory"]["gaps"] == 30 * MIB


def _growing(steps: int, capacity: int) -> Tape:
    """Each step keeps an activation of 10 MiB, and frees a temporary one of 20; the last request fails."""
    columns: dict[str, list[int]] = {name: [] for name in ("action", "address", "size", "step", "phase", "category")}
    address = 1 << 40

    def row(action: Action, at: int, size: int, step: int) -> None:
        values = (action, at, size * MIB, step, Phase.FORWARD, Category.ACTIVATION)
        for name, value in zip(columns, values, strict=True):
            columns[name].append(int(value))

    for step in range(1, steps + 1):
        row(Action.ALLOC, address, 10, step)
        row(Action.ALLOC, address + 64 * MIB, 20, step)
        row(Action.FREE_REQUESTED, address + 64 * MIB, 20, step)
        row(Action.FREE_COMPLETED, address + 64 * MIB, 20, step)
        address += 128 * MIB
    row(Action.OOM, -1, 20, steps + 1)
    return Tape.from_columns(columns, meta=_meta(capacity))


def test_growth_from_step_to_step_is_a_leak_without_any_evidence() -> None:
    # 8 steps of 10 MiB and 20 MiB for the request: 100 MiB of 95
    found = of_tape(_growing(8, 95))
    assert found is not None
    assert found.cause is Cause.LEAK
    assert found.growth == 10 * MIB
    assert "10.0 MiB a step" in found.sentences[-1]


def test_growth_that_is_too_small_to_matter_is_no_leak() -> None:
    # Without what the steps kept, 8 × 10 MiB, the request of 20 MiB does not fit into 15 MiB either.
    tape = _growing(8, 15)
    found = of_tape(tape)
    assert found is not None
    assert found.cause is Cause.TOO_MUCH


@needs_recordings
def test_recorded_failure_of_one_of_three_gpus() -> None:
    tapes = snapshot.load(RECORDINGS / "expandable-3gpu-oom.pickle.gz")
    found = {device: of_tape(tape) for device, tape in tapes.items()}
    assert found[0] is None
    assert found[2] is None
    failed = found[1]
    assert failed is not None
    assert failed.request is not None
    assert (failed.request.op, failed.request.size) == ("aten::relu", 5_308_694_528)
    assert "models.py, line 181" in failed.sentences[0]
    # Segments were expandable already; 84 063 358 976 allocated + 5 308 694 528 requested − 84 298 432 512
    assert failed.cause is Cause.TOO_MUCH
    assert failed.missing == 5_073_620_992
    assert failed.by_category[0][0] == "activation"


@needs_recordings
def test_recorded_layout_says_what_the_file_says() -> None:
    (tape,) = snapshot.load(RECORDINGS / "layout-only-after-oom.pickle.gz").values()
    found = of_tape(tape)
    assert found is not None
    assert (found.cause, found.request) == (Cause.UNKNOWN, None)
    # Segments of 11 844 714 496 bytes, blocks of 11 840 159 744
    assert (found.memory.allocated, found.memory.reserved) == (11_840_159_744, 11_844_714_496)
    assert "no events" in found.text
