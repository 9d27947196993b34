"""Write a copy of a script that fits: its own lines, changed as the first setting that such a copy runs with."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore.text.units import size_text

if TYPE_CHECKING:
    from memexplore.out_of_memory.what_fits import WhatFits
    from memexplore.run.code.own_code import OwnCode

_MARK = "# Written by `memexplore run --advise`: a copy of "
_MOST_RUNS = 3
"""Copies that are run; one that does not fit is followed by that of the next setting."""
_SECONDS = 300
"""Time for the run of a copy."""


class FittingCopy(NamedTuple):
    """A changed copy of a script that was run, and fits."""

    path: pathlib.Path
    number: int
    """The setting that it has, counted from 1 among those that would have fitted."""
    setting: str
    diff: str
    """Against the script, as in the explorer's Code tab."""
    needed: int
    """Bytes."""

    @property
    def text(self) -> str:
        """All as plain text."""
        lines = [
            f"{self.path.name} beside it is a copy with setting {self.number} ({self.setting}). It was run, fits and "
            f"needs {size_text(self.needed)}:",
            *(f"  {line}" for line in self.diff.splitlines()),
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """All as values for JSON."""
        return self._asdict() | {"path": str(self.path)}


def fitting_copy(
    script: pathlib.Path, own: OwnCode, what_fits: WhatFits, command: Callable[[pathlib.Path], list[str]]
) -> FittingCopy | None:
    """Write a copy of a script that fits beside it; None where no setting can be written into its lines, or fits.

    `command` returns the command line that runs a copy and prints its result as `memexplore run --json` does. No file
    is replaced but one with the same text.
    """
    from memexplore.out_of_memory.changed_code import changed_codes

    for code in changed_codes(own, what_fits)[:_MOST_RUNS]:
        text = f"{code.source.rstrip()}\n\n{_MARK}{script.name} with {code.option.knobs}\n"
        path, was_there = _path_for(script, text)
        needed = None
        try:
            path.write_text(text, encoding="utf-8")
            needed = _needed(command(path))
        except OSError:  # a folder that cannot be written
            return None
        finally:
            # Also after an interrupt: what was not run is not kept.
            if needed is None and not was_there:
                path.unlink(missing_ok=True)
        if needed is not None:
            return FittingCopy(path, code.number, str(code.option.knobs), code.diff, needed)
    return None


def _path_for(script: pathlib.Path, text: str) -> tuple[pathlib.Path, bool]:
    """Return the path of a copy with some text, beside its script, and whether the file is there already."""
    path, number = script.with_name(f"{script.stem}_fits.py"), 2
    while path.exists() and path.read_bytes() != text.encode():
        path, number = script.with_name(f"{script.stem}_fits_{number}.py"), number + 1
    return path, path.exists()


def _needed(command: list[str]) -> int | None:
    """Run a copy, and return what it needs; None if it does not fit."""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        result = json.loads(ended.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return None
    return int(result["need"]["smallest"]) if result["outcome"] == "fits" else None
