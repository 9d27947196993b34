from __future__ import annotations

import sys

from tests.interrupts import interrupted


def _handles() -> object:
    try:
        raise LookupError
    except LookupError:
        return None


def test_no_exception_is_handled_any_more_after_an_interrupt_of_its_handler() -> None:
    lines = [interrupted(lambda: _handles(), number) for number in range(4)]
    assert None not in lines
    assert sys.exc_info() == (None, None, None)
