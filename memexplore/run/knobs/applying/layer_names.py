"""Layers of a model by their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import nn


def check_names(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ValueError, with similar names, if the model has no layer of one of these names.

    >>> check_names(nn.Sequential(nn.Linear(1, 1)), ["1"])
    Traceback (most recent call last):
    ValueError: Sequential has no layer '1'; it has: '0'
    """
    layers = [name for name, _ in model.named_modules() if name]
    wrong = [name for name in names if name and name not in layers]
    if not wrong:
        return
    similar = {match: None for name in wrong for match in difflib.get_close_matches(name, layers, n=3)}
    listed = ", ".join(map(repr, similar or layers[:5]))
    hint = f"; {'close' if similar else 'it has'}: {listed}" if listed else ""
    raise ValueError(f"{type(model).__name__} has no layer {', '.join(map(repr, wrong))}{hint}")


def for_layers(names: tuple[str, ...], statement: str) -> str:
    """Return a loop over the names of layers as code.

    >>> print(for_layers(("a", "b"), "print(name)"))
    for name in ['a', 'b']:
        print(name)
    """
    return f"for name in {list(names)!r}:\n    {statement}"
