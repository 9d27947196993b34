"""Group the memory at a failure that nothing needs any more by who holds it.

Each group has the blocks that one change of the code gives back.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import Rows, cached_by_tape, lifetimes
from memexplore.analysis.growth import leak
from memexplore.analysis.location import where
from memexplore.analysis.periods import periods
from memexplore.out_of_memory.counterfactual import alive, bytes_of
from memexplore.out_of_memory.ended_calls import of_ended_calls
from memexplore.out_of_memory.evidence_types import Evidence, Holder, VariableUse
from memexplore.out_of_memory.failure import NOTE
from memexplore.out_of_memory.held_types import GROWING, MAYBE_READ, OF_MODEL, WITHOUT_BACKWARD, HeldGroup, WhyHeld
from memexplore.tape import Action, Category, Phase, Tape
from memexplore.text.tensor_text import dtype_of, shape_of

_ALIKE = 3
"""Blocks of one place, from as many calls, from which a holder is said to grow."""
_SHARE = 0.1
"""Share of what grows, and of all that a variable keeps, from which the variable is named."""
_MOST_ATTRIBUTES = 3
"""Attributes of a variable that are named."""
SCALAR = 8
"""Bytes of a number."""
_LASTING = (
    Category.PARAMETER,
    Category.BUFFER,
    Category.OPTIMIZER_STATE,
    Category.GRADIENT,
    Category.INPUT,
    Category.GATHERED_PARAMETER,
    Category.GRADIENT_BUCKET,
)
_OF_TRAINING = (
    Category.OPTIMIZER_STATE,
    Category.GRADIENT,
    Category.GATHERED_PARAMETER,
    Category.GRADIENT_BUCKET,
)
"""Categories that training steps make; copies of weights are kept by mistake as results are."""


def held_groups(tape: Tape, evidence: Evidence | None) -> list[HeldGroup]:
    """Return the groups of a tape that ends with a failed request, the most bytes first."""
    groups: list[HeldGroup | None] = []
    held_by: list[list[int]] = []
    rows = alive(tape)
    of_idle: frozenset[int] = frozenset()
    of_layers: list[HeldGroup] = []
    row_at = {int(tape.address[row]): int(row) for row in rows}
    if evidence is not None:
        idle = _no_update(tape, evidence, row_at)
        evaluates = _evaluates(tape, evidence)
        of_idle = frozenset(idle.rows if idle is not None else ())
        of_layers = _left_by_layers(tape, evidence, row_at)
        # A model is not to be deleted for what it leaves.
        apart = of_idle.union(*(group.rows for group in of_layers))
        held_by = [
            [row_at[address] for address in holder.addresses if address in row_at and row_at[address] not in apart]
            for holder in evidence.holders
        ]
        of_holders = [
            _of_holder(
                tape,
                holder,
                _without_graphs(tape, holder, held) if evaluates is WhyHeld.NO_BACKWARD else held,
                evidence,
            )
            for holder, held in zip(evidence.holders, held_by, strict=True)
        ]
        own = [
            {row for row in held if int(tape.address[row]) not in holder.in_graph}
            for holder, held in zip(evidence.holders, held_by, strict=True)
        ]
        groups += _given_back(tape, of_holders, held_by, own)
        for holder in evidence.in_use:
            in_use = [row_at[address] for address in holder.addresses & row_at.keys()]
            groups.append(_growing_in_use(tape, holder, in_use))
        groups.append(idle)
        if idle is None and evaluates is not None:
            groups.append(_no_backward(tape, rows[~np.isin(rows, [*set().union(*own)])], evaluates))
    groups += of_layers
    groups += [_stale_gradients(tape, rows[~np.isin(rows, list(of_idle))]), _cast_weights(tape, rows)]
    named = [group for group in groups if group is not None and group.what in GROWING]
    growing = _growing(tape, rows, evidence.graph if evidence is not None else frozenset())
    cycles = {row for group in groups if group is not None and group.what is WhyHeld.CYCLE for row in group.rows}
    of_cycles = [row for row in growing.rows if row in cycles] if growing is not None else []
    # What waits for the garbage collector grows until it runs.
    if growing is not None and (_is_replaced(tape, growing, evidence) or _is_most(tape, growing, of_cycles)):
        growing = None
    # What the tape shows to grow is complete; of what grows, the variables are often a part.
    if growing is not None and growing.size > sum(group.size for group in named):
        groups = [group for group in groups if group not in named]
        groups.append(growing if evidence is None else _with_holders(tape, growing, named, evidence, row_at))
    return sorted(filter(None, groups), key=lambda group: (group.what not in WITHOUT_BACKWARD, -group.size))


def _group(tape: Tape, reason: WhyHeld, holder: str, rows: list[int] | Rows) -> HeldGroup | None:
    numbers = [int(row) for row in rows]
    if not numbers:
        return None
    places = Counter((int(tape.op[row]), int(tape.module[row]), int(tape.stack[row])) for row in numbers)
    count = max(places.values())
    size = bytes_of(tape, numbers)
    largest = max(numbers, key=lambda row: int(tape.size[row]))
    location = where(tape, largest)
    return HeldGroup(
        reason, holder, tuple(numbers), size, count, size // count, location["layer"] or "", location["line"] or ""
    )


def _of_holder(tape: Tape, holder: Holder, rows: list[int], evidence: Evidence) -> HeldGroup | None:
    """Return the group of a variable, with the attributes of it that hold the group; None if the memory is needed."""
    group = _of_variable(tape, holder, rows, evidence)
    if group is None or holder.is_model or group.what not in (*GROWING, WhyHeld.NOT_REACHED):
        return group
    known = {holder.attributes.get(int(tape.address[row]), "") for row in group.rows} - {""}
    for names in (known, {".".join(name.split(".")[:2]) for name in known}):
        if 0 < len(names) <= _MOST_ATTRIBUTES:
            return group._replace(holder=", ".join(sorted(names)))
    return group


def _of_variable(tape: Tape, holder: Holder, rows: list[int], evidence: Evidence) -> HeldGroup | None:
    if not rows:
        return None
    computed = [row for row in rows if _is_computed(tape, row) or int(tape.address[row]) in holder.in_graph]
    has_graph = any(int(tape.address[row]) in holder.in_graph for row in rows)
    if holder.use in _BY_USE:
        return _group(tape, _BY_USE[holder.use], holder.name, rows)
    is_beside = holder.use is VariableUse.BESIDE
    # What a recorded program has made itself may wait for a later line.
    is_recorded = NOTE not in tape.meta.notes
    if is_recorded and not is_beside and np.all(tape.action[rows] == Action.PREEXISTING):
        in_use = _weights_in_use(tape, evidence)
        not_in_use = [row for row in rows if row not in in_use]
        # Data may be used in each step.
        is_data = not has_graph and not np.any(np.isin(tape.category[rows], OF_MODEL))
        return _group(tape, WhyHeld.NOT_REACHED if is_data else WhyHeld.BEFORE, holder.name, not_in_use)
    several, passes = _of_several_passes(tape, rows) if holder.is_container else ([], 0)
    computed = sorted({*computed, *several})
    group = _group(tape, WhyHeld.GROWS, holder.name, computed)
    # One call may make several blocks at one place, such as the copies of query, key and value.
    of_calls = _of_several_calls(tape, computed) if group is not None and group.blocks >= _ALIKE else []
    grows = group is not None and any(_is_most(tape, group, repeated) for repeated in (of_calls, several))
    grows = grows and not _of_few_backward_passes(tape, computed)
    direct = [row for row in rows if int(tape.address[row]) not in holder.in_graph]
    is_loss = bool(np.all(tape.size[direct] <= SCALAR))
    if grows and group is not None and (holder.is_container or has_graph):
        if several == computed:
            # One call may keep several blocks of a place, such as a copy of all weights.
            group = group._replace(blocks=passes, each=group.size // passes)
        # Derivatives on the way of a step, such as those of meta-learning, leave the graphs to its backward pass.
        in_graph = [row for row in group.rows if int(tape.address[row]) in holder.in_graph]
        of_step = [row for row in in_graph if tape.step[row] == tape.step[-1]]
        if not has_graph or (went_backward(tape, [min(computed)]) and not _is_most(tape, group, of_step)):
            return group
        # Other values than losses, such as those that a loss compares, are needed together.
        return group._replace(what=WhyHeld.SUMMED_GRAPHS) if is_loss else None
    if has_graph and (is_loss or not is_beside) and _is_earlier_pass(tape, computed, is_loss):
        what = WhyHeld.EARLIER_GRAPH if is_loss else WhyHeld.OLD_VALUE
        graph = _group(tape, what, holder.name, computed)
        return graph and graph._replace(is_container=holder.is_container)
    # A model that is being built uses nothing of another, and often replaces it where none is trained.
    replaces = evidence.building and evidence.trained is None and holder.is_model
    replaced = [
        row
        for row in direct
        if replaces or tape.category[row] not in _LASTING or _is_copy_of_weights(tape, row, evidence)
    ]
    if has_graph or is_beside:
        return None
    if not replaced:
        # A program that does not train uses one model after the other.
        trains = evidence.may_train or np.any(tape.phase == Phase.BACKWARD)
        idle = [row for row in direct if tape.category[row] in (Category.PARAMETER, Category.BUFFER)]
        return None if trains or evidence.building else _group(tape, WhyHeld.NOT_REACHED, holder.name, idle)
    what = WhyHeld.NOT_REACHED
    if _is_made_again(tape, replaced):
        is_of_model = computed or holder.is_model
        what = WhyHeld.OLD_VALUE if is_of_model or not _collects(tape, replaced) else WhyHeld.COLLECTED
    return _group(tape, what, holder.name, replaced)


def _collects(tape: Tape, rows: list[int]) -> bool:
    """Return whether a container has a block of each of several calls of one place, the last call included.

    The next call then adds to it, as to a list of folds, and replaces nothing. One call may make two blocks of a place,
    such as values and indices.
    """
    places = _places(tape)
    place, count = Counter(places[rows].tolist()).most_common(1)[0]
    requests = np.flatnonzero(places[:-1] >= 0)
    at_place = np.flatnonzero(places[requests] == place)
    if not len(at_place) or int(requests[at_place[-1]]) not in rows:
        return False
    are_apart = bool(np.any(np.diff(at_place[-count:]) > 1))
    return count >= _ALIKE or (count > 1 and are_apart)


def _is_copy_of_weights(tape: Tape, row: int, evidence: Evidence) -> bool:
    """Return whether a block is of a state that a variable has, such as a checkpoint's, and no model or optimizer."""
    return tape.category[row] in OF_MODEL and int(tape.address[row]) not in evidence.of_models


def _weights_in_use(tape: Tape, evidence: Evidence) -> set[int]:
    """Return the weights of the layers that were called.

    A model that was not called may have layers of the same names, as that of an earlier fold: where the failing call
    reaches weights of a name, or the program has made some, these are the ones that were called.
    """
    called = _weights_called(tape)
    own = {row for row in called if tape.action[row] == Action.ALLOC or int(tape.address[row]) in evidence.needed}
    of_own = {int(tape.module[row]) for row in own}
    return own | {row for row in called if int(tape.module[row]) not in of_own}


@cached_by_tape
def _weights_called(tape: Tape) -> tuple[int, ...]:
    """Return the weights of all layers with the names of those that were called."""
    called = np.unique(tape.module[tape.phase == Phase.FORWARD])
    is_weight = np.isin(tape.category, (Category.PARAMETER, Category.BUFFER)) & np.isin(tape.module, called)
    return tuple(np.flatnonzero(is_weight & (tape.module >= 0)).tolist())


_BY_USE = {
    VariableUse.OUTPUT: WhyHeld.OUTPUT,
    VariableUse.LAST_ERROR: WhyHeld.LAST_ERROR,
    VariableUse.KEPT_ERROR: WhyHeld.KEPT_ERROR,
    VariableUse.HANDLED_ERROR: WhyHeld.HANDLED_ERROR,
    VariableUse.CYCLE: WhyHeld.CYCLE,
    VariableUse.OWN_GRADIENT: WhyHeld.OWN_GRADIENT,
    VariableUse.LIBRARY: WhyHeld.LIBRARY,
}
LAST_ERROR = "sys.last_exc"
"""Name of the holder of an earlier error."""
_ALONE = (
    WhyHeld.OLD_VALUE,
    WhyHeld.OUTPUT,
    WhyHeld.LAST_ERROR,
    WhyHeld.KEPT_ERROR,
    WhyHeld.HANDLED_ERROR,
    WhyHeld.BEFORE,
    *MAYBE_READ,
)


def _given_back(
    tape: Tape, groups: list[HeldGroup | None], held_by: list[list[int]], own: list[set[int]]
) -> list[HeldGroup]:
    """Return the groups of holders, with the blocks that come back when their variables are deleted.

    Variables that hold the same blocks for the same reason are one group: one alone gives nothing back. `own` are the
    blocks of each holder that no graph keeps for it.
    """
    result: list[HeldGroup] = []
    own_of: dict[str, set[int]] = {}
    for group, itself in zip(groups, own, strict=True):
        if group is None:
            continue
        if group.what in GROWING and (first := _kept_too(tape, group, itself, result, own_of)) is not None:
            own_of[first.holder] |= itself
            result[result.index(first)] = first._replace(holder=f"{first.holder}, {group.holder}")
            own_of[f"{first.holder}, {group.holder}"] = own_of[first.holder]
            continue
        own_of[group.holder] = itself
        rows, name = set(group.rows), group.holder
        if group.what in _ALONE:
            for other, held in zip(groups, held_by, strict=True):
                if other is not None and other.what is WhyHeld.LAST_ERROR and group.what is not WhyHeld.LAST_ERROR:
                    # The frames of the error are freed too: together they give these back.
                    name = f"{name}, {LAST_ERROR}" if rows & set(held) else name
                elif other is None or other.what is not group.what:
                    rows.difference_update(held)
        if group.what in GROWING and any(
            earlier.what is group.what and rows <= set(earlier.rows) for earlier in result
        ):
            continue
        same = next(
            (earlier for earlier in result if earlier.what is group.what and rows & set(earlier.rows)),
            None,
        )
        if same is not None and group.what not in GROWING:
            result.remove(same)
            rows |= set(same.rows)
            name = ", ".join(dict.fromkeys([*same.holder.split(", "), *name.split(", ")]))
        is_same = rows == set(group.rows)
        changed = group._replace(holder=name) if is_same else _group(tape, group.what, name, sorted(rows))
        if changed is not None:
            result.append(changed._replace(is_container=group.is_container))
    return result


def _kept_too(
    tape: Tape, group: HeldGroup, own: set[int], groups: list[HeldGroup], own_of: dict[str, set[int]]
) -> HeldGroup | None:
    """Return the group most of whose blocks another value keeps as well, such as a list of losses beside their sum.

    A second name of the same list is none: both hold the same blocks themselves.
    """
    rows = set(group.rows)
    for other in groups:
        shared = [row for row in other.rows if row in rows]
        if other.what is group.what and _is_most(tape, other, shared) and own.isdisjoint(own_of[other.holder]):
            return other
    return None


def _is_computed(tape: Tape, row: int) -> bool:
    """Return whether a block was made by a forward or backward pass, and is no part of the model."""
    if tape.category[row] in _LASTING:
        return False
    return tape.phase[row] in (Phase.FORWARD, Phase.BACKWARD) or tape.module[row] >= 0


def _is_earlier_pass(tape: Tape, rows: list[int], alone: bool) -> bool:
    """Return whether the failing call goes through the place of a block once more: it makes the same graph again.

    A graph that is `alone`, such as that of a loss, is one too if the call goes through the same layers from another
    line: other values may be needed together, as those of two images that are compared.
    """
    rows = [row for row in rows if tape.category[row] not in _LASTING]
    if not rows:
        return False
    last = max(rows)
    if tape.step[-1] > tape.step[last] or _is_made_again(tape, rows):
        return True
    after = _after(tape, last)
    layers = {(int(tape.op[row]), int(tape.module[row])) for row in rows if tape.module[row] >= 0}
    again = zip(tape.op[after].tolist(), tape.module[after].tolist(), strict=True)
    return alone and not layers.isdisjoint(again)


def _is_made_again(tape: Tape, rows: list[int]) -> bool:
    """Return whether a later call asks for memory where some blocks were made, or one of an earlier period has."""
    places, last = _places(tape), max(rows)
    if np.any(np.isin(places[_after(tape, last)], places[rows])):
        return True
    ends = periods(tape).ends
    before = [end for end in ends if end < min(rows)]
    is_earlier = bool(ends) and last <= ends[-1]
    return is_earlier and bool(before) and bool(np.isin(places[rows], places[: before[-1] + 1]).all())


def _after(tape: Tape, row: int) -> Rows:
    """Return the rows behind a call: one call may make several blocks, such as values and indices."""
    places = _places(tape)
    other = np.flatnonzero((places[row + 1 :] != places[row]) & (places[row + 1 :] >= 0))
    return np.arange(row + 1 + other[0], len(tape)) if len(other) else np.arange(0)


def _of_several_passes(tape: Tape, rows: list[int]) -> tuple[list[int], int]:
    """Return the blocks of lines to which at least `_ALIKE` forward passes of a model have led, and the passes.

    Models that were made between the passes, such as those of a search, come with what was made to train them.
    """
    is_forward = tape.phase == Phase.FORWARD
    passes = np.cumsum(is_forward & ~np.concatenate([[False], is_forward[:-1]]))
    kept: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        if tape.category[row] not in _OF_TRAINING and tape.action[row] == Action.ALLOC:
            # Not by layer: the layers of each model have names of their own.
            kept.setdefault((int(tape.op[row]), int(tape.stack[row])), []).append(row)
    repeated = [row for same in kept.values() if len({int(passes[row]) for row in same}) >= _ALIKE for row in same]
    count = len({int(passes[row]) for row in repeated})
    if np.any(tape.category[repeated] == Category.PARAMETER):
        repeated += [row for row in rows if tape.category[row] in _OF_TRAINING]
    return sorted(repeated), count


def _places(tape: Tape) -> NDArray[np.int64]:
    """Return one number for op, layer and stack of each request, -1 for other rows."""
    names, stacks = len(tape.modules) + 1, len(tape.stacks) + 1
    numbers = ((tape.op + 1).astype(np.int64) * names + tape.module + 1) * stacks + tape.stack + 1
    return np.where(np.isin(tape.action, (Action.ALLOC, Action.OOM)), numbers, -1)


def went_backward(tape: Tape, rows: list[int]) -> bool:
    """Return whether a backward pass ran after the blocks were made."""
    after = slice(max(rows), len(tape))
    return bool(np.any(tape.phase[after] == Phase.BACKWARD))


def _stale_gradients(tape: Tape, rows: Rows) -> HeldGroup | None:
    last = len(tape) - 1
    if tape.phase[last] != Phase.FORWARD:
        return None
    step = int(tape.step[last])
    stale = rows[(tape.category[rows] == Category.GRADIENT) & (tape.step[rows] < step) & (tape.step[rows] > 0)]
    return _group(tape, WhyHeld.STALE_GRADIENTS, "", stale)


def _cast_weights(tape: Tape, rows: Rows) -> HeldGroup | None:
    """Return the copies of weights that autocast made without gradients: no backward pass needs them."""
    weights = {
        (int(tape.module[row]), shape_of(text))
        for row in rows[tape.category[rows] == Category.PARAMETER]
        if (text := _text(tape, row)) and dtype_of(text) == "float32"
    }
    copies = [
        int(row)
        for row in rows[tape.category[rows] == Category.TEMPORARY]
        if (text := _text(tape, row))
        and dtype_of(text) in ("float16", "bfloat16")
        and (int(tape.module[row]), shape_of(text)) in weights
        and tape.op[row] >= 0
        and tape.ops[tape.op[row]].endswith("_to_copy")
    ]
    # Those of the running layer are in use.
    module = int(tape.module[-1])
    return _group(tape, WhyHeld.CAST_WEIGHTS, "", [row for row in copies if tape.module[row] != module])


def _text(tape: Tape, row: int) -> str:
    return tape.tensor_texts[tape.tensor[row]] if tape.tensor[row] >= 0 else ""


def _evaluates(tape: Tape, evidence: Evidence) -> WhyHeld | None:
    """Return why no backward pass follows the failing call, by what has run; None if one may follow.

    A model in evaluation mode is trained too, with dropout off: where an optimizer has yet to see a backward pass, and
    where backward passes have gone through what the failing call makes again.
    """
    went_backward = tape.phase == Phase.BACKWARD
    if not evidence.evaluating:
        trains = evidence.may_train or bool(np.any(went_backward)) or leak(tape) is None
        return None if trains else WhyHeld.NO_OPTIMIZER
    ends = periods(tape).ends
    if np.any(went_backward[ends[-1] + 1 if ends else 0 :]) or (evidence.may_train and not np.any(went_backward)):
        return None
    made = alive(tape)[tape.category[alive(tape)] == Category.ACTIVATION]
    trained = np.isin(_places(tape)[made], _places(tape)[_gone_backward(tape)])
    return None if 2 * np.count_nonzero(trained) > len(made) else WhyHeld.NO_BACKWARD


def _gone_backward(tape: Tape) -> Rows:
    """Return the blocks of the graphs through which backward passes have gone, which free them."""
    life = lifetimes(tape)
    freed = life.requested < len(tape)
    born, by = life.born[freed], life.requested[freed]
    return born[(tape.category[born] == Category.ACTIVATION) & (tape.phase[by] == Phase.BACKWARD)]


def _left_by_layers(tape: Tape, evidence: Evidence, row_at: dict[int, int]) -> list[HeldGroup]:
    """Return what attributes of layers have of calls that have ended, and no graph needs any more."""
    passes = _backward_passes(tape)
    result = []
    for holder in evidence.of_layers:
        rows = np.array(sorted(row_at[address] for address in holder.addresses & row_at.keys()), dtype=np.int64)
        is_done = (tape.category[rows] == Category.TEMPORARY) | (
            (tape.category[rows] == Category.ACTIVATION) & (passes[rows] < passes[-1])
        )
        group = _group(tape, WhyHeld.LEFT_BY_LAYERS, holder.name, of_ended_calls(tape, rows[is_done]))
        if group is not None:
            result.append(group._replace(blocks=len(group.rows)))
    return result


def _without_graphs(tape: Tape, holder: Holder, rows: list[int]) -> list[int]:
    """Return the blocks that a variable has itself: what graphs keep belongs to none, whichever one they hang on."""
    return [row for row in rows if int(tape.address[row]) not in holder.in_graph]


def _no_backward(tape: Tape, rows: Rows, why: WhyHeld) -> HeldGroup | None:
    """Return the activations for a backward pass, but for the inputs of the failing call."""
    kept = rows[(tape.category[rows] == Category.ACTIVATION) & ~np.isin(tape.action[rows], (Action.PREEXISTING,))]
    # Without a graph the op itself still reads what the one before it wrote.
    return _group(tape, why, "", kept[:-1])


def _no_update(tape: Tape, evidence: Evidence, row_at: dict[int, int]) -> HeldGroup | None:
    """Return what a model without an optimizer keeps for its gradients, and these."""
    if evidence.no_update is None:
        return None
    rows = [row_at[address] for address in evidence.no_update.addresses if address in row_at]
    kept = [row for row in rows if tape.category[row] not in _LASTING or tape.category[row] == Category.GRADIENT]
    return _group(tape, WhyHeld.NO_UPDATE, evidence.no_update.name, sorted(kept))


def _growing_in_use(tape: Tape, holder: Holder, rows: list[int]) -> HeldGroup | None:
    """Return what a container that is in use has kept of several earlier passes, such as a hook's list."""
    kept = _of_earlier_passes(tape, rows)
    # One call may keep several blocks of a place, such as a mean and a deviation.
    count = len(set(_backward_passes(tape)[kept].tolist()))
    if not kept and not holder.in_graph:
        # Results without a graph, such as those that are joined after their loop.
        kept, count = _of_several_passes(tape, [row for row in sorted(rows) if _is_computed(tape, row)])
    group = _group(tape, WhyHeld.GROWS, holder.name, kept)
    return group and group._replace(blocks=count, each=group.size // count)


def _is_replaced(tape: Tape, group: HeldGroup, evidence: Evidence | None) -> bool:
    """Return whether the failing call uses what grows, such as keys and values, and has it anew in each period."""
    ends = periods(tape).ends
    if evidence is None or group.what is not WhyHeld.GROWS or len(ends) < 2:
        return False
    new = [row for row in group.rows if row > ends[-2] and int(tape.address[row]) in evidence.needed]
    return _is_most(tape, group, new)


def _backward_passes(tape: Tape) -> NDArray[np.int64]:
    """Return for each row the number of backward passes that have ended before it."""
    is_backward = tape.phase == Phase.BACKWARD
    return np.concatenate([[0], np.cumsum(is_backward[:-1] & ~is_backward[1:])])


def _of_few_backward_passes(tape: Tape, rows: list[int]) -> bool:
    """Return whether fewer than `_ALIKE` backward passes made some blocks: one makes the gradients of many weights."""
    is_backward = bool(np.all(tape.phase[rows] == Phase.BACKWARD))
    return is_backward and len(set(_backward_passes(tape)[rows].tolist())) < _ALIKE


def _of_earlier_passes(tape: Tape, rows: list[int]) -> list[int]:
    """Return the blocks of places of which at least `_ALIKE` backward passes, the last included, have left some."""
    passes, places = _backward_passes(tape), _places(tape)
    kept: dict[int, list[int]] = {}
    for row in rows:
        if passes[row] < passes[-1] and _is_computed(tape, row):
            kept.setdefault(int(places[row]), []).append(row)
    result: list[int] = []
    for same in kept.values():
        of_passes = {int(passes[row]) for row in same}
        if len(of_passes) >= _ALIKE and max(of_passes) == passes[-1] - 1:
            result += same
    return sorted(result)


def _growing(tape: Tape, rows: Rows, graph: frozenset[int]) -> HeldGroup | None:
    """Return the blocks of earlier periods at the places whose memory grows, by the tape alone.

    `graph` are the addresses that only the graph of the failing step keeps.
    """
    by_period = _growing_by_period(tape)
    if by_period is None and (long := _long_graph(tape, rows, graph)) is not None:
        return long
    group = by_period or _group(tape, WhyHeld.GROWS, "", _of_earlier_passes(tape, rows.tolist()))
    if group is None or not _is_most(tape, group, [row for row in group.rows if int(tape.address[row]) in graph]):
        return group
    # A step may take derivatives several times on its way: it has a long graph only if steps have ended on that way.
    has_ended = periods(tape).unit == "step" or np.any(tape.category == Category.GRADIENT)
    return group._replace(what=WhyHeld.LONG_GRAPH) if by_period is not None and has_ended else None


def _long_graph(tape: Tape, rows: Rows, graph: frozenset[int]) -> HeldGroup | None:
    """Return what the graph of the failing step keeps of several earlier steps: growth may not be measured yet."""
    earlier = (tape.step[rows] > 0) & (tape.step[rows] < tape.step[-1])
    back = [row for row in rows[earlier].tolist() if int(tape.address[row]) in graph and _is_computed(tape, row)]
    steps = len({int(tape.step[row]) for row in back})
    group = _group(tape, WhyHeld.LONG_GRAPH, "", back) if steps > 1 else None
    return group and group._replace(blocks=steps, each=group.size // steps)


def _of_several_calls(tape: Tape, rows: list[int]) -> list[int]:
    """Return the blocks of places at which at least `_ALIKE` of the blocks were made."""
    places = _places(tape)
    count = Counter(int(places[row]) for row in rows)
    return [row for row in rows if count[int(places[row])] >= _ALIKE]


def _is_most(tape: Tape, group: HeldGroup, rows: list[int]) -> bool:
    return 2 * bytes_of(tape, rows) > group.size


def _with_holders(
    tape: Tape, group: HeldGroup, named: list[HeldGroup], evidence: Evidence, row_at: dict[int, int]
) -> HeldGroup:
    """Return a group with the names of the variables that keep it: those that grow, else those that have some of it."""
    rows = set(group.rows)
    names = [grown.holder for grown in named if grown.holder and not rows.isdisjoint(grown.rows)]
    variables = (*evidence.in_use, *evidence.holders)
    held = [(each.name, {row_at[address] for address in each.addresses & row_at.keys()}) for each in variables]
    missing = rows.difference(*(grown.rows for grown in named if grown.holder))
    for name, blocks in sorted(held, key=lambda item: (-bytes_of(tape, list(item[1] & rows)), item[0])):
        # The model and its trainer lead to everything.
        least = _SHARE * max(group.size, bytes_of(tape, list(blocks)))
        if name not in names and blocks & missing and bytes_of(tape, list(blocks & missing)) >= least:
            names.append(name)
            missing -= blocks
    what = named[0].what if named else group.what
    return group._replace(what=what, holder=", ".join(names))


def _growing_by_period(tape: Tape) -> HeldGroup | None:
    """Return what earlier periods have left at the places that grow, of all categories."""
    growth = leak(tape)
    if growth is None:
        return None
    group = _group(tape, WhyHeld.GROWS, "", list(growth.kept))
    return group and group._replace(each=growth.bytes_per_period)
