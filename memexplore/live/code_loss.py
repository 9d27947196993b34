"""Find the lines that compute the loss in the code of a step, to run them in another process.

The lines are the statements between the call of the model and the start of backward on which the loss depends. So
variables hold tensors as long as they do in the program. The lines run in a copy of the names that they use.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import linecache
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from memexplore.live.code_step import CALLED, IN_LOOP, LOSS, Argument, CodeLoss, Lifetime, Loop, Model
from memexplore.live.observed import template, unknown_in
from memexplore.virtual_gpu.frame_variables import variables

_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_REPEATED = (ast.For, ast.While, ast.If, ast.Try, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)


def loss_in_code(error: BaseException, model: torch.nn.Module, arguments: list[torch.Tensor]) -> CodeLoss | None:
    """Return the lines of the traceback that call a model and compute its loss; None where they are not understood.

    `arguments` are the tensors of the call. No code of the program runs.
    """
    for frame, line in traceback.walk_tb(error.__traceback__):
        code_loss = None if _is_own(frame) else _in_frame(frame, line, model, arguments)
        if code_loss is not None:
            return code_loss
    return None


class CallSite(NamedTuple):
    """A line that calls a model."""

    code: CodeType
    line: int

    @property
    def is_in_function(self) -> bool:
        """Whether the line is in a function, not in a module or cell."""
        return bool(self.code.co_flags & inspect.CO_NEWLOCALS)


def call_site(frame: FrameType | None) -> CallSite | None:
    """Return the innermost line of the program in a frame and its callers."""
    frame = _of_program(frame)
    return None if frame is None else CallSite(frame.f_code, frame.f_lineno)


def loss_in_loop(
    frame: FrameType | None, place: CallSite, model: torch.nn.Module, arguments: list[torch.Tensor]
) -> CodeLoss | None:
    """Return the lines of a function that called a model at a place and still runs; `frame` is in a call by it.

    None where it has ended, or its lines are not understood.
    """
    while frame is not None and frame.f_code is not place.code:
        frame = frame.f_back
    return None if frame is None else _in_frame(frame, place.line, model, arguments)


_others: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Code that calls a model and does not return its loss."""


def returned_loss(frame: FrameType | None, model: torch.nn.Module, arguments: list[torch.Tensor]) -> CodeLoss | None:
    """Return the lines of a function that is about to call a model and returns its loss, None where it does not.

    Its variables are gone when backward fails. `frame` may be one of torch's, which the function calls.
    """
    frame = _of_program(frame)
    if frame is None or frame.f_code in _others:
        return None
    code_loss = _in_frame(frame, frame.f_lineno, model, arguments)
    if code_loss is None or code_loss.held is not Lifetime.UNTIL_RETURN:
        _others.add(frame.f_code)
        return None
    return code_loss


def _of_program(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _is_own(frame):
        frame = frame.f_back
    return frame


def _is_own(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "memexplore")


def _in_frame(frame: FrameType, line: int, model: torch.nn.Module, arguments: list[torch.Tensor]) -> CodeLoss | None:
    try:
        return _understood(frame, line, model, arguments)
    except (LookupError, SyntaxError):
        return None


def _understood(frame: FrameType, line: int, model: torch.nn.Module, arguments: list[torch.Tensor]) -> CodeLoss | None:
    code = frame.f_code
    tree = _trees.get(code) or _tree(frame)
    names = _Names(frame)

    def calls_of_model(node: ast.AST) -> list[ast.Call]:
        calls = [part for part in _walk(node) if isinstance(part, ast.Call)]
        return [call for call in calls if names.value_or_none(call.func) is model]

    part = _part(tree, line, calls_of_model)
    if part is None:
        return None
    before, loss, held, casts = part
    lines = _slice(before, loss, calls_of_model)
    lines = [ast.With(casts, lines)] if casts else lines
    calls = [call for node in lines for call in calls_of_model(node)]
    repeated = [inner for node in lines for inner in _walk(node) if isinstance(inner, _REPEATED)]
    if len(calls) != 1 or any(calls[0] in ast.walk(node) for node in repeated):
        return None
    replacing = _Replacing(names, calls[0], lines)
    # The tree is kept, and a visit changes it.
    copied = copy.deepcopy(lines, {id(calls[0]): calls[0]})
    changed = ast.Module([replacing.visit(node) for node in copied], [])
    layers = {id(part_of_model) for part_of_model in (*model.modules(), *model.parameters(), *model.buffers())}
    values: dict[str, Any] = {}
    for name, value in replacing.values.items():
        if value is not model and id(value) in layers:
            raise LookupError(name)
        values[name] = Model() if value is model else _packed(value, arguments)
    if unknown := next(filter(None, map(unknown_in, values.values())), ""):
        raise LookupError(unknown)
    return CodeLoss(ast.unparse(ast.fix_missing_locations(changed)), values, held)


_trees: weakref.WeakKeyDictionary[CodeType, ast.AST] = weakref.WeakKeyDictionary()
"""Functions that call a model, in every step."""


def _tree(frame: FrameType) -> ast.AST:
    """Return the syntax tree of a frame's function or module. Raises LookupError for one without statements."""
    code = frame.f_code
    tree = ast.parse("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    if not code.co_flags & inspect.CO_NEWLOCALS:
        return tree
    for part in ast.walk(tree):
        if isinstance(part, ast.FunctionDef) and part.name == code.co_name:
            first_lines = {part.lineno, *(decorator.lineno for decorator in part.decorator_list)}
            if code.co_firstlineno in first_lines:
                return _trees.setdefault(code, part)
    raise LookupError(code.co_name)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all in it, without the bodies of functions and classes."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _OWN_SCOPE):
            yield from _walk(child)


# --- which lines ----------------------------------------------------------------------------------------------------

_Part = tuple[list[ast.stmt], ast.expr, Lifetime, list[ast.withitem]]


def _part(tree: ast.AST, line: int, calls: Callable[[ast.AST], list[ast.Call]]) -> _Part | None:
    """Return the statements from the call of the model to backward, the loss there, how long variables live, and casts.

    The casts are blocks of autocast around all of the statements.
    """
    result: _Part | None = None
    for block, in_loop, casts in _blocks(tree, False, []):
        ends = [number for number, statement in enumerate(block) if _backward_of(statement) is not None]
        starts = [number for number, statement in enumerate(block) if calls(statement)]
        held = Lifetime.UNTIL_ASSIGNED if in_loop else Lifetime.DURING_STEP
        if not ends and starts and isinstance(block[-1], ast.Return) and block[-1].value is not None:
            result = block[starts[0] : -1], block[-1].value, Lifetime.UNTIL_RETURN, casts
            continue
        starts = [number for number in starts if ends and number <= ends[-1]]
        if not starts or not block[starts[0]].lineno <= line:
            continue
        if len([number for number in ends if number >= starts[0]]) != 1:
            # The step has several losses that go backward one after the other.
            return None
        loss = _backward_of(block[ends[-1]])
        assert loss is not None
        result = block[starts[0] : ends[-1]], loss, held, casts
    return result


def _blocks(
    node: ast.AST, in_loop: bool, casts: list[ast.withitem]
) -> Iterator[tuple[list[ast.stmt], bool, list[ast.withitem]]]:
    """Yield the lists of statements of a function, outer ones first, whether each is in a loop, and autocast around."""
    if isinstance(node, ast.With):
        casts = [*casts, *(item for item in node.items if "autocast" in ast.unparse(item))]
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if not isinstance(block, list):
            continue
        inside = in_loop or isinstance(node, ast.For | ast.While)
        yield block, inside, casts
        for statement in block:
            if not isinstance(statement, _OWN_SCOPE):
                yield from _blocks(statement, inside, casts)


def _backward_of(statement: ast.stmt) -> ast.expr | None:
    """Return what a statement begins backward with, None for another statement."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "backward"):
        return None
    # `accelerator.backward(loss)` beside `loss.backward()`
    loss = call.args[0] if call.args else call.func.value
    if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale":
        return loss.args[0]
    return loss


def _slice(before: list[ast.stmt], loss: ast.expr, calls: Callable[[ast.AST], list[ast.Call]]) -> list[ast.stmt]:
    """Return the statements that the loss depends on, and the assignments that hold more of what these computed."""
    needed, kept = set(_names(loss, ast.Load)), set[int]()
    for number, statement in reversed(list(enumerate(before))):
        receiver = (
            statement.value.func if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
        )
        changes = isinstance(receiver, ast.Attribute) and not needed.isdisjoint(_names(receiver.value, ast.Load))
        if calls(statement) or changes or not needed.isdisjoint(_names(statement, ast.Store)):
            kept.add(number)
            needed.update(_names(statement, ast.Load))
    for number, statement in enumerate(before):
        # Freed before backward, or held by a variable besides.
        deleted = set(_names(statement, ast.Del))
        known = deleted <= needed and (_deletes(statement) or set(_names(statement, ast.Load)) <= needed)
        if known and (isinstance(statement, ast.Assign) or _deletes(statement)):
            kept.add(number)
            needed.update(_names(statement, ast.Store))
    last = ast.Assign([ast.Name(LOSS, ast.Store())], loss)
    return [*(before[number] for number in sorted(kept)), last]


def _deletes(statement: ast.stmt) -> bool:
    """Return whether a statement deletes variables and does nothing else, perhaps under a condition that calls nothing.

    >>> _deletes(ast.parse("if last: del x, y").body[0])
    True
    """
    if not isinstance(statement, ast.If):
        return isinstance(statement, ast.Delete)
    calls = any(isinstance(part, ast.Call | ast.Await | ast.NamedExpr) for part in ast.walk(statement.test))
    return not calls and all(map(_deletes, (*statement.body, *statement.orelse)))


def _names(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    return [part.id for part in _walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, context)]


# --- what they use --------------------------------------------------------------------------------------------------


class _Names:
    """The names of a frame."""

    def __init__(self, frame: FrameType) -> None:
        self._tables = (variables(frame), frame.f_globals, vars(builtins))

    def value(self, node: ast.expr) -> Any:
        """Return the value of a name, or of its attribute or item. Raises LookupError for what only code knows."""
        match node:
            case ast.Name(id=name):
                return next(table[name] for table in self._tables if name in table) if self._has(name) else _no(name)
            case ast.Attribute(value=owner, attr=name):
                return _attribute(self.value(owner), name)
            case ast.Subscript(value=owner, slice=ast.Constant(value=key)):
                table = self.value(owner)
                return table[key] if type(table) in (dict, list, tuple) else _no(key)
        raise LookupError(ast.unparse(node))

    def value_or_none(self, node: ast.expr) -> Any:
        """Return the value, None for what only code knows."""
        try:
            return self.value(node)
        except LookupError:
            return None

    def _has(self, name: str) -> bool:
        return any(name in table for table in self._tables)


def _no(name: object) -> Any:
    raise LookupError(name)


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without running code of the program. Raises LookupError for what only code knows."""
    if isinstance(value, torch.Tensor):
        raise LookupError(name)
    try:
        own = object.__getattribute__(value, "__dict__")
        # Layers, weights and buffers
        return own[name] if name in own else torch.nn.Module.__getattr__(value, name)
    except (AttributeError, TypeError):
        raise LookupError(name) from None


class _Replacing(ast.NodeTransformer):
    """Replaces the call of the model, and what the lines use of earlier values by names for these."""

    def __init__(self, names: _Names, call: ast.Call, lines: list[ast.stmt]) -> None:
        self._frame, self._call = names, call
        self._assigned = {name for statement in lines for name in _names(statement, ast.Store)}
        self._bound_names = {name for statement in lines for name in _bound_names(statement)}
        self._known: set[str] = set()
        self.values: dict[str, Any] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is self._call:
            return ast.Call(ast.Name(CALLED, ast.Load()), [], [])
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        # The value is computed before a name has it.
        node = ast.Assign([*node.targets], self.visit(node.value))
        node.targets = [self.visit(target) for target in node.targets]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._chain(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return self._chain(node)

    def _chain(self, node: Any) -> ast.AST:
        root = node
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        is_own = isinstance(root, ast.Name) and root.id in self._assigned
        value = None if is_own or not isinstance(node.ctx, ast.Load) else self._frame.value_or_none(node)
        if value is None:
            return self.generic_visit(node)
        name = next(
            (known_name for known_name, known_value in self.values.items() if known_value is value),
            f"_value_{len(self.values)}",
        )
        self.values[name] = value
        return ast.Name(name, ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Store):
            self._known.add(node.id)
        elif node.id not in self._known and node.id not in self._bound_names and not hasattr(builtins, node.id):
            if node.id in self._assigned:
                # The lines have run, and what the variable was before is gone.
                raise LookupError(node.id)
            self.values[node.id] = self._frame.value(node)
        return node


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that comprehensions and lambdas give values to."""
    for part in ast.walk(node):
        if isinstance(part, ast.comprehension):
            yield from _names(part.target, ast.Store)
        elif isinstance(part, ast.arg):
            yield part.arg


def _packed(value: Any, arguments: list[torch.Tensor]) -> Any:
    """Return a value without tensors; functions, modules and layers stay as they are."""
    if isinstance(value, torch.Tensor):
        same = next((number for number, argument in enumerate(arguments) if argument is value), None)
        return template(value) if same is None else Argument(same)
    kind = type(value)
    if kind is dict:
        return {key: _packed(part, arguments) for key, part in value.items()}
    if kind in (tuple, list):
        return kind(_packed(part, arguments) for part in value)
    if isinstance(value, torch.nn.Module | ModuleType | type) or callable(value):
        return value
    if hasattr(kind, IN_LOOP):
        return Loop()
    return template(value)
