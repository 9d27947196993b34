from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memexplore.tape import Action, Category, Frame, Meta, Phase, Source, Tape

META = Meta(
    Source.PREDICTED, "Tesla T4", "T4", capacity=100, total=120, versions={"torch": "2.13.0"}, notes=("a note",)
)
FRAMES = (Frame("train.py", 7, "step"), Frame("train.py", 1, "<module>"))


def _tape() -> Tape:
    columns = {
        "action": [Action.MARK, Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED],
        "address": [-1, 512, 512, 512],
        "size": [0, 100, 100, 100],
        "category": [Category.UNKNOWN, *[Category.ACTIVATION] * 3],
        "phase": [Phase.FORWARD] * 4,
        "step": [1] * 4,
        "op": [-1, 0, -1, -1],
        "module": [-1, 0, -1, -1],
        "stack": [-1, 0, -1, -1],
    }
    return Tape.from_columns(columns, meta=META, ops=["aten::mm"], modules=["fc"], stacks=[FRAMES])


def test_load_returns_the_saved_tape(tmp_path):
    tape = _tape()
    tape.save(tmp_path / "tape.tape")
    loaded = Tape.load(tmp_path / "tape.tape")
    assert loaded.equals(tape)
    assert loaded.meta == tape.meta


def test_load_of_another_file_raises(tmp_path):
    path = tmp_path / "no.tape"
    path.write_bytes(b"memexplore tape 1\n not really")
    with pytest.raises(ValueError, match="not a readable tape"):
        Tape.load(path)


def test_load_of_a_truncated_file_raises(tmp_path):
    path = tmp_path / "tape.tape"
    _tape().save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="not a readable tape"):
        Tape.load(path)


def test_to_pandas_has_text_instead_of_indices():
    frame = _tape().to_pandas()
    assert list(frame["action"]) == ["mark", "alloc", "free_requested", "free_completed"]
    row = frame.iloc[1]
    assert (row["category"], row["phase"], row["op"], row["module"]) == ("activation", "forward", "aten::mm", "fc")
    assert row["stack"] == "train.py:7"


def test_to_pandas_has_the_sizes_of_a_workspace_as_text():
    tape = Tape.from_columns({"size": [1, 2], "workspace": [0, -1]}, workspaces=[(0, 512)], meta=META)
    assert tape.to_pandas()["workspace"].tolist() == ["0, 512", ""]


def test_tapes_with_other_workspaces_are_not_equal():
    one, other = (
        Tape.from_columns({"size": [1], "workspace": [0]}, workspaces=[sizes], meta=META) for sizes in ((0,), (0, 512))
    )
    assert one.equals(one[:])
    assert not one.equals(other)
    assert one.without_workspaces().equals(other.without_workspaces())


def test_columns_of_different_lengths_raise():
    with pytest.raises(ValueError, match="one length"):
        Tape.from_columns({"size": [1], "address": [1, 2]}, meta=META)


def test_unknown_column_raises():
    with pytest.raises(ValueError, match="no column"):
        Tape.from_columns({"bytes": [1]}, meta=META)


def test_index_outside_its_table_raises():
    with pytest.raises(ValueError, match="outside its table"):
        Tape.from_columns({"op": [3]}, meta=META, ops=["aten::mm"])


def test_columns_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        _tape().size[0] = 1


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(list(Action)), st.integers(-1, 2**62), st.integers(0, 2**62)), max_size=30))
def test_load_returns_any_saved_rows(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("tapes") / "tape.tape"
    columns = {"action": [r[0] for r in rows], "address": [r[1] for r in rows], "size": [r[2] for r in rows]}
    tape = Tape.from_columns(columns, meta=META)
    tape.save(path)
    assert Tape.load(path).equals(tape)


def test_slice_keeps_tables():
    part = _tape()[1:2]
    assert len(part) == 1
    assert part.ops == ("aten::mm",)
    assert np.array_equal(part.size, [100])


@pytest.mark.parametrize("rows", [np.array([1]), np.array([False, True, *[False] * (len(_tape()) - 2)])])
def test_rows_of_an_array_or_a_mask_are_those_of_the_slice(rows):
    assert _tape()[rows].equals(_tape()[1:2])


def test_rows_of_an_array_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        _tape()[np.array([1])].size[0] = 5


def test_other_rows_keep_tables_and_metadata():
    other = _tape().with_rows({"size": [7], "op": [0]})
    assert (other.ops, other.meta, other.size.tolist()) == (_tape().ops, _tape().meta, [7])


def test_other_rows_may_have_other_tables():
    assert _tape().with_rows({"op": [1]}, ops=["aten::mm", "aten::relu"]).ops == ("aten::mm", "aten::relu")
