"""What some tests need beside Python packages: a browser, node, recordings."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

HAS_COMPILER = all(map(shutil.which, ("g++", "ninja"))) and Path(sysconfig.get_paths()["include"], "Python.h").is_file()
"""Whether extensions of Python can be compiled here. Nothing else needs that, so a machine for tests may lack it."""


def need(condition: object, reason: str) -> None:
    """Skip the test without what it needs; fail it in continuous integration, which has everything."""
    if not condition:
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
