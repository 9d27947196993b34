"""Collect what only the live process knows of a failure: which tensors are still needed, and who holds the others.

A tensor is needed if the failing call reaches it: by the variables of its frames, the names of the failing expression,
or the variables that the frames around it read again (`liveness`). Every other tensor alive has a holder.
"""

from __future__ import annotations

import ast
import linecache
import sys
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from memexplore.allocator.gc_pause import gc_paused
from memexplore.analysis.tables import is_users
from memexplore.out_of_memory import updates
from memexplore.out_of_memory.attempts import Attempts, is_readable, one_line
from memexplore.out_of_memory.cures import cure_of, names_of_classes
from memexplore.out_of_memory.evidence_types import Evidence, Holder, State, VariableUse
from memexplore.out_of_memory.joint_losses import losses_of, terms_until
from memexplore.out_of_memory.liveness import (
    Ahead,
    ahead,
    code_behind,
    names_in_cell,
    names_of_functions,
    on_stack,
    read_again,
)
from memexplore.out_of_memory.message import parse
from memexplore.out_of_memory.optimizer_state import state_to_come
from memexplore.out_of_memory.owners import owners
from memexplore.out_of_memory.reach import Block, Reached, is_node, is_users_module, locals_of, reached_from
from memexplore.out_of_memory.untrained import untrained
from memexplore.recorder.endings import out_of_memory_error
from memexplore.tape import Phase
from memexplore.virtual_gpu.frame_variables import variables

SECONDS = 2.0
"""Processor time for the walk over references: on a busy machine it finds as much."""
_SHELL_NAMES = ("_", "__", "___", "_i", "_ii", "_iii", "In", "Out", "_oh", "_ih", "_dh", "_exit_code", "exit", "quit")


class Shell(NamedTuple):
    """The names of a notebook."""

    names: Mapping[str, Any]
    outputs: Mapping[int, Any]


def earlier_error(seconds: float = SECONDS) -> Holder | None:
    """Return what the error before holds, as addresses only: the next error takes its place."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return None
    reached = reached_from(error, time.thread_time() + seconds)
    return _holder("sys.last_exc", VariableUse.LAST_ERROR, error, reached.blocks, reached) if reached.blocks else None


def collect(
    raised: BaseException, shell: Shell | None = None, seconds: float = SECONDS, earlier: Holder | None = None
) -> Evidence | None:
    """Return the evidence of an error whose frames are still alive; None for another error.

    The walk over references ends after `seconds` of processor time. An error raised `from` an out-of-memory error is
    one, as in `endings.end_of`. `earlier` is what `earlier_error` returned before the program ran.
    """
    error = out_of_memory_error(raised)
    if error is None:
        return None
    try:
        # A collection on the way would free the reference cycles that are looked for.
        with gc_paused():
            return _collected(error, shell, time.thread_time() + seconds, earlier)
    except Exception as failure:
        # Objects of the user may raise when they are read: the error's own text remains.
        return Evidence(parse(str(error)), complete=False, search_error=one_line(failure))


def _collected(error: BaseException, shell: Shell | None, end: float, earlier: Holder | None) -> Evidence:
    frames = [(link.tb_frame, link.tb_lasti, link.tb_lineno) for link in _links(error.__traceback__)]
    users = [frame for frame in frames if is_users(frame[0].f_code.co_filename)]
    outer = _outer(frames)
    needed = _needed(frames, outer, end)
    holders: list[Holder] = []
    complete = needed.complete
    attempts = Attempts()
    of_program = [needed]
    variables: list[tuple[str, Any]] = []
    models: dict[str, torch.nn.Module] = {}
    behind_graphs = _weights_behind(needed)
    seen: set[str] = set()
    addresses = set(needed.blocks)
    for name, use, value in _roots(error, frames, outer, shell):
        if name in seen or time.thread_time() > end:
            complete &= name in seen
            continue
        seen.add(name)
        reached = reached_from(value, end, needed.visited)
        if use is VariableUse.LATER:
            behind_graphs |= _weights_behind(reached)
        complete &= reached.complete
        addresses.update(reached.blocks)
        own = {address: block for address, block in reached.blocks.items() if address not in needed.blocks}
        if own:
            holders.append(_holder(name, use, value, own, reached))
            models |= {name: value} if isinstance(value, torch.nn.Module) else {}
        if use in (VariableUse.LATER, VariableUse.DEAD):
            of_program.append(reached)
            variables.append((name, value))
    # A model gets its gradients through a graph that is read again, also where no later line names the model.
    waiting = [
        name for name, model in models.items() if any(id(weight) in behind_graphs for weight in model.parameters())
    ]
    holders = [holder._replace(use=VariableUse.LATER) if holder.name in waiting else holder for holder in holders]
    objects = list({id(value): value for reached in of_program for value in reached.kept}.values())
    if earlier is not None:
        rest = earlier.addresses.difference(needed.blocks)
        addresses.update(earlier.addresses)
        holders.append(earlier._replace(addresses=rest, in_graph=earlier.in_graph & rest))
    line = f"{users[-1][0].f_code.co_filename}:{users[-1][2]}" if users else ""
    layer, evaluating = _modules(frames)
    before = {number: ahead(frames[number][0].f_code, frames[number][1]) for number in outer}
    before_backward = frozenset(
        name for number in outer if before[number] is Ahead.BACKWARD for name, _ in _variables(frames[number][0])
    )
    # A function that ends with a change of the mode, such as `model.train()`, evaluates, whatever its caller does.
    first = next((before[number] for number in reversed(outer) if before[number] is not Ahead.RETURNS), Ahead.RETURNS)
    codes = [frame.f_code for frame, _, _ in users]
    state, no_update, not_trained = State.UNKNOWN, None, None
    if complete:
        blocks = [reached.blocks for reached in of_program]
        state = attempts.value(lambda: updates.state_of(updates.optimizers_in(objects)), state)
        no_update = attempts.value(lambda: updates.without_update(objects, blocks, variables, end), no_update)
        not_trained = attempts.value(lambda: untrained(objects, variables), not_trained)
        del objects, blocks, variables, of_program
        none: tuple[list[Holder], bool] = ([], False)
        others, complete = attempts.value(lambda: owners(addresses, end), none)
        holders += others
    to_come = attempts.value(lambda: _state_to_come(frames), 0)
    losses = attempts.value(lambda: _losses(frames, outer, first, end), 0)
    return Evidence(
        parse(str(error)),
        tuple(sorted(holders, key=lambda holder: -holder.size)),
        complete and not attempts.error,
        attempts.error,
        line,
        layer,
        _phase(frames),
        "" if first is Ahead.BACKWARD else evaluating,
        before_backward,
        _retains(codes),
        _in_use(needed),
        frozenset(address for address, block in needed.blocks.items() if block.in_graph),
        state,
        no_update,
        not_trained,
        to_come,
        _of_libraries(needed),
        losses,
    )


def _of_libraries(needed: Reached) -> tuple[Holder, ...]:
    """Return what the failing call reaches in objects for which a library offers a cure."""
    blocks: dict[type, dict[int, Block]] = {}
    for address, block in needed.blocks.items():
        if block.owner is not None and not block.in_graph and cure_of(names_of_classes(block.owner)) is not None:
            blocks.setdefault(block.owner, {})[address] = block
    holders = []
    for owner, own in blocks.items():
        # The path begins with the number of its frame.
        name = next(iter(own.values())).path.partition(".")[2].partition("[")[0]
        size = sum(block.size for block in own.values())
        use, classes = VariableUse.IN_USE, names_of_classes(owner)
        holders.append(Holder(name, use, frozenset(own), frozenset(), size, len(own), True, classes))
    return tuple(sorted(holders, key=lambda holder: -holder.size))


def _weights_behind(reached: Reached) -> set[int]:
    """Return the identities of the weights to which graphs lead."""
    nodes = (value for value in reached.kept if is_node(value))
    return {id(node.variable) for node in nodes if getattr(node, "variable", None) is not None}


def _in_use(needed: Reached) -> tuple[Holder, ...]:
    """Return the containers of the failing call, such as `self.history`."""
    blocks: dict[str, dict[int, Block]] = {}
    for address, block in needed.blocks.items():
        # The path begins with the number of its frame.
        name, item, _ = block.path.partition(".")[2].partition("[")
        if item:
            blocks.setdefault(name, {})[address] = block
    result = []
    for name, own in blocks.items():
        in_graph = frozenset(address for address, block in own.items() if block.in_graph)
        size = sum(block.size for block in own.values())
        if len(own) > len(in_graph):
            result.append(
                Holder(
                    name,
                    VariableUse.IN_USE,
                    frozenset(own),
                    in_graph,
                    size,
                    len(own) - len(in_graph),
                    True,
                    _classes(own),
                )
            )
    return tuple(result)


def _links(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


_Frames = list[tuple[types.FrameType, int, int]]
_IMPORTED = (types.ModuleType, types.FunctionType, type)
"""What code imports by name."""


def _outer(frames: _Frames) -> range:
    """Return the numbers of the user's frames around the failing call: those before the first of a library.

    They begin with the program: what is around its module runs it.
    """
    users = [is_users(frame.f_code.co_filename) for frame, _, _ in frames]
    programs = [
        number for number, is_user in enumerate(users) if is_user and frames[number][0].f_code.co_name == "<module>"
    ]
    first = programs[-1] if programs else users.index(True) if True in users else 0
    end = first
    while end < len(frames) and users[end] and not isinstance(frames[end][0].f_locals.get("self"), torch.nn.Module):
        end += 1
    return range(first, end)


def _needed(frames: _Frames, outer: range, end: float) -> Reached:
    """Return what the failing call reaches, and what the functions around it read again."""
    roots = [{name: value for value, name, _ in locals_of(frame)} for frame, _, _ in frames[outer.stop :]]
    if outer:
        frame, offset, _ = frames[outer.stop - 1]
        roots.append({name: _lookup(frame, name) for name in _expression_names(frame, offset)})
    reached = _reached(roots, end)
    # The model and the optimizer stay if the code uses them again, and a model of which a part is in use.
    for number in outer:
        again = _read_again(frames, number)
        for name, value in _variables(frames[number][0]):
            in_use = isinstance(value, torch.nn.Module) and not reached.blocks.keys().isdisjoint(
                reached_from(value, end).blocks
            )
            if in_use or (isinstance(value, torch.nn.Module | torch.optim.Optimizer) and name in again):
                roots.append({name: value})
    return _reached(roots, end)


def _reached(roots: list[dict[str, Any]], end: float) -> Reached:
    return reached_from([types.SimpleNamespace(**names) for names in roots], end)


def _read_again(frames: _Frames, number: int) -> frozenset[str]:
    """Return the variables of a frame that are in use or read again, global ones by the functions that it calls too."""
    frame, offset, _ = frames[number]
    code = frame.f_code
    again = read_again(code, offset) | on_stack(code, offset)
    if code.co_name != "<module>":
        return again
    inner = [
        inner_frame.f_code for inner_frame, _, _ in frames[number + 1 :] if is_users(inner_frame.f_code.co_filename)
    ]
    behind = code_behind(code)
    called = [code] if behind is None else [code, behind]
    return again.union(*(names_of_functions([called_code, *inner], frame.f_globals) for called_code in called))


def _lookup(frame: types.FrameType, name: str) -> Any:
    return variables(frame).get(name, frame.f_globals.get(name))


def _variables(frame: types.FrameType) -> list[tuple[str, Any]]:
    names = variables(frame) if frame.f_code.co_name != "<module>" else frame.f_globals
    return [
        (name, value)
        for name, value in list(names.items())
        if not name.startswith("__") and is_readable(value) and not isinstance(value, types.ModuleType)
    ]


def _expression_names(frame: types.FrameType, offset: int) -> set[str]:
    """Return the names in the failing expression of a frame, all of its line where the expression is not known."""
    positions = list(frame.f_code.co_positions())
    at = positions[offset // 2] if 0 <= offset // 2 < len(positions) else (None,) * 4
    first, last, start, stop = at
    if first is None or last is None or start is None or stop is None:
        return set(frame.f_code.co_names)
    lines = [linecache.getline(frame.f_code.co_filename, number) for number in range(first, last + 1)]
    text = "".join(lines).encode()
    ending = len("".join(lines[:-1]).encode()) + stop
    try:
        tree = ast.parse(text[start:ending].decode().strip(), mode="eval")
    except (SyntaxError, UnicodeDecodeError):
        return set(frame.f_code.co_names)
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


# -- roots that the failing call does not need


def _roots(
    error: BaseException, frames: _Frames, outer: range, shell: Shell | None
) -> Iterator[tuple[str, VariableUse, Any]]:
    """Yield names with their use and value; where a name comes twice, its first use counts."""
    for number in reversed(outer):
        yield from _roots_in_frame(frames, number, shell)
    if shell is not None:
        yield from _roots_in_shell(shell)
    for name in ("last_exc", "last_value", "last_traceback"):
        value = getattr(sys, name, None)
        if value is not None and value is not error and value is not error.__traceback__:
            yield f"sys.{name}", VariableUse.LAST_ERROR, value
    for name, module in _imported([frames[number][0].f_globals for number in outer]):
        yield name, VariableUse.LATER, types.SimpleNamespace(**vars(module))


def _roots_in_frame(frames: _Frames, number: int, shell: Shell | None) -> Iterator[tuple[str, VariableUse, Any]]:
    """Yield the variables of a frame; of a notebook's names those that its cell mentions."""
    frame = frames[number][0]
    again = _read_again(frames, number)
    mentioned = again | names_in_cell(frame.f_code)
    are_notebooks = shell is not None and frame.f_code.co_name == "<module>"
    for name, value in _variables(frame):
        is_history = name in _SHELL_NAMES or (name.startswith("_") and name[1:].isdecimal())
        if not is_history and (name in mentioned or not are_notebooks):
            yield name, VariableUse.LATER if name in again else VariableUse.DEAD, value


def _roots_in_shell(shell: Shell) -> Iterator[tuple[str, VariableUse, Any]]:
    """Yield the names that other cells have made, and the outputs of cells."""
    for name, value in list(shell.names.items()):
        hidden = name in _SHELL_NAMES or name.startswith("_") or not is_readable(value)
        if not hidden and not isinstance(value, types.ModuleType):
            yield name, VariableUse.OTHER_CELL, value
    for number, value in list(shell.outputs.items()):
        yield f"Out[{number}]", VariableUse.OUTPUT, value
    for name in _SHELL_NAMES[:3]:
        yield name, VariableUse.OUTPUT, shell.names.get(name)


def _imported(names: list[dict[str, Any]]) -> Iterator[tuple[str, types.ModuleType]]:
    """Yield the user's modules from which global names come, and the user's modules that these have imported."""
    known = {"__main__"}
    waiting = list(names)
    while waiting:
        for value in list(waiting.pop().values()):
            if not is_readable(value) or not isinstance(value, _IMPORTED):
                continue
            name = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", None)
            if not isinstance(name, str) or name in known:
                continue
            known.add(name)
            module = sys.modules.get(name)
            if module is not None and is_users_module(name):
                waiting.append(vars(module))
                yield name, module


def _holder(name: str, use: VariableUse, value: Any, own: dict[int, Any], reached: Reached) -> Holder:
    path = next((block.path for block in own.values() if not block.in_graph), next(iter(own.values())).path)
    attribute = path.split("[")[0].split(".__")[0] if path.startswith(".") else ""
    in_graph = frozenset(address for address, block in own.items() if block.in_graph)
    size = sum(block.size for block in own.values())
    direct = len(own) - len(in_graph)
    # The attribute that holds it: `trainer.history`, but of several attributes only the object.
    several = {block.path.split("[")[0] for block in own.values() if not block.in_graph}
    if isinstance(value, torch.optim.Optimizer) and attribute == ".param_groups":
        attribute = ""  # the weights: only the optimizer as a whole can be deleted
    label = name + (
        attribute if len(several) == 1 and use in (VariableUse.LATER, VariableUse.DEAD, VariableUse.OTHER_CELL) else ""
    )
    is_container = not isinstance(value, torch.Tensor)
    return Holder(label, use, frozenset(own), in_graph, size, direct, is_container, _classes(own))


def _classes(blocks: Mapping[int, Block]) -> tuple[str, ...]:
    """Return the classes of the object that holds most of some blocks."""
    sizes: dict[type, int] = {}
    for block in blocks.values():
        if block.owner is not None:
            sizes[block.owner] = sizes.get(block.owner, 0) + block.size
    return names_of_classes(max(sizes, key=sizes.__getitem__, default=None))


def _modules(frames: _Frames) -> tuple[str, str]:
    """Return the name of the innermost module of the traceback, and the model that was called to evaluate."""
    modules: list[torch.nn.Module] = []
    for frame, _, _ in frames:
        value = frame.f_locals.get("self")
        if isinstance(value, torch.nn.Module) and (not modules or modules[-1] is not value):
            modules.append(value)
    if not modules:
        return "", _evaluating(frames)
    root, innermost = modules[0], modules[-1]
    name = next(
        (name for name, module in root.named_modules() if module is innermost and name), type(innermost).__name__
    )
    if not any(weight.requires_grad for weight in root.parameters()):
        # Such as a criterion.
        return name, _evaluating(frames)
    return name, "" if root.training else type(root).__name__


def _evaluating(frames: _Frames) -> str:
    """Return the model that evaluates where the failing call is outside of it, as in a loss: all others do as well."""
    users = [frame for frame, _, _ in frames if is_users(frame.f_code.co_filename)]
    modules = [value for frame in users for _, value in _variables(frame) if isinstance(value, torch.nn.Module)]
    models = [model for model in modules if any(weight.requires_grad for weight in model.parameters())]
    return "" if not models or any(model.training for model in models) else type(models[0]).__name__


def _phase(frames: _Frames) -> Phase:
    """Return the part of the step, by the innermost frame that shows one."""
    for frame, _, _ in reversed(frames):
        value = frame.f_locals.get("self")
        if isinstance(value, torch.optim.Optimizer):
            return Phase.OPTIMIZER
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__", "").startswith("torch"):
            return Phase.BACKWARD
        if isinstance(value, torch.nn.Module):
            return Phase.FORWARD
    return Phase.OTHER


def _state_to_come(frames: _Frames) -> int:
    """Return the bytes of state that the failing update still lacks, 0 outside of one."""
    values = (frame.f_locals.get("self") for frame, _, _ in reversed(frames))
    optimizer = next((value for value in values if isinstance(value, torch.optim.Optimizer)), None)
    return 0 if optimizer is None else state_to_come(optimizer)


def _losses(frames: _Frames, outer: range, follows: Ahead, end: float) -> int:
    """Return how many losses the failing backward pass sums, or the failing statement before one."""
    if outer and follows is Ahead.BACKWARD and _phase(frames) is Phase.FORWARD:
        frame, offset, _ = frames[outer.stop - 1]
        return terms_until(frame, offset)
    return losses_of((frame for frame, _, _ in frames), end)


def _retains(codes: list[types.CodeType]) -> bool:
    """Return whether code passes an argument `retain_graph`: its name is among the constants of the call."""
    return any(
        "retain_graph" in (constant if isinstance(constant, tuple) else (constant,))
        for code in codes
        for constant in code.co_consts
    )
