"""A rank of several processes: its place and NCCL's memory, which no peak contains."""

from __future__ import annotations

import pytest

from memexplore.analysis.rank import nccl_object
from memexplore.analysis.summary import summary
from memexplore.analysis.verdict_content import Level, verdict_content
from memexplore.tape import Communicator, Meta, Source, Tape

MIB = 2**20
GROUP = (Communicator(8),)  # 688 MiB to 1.6 GiB


def tape(capacity: int, communicators: tuple[Communicator, ...] = GROUP) -> Tape:
    meta = Meta(Source.PREDICTED, "H100", capacity=capacity, rank=3, world=8, communicators=communicators)
    return Tape.from_columns({"address": [0], "size": [100 * MIB]}, meta=meta)


@pytest.mark.parametrize(
    ("capacity", "level", "text"),
    [
        (80 << 30, Level.FITS, "plus 688 MiB to 1.60 GiB of NCCL, outside the allocator · rank 3 of 8"),
        (1 << 30, Level.TIGHT, "of NCCL, outside the allocator: more than is left at its upper end · rank 3 of 8"),
        (500 * MIB, Level.TIGHT, "of NCCL, outside the allocator: more than is left · rank 3 of 8"),
    ],
)
def test_the_verdict_names_rank_and_nccl(capacity: int, level: Level, text: str) -> None:
    verdict = verdict_content(tape(capacity))
    assert text in verdict.detail
    assert (verdict.level, verdict.used) == (level, 100 * MIB)


def test_the_summary_has_the_range_beside_the_peak() -> None:
    found = summary(tape(80 << 30))
    assert (found["rank"], found["world"], found["peak_allocated"]) == (3, 8, 100 * MIB)
    assert found["nccl"]["communicators"] == [{"size": 8, "all_to_all": False}]
    assert nccl_object(tape(80 << 30, ())) is None
