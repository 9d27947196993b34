"""The comparison of two tapes that are short enough to be read."""

from __future__ import annotations

from memexplore.tape import Action, Category, Frame, Meta, Source, Tape
from tests.fidelity import compared

MIB = 1024**2
SEGMENT = (Action.SEGMENT_ALLOC, 0, 2 * MIB)
FIRST, SECOND = (Action.ALLOC, 0, 512), (Action.ALLOC, 512, 1024)
FREE_FIRST, FREE_SECOND = (Action.FREE_REQUESTED, 0, 512), (Action.FREE_REQUESTED, 512, 1024)
STACKS = ((Frame("model.py", 1, "forward"),), (Frame("torch/amp/autocast_mode.py", 2, "__exit__"),))
IN_MODEL, IN_AUTOCAST = range(2)


def tape(*rows: tuple[Action, int, int], stack: int = IN_MODEL) -> Tape:
    action, address, size = zip(*rows, strict=True)
    columns = {"action": action, "address": address, "size": size, "stack": [stack] * len(rows)}
    return Tape.from_columns(columns, meta=Meta(Source.IMPORTED, "cuda:0"), stacks=STACKS)


def compare(ours: Tape, theirs: Tape, absorbed_before: int = 0) -> compared.Comparison:
    return compared.compare("run", "2.6", ours, theirs, absorbed_before)


def cells(found: compared.Comparison) -> list[str]:
    """A recording's line of the table from the count of its requests on."""
    line = compared.markdown([found]).splitlines()[2]
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


def test_equal_tapes_compare_as_the_same():
    each = tape(SEGMENT, FIRST, SECOND, FREE_FIRST)
    # two allocs and a free; blocks of 512 and 1024 bytes in one segment of 2 MiB, 2 097 152 bytes
    assert cells(compare(each, each)) == ["3", "all", "1536 (same)", "2097152 (same) / 1 + 0 (same)"]


def test_the_first_different_request_is_named():
    ours, theirs = tape(SEGMENT, FIRST, SECOND), tape(SEGMENT, FIRST, FREE_FIRST)
    assert cells(compare(ours, theirs))[1] == "first difference at request 1: predicted 1024, measured -512"
    assert cells(compare(tape(SEGMENT, FIRST), theirs))[1].endswith("predicted none, measured -512")
    assert "0 of 1" in compared.markdown([compare(ours, theirs)])


def test_the_order_of_frees_of_the_autocast_cache_is_ignored():
    ours = tape(SEGMENT, FIRST, SECOND, FREE_FIRST, FREE_SECOND)
    rows = SEGMENT, FIRST, SECOND, FREE_SECOND, FREE_FIRST
    in_autocast = compare(ours, tape(*rows, stack=IN_AUTOCAST))
    assert (in_autocast.request_difference, in_autocast.reordered) == (None, 2)
    assert cells(in_autocast)[1] == "all; 2 frees of autocast's cache in another order"
    # outside autocast the order counts: the third request, counted from 0, is the first free
    assert compare(ours, tape(*rows, stack=IN_MODEL)).request_difference == (2, -512, -1024)


def test_allocs_inside_autocast_keep_their_order():
    theirs = tape(SEGMENT, (Action.ALLOC, 0, 1024), (Action.ALLOC, 1024, 512), stack=IN_AUTOCAST)
    assert compare(tape(SEGMENT, FIRST, SECOND), theirs).request_difference == (0, 512, 1024)


def test_an_estimated_workspace_is_left_out_only_if_the_rest_is_then_the_same():
    action, address, size = zip(SEGMENT, FIRST, SECOND, FREE_SECOND, strict=True)
    category = [Category.UNKNOWN, Category.UNKNOWN, Category.WORKSPACE, Category.UNKNOWN]
    columns = {"action": action, "address": address, "size": size, "category": category, "op": [-1, -1, 0, -1]}
    ours = Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "cuda:0"), ops=["aten.convolution"])
    found = compare(ours, tape(SEGMENT, FIRST))
    assert (found.request_difference, found.estimated) == (None, 1)
    assert cells(found)[1] == "all; workspaces of convolutions left out, which are estimates: 1"
    assert compare(ours, tape(SEGMENT, FIRST, SECOND, FREE_SECOND)).estimated == 0
    # with or without it the free of 512 bytes is missing: the difference is that of the whole run
    assert compare(ours, tape(SEGMENT, FIRST, FREE_FIRST)).request_difference == (1, 1024, -512)


def test_segment_allocs_and_frees_are_counted_and_compared():
    ours = tape(SEGMENT, FIRST, FREE_FIRST, (Action.SEGMENT_FREE, 0, 2 * MIB))
    theirs = tape(SEGMENT, FIRST, FREE_FIRST)
    assert compare(ours, theirs).segment_difference == (1, (Action.SEGMENT_FREE, 2 * MIB), None)
    assert cells(compare(theirs, ours))[3] == "2097152 (same) / 1 + 1 (first difference at segment 1)"


def test_bytes_missing_in_the_file_are_named():
    # 1536 predicted, 512 in the file, which lacks 1024
    found = compare(tape(SEGMENT, FIRST, SECOND), tape(SEGMENT, FIRST), absorbed_before=1024)
    assert cells(found)[2] == "512 (+1024, as the file leaves untold)"
    assert cells(found._replace(absorbed_before=1000))[2] == "512 (+1024)"


def test_larger_blocks_for_equal_requests_are_distinguished():
    found = compare(tape(SEGMENT, FIRST), tape(SEGMENT, FIRST))
    assert cells(found._replace(allocated=(1024, 512)))[2] == "512 (+512; peak requested same)"
    assert cells(found._replace(allocated=(1024, 512), requested=(900, 512)))[2] == "512 (+512)"
