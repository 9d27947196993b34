"""Find the variables that a suspended frame reads again.

A variable is read again if on some path from the position an instruction loads it before one stores it. The paths are
those of the bytecode without exception handlers. IPython compiles each statement of a cell alone: the statements behind
it are read in the source of the cell.
"""

from __future__ import annotations

import ast
import dis
import enum
import linecache
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from memexplore.analysis.tables import is_users

_RETURNS = ("RETURN_VALUE", "RETURN_CONST")
_ENDS = (*_RETURNS, "RAISE_VARARGS", "RERAISE")
_STATEMENT_ENDS = ("POP_TOP", "RESUME", "NOP", "JUMP_BACKWARD", "FOR_ITER")
_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
_DERIVATIVES = ("backward", "grad")
_MODES = ("train", "eval")
_SCOPES = ("FAST", "NAME", "GLOBAL", "DEREF", "CLASSDEREF")


class _Effect(NamedTuple):
    """Names that an instruction loads and stores, in this order or the other."""

    loads: frozenset[str]
    stores: frozenset[str]
    stores_first: bool


def read_again(code: CodeType, offset: int) -> frozenset[str]:
    """Return the names that code may read after the instruction at `offset`, which has not ended.

    Names that functions inside the code read are included, whatever the position, and those that the statements behind
    the code read, where it is only one statement of a cell.

    >>> source = '''
    ... for batch in batches:
    ...     output = model(batch)
    ...     total = total + output
    ... '''
    >>> code = compile(source, "<cell>", "exec")
    >>> at = next(each.offset for each in dis.get_instructions(code) if each.opname.startswith("CALL"))
    >>> sorted(read_again(code, at) & {"batch", "output", "total"})
    ['total']
    """
    instructions = list(dis.get_instructions(code))
    rest = code_behind(code)
    at_end = read_first(rest) if rest is not None else frozenset()
    following, live = _live(instructions, at_end)
    # Caches stand between the instructions: the position may be inside one.
    number = _number_at(instructions, offset)
    result = (
        frozenset().union(*(live[following_number] for following_number in following[number]))
        if instructions
        else frozenset()
    )
    inner = frozenset(code.co_cellvars) | frozenset(_inner_names(code))
    return result | inner | _iterated(instructions)


def read_first(code: CodeType) -> frozenset[str]:
    """Return the names that code may read before it stores them, and the names that functions inside it read.

    >>> sorted(read_first(compile("a = b; print(a)", "<cell>", "exec")))
    ['b', 'print']
    """
    _, live = _live(list(dis.get_instructions(code)), frozenset())
    return live[0] | frozenset(_inner_names(code))


def code_behind(code: CodeType) -> CodeType | None:
    """Return the code of the statements behind `code` in its cell; None where it is not one statement of a cell.

    Source of what IPython does: `InteractiveShell.run_ast_nodes`.
    """
    if code.co_name != "<module>":
        return None
    starts = [
        (position[0], position[2])
        for position in code.co_positions()
        if position[0] is not None and position[2] is not None
    ]
    tree = _source_tree(code)
    if tree is None or not starts:
        return None
    last = max(starts)
    behind = [node for node in tree.body if (node.lineno, node.col_offset) > last]
    if not behind:
        return None
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile(ast.Module(behind, []), code.co_filename, "exec", flags, dont_inherit=True)


def names_in_cell(code: CodeType) -> frozenset[str]:
    """Return the names in the source of the cell or script of a module's code, in all its statements."""
    tree = _source_tree(code)
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} if tree is not None else set()
    return frozenset(named) | frozenset(code.co_names)


def _source_tree(code: CodeType) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return None


def on_stack(code: CodeType, offset: int) -> frozenset[str]:
    """Return the names that the statement at `offset` has read already: it uses their values when the call returns.

    >>> code = compile("total = 0; total = total + model(batch)", "<cell>", "exec")
    >>> at = next(each.offset for each in dis.get_instructions(code) if each.opname.startswith("CALL"))
    >>> sorted(on_stack(code, at))
    ['batch', 'model', 'total']
    """
    instructions = list(dis.get_instructions(code))
    names: frozenset[str] = frozenset()
    for instruction in reversed(instructions[: _number_at(instructions, offset) + 1]):
        effect = _effect(instruction)
        if effect.stores or instruction.opname in _STATEMENT_ENDS:
            break
        names |= effect.loads
    return names


class Ahead(enum.Enum):
    """What code does after a call that has not ended."""

    BACKWARD = enum.auto()
    """It may take derivatives before a model changes its mode."""
    OTHER_MODE = enum.auto()
    """It returns only after a model has changed its mode."""
    RETURNS = enum.auto()


def ahead(code: CodeType, offset: int) -> Ahead:
    """Return what code does after the instruction at `offset`, which has not ended.

    >>> def follows(source):
    ...     code = compile(source, "<cell>", "exec")
    ...     at = next(each.offset for each in dis.get_instructions(code) if each.opname.startswith("CALL"))
    ...     return ahead(code, at).name
    >>> [follows(f"loss = model(batch); {rest}") for rest in ("loss.backward()", "model.train()", "print(loss)")]
    ['BACKWARD', 'OTHER_MODE', 'RETURNS']
    """
    rest = code_behind(code)
    instructions = list(dis.get_instructions(code))
    following = _all_following(instructions)
    waiting = list(following[_number_at(instructions, offset)]) if instructions else []
    seen: set[int] = set()
    result = Ahead.OTHER_MODE
    while waiting:
        number = waiting.pop()
        if number in seen:
            continue
        seen.add(number)
        instruction = instructions[number]
        if instruction.opname in _RETURNS:
            behind = Ahead.RETURNS if rest is None else ahead(rest, 0)
            if behind is Ahead.BACKWARD:
                return behind
            result = behind if behind is Ahead.RETURNS else result
        name = instruction.argval if instruction.opname.startswith("LOAD_") else None
        if name in _DERIVATIVES:
            return Ahead.BACKWARD
        if name not in _MODES:
            waiting += following[number]
    return result


def _number_at(instructions: list[dis.Instruction], offset: int) -> int:
    return max((number for number, instruction in enumerate(instructions) if instruction.offset <= offset), default=0)


def _live(instructions: list[dis.Instruction], at_end: frozenset[str]) -> tuple[list[list[int]], list[frozenset[str]]]:
    """Return the instructions that may follow each one, and the names that are read again from each one on."""
    following = _all_following(instructions)
    effects = [_effect(instruction) for instruction in instructions]
    live: list[frozenset[str]] = [frozenset()] * len(instructions)
    changed = True
    while changed:
        changed = False
        for number in range(len(instructions) - 1, -1, -1):
            after = frozenset().union(*(live[following_number] for following_number in following[number]))
            if instructions[number].opname in _RETURNS:
                after = at_end
            before = _before(effects[number], after)
            if before != live[number]:
                live[number], changed = before, True
    return following, live


def _iterated(instructions: list[dis.Instruction]) -> frozenset[str]:
    """Return the names on the lines that begin a loop: the iterator, which is no variable, holds what they held."""
    lines = {
        instruction.positions.lineno
        for instruction in instructions
        if instruction.opname == "GET_ITER" and instruction.positions
    }
    on_lines = (
        _effect(instruction).loads
        for instruction in instructions
        if instruction.positions is not None and instruction.positions.lineno in lines
    )
    return frozenset().union(*on_lines)


def _before(effect: _Effect, after: frozenset[str]) -> frozenset[str]:
    if effect.stores_first:
        return (after | effect.loads) - effect.stores
    return (after - effect.stores) | effect.loads


def _all_following(instructions: list[dis.Instruction]) -> list[list[int]]:
    at = {instruction.offset: number for number, instruction in enumerate(instructions)}
    return [list(_following(instructions, number, at)) for number in range(len(instructions))]


def _following(instructions: list[dis.Instruction], number: int, at: dict[int, int]) -> Iterator[int]:
    instruction = instructions[number]
    if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
        target = at.get(instruction.argval)
        if target is not None:
            yield target
    if instruction.opname not in _ENDS and instruction.opname not in _ALWAYS and number + 1 < len(instructions):
        yield number + 1


def _effect(instruction: dis.Instruction) -> _Effect:
    """Return what an instruction loads and stores; `LOAD_FAST_LOAD_FAST` and `STORE_FAST_LOAD_FAST` do two things."""
    name = instruction.opname
    if not any(scope in name for scope in _SCOPES):
        return _Effect(frozenset(), frozenset(), False)
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    parts = [part for part in name.split("_") if part in ("LOAD", "STORE", "DELETE")]
    if not parts:
        return _Effect(frozenset(), frozenset(), False)
    if len(parts) != len(names):
        parts = parts[:1] * len(names)
    loads = frozenset(which for part, which in zip(parts, names, strict=True) if part == "LOAD" and which)
    stores = frozenset(which for part, which in zip(parts, names, strict=True) if part != "LOAD" and which)
    return _Effect(loads, stores, parts[0] != "LOAD")


def _inner_names(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from constant.co_names
            yield from _inner_names(constant)


def names_of_functions(codes: list[CodeType], names: Mapping[str, Any]) -> frozenset[str]:
    """Return the names read by the functions and classes that `codes[0]` names, and by those that they name in turn.

    `codes[1:]` are functions that run. Only code of the user is followed.

    >>> namespace = {}
    >>> exec("def step(): return inner(model)\\ndef inner(x): return scale * x", namespace)
    >>> sorted(names_of_functions([compile("step()", "<cell>", "exec")], namespace))
    ['inner', 'model', 'scale']
    """
    result: set[str] = set()
    seen: set[CodeType] = set()
    waiting = [code for name in codes[0].co_names for code in _codes(names.get(name))] + codes[1:]
    while waiting:
        code = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        read = {*code.co_names, *_inner_names(code)}
        result |= read
        waiting += [code for name in read for code in _codes(names.get(name))]
    return frozenset(result)


def _codes(value: Any) -> list[CodeType]:
    """Return the code of a function of the user, or of the methods of a class or of an instance."""
    # By its type: `isinstance` also asks the value, which may be a proxy that raises.
    if issubclass(type(value), FunctionType):
        return [value.__code__] if is_users(value.__code__.co_filename) else []
    kind = value if issubclass(type(value), type) else type(value)
    methods = (method.__code__ for method in vars(kind).values() if isinstance(method, FunctionType))
    return [code for code in methods if is_users(code.co_filename)]
