"""Collect what only the live process knows of a failure: what the failing call reaches, and who holds the rest.

The failing call reaches what the variables of its frames lead to, and the models and optimizers of which it uses a
part. Every other tensor alive has a holder. Whether the code around the failing call reads a holder again is not known.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from memexplore.allocator.gc_pause import gc_paused
from memexplore.analysis.tables import is_users
from memexplore.out_of_memory.attempts import Attempts, one_line
from memexplore.out_of_memory.cures import cure_of, names_of_classes
from memexplore.out_of_memory.evidence_types import Evidence, Holder, State, VariableUse
from memexplore.out_of_memory.message import parse
from memexplore.out_of_memory.objects import (
    attributes_of,
    is_a,
    is_training,
    items_of,
    module_of,
    of_kind,
    own_buffers,
    own_weights,
    parts_of,
    requires_gradient,
    stored,
    weights_of,
)
from memexplore.out_of_memory.optimizer_state import bytes_of_weights, state_of, state_to_come
from memexplore.out_of_memory.owners import owners
from memexplore.out_of_memory.reach import Block, Reached, address_of, is_users_module, locals_of, reached_from
from memexplore.out_of_memory.untrained import optimizers_in, untrained, without_update
from memexplore.recorder.endings import class_name, links_to_out_of_memory
from memexplore.tape import Phase
from memexplore.virtual_gpu.frame_variables import variables

SECONDS = 2.0
"""Processor time for the walk over references: on a busy machine it finds as much."""
_MOST_LISTS = 3
"""Lists of an object that are named."""
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
    return _holder("sys.last_exc", VariableUse.LAST_ERROR, error, reached.blocks) if reached.blocks else None


def collect(
    raised: BaseException, shell: Shell | None = None, seconds: float = SECONDS, earlier: Holder | None = None
) -> Evidence | None:
    """Return the evidence of an error whose frames are still alive; None for another error.

    The walk over references ends after `seconds` of processor time. An error raised `from` an out-of-memory error is
    one, as in `endings.end_of`. `earlier` is what `earlier_error` returned before the program ran.
    """
    links = links_to_out_of_memory(raised)
    if not links:
        return None
    try:
        # A collection on the way would free the reference cycles that are looked for.
        with gc_paused():
            return _collected(links[-1], _frames(links), shell, time.thread_time() + seconds, earlier)
    except Exception as failure:
        # Objects of the user may raise when they are read: the error's own text remains.
        return Evidence(parse(str(links[-1])), complete=False, search_error=one_line(failure))


def _collected(
    error: BaseException, frames: _Frames, shell: Shell | None, end: float, earlier: Holder | None
) -> Evidence:
    users = [frame for frame in frames if is_users(frame[0].f_code.co_filename)]
    program = _program([frame for frame, _ in frames])
    data: set[int] = set()
    needed = _needed(program, end, data)
    holders: list[Holder] = []
    complete = needed.complete
    attempts = Attempts()
    of_program = [needed]
    variables: list[tuple[str, Any]] = []
    seen: set[str] = set()
    addresses = set(needed.blocks)
    sizes = {address: block.size for address, block in needed.blocks.items()}
    of_models = _of_models(needed)
    # The path begins with the number of its frame.
    attributes = {address: path.partition(".")[2] for address, path in _attributes_of_layers(needed)}
    context = stored(error, BaseException, "__context__")
    handled = reached_from(context, end, needed.visited, data).blocks.keys()
    for name, use, value in _roots(error, program, shell):
        if name in seen or time.thread_time() > end:
            complete &= name in seen
            continue
        seen.add(name)
        reached = reached_from(value, end, needed.visited, data)
        complete &= reached.complete
        addresses.update(reached.blocks)
        sizes |= {address: block.size for address, block in reached.blocks.items()}
        of_models |= _of_models(reached)
        for address, path in _attributes_of_layers(reached):
            attributes.setdefault(address, f"{name}{path}")
        own = {address: block for address, block in reached.blocks.items() if address not in needed.blocks}
        kept_by = dict.fromkeys(own, use)
        if use in (VariableUse.NOT_REACHED, VariableUse.BESIDE):
            of_errors = (address for address, block in own.items() if ".__traceback__" in block.path)
            kept_by |= dict.fromkeys(filter(lambda address: address not in handled, of_errors), VariableUse.KEPT_ERROR)
        for each in dict.fromkeys(kept_by.values()):
            of_use = {address: block for address, block in own.items() if kept_by[address] is each}
            holders.append(_holder(name, each, value, of_use))
        if use in (VariableUse.NOT_REACHED, VariableUse.BESIDE):
            of_program.append(reached)
            variables.append((name, value))
    running = _reached(_locals(program.libraries), end, needed.visited, data)
    complete &= running.complete
    of_program.append(running)
    in_use = {address: block for address, block in running.blocks.items() if address not in addresses}
    in_use |= needed.blocks
    addresses.update(running.blocks)
    objects = list({id(value): value for reached in of_program for value in reached.kept}.values())
    if earlier is not None:
        rest = earlier.addresses.difference(needed.blocks)
        addresses.update(earlier.addresses)
        holders.append(earlier._replace(addresses=rest, in_graph=earlier.in_graph & rest))
    wants_gradients = any(map(_wants_gradient, needed.kept))
    line = f"{users[-1][0].f_code.co_filename}:{users[-1][1]}" if users else ""
    # A model whose constructor has not got far may have no layers yet.
    layer, evaluating = attempts.value(lambda: _modules(frames), ("", ""))
    state, no_update, not_trained, may_train, trained = State.UNKNOWN, None, None, True, None
    of_layers: tuple[Holder, ...] = ()
    if complete:
        blocks = [reached.blocks for reached in of_program]
        optimizers = optimizers_in(objects)
        may_train = bool(optimizers) or wants_gradients
        trained = attempts.value(lambda: bytes_of_weights(optimizers), None) if optimizers else None
        state = attempts.value(lambda: state_of(optimizers), state)
        no_update = attempts.value(lambda: without_update(objects, blocks, variables, end), no_update)
        not_trained = attempts.value(lambda: untrained(objects, variables), not_trained)
        of_layers = attempts.value(lambda: _of_layers(objects, attributes, sizes), of_layers)
        del objects, blocks, variables, of_program, optimizers
        none: tuple[list[Holder], bool] = ([], False)
        others, complete = attempts.value(lambda: owners(addresses, end), none)
        holders += others
    to_come = attempts.value(lambda: _state_to_come(frames), 0)
    return Evidence(
        parse(str(error)),
        tuple(sorted(holders, key=lambda holder: -holder.size)),
        complete and not attempts.error,
        attempts.error,
        line,
        layer,
        _phase(frames),
        "" if wants_gradients else evaluating,
        _in_use(in_use),
        frozenset(address for address, block in needed.blocks.items() if block.in_graph),
        frozenset(needed.blocks),
        state,
        no_update,
        not_trained,
        to_come,
        may_train,
        trained,
        frozenset(of_models),
        any(frame.f_code.co_name == "__init__" and _is_module(frame) for frame, _ in frames),
        _of_libraries(in_use),
        of_layers,
    )


def _of_models(reached: Reached) -> set[int]:
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return {
        address
        for address, block in reached.blocks.items()
        if block.owner is not None and issubclass(block.owner, kinds)
    }


def _is_module(frame: types.FrameType) -> bool:
    return is_a(_self_of(frame), torch.nn.Module)


def _self_of(frame: types.FrameType) -> Any:
    """Return the object whose method a frame runs, None for a function."""
    return dict(items_of(variables(frame))).get("self")


def _wants_gradient(value: Any) -> bool:
    """Return whether a value is a tensor for which a gradient is wanted and that is no weight of a module."""
    # Classes of the user may compute their attributes.
    return type(value) is torch.Tensor and value.is_leaf and value.requires_grad


def _of_libraries(reached: Mapping[int, Block]) -> tuple[Holder, ...]:
    """Return what was reached in objects for which a library offers a cure."""
    blocks: dict[type, dict[int, Block]] = {}
    for address, block in reached.items():
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


def _attributes_of_layers(reached: Reached) -> Iterator[tuple[int, str]]:
    """Yield the address of each tensor that is itself an attribute of a module, and its path."""
    for address, block in reached.blocks.items():
        # The path may begin with the number of its frame, or of a model in a list.
        is_direct = not block.in_graph and "[" not in block.path[1:] and not block.path.endswith(".grad")
        if is_direct and block.owner is not None and issubclass(block.owner, torch.nn.Module):
            yield address, block.path


def _of_layers(objects: list[Any], attributes: Mapping[int, str], sizes: Mapping[int, int]) -> tuple[Holder, ...]:
    """Return the attributes that are no weights or buffers, those of the same name of repeated layers together."""
    tables = (table(module) for module in of_kind(objects, torch.nn.Module) for table in (own_weights, own_buffers))
    weights = {address_of(tensor)[0] for table in tables for tensor in table.values()}
    by_name: dict[str, list[int]] = {}
    for address, path in attributes.items():
        if address not in weights:
            by_name.setdefault(re.sub(r"\.\d+(?=\.)", ".*", path), []).append(address)
    return tuple(
        Holder(
            name if len(own) > 1 else attributes[own[0]],
            VariableUse.ATTRIBUTE,
            frozenset(own),
            frozenset(),
            sum(sizes[address] for address in own),
            len(own),
            is_container=False,
        )
        for name, own in by_name.items()
    )


def _in_use(reached: Mapping[int, Block]) -> tuple[Holder, ...]:
    """Return the containers that are in use, such as `self.history`."""
    blocks: dict[str, dict[int, Block]] = {}
    for address, block in reached.items():
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


_Frames = list[tuple[types.FrameType, int]]
"""Frames of a traceback with their lines."""


def _frames(links: list[BaseException]) -> _Frames:
    """Return the frames from the outermost one of an error to the failing call of the last error that it reports.

    The traceback of an error that was caught begins with the function that has caught it.
    """
    frames: _Frames = []
    for link in links:
        own = list(traceback.walk_tb(stored(link, BaseException, "__traceback__")))
        numbers = [number for number, (frame, _) in enumerate(frames) if own and frame is own[0][0]]
        frames = [*frames[: numbers[0] if numbers else None], *own]
    return frames


_OF_CALLS = ("torch.nn.modules.module", "torch._tensor", "torch.autograd", "torch.autograd.function")
"""Modules whose functions call modules and functions of autograd, and go backward."""
_OF_MODULES = ("__init__", "forward")
"""Methods of a module that are no part of the program around it, as a loop in a method named `fit` is."""


class _Program(NamedTuple):
    """The frames around the failing call, the outermost first."""

    users: list[types.FrameType]
    """Those of the user."""
    libraries: list[types.FrameType]
    """Those of libraries between them, such as of a decorator or of a trainer."""
    inner: list[types.FrameType]
    """Those of the failing call."""


def _program(frames: list[types.FrameType]) -> _Program:
    """Return the frames of the program, which end with the last of the user's that no call of a model has led to.

    They begin with the last module: what is around it runs the program.
    """
    users = [is_users(frame.f_code.co_filename) for frame in frames]
    modules = [
        number for number, is_user in enumerate(users) if is_user and frames[number].f_code.co_name == "<module>"
    ]
    first = modules[-1] if modules else users.index(True) if True in users else 0
    calls = (number for number in range(first, len(frames)) if _begins_call(frames[number], users[number]))
    call = next(calls, len(frames))
    end = 1 + max((number for number in range(first, call) if users[number]), default=first - 1)
    around = list(zip(frames[first:end], users[first:end], strict=True))
    of_user = [frame for frame, is_user in around if is_user]
    return _Program(of_user, [frame for frame, is_user in around if not is_user], frames[end:])


def _begins_call(frame: types.FrameType, is_user: bool) -> bool:
    """Return whether a frame is one of a call of a module or of its constructor, of a backward pass or an update."""
    if not is_user:
        return frame.f_globals.get("__name__") in _OF_CALLS
    own = _self_of(frame)
    # The closure that an optimizer of torch calls is a part of the program.
    return is_a(own, torch.optim.Optimizer) or (is_a(own, torch.nn.Module) and frame.f_code.co_name in _OF_MODULES)


def _needed(program: _Program, end: float, data: set[int]) -> Reached:
    """Return what the failing call reaches, under the names that it has in the user's frames around the call."""
    around = [dict(_variables(frame)) for frame in program.users]
    roots = _locals(program.inner)
    reached = _reached(roots, end, data=data)
    # The whole model of which a part is in use stays, and then the optimizer of a model that stays.
    for kind in (torch.nn.Module, torch.optim.Optimizer):
        for name, value in ((name, value) for names in around for name, value in names.items()):
            if is_a(value, kind) and not reached.blocks.keys().isdisjoint(reached_from(value, end, data=data).blocks):
                roots.append({name: value})
        reached = _reached(roots, end, data=data)
    # The last root is followed first: a name of the program comes before those of the functions that it calls.
    named = _reached(around[::-1], end, data=data).blocks
    blocks = {
        address: named.get(address, block)._replace(in_graph=block.in_graph)
        for address, block in reached.blocks.items()
    }
    return reached._replace(blocks=blocks)


def _locals(frames: list[types.FrameType]) -> list[dict[str, Any]]:
    return [{name: value for value, name, _ in locals_of(frame)} for frame in frames]


def _reached(
    roots: list[dict[str, Any]], end: float, known: Collection[int] = frozenset(), data: set[int] | None = None
) -> Reached:
    return reached_from([types.SimpleNamespace(**names) for names in roots], end, known, data)


def _variables(frame: types.FrameType) -> list[tuple[str, Any]]:
    names = variables(frame) if frame.f_code.co_name != "<module>" else frame.f_globals
    return [
        (name, value)
        for name, value in items_of(names)
        if not name.startswith("__") and not is_a(value, types.ModuleType)
    ]


# -- roots that the failing call does not reach


def _roots(error: BaseException, program: _Program, shell: Shell | None) -> Iterator[tuple[str, VariableUse, Any]]:
    """Yield names with their use and value; where a name comes twice, its first use counts."""
    for number, frame in enumerate(reversed(program.users)):
        # An op of C++ has no frame.
        use = VariableUse.NOT_REACHED if number or program.inner else VariableUse.BESIDE
        if shell is not None and frame.f_code.co_name == "<module>":
            yield from _roots_in_shell(shell, use)
        else:
            yield from ((name, use, value) for name, value in _variables(frame))
    # The error was raised while this one was handled, and its `except` block keeps it.
    handled = stored(error, BaseException, "__context__")
    if handled is not None:
        yield class_name(handled), VariableUse.HANDLED_ERROR, handled
    for name in ("last_exc", "last_value", "last_traceback"):
        value = getattr(sys, name, None)
        if value is not None and value is not error and value is not error.__traceback__:
            yield f"sys.{name}", VariableUse.LAST_ERROR, value
    for name, module in _imported([frame.f_globals for frame in program.users]):
        yield name, VariableUse.NOT_REACHED, types.SimpleNamespace(**attributes_of(module))


def _roots_in_shell(shell: Shell, use: VariableUse) -> Iterator[tuple[str, VariableUse, Any]]:
    """Yield the names of the notebook, and the outputs of cells."""
    for name, value in list(shell.names.items()):
        hidden = name in _SHELL_NAMES or name.startswith("_")
        if not hidden and not is_a(value, types.ModuleType):
            yield name, use, value
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
            name = _module_name(value)
            if not name or name in known:
                continue
            known.add(name)
            module = sys.modules.get(name)
            if module is not None and is_users_module(name):
                waiting.append(attributes_of(module))
                yield name, module


def _module_name(value: Any) -> str:
    """Return the name of a module, or of the module of a class or function, "" for another value."""
    if is_a(value, type):
        return module_of(value)
    name = value.__module__ if is_a(value, types.FunctionType) else None
    if is_a(value, types.ModuleType):
        name = attributes_of(value).get("__name__")
    return name if is_a(name, str) else ""


_OF_VARIABLES = (VariableUse.NOT_REACHED, VariableUse.BESIDE, VariableUse.KEPT_ERROR)


def _holder(name: str, use: VariableUse, value: Any, own: dict[int, Block]) -> Holder:
    in_graph = frozenset(address for address, block in own.items() if block.in_graph)
    size = sum(block.size for block in own.values())
    label, is_model = name, is_a(value, torch.nn.Module)
    # An optimizer can only be deleted as a whole.
    if use in _OF_VARIABLES and not is_a(value, torch.optim.Optimizer):
        way = "" if is_model else _model_of(value, own.values())
        is_model = is_model or bool(way)
        label = f"{name}{way}" if way else ", ".join(f"{name}{attribute}" for attribute in sorted(_attributes(own)))
    is_container = not is_a(value, torch.Tensor)
    tensors, classes = len(own) - len(in_graph), _classes(own)
    attributes = {address: f"{name}{_attribute(block)}" for address, block in own.items() if not block.in_graph}
    return Holder(label, use, frozenset(own), in_graph, size, tensors, is_container, classes, is_model, attributes)


def _attribute(block: Block) -> str:
    """Return the attribute that leads to a block from its root, such as `.history`."""
    return block.path.partition("[")[0].partition(".__")[0]


def _attributes(own: dict[int, Block]) -> list[str]:
    """Return the attribute that holds some blocks, or the few lists that do, such as `.history`; else only ""."""
    direct = [block for block in own.values() if not block.in_graph] or list(own.values())
    sizes: dict[str, int] = {}
    for block in direct:
        path = _attribute(block)
        sizes[path] = sizes.get(path, 0) + block.size
    are_lists = all("[" in block.path for block in direct)
    return list(sizes) if len(sizes) == 1 or (are_lists and len(sizes) <= _MOST_LISTS) else [""]


def _model_of(value: Any, blocks: Iterable[Block]) -> str:
    """Return the attributes of a value that lead to the one model with all blocks, "" if there is none."""
    way = ""
    for names in zip(*(block.path.partition("[")[0].split(".")[1:] for block in blocks), strict=False):
        if is_a(value, torch.nn.Module) or len({*names}) > 1:
            break
        way = f"{way}.{names[0]}"
        value = attributes_of(value).get(names[0])
    return way if is_a(value, torch.nn.Module) else ""


def _classes(blocks: Mapping[int, Block]) -> tuple[str, ...]:
    """Return the classes of the object that itself holds most of some blocks."""
    sizes: dict[type, int] = {}
    for block in blocks.values():
        if block.owner is not None and not block.in_graph:
            sizes[block.owner] = sizes.get(block.owner, 0) + block.size
    return names_of_classes(max(sizes, key=sizes.__getitem__, default=None))


def _modules(frames: _Frames) -> tuple[str, str]:
    """Return the name of the innermost module of the traceback, and the model that was called to evaluate."""
    modules: list[torch.nn.Module] = []
    for frame, _ in frames:
        value = _self_of(frame)
        if is_a(value, torch.nn.Module) and (not modules or modules[-1] is not value):
            modules.append(value)
    if not modules:
        return "", _evaluating(frames)
    root, innermost = modules[0], modules[-1]
    name = next((name for name, module in parts_of(root) if module is innermost and name), type(innermost).__name__)
    if not any(map(requires_gradient, weights_of(root))):
        # Such as a criterion.
        return name, _evaluating(frames)
    return name, "" if is_training(root) else type(root).__name__


def _evaluating(frames: _Frames) -> str:
    """Return the model that evaluates where the failing call is outside of it, as in a loss: all others do as well."""
    users = [frame for frame, _ in frames if is_users(frame.f_code.co_filename)]
    modules = of_kind((value for frame in users for _, value in _variables(frame)), torch.nn.Module)
    models = [model for model in modules if any(map(requires_gradient, weights_of(model)))]
    return "" if not models or any(map(is_training, models)) else type(models[0]).__name__


def _phase(frames: _Frames) -> Phase:
    """Return the part of the step, by the innermost frame that shows one."""
    for frame, _ in reversed(frames):
        value = _self_of(frame)
        if is_a(value, torch.optim.Optimizer):
            return Phase.OPTIMIZER
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__", "").startswith("torch"):
            return Phase.BACKWARD
        if is_a(value, torch.nn.Module):
            return Phase.FORWARD
    return Phase.OTHER


def _state_to_come(frames: _Frames) -> int:
    """Return the bytes of state that the failing update still lacks, 0 outside of one."""
    optimizers = of_kind((_self_of(frame) for frame, _ in reversed(frames)), torch.optim.Optimizer)
    return state_to_come(optimizers[0]) if optimizers else 0
