"""Reading the variables of a running function keeps none of them alive."""

from __future__ import annotations

import sys
import weakref

from memexplore.virtual_gpu.frame_variables import variables


class Large:
    """Stands for a tensor."""


def test_a_variable_that_was_read_dies_with_its_last_assignment():
    value = Large()
    seen = weakref.ref(value)
    assert variables(sys._getframe())["value"] is value
    value = None
    assert seen() is None


def test_what_the_program_got_from_locals_stays_as_it_is():
    value = Large()
    held = locals()
    assert variables(sys._getframe())["value"] is value
    assert held["value"] is value


def test_the_variables_of_a_module_are_its_own():
    frame = sys._getframe()
    while frame.f_code.co_name != "<module>":
        frame = frame.f_back
    assert variables(frame) is frame.f_globals
