"""Verdicts on runs that end in different ways."""

import pytest

from memexplore.analysis.summary import summary
from memexplore.analysis.verdict import Verdict, caught_requests, caught_text, failed_request, verdict
from memexplore.tape import Action, Ending, Meta, Tape
from tests.sample_tapes import CPU, GIB, MIB, T4

ENDED = T4._replace(ending=Ending.COMPLETED, notes=())


def tape_of(*rows: tuple[Action, int], meta: Meta = ENDED) -> Tape:
    """Return a tape of (action, size) rows; every block has an address of its own."""
    actions, sizes = zip(*rows, strict=True) if rows else ((), ())
    addresses = [-1 if action == Action.OOM else number * GIB for number, action in enumerate(actions)]
    return Tape.from_columns(
        {"action": actions, "address": addresses, "size": sizes, "step": [1] * len(rows)}, meta=meta
    )


ALLOC, OOM = (Action.ALLOC, MIB), (Action.OOM, 16 * GIB)


@pytest.mark.parametrize(
    ("ending", "rows", "expected", "failed", "caught"),
    [
        (Ending.COMPLETED, [ALLOC], Verdict.FITS, -1, []),
        (Ending.COMPLETED, [OOM, OOM, ALLOC], Verdict.FITS, -1, [0, 1]),
        # The program caught the last error and used the GPU no more: it has given up.
        (Ending.COMPLETED, [OOM], Verdict.OOM, 0, []),
        (Ending.COMPLETED, [OOM, ALLOC, OOM], Verdict.OOM, 2, [0]),
        (Ending.COMPLETED, [], Verdict.NOT_ON_GPU, -1, []),
        (Ending.OUT_OF_MEMORY, [OOM, ALLOC, OOM], Verdict.OOM, 2, [0]),
        # Another device ran out of memory, or the program raised the error itself.
        (Ending.OUT_OF_MEMORY, [ALLOC], Verdict.ERROR, -1, []),
        (Ending.ERROR, [OOM, ALLOC], Verdict.ERROR, -1, [0]),
        (Ending.ERROR, [], Verdict.ERROR, -1, []),
        (Ending.INTERRUPTED, [ALLOC], Verdict.INTERRUPTED, -1, []),
        # A snapshot file does not say how its program ended: the last failed request counts as its end.
        (Ending.UNKNOWN, [OOM, ALLOC, OOM, ALLOC], Verdict.OOM, 2, []),
        (Ending.UNKNOWN, [], Verdict.FITS, -1, []),
    ],
)
def test_verdict(ending, rows, expected, failed, caught):
    tape = tape_of(*rows, meta=ENDED._replace(ending=ending))
    assert (verdict(tape), failed_request(tape), caught_requests(tape)) == (expected, failed, caught)


def test_cpu_recording_without_tensors_is_not_a_gpu_that_was_missed():
    assert verdict(tape_of(meta=CPU._replace(ending=Ending.COMPLETED))) is Verdict.FITS


def test_caught_errors_are_listed():
    tape = tape_of(OOM, OOM, ALLOC)
    assert caught_text(tape) == (
        "The program went on after 2 out-of-memory errors: step 1, a request requested 16.0 GiB; "
        "step 1, a request requested 16.0 GiB."
    )
    assert [one["requested"] for one in summary(tape)["caught_requests"]] == [16 * GIB] * 2


def test_long_list_of_caught_errors_is_cut():
    assert caught_text(tape_of(*[OOM] * 8, ALLOC)).endswith("; and 3 more.")  # 5 of 8 are listed
