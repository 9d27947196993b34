"""The description of one rank in its `run.json`, which may come from anybody."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

from memexplore.ranks.rows import Totals, totals_of_json
from memexplore.text.untrusted import clean_text

FILE = "run.json"
_LONGEST_FILE = 1 << 20
_MOST_TEXTS = 16
WATCHING, PAUSED, DIED = "watching", "paused", "died"


class About(NamedTuple):
    """What a rank says about itself."""

    device: str = ""
    capacity: int | None = None
    state: str = ""
    """That of its `Live`, or "died" where its process on this machine is gone without an end."""
    error: str = ""
    host: str = ""
    time: float | None = None
    """Seconds since 1970 when it was written."""
    overhead: float | None = None
    """What watching costs, as a share of the time."""
    growth: str = ""
    """The growth of memory as a sentence."""
    full_at: float | None = None
    """The step in which the device would be full."""
    held_by: tuple[str, ...] = ()
    """Who holds the tensors of the growth."""
    notes: tuple[str, ...] = ()
    totals: Totals | None = None
    """What its steps come to; None where that is not known without them."""


def about(folder: Path) -> About:
    """Return the description in the folder of a rank; one that cannot be read has an error and no state."""
    path = folder / FILE
    try:
        if path.stat().st_size > _LONGEST_FILE:
            raise ValueError
        values = json.loads(path.read_text())
        names = ("device", "state", "error", "host", "growth")
        fields: dict[str, Any] = {name: clean_text(str(values.get(name, ""))) for name in names}
        fields |= {name: _texts(values.get(name)) for name in ("held_by", "notes")}
        fields |= {name: _number(values.get(name)) for name in ("time", "overhead", "full_at")}
        fields["totals"] = totals_of_json(values.get("totals"))
        capacity, pid = values.get("capacity"), values.get("pid")
    except (OSError, ValueError, AttributeError, RecursionError):
        return About(error="its run.json cannot be read")
    if fields["state"] in (WATCHING, PAUSED) and fields["host"] == socket.gethostname() and not _runs(pid):
        fields["state"] = DIED
    size = capacity if type(capacity) is int and 0 <= capacity < 1 << 62 else None
    return About(capacity=size, **fields)


def _texts(values: Any) -> tuple[str, ...]:
    texts = values if isinstance(values, list) else []
    return tuple(clean_text(value) for value in texts[:_MOST_TEXTS] if isinstance(value, str))


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < 1e15 and math.isfinite(value) else None


def _runs(pid: Any) -> bool:
    """Return whether a process of this machine runs, also where that is not known."""
    if os.name != "posix" or type(pid) is not int or not 0 < pid < 1 << 31:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
