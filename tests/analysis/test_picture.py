"""The tape to draw for a run that did not fit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from memexplore.analysis import curves
from memexplore.analysis.layer_rows import highest_layers
from memexplore.analysis.picture import picture, with_whole
from memexplore.analysis.verdict import failed_request
from memexplore.analysis.verdict_content import verdict_content
from memexplore.figures.timeline import timeline
from memexplore.tape import Action, Category, Phase, Source, Tape
from tests.sample_tapes import GIB, MIB, T4, Program, oom_tape, small_tape, training_tape, unwound_tape


def test_picture_ends_where_the_request_failed() -> None:
    tape = unwound_tape()
    assert picture(tape).action.tolist() == [Action.MARK, Action.ALLOC, Action.OOM]
    assert len(tape) == 5


def test_picture_of_a_run_that_fits_is_its_tape() -> None:
    tape = small_tape()
    assert picture(tape) is tape


def test_picture_is_the_whole_run_with_the_capacity_of_the_device() -> None:
    program = Program()
    program.mark(1, Phase.FORWARD)
    program.alloc(GIB, Category.ACTIVATION, "mm", "fc", 3)
    program.alloc(4 * GIB, Category.ACTIVATION, "mm", "fc", 4)
    program.alloc(GIB, Category.GRADIENT, "mm", "fc", 5)
    whole = picture(with_whole(unwound_tape(), program.tape(T4._replace(capacity=None))))
    # 1 + 4 + 1 GiB; the second request of the run is the one that failed
    assert curves.peak(whole)[0] == 6 * GIB
    assert whole.meta.capacity == 2 * GIB
    assert failed_request(whole) == 2
    assert whole.size[2] == 4 * GIB
    assert whole.action.tolist() == [Action.MARK, Action.ALLOC, Action.OOM, Action.ALLOC, Action.ALLOC]


def test_measured_stop_is_at_the_same_place_of_the_predicted_run() -> None:
    died, program = unwound_tape(), Program()
    died = died.replace(meta=died.meta._replace(source=Source.MEASURED))
    program.mark(1, Phase.FORWARD)
    # The prediction has a request of its own before those of the layer.
    program.alloc(MIB, Category.TEMPORARY, "cat", "other", 2)
    program.alloc(GIB, Category.ACTIVATION, "mm", "fc", 3)
    program.alloc(4 * GIB, Category.ACTIVATION, "mm", "fc", 4)
    program.alloc(GIB, Category.GRADIENT, "mm", "fc", 5)
    whole = picture(with_whole(died, program.tape(T4._replace(capacity=None))))
    # mark, 1 MiB, 1 GiB, then the request that failed
    assert failed_request(whole) == 3
    assert whole.size[3] == whole.size[4] == 4 * GIB


@pytest.mark.parametrize(("size", "row"), [(GIB, 2), (GIB // 4, None)])
def test_measured_stop_outside_of_the_predicted_layers_is_where_there_is_no_room(size: int, row: int | None) -> None:
    died, program = unwound_tape(), Program()
    died = died.replace(meta=died.meta._replace(source=Source.MEASURED))
    for _ in range(3):
        program.alloc(size, Category.ACTIVATION, "mm", "other", 3)
    whole = with_whole(died, program.tape(T4._replace(capacity=None))).whole
    # the GPU has 2 GiB: the third request of 1 GiB has no room, and 3 times 256 MiB have
    assert (None if whole is None else failed_request(whole)) == row


def test_slices_and_files_have_no_whole_run(tmp_path) -> None:
    tape = with_whole(unwound_tape(), training_tape())
    assert tape.whole is not None
    assert tape[:2].whole is None
    tape.save(tmp_path / "tape.tape")
    loaded = Tape.load(tmp_path / "tape.tape")
    assert loaded.whole is None
    assert loaded.equals(tape)


def test_tape_that_fits_gets_no_whole_run() -> None:
    assert with_whole(small_tape(), training_tape()).whole is None


def test_classes_are_saved(tmp_path) -> None:
    columns = {"address": [0], "size": [8], "module": [0]}
    tape = Tape.from_columns(columns, modules=["fc"], classes=["Linear"], meta=T4)
    tape.save(tmp_path / "tape.tape")
    assert Tape.load(tmp_path / "tape.tape").classes == ("Linear",)
    assert np.array_equal(oom_tape().module, oom_tape()[:].module)


@pytest.mark.parametrize("made", [training_tape, unwound_tape, oom_tape])
def test_tape_that_was_shown_is_freed(made: Callable[[], Tape]) -> None:
    tape = made()
    for show in (picture, verdict_content, highest_layers, timeline):
        show(tape)
    shown = weakref.ref(tape)
    del tape
    gc.collect()
    assert shown() is None
