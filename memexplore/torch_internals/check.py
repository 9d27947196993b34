"""Probe all private names of torch in the installed release: missing names, and one warning for a new release."""

from __future__ import annotations

import importlib
import threading
import warnings

import torch

from memexplore.torch_internals.table import TABLE, Internal

TESTED = ((2, 11), (2, 15))
"""Oldest and newest release of torch under which the tests pass."""


def internals() -> list[Internal]:
    """All private names of torch that memexplore relies on."""
    for module in ("cuda", "dispatch", "distributed", "dtensor", "memory_access", "modules", "state", "tensors"):
        importlib.import_module(f"memexplore.torch_internals.{module}")
    return TABLE


def missing() -> list[Internal]:
    """Rows whose probe fails in the installed torch: the name is absent, or behaves differently."""

    def passes(row: Internal) -> bool:
        try:
            return row.probe()
        except Exception:
            return False

    return [row for row in internals() if not passes(row)]


def tested() -> bool:
    """Whether the installed torch is no newer than the newest release of `TESTED`."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) <= TESTED[1]


_first_warning = threading.Lock()


def warn_if_untested() -> None:
    """Warn if the installed torch is newer than those tested; once in a process."""
    if tested() or not _first_warning.acquire(blocking=False):
        return
    absent = [row.name for row in missing()]
    lacks = f" and lacks {', '.join(absent)}" if absent else ""
    warnings.warn(
        f"torch {torch.__version__} is newer than {'.'.join(map(str, TESTED[1]))}, the newest release that memexplore "
        f"was tested with{lacks}. Compare peaks with a real GPU before relying on them; `memexplore doctor` says more.",
        stacklevel=3,
    )
