"""Hold a person's own source code, and a change of it in progress.

A `Change` has the parts of the syntax tree that its steps share.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeGuard

from memexplore.run.code.edits import Edits
from memexplore.run.code.own_loop import OwnLoop
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.precision import Precision


@dataclasses.dataclass(frozen=True, eq=False)
class OwnCode:
    """Source code, and the values of its names after it has run."""

    source: str
    names: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    title: str = ""
    """Where the source is, such as ``Cell In[3]``."""


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """A source in which the lines of knobs are being inserted."""

    own: OwnCode
    knobs: Knobs
    loop: OwnLoop
    edits: Edits
    added: list[str] = dataclasses.field(default_factory=list)
    """Pieces of code that were added, whose imports are still missing."""

    @property
    def forward(self) -> list[ast.stmt]:
        """The statements from the first call of the model to the backward pass."""
        return self.loop.body[self.loop.first : self.loop.backward]

    @property
    def is_inline(self) -> bool:
        """Whether the loss has no name."""
        return not self.forward or not isinstance(self.loop.loss, ast.Name)

    @property
    def scales(self) -> bool:
        """Whether a gradient scaler is to be added."""
        return self.knobs.precision is Precision.FP16 and not self.loop.scaler

    def insert_before(self, node: ast.stmt, pieces: list[str]) -> None:
        """Insert pieces before a statement; their imports go to the beginning."""
        self.added.extend(pieces)
        self.edits.insert_before(node, [piece for piece in pieces if not piece.startswith("from ")])

    def text(self, node: ast.expr) -> str:
        """Return an expression as it is written."""
        return ast.get_source_segment(self.own.source, node) or ast.unparse(node)


def assigns(node: ast.AST, name: str) -> bool:
    """Return whether a statement assigns a name, alone or with an annotation."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    """Return whether a node is a name that gets a value."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_zero_grad(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether a node calls ``zero_grad``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "zero_grad"


def names(tree: ast.AST) -> set[str]:
    """Return all names in code."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def fixed_names(loop: OwnLoop) -> set[str]:
    """Return the names that do not get a new value in each step."""
    local = {node.id for node in ast.walk(loop.repeated) if is_stored(node)}
    if loop.function is not None and loop.repeated is loop.function:
        arguments = loop.function.args
        local |= {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return (names(loop.tree) - local) | {loop.model, loop.optimizer, loop.scaler}
