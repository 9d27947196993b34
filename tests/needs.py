"""What some tests need beside Python packages: a browser, node, recordings."""

from __future__ import annotations

import os

import pytest


def need(condition: object, reason: str) -> None:
    """Skip the test without what it needs; fail it in continuous integration, which has everything."""
    if not condition:
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
