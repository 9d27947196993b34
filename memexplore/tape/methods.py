"""What a Tape can show and compute: its methods, each with the function of a package above that does the work.

A tape lies below everything that reads it, and still `tape.layers()` is what a user wants to write. This table is the
one place where a name points upwards; the test of imports knows it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

METHODS = {
    "block_bytes": "memexplore.analysis.curves.block_bytes",
    "by_category": "memexplore.analysis.curves.by_category",
    "by_line": "memexplore.analysis.groups.by_line",
    "comparison_html": "memexplore.figures.values.comparison_html",
    "difference_html": "memexplore.figures.values.difference_html",
    "html": "memexplore.figures.values.tape_html",
    "layers": "memexplore.analysis.tables.layers",
    "load": "memexplore.tape.file.load",
    "peak": "memexplore.analysis.curves.peak",
    "peaks": "memexplore.analysis.peaks.peaks",
    "save": "memexplore.tape.file.save",
    "tensors": "memexplore.analysis.tables.tensors",
    "text": "memexplore.figures.values.tape_text",
    "to_parquet": "memexplore.tape.parquet.write_parquet",
}
"""Name -> function; `difference_html` and `comparison_html` are forms of comparisons of two tapes, `peaks` the summary
in a file."""


def method(name: str) -> Callable[..., Any]:
    """Return the function behind a method; its module is imported at the first call.

    >>> method("peak").__module__
    'memexplore.analysis.curves'
    """
    module, _, function = METHODS[name].rpartition(".")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
