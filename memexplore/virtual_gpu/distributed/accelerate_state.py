"""Restore what accelerate records about this process for its life: rank, world, device, plugins.

A rank begins without a record: accelerate would take the size of the group that it recorded first.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from memexplore.virtual_gpu.patches.install import Call, Keep, Patch

_MODULE = "accelerate.state"
_CLASSES = ("PartialState", "AcceleratorState", "GradientState")
_TABLE = "_shared_state"
"""The table that all instances of a class share, one for each class."""
_VARIABLES = ("ACCELERATE_", "FSDP_")
"""Beginnings of the names of environment variables by which its plugins pass settings on."""


def patch() -> Keep:
    """Return the patch; it does not import accelerate."""
    return Keep(_read, _write)


def cleared() -> Patch:
    """Return a patch with which a rank begins without a record; `patch` restores that of the process."""
    return Call(_clear)


def _clear() -> None:
    for table in _tables().values():
        table.clear()


def _tables() -> dict[str, dict[str, Any]]:
    module = sys.modules.get(_MODULE)
    tables = {name: getattr(getattr(module, name, None), _TABLE, None) for name in _CLASSES}
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def _read() -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    return {name: dict(table) for name, table in _tables().items()}, _variables()


def _write(before: tuple[dict[str, dict[str, Any]], dict[str, str]]) -> None:
    tables, variables = before
    for name, table in _tables().items():
        # In place: instances have the table itself as their attributes.
        table.clear()
        table.update(tables.get(name, {}))
    for name in _variables().keys() - variables.keys():
        os.environ.pop(name, None)
    os.environ.update(variables)
