"""Content of a view: it holds no tape."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from memexplore.analysis import curves
from memexplore.analysis.picture import picture
from memexplore.jupyter.view_content import (
    Scene,
    highest_layers_content,
    packed_details_content,
    packed_tape_content,
    scene_content,
)
from memexplore.tape import Tape
from tests.sample_tapes import training_tape, unwound_tape


@pytest.mark.parametrize("made", [training_tape, unwound_tape])
def test_tape_whose_content_was_sent_is_freed(made: Callable[[], Tape]) -> None:
    tape = made()
    drawn = picture(tape)
    scene = Scene(drawn, curves.peak(drawn)[1], before=tape, happened=tape)
    for content in (packed_tape_content, scene_content, packed_details_content, highest_layers_content):
        content(scene)
    sent = weakref.ref(tape)
    del tape, drawn, scene
    gc.collect()
    assert sent() is None
