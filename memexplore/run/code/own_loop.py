"""Find the training loop in a person's own source: the statements that a knob changes, and the names that they use.

Where that is not clear, `Unclear` has the reason.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

_LOOPS = (ast.For, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Unclear(ValueError):  # noqa: N818 - says what the source is
    """The source does not say which lines to change; the message is the reason, for a comment."""


class Role(enum.Enum):
    """What a name of a training script stands for."""

    MODEL = enum.auto()
    OPTIMIZER = enum.auto()
    SCALER = enum.auto()


_KINDS = {
    torch.nn.Module: Role.MODEL,
    torch.optim.Optimizer: Role.OPTIMIZER,
    torch.amp.GradScaler: Role.SCALER,
}


def roles_of(names: Mapping[str, Any]) -> dict[str, Role]:
    """Return the roles of names by their values.

    >>> roles_of({"net": torch.nn.Linear(1, 1), "x": torch.zeros(1)})
    {'net': <Role.MODEL: 1>}
    """
    typed = ((name, role) for name, value in names.items() for kind, role in _KINDS.items() if isinstance(value, kind))
    # A criterion is a module without weights.
    return {
        name: role
        for name, role in typed
        if not name.startswith("_") and (role is not Role.MODEL or next(names[name].parameters(), None) is not None)
    }


class StatementPosition(NamedTuple):
    """A statement by the list that holds it."""

    body: list[ast.stmt]
    at: int

    @property
    def statement(self) -> ast.stmt:
        """The statement."""
        return self.body[self.at]


class OwnLoop(NamedTuple):
    """The statements of one training step."""

    tree: ast.Module
    model: str
    """The name by which the loop calls the model."""
    calls: list[ast.Call]
    """The calls of the model before the backward pass."""
    body: list[ast.stmt]
    """The statements that hold forward and backward pass."""
    first: int
    """Index in `body` of the first statement of the forward pass."""
    backward: int
    """Index in `body` of the statement of the backward pass."""
    backward_call: ast.Call
    loss: ast.expr
    """The expression whose gradients are computed; a name, or the whole forward pass."""
    update: ast.Call | None
    """The call of the optimizer's step, or of the scaler's."""
    optimizer: str
    scaler: str
    autocast: ast.withitem | None
    """The item of a `with` statement that casts the forward pass."""
    optimizer_made: StatementPosition | None
    """The statement that makes the optimizer."""
    loop: StatementPosition
    """The outermost statement that repeats the step, in the scope of the step."""
    repeated: ast.AST
    """The innermost loop around the step, or the function that holds it; without either the whole source."""
    function: ast.FunctionDef | ast.AsyncFunctionDef | None
    """The function that holds the step."""


def find_loop(source: str, roles: Mapping[str, Role]) -> OwnLoop:
    """Return the training step of a source.

    `roles` are the roles of names after the source has run; the names to which `….parameters()` belongs are models as
    well. Raises Unclear where there is none, or more than one, and SyntaxError for a source that is not Python.
    """
    tree = ast.parse(source)
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    call = _only_backward(tree)
    place = _place(call, parents)
    if not isinstance(place.statement, ast.Expr) or place.statement.value is not call:
        raise Unclear("its call of backward() is part of another expression")
    assert isinstance(call.func, ast.Attribute)
    made = _optimizer_made(tree, parents)
    function = next(
        (ancestor for ancestor in _above(place.statement, parents) if isinstance(ancestor, _FUNCTIONS)), None
    )
    known = dict(roles) | dict.fromkeys(made.models, Role.MODEL) | dict.fromkeys(made.places, Role.OPTIMIZER)
    known |= _scalers(tree)
    known |= _parameter_roles(tree, function, known)
    before = place.body[: place.at + 1]
    calls = [
        (at, node)
        for at, statement in enumerate(before)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and known.get(node.func.id) is Role.MODEL
    ]
    names = {node.func.id for _, node in calls if isinstance(node.func, ast.Name)}
    if not calls:
        raise Unclear("no call of a known model precedes its backward()")
    if len(names) > 1:
        raise Unclear(f"several models are called before its backward(): {', '.join(sorted(names))}")
    loss, scaler = call.func.value, ""
    if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale":
        scaler, loss = ast.unparse(loss.func.value), loss.args[0]
    first = calls[0][0]
    update, optimizer = _update(tree, known)
    model = names.pop()
    innermost = next(
        (ancestor for ancestor in _above(place.statement, parents) if isinstance(ancestor, (*_LOOPS, *_FUNCTIONS))),
        tree,
    )
    only = next(iter(made.places.values())) if len(made.places) == 1 else None
    return OwnLoop(
        tree=tree,
        model=model,
        calls=[node for _, node in calls],
        body=place.body,
        first=first,
        backward=place.at,
        backward_call=call,
        loss=loss,
        update=update,
        optimizer=optimizer,
        scaler=scaler,
        autocast=_autocast(before[first:]),
        optimizer_made=made.places.get(optimizer, only),
        loop=_outermost_loop(place, parents),
        repeated=innermost,
        function=function,
    )


def statement_place(tree: ast.Module, node: ast.AST) -> StatementPosition:
    """Return the innermost statement that holds a node."""
    return _place(node, {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)})


def _only_backward(tree: ast.Module) -> ast.Call:
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    ]
    # A function that accelerates training takes the loss as an argument.
    if any(call.args for call in calls):
        raise Unclear("a library calls backward()")
    if len(calls) != 1:
        raise Unclear(f"it calls backward() {len(calls)} times" if calls else "it has no call of backward()")
    return calls[0]


def _above(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def _place(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> StatementPosition:
    statement = node
    while not isinstance(statement, ast.stmt):
        statement = parents[statement]
    parent = parents[statement]
    for _, value in ast.iter_fields(parent):
        if isinstance(value, list) and statement in value:
            return StatementPosition(value, value.index(statement))
    raise AssertionError("a statement is in a list of its parent")


def _outermost_loop(place: StatementPosition, parents: Mapping[ast.AST, ast.AST]) -> StatementPosition:
    outermost: ast.AST = place.statement
    for node in (place.statement, *_above(place.statement, parents)):
        if isinstance(node, _FUNCTIONS):
            break
        if isinstance(node, _LOOPS):
            outermost = node
    return _place(outermost, parents)


class _Made(NamedTuple):
    """Statements ``name = Optimizer(model.parameters(), …)``."""

    places: dict[str, StatementPosition]
    models: set[str]


def _optimizer_made(tree: ast.Module, parents: Mapping[ast.AST, ast.AST]) -> _Made:
    made = _Made({}, set())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or len(node.targets) != 1:
            continue
        target, arguments = node.targets[0], [*node.value.args, *(word.value for word in node.value.keywords)]
        models = {
            part.func.value.id
            for argument in arguments[:1]
            for part in ast.walk(argument)
            if isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and part.func.attr in ("parameters", "named_parameters")
            and isinstance(part.func.value, ast.Name)
        }
        if isinstance(target, ast.Name) and models and not isinstance(arguments[0], ast.GeneratorExp):
            if ast.unparse(node.value.func) in ("list", "sum", "dict", "len", "tuple"):
                continue
            made.places[target.id] = _place(node, parents)
            made.models.update(models)
    return made


def _scalers(tree: ast.Module) -> dict[str, Role]:
    return {
        node.targets[0].id: Role.SCALER
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).endswith("GradScaler")
    }


def _parameter_roles(
    tree: ast.Module, function: ast.FunctionDef | ast.AsyncFunctionDef | None, roles: Mapping[str, Role]
) -> dict[str, Role]:
    """Return the roles of a function's parameters, from the names with which the source calls it."""
    if function is None:
        return {}
    names = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    parameter_roles: dict[str, Role] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function.name:
            passed = [*zip(names, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
            for name, value in passed:
                if name is not None and isinstance(value, ast.Name) and value.id in roles:
                    parameter_roles[name] = roles[value.id]
    return parameter_roles


def _update(tree: ast.Module, roles: Mapping[str, Role]) -> tuple[ast.Call | None, str]:
    """Return the call that updates the weights, and the name of the optimizer; None where it is not clear."""
    updates: list[tuple[ast.Call, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "step":
            continue
        holder = node.func.value
        role = roles.get(holder.id) if isinstance(holder, ast.Name) else None
        if role is Role.OPTIMIZER and not node.args and not node.keywords:
            updates.append((node, ast.unparse(holder)))
        elif role is Role.SCALER and len(node.args) == 1:
            updates.append((node, ast.unparse(node.args[0])))
    return updates[0] if len(updates) == 1 else (None, "")


def _autocast(forward: list[ast.stmt]) -> ast.withitem | None:
    for statement in forward:
        for node in ast.walk(statement):
            if isinstance(node, ast.With):
                for item in node.items:
                    if isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func).endswith(
                        "autocast"
                    ):
                        return item
    return None
