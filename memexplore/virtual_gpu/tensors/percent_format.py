"""Formatting with ``%`` and conversions by ``float`` and ``int``, after which unknown values still read `virtual`.

C code formats and converts a number without asking its class, so ``"%.4f" % loss.item()`` and ``float(loss)`` would
give the number that stands for an unknown value. `memexplore run` calls `percent` for each ``%`` after a string in the
script and `converted` for each conversion, and records of `logging` call `percent` for their message.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from memexplore.virtual_gpu.tensors import values
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor
from memexplore.virtual_gpu.tensors.virtual_numbers import VirtualFloat, VirtualInt

_CONVERSION = re.compile(
    r"%(?:\((?P<name>[^)]*)\))?(?P<flags>[#0\- +]*)(?P<width>\*|\d+)?(?:\.(?:\*|\d+)?)?[hlL]?(?P<kind>.)", re.DOTALL
)


def percent(template: Any, arguments: Any) -> Any:
    """Return ``template % arguments`` with `virtual`, in the width of its conversion, for each virtual number.

    >>> percent("%d: loss %.4f", (3, VirtualFloat(1)))
    '3: loss virtual'
    >>> percent("%(loss)9.3f|", {"loss": VirtualFloat(1)}), percent("%.2f", 2.0)
    ('  virtual|', '2.00')

    Raises what ``template % arguments`` raises.
    """
    if not isinstance(template, str):
        return template % arguments
    if isinstance(arguments, Mapping):
        unknown: set[Any] = {name for name, value in arguments.items() if _is_unknown(value)}
    else:
        entries = arguments if isinstance(arguments, tuple) else (arguments,)
        unknown = {number for number, value in enumerate(entries) if _is_unknown(value)}
    matches = [match for match in _CONVERSION.finditer(template) if match["kind"] != "%"]
    if not unknown or any("*" in match[0] for match in matches):
        return template % arguments
    places = {match.start(): match["name"] or number for number, match in enumerate(matches)}

    def shown(match: re.Match[str]) -> str:
        if places.get(match.start()) not in unknown:
            return match[0]
        name = "" if match["name"] is None else f"({match['name']})"
        return f"%{name}{'-' if '-' in match['flags'] else ''}{match['width'] or ''}s"

    if isinstance(arguments, Mapping):
        replaced: Any = {name: "virtual" if name in unknown else value for name, value in arguments.items()}
    else:
        replaced = tuple("virtual" if number in unknown else value for number, value in enumerate(entries))
    return _CONVERSION.sub(shown, template) % replaced


def converted(kind: Any, value: Any) -> Any:
    """Return ``kind(value)``; of an unknown value, `float` and `int` give a number that reads `virtual`, too.

    >>> loss = converted(float, VirtualFloat(1))
    >>> print(loss, converted(int, loss), converted(int, "12"))
    virtual virtual 12
    """
    if kind is not float and kind is not int:
        return kind(value)
    if isinstance(value, VirtualTensor) and value.numel() == 1:
        value = values.item(value)
    if not isinstance(value, VirtualFloat | VirtualInt):
        return kind(value)
    if isinstance(value, kind):
        return value
    return VirtualFloat(value) if kind is float else VirtualInt(value)


def _is_unknown(value: Any) -> bool:
    if isinstance(value, VirtualTensor) and value.numel() == 1:
        value = values.item(value)
    return isinstance(value, VirtualFloat | VirtualInt)


def message(original: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return ``logging.LogRecord.getMessage`` that formats with `percent`."""

    def get_message(record: logging.LogRecord) -> str:
        return percent(str(record.msg), record.args) if record.args else original(record)

    return get_message
