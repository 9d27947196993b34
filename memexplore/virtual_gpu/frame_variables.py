"""Read the variables of a running function without keeping their values alive.

Up to Python 3.12 a frame keeps the dictionary that `f_locals` returns, with the values of that moment, until the
function ends: a tensor in it would outlive its variable.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

_COPIES = sys.version_info < (3, 13)
_OF_FRAME = 3
"""References to the dictionary: of the frame, of the variable here, and of the argument of `getrefcount`."""


def variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame by name; those of a module are its own dictionary.

    >>> def function():
    ...     tensor = "large"
    ...     return variables(sys._getframe())
    >>> function()
    {'tensor': 'large'}
    """
    of_frame: Any = frame.f_locals
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return of_frame  # type: ignore[no-any-return]
    copied = dict(of_frame)
    # Not where the program holds it, as `locals()` returned it.
    if _COPIES and sys.getrefcount(of_frame) <= _OF_FRAME:
        of_frame.clear()
    return copied
