"""Units of recomputation: a module, or consecutive children of an `nn.Sequential`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from memexplore.run.knobs.checkpoints import blocks
from memexplore.torch_internals.modules import children_of


class Piece(NamedTuple):
    """Modules recomputed together, called one after another; nearly always one module."""

    name: str
    modules: tuple[nn.Module, ...]
    parent: nn.Module | None = None
    """The `nn.Sequential` that calls the modules, if they are a run of its children."""
    start: int = 0
    """Index of the first module among the children of `parent`."""
    others: tuple[str, ...] = ()
    """Names of the further blocks in this piece."""


def pieces_of(model: nn.Module) -> list[Piece]:
    """Return the repeated blocks of a model as pieces, in order of registration."""
    pieces = []
    for block in blocks.blocks(model):
        modules = tuple(model.get_submodule(name) for name in block.names)
        parent_name, _, child_name = block.name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if len(modules) > 1 or (blocks.is_sequential(parent) and next(modules[0].children(), None) is None):
            pieces.append(Piece(block.name, modules, parent, list(children_of(parent)).index(child_name)))
        else:
            pieces.append(Piece(block.name, modules))
    return pieces


def segments_of(count: int) -> list[int]:
    """Return for each of N blocks the number of its segment, of √N segments.

    Source: Chen et al. 2016, Training deep nets with sublinear memory cost.

    >>> segments_of(5)
    [0, 0, 0, 1, 1]
    """
    segments = max(1, round(math.sqrt(count)))
    return [position * segments // count for position in range(count)]


def follows(piece: Piece, before: Piece) -> bool:
    """Return whether an `nn.Sequential` calls a piece directly after another."""
    return before.parent is piece.parent and before.start + len(before.modules) == piece.start


def joined(run: list[Piece]) -> Piece:
    """Return consecutive pieces of one `nn.Sequential` as one piece."""
    modules = tuple(module for piece in run for module in piece.modules)
    return run[0]._replace(modules=modules, others=tuple(piece.name for piece in run[1:]))


def by_parent(pieces: Iterable[Piece]) -> dict[nn.Module, list[Piece]]:
    """Return the pieces that are runs of children, by their `nn.Sequential`."""
    runs: dict[nn.Module, list[Piece]] = {}
    for piece in pieces:
        if piece.parent is not None:
            runs.setdefault(piece.parent, []).append(piece)
    return runs


def modules_in(pieces: Iterable[Piece]) -> list[nn.Module]:
    """Return all modules of pieces and those below them, each once."""
    return list(dict.fromkeys(inner for piece in pieces for module in piece.modules for inner in module.modules()))
