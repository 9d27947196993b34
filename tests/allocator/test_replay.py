"""`replay` and `block_sizes`; tapes are written as rows of action, address and size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.allocator import Allocator, Settings, block_sizes, replay
from memexplore.tape import Action, Meta, Source, Tape

MIB = 1024**2


def tape(*rows: tuple[str, int, int], device: str = "cuda:0", **meta: object) -> Tape:
    columns = {
        "action": [Action[name.upper()] for name, _, _ in rows],
        "address": [address for _, address, _ in rows],
        "size": [size for _, _, size in rows],
    }
    return Tape.from_columns(columns, meta=Meta(Source.MEASURED, device, **meta))  # type: ignore[arg-type]


def rows_of(tape: Tape) -> list[tuple[str, int]]:
    return [(Action(action).name.lower(), size) for action, size in zip(tape.action, tape.size.tolist(), strict=True)]


# ---- replay


def test_replay_adds_the_segments_of_requests() -> None:
    replayed = replay(
        tape(("alloc", 1, 100), ("alloc", 2, 3 * MIB), ("free_requested", 1, 100), ("free_completed", 1, 100))
    )
    assert rows_of(replayed) == [
        ("segment_alloc", 2 * MIB),
        ("alloc", 100),
        ("segment_alloc", 20 * MIB),
        ("alloc", 3 * MIB),
        ("free_requested", 100),
        ("free_completed", 100),
    ]
    assert replayed.address[4] == replayed.address[5] == replayed.address[1] == replayed.address[0]


def test_an_inserted_row_shares_the_op_of_its_request() -> None:
    columns = {
        "action": [Action.MARK, Action.ALLOC],
        "address": [-1, 1],
        "size": [0, 100],
        "step": [1, 1],
        "op": [-1, 0],
    }
    source = Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "virtual"), ops=["aten::add"])
    replayed = replay(source)
    assert [replayed.ops[op] if op >= 0 else "" for op in replayed.op] == ["", "aten::add", "aten::add"]


def test_only_requests_have_the_tensor() -> None:
    columns = {"action": [Action.ALLOC] * 2, "address": [1, 2], "size": [30 * MIB, 90 * MIB], "tensor": [0, 1]}
    columns |= {"workspace": [0, 1]}
    texts = ["int8[30, 1048576]", "int8[90, 1048576]"]
    meta = Meta(Source.PREDICTED, "virtual", capacity=80 * MIB)
    replayed = replay(Tape.from_columns(columns, meta=meta, tensor_texts=texts, workspaces=[(0, 64), (64,)]))
    # the segment, the block in it, and the second request, which does not fit
    assert rows_of(replayed) == [("segment_alloc", 30 * MIB), ("alloc", 30 * MIB), ("oom", 90 * MIB)]
    assert replayed.tensor.tolist() == [-1, 0, 1]
    assert replayed.tensor_texts == tuple(texts)
    # The second request does not fit, so that no workspace follows it.
    assert replayed.workspace.tolist() == [-1, 0, -1]


def test_other_settings_give_other_segments() -> None:
    replayed = replay(tape(("alloc", 1, 15 * MIB)), Settings(expandable_segments=True))
    assert rows_of(replayed) == [("segment_map", 20 * MIB), ("alloc", 15 * MIB)]
    assert replayed.meta.settings == "expandable_segments:True"


def test_replaying_twice_changes_nothing() -> None:
    once = replay(tape(("alloc", 1, 100), ("alloc", 2, 3 * MIB), ("free_completed", 2, 3 * MIB), ("alloc", 3, 2 * MIB)))
    assert replay(once).equals(once)


def test_a_request_beyond_the_capacity_ends_the_tape() -> None:
    rows = [("alloc", 1, 30 * MIB), ("free_completed", 1, 30 * MIB), ("alloc", 2, 90 * MIB), ("alloc", 3, 512)]
    replayed = replay(tape(*rows, capacity=80 * MIB))
    assert rows_of(replayed)[-2:] == [("segment_free", 30 * MIB), ("oom", 90 * MIB)]


def test_an_oom_row_is_left_out_if_its_request_succeeds() -> None:
    replayed = replay(tape(("alloc", 1, 512), ("oom", -1, 30 * MIB), ("alloc", 2, 512), capacity=100 * MIB))
    assert ("oom", 30 * MIB) not in rows_of(replayed)


def test_an_oom_row_stays_if_its_request_fails_again() -> None:
    replayed = replay(tape(("alloc", 1, 512), ("oom", -1, 30 * MIB), ("alloc", 2, 512), capacity=20 * MIB))
    assert rows_of(replayed)[2] == ("oom", 30 * MIB)


def test_without_a_capacity_the_cache_is_released_as_recorded() -> None:
    rows = [("segment_alloc", 0, 30 * MIB), ("alloc", 0, 30 * MIB), ("free_completed", 0, 30 * MIB)]
    rows += [("segment_free", 0, 30 * MIB), ("segment_alloc", 0, 20 * MIB), ("alloc", 0, 3 * MIB)]
    assert rows_of(replay(tape(*rows))) == [(name, size) for name, _, size in rows]


def test_with_a_capacity_the_allocator_decides_on_releases() -> None:
    # With 45 MiB the 20 MiB for the second request fit only after a release; with 60 MiB they fit beside.
    rows = [("segment_alloc", 0, 30 * MIB), ("alloc", 0, 30 * MIB), ("free_completed", 0, 30 * MIB)]
    rows += [("segment_free", 0, 30 * MIB), ("segment_alloc", 0, 36 * MIB), ("alloc", 0, 36 * MIB)]
    assert rows_of(replay(tape(*rows, capacity=45 * MIB))) == [(name, size) for name, _, size in rows]


def test_a_pending_free_keeps_its_block() -> None:
    rows = [
        ("alloc", 1, 30 * MIB),
        ("free_requested", 1, 30 * MIB),
        ("alloc", 2, 30 * MIB),
        ("free_completed", 1, 30 * MIB),
    ]
    replayed = replay(tape(*rows, ("alloc", 3, 30 * MIB)))
    first, second, third = replayed.address[replayed.action == Action.ALLOC].tolist()
    assert first != second
    assert third == first


def test_a_pending_free_completes_early_if_memory_runs_out() -> None:
    rows = [
        ("alloc", 1, 30 * MIB),
        ("free_requested", 1, 30 * MIB),
        ("alloc", 2, 40 * MIB),
        ("free_completed", 1, 30 * MIB),
    ]
    assert rows_of(replay(tape(*rows, capacity=60 * MIB)))[2:] == [
        ("free_requested", 30 * MIB),
        ("free_completed", 30 * MIB),
        ("segment_free", 30 * MIB),
        ("segment_alloc", 40 * MIB),
        ("alloc", 40 * MIB),
    ]


def test_an_empty_request_gets_no_block() -> None:
    replayed = replay(tape(("alloc", 1, 0), ("free_requested", 1, 0), ("free_completed", 1, 0)))
    assert rows_of(replayed) == [("alloc", 0), ("free_requested", 0), ("free_completed", 0)]


def test_freeing_an_address_without_a_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="row 0 frees 0x1"):
        replay(tape(("free_completed", 1, 512)))


def test_preexisting_blocks_keep_their_addresses() -> None:
    rows = [("segment_alloc", 0, 2 * MIB), ("preexisting", 512, 512), ("alloc", 0, 512), ("alloc", 1024, 512)]
    replayed = replay(tape(*rows))
    # The free block of 512 bytes in front fits best, then the rest behind.
    assert replayed.equals(tape(*rows))


def test_preexisting_blocks_get_new_addresses_under_other_settings() -> None:
    rows = [("segment_alloc", 0, 2 * MIB), ("preexisting", 512, 512)]
    replayed = replay(tape(*rows), Settings(expandable_segments=True))
    assert rows_of(replayed) == [("segment_map", 2 * MIB), ("preexisting", 512)]


SIZES = st.one_of(st.integers(1, 5000), st.integers(1, 30 * MIB))


@given(
    st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 100)), max_size=60),
    st.sampled_from(["", "expandable_segments:True"]),
)
def test_a_replay_agrees_with_single_requests_to_the_allocator(steps: list[tuple[int, bool, int]], text: str) -> None:
    model = Allocator(Settings.parse(text), capacity=None, total=None)
    rows: list[tuple[str, int, int]] = []
    live: list[tuple[int, int, int]] = []
    expected = []
    for name, (size, frees, which) in enumerate(steps):
        address = model.malloc(size)
        expected.append((address, model.block_size(address)))
        rows.append(("alloc", name, size))
        live.append((name, address, size))
        if frees:
            freed, address, size = live.pop(which % len(live))
            model.free(address)
            rows += [("free_requested", freed, size), ("free_completed", freed, size)]
    replayed = replay(tape(*rows, versions={"torch": "2.13"}), Settings.parse(text))
    births = replayed.action == Action.ALLOC
    assert replayed.address[births].tolist() == [address for address, _ in expected]
    assert block_sizes(replayed)[births].tolist() == [size for _, size in expected]


# ---- block sizes


def test_on_a_cpu_a_block_is_the_request() -> None:
    assert block_sizes(tape(("alloc", 64, 100), ("free_requested", 64, 100), device="cpu")).tolist() == [100, 0]


def test_small_blocks_are_rounded() -> None:
    assert block_sizes(tape(("segment_alloc", 0, 2 * MIB), ("alloc", 0, 513))).tolist() == [0, 1024]


@pytest.mark.parametrize(("size", "expected"), [(11 * MIB, 12 * MIB), (11 * MIB - 512, 11 * MIB - 512)])
def test_up_to_a_mebibyte_before_the_end_belongs_to_the_block(size: int, expected: int) -> None:
    # Of a segment of 12 MiB exactly 1 MiB remains, or 512 bytes more than that.
    assert block_sizes(tape(("segment_alloc", 0, 12 * MIB), ("alloc", 0, size))).tolist() == [0, expected]


def test_up_to_a_mebibyte_before_a_neighbour_belongs_to_the_block() -> None:
    rows = [("segment_alloc", 0, 20 * MIB), ("alloc", 0, 5 * MIB), ("alloc", 5 * MIB, 5 * MIB)]
    rows += [("free_completed", 0, 5 * MIB), ("alloc", 0, 4 * MIB)]
    assert block_sizes(tape(*rows)).tolist() == [0, 5 * MIB, 5 * MIB, 0, 5 * MIB]


def test_expandable_blocks_have_no_remainder() -> None:
    assert block_sizes(tape(("segment_map", 0, 20 * MIB), ("alloc", 0, 20 * MIB - 512))).tolist() == [0, 20 * MIB - 512]


def test_blocks_beyond_max_split_size_are_whole_segments() -> None:
    rows = [
        ("segment_alloc", 0, 50 * MIB),
        ("alloc", 0, 50 * MIB),
        ("free_completed", 0, 50 * MIB),
        ("alloc", 0, 31 * MIB),
    ]
    assert block_sizes(tape(*rows, settings="max_split_size_mb:20")).tolist() == [0, 50 * MIB, 0, 50 * MIB]


def test_an_empty_preexisting_block_marks_an_end() -> None:
    rows = [("segment_alloc", 0, 20 * MIB), ("preexisting", 0, 5 * MIB)]
    mark = [
        ("preexisting", 5 * MIB + 512, 0),
        ("free_requested", 5 * MIB + 512, 0),
        ("free_completed", 5 * MIB + 512, 0),
    ]
    assert block_sizes(tape(*rows)).tolist() == [0, 5 * MIB]
    assert block_sizes(tape(*rows, *mark)).tolist() == [0, 5 * MIB + 512, 0, 0, 0]
