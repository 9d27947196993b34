"""The command that installs optional packages: the name of an extra goes in, the command for this installation out."""

from __future__ import annotations

import pathlib

import memexplore

_IN_CHECKOUT = (pathlib.Path(memexplore.__file__).parents[1] / "pyproject.toml").is_file()


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, in a checkout the one for the checkout.

    >>> "[runs]" in install_command("runs")
    True
    """
    return f'pip install -e ".[{extra}]"' if _IN_CHECKOUT else f'pip install "memexplore[{extra}]"'
