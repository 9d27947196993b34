"""Describe the installed package: its release, its folder, and the command that installs more of it."""

from __future__ import annotations

import os
import pathlib

VERSION = "0.1.0"
FOLDER = pathlib.Path(os.path.abspath(__file__)).parents[1]
"""Folder of the package, whose frames are not a user's code."""


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, in a checkout the one for the checkout.

    >>> "[lab]" in install_command("lab")
    True
    """
    is_checkout = (FOLDER.parent / "pyproject.toml").is_file()
    return f'pip install -e ".[{extra}]"' if is_checkout else f'pip install "memexplore[{extra}]"'
