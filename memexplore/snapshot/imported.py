"""Steps, phases and categories of a tape that somebody sent, decided from stacks and lifetimes.

A snapshot knows no layers, steps or categories. What its stacks tell of each row (`stacks.Origin`) is spread over the
rows between: from the first layer call on until the optimizer has run is a step, the autograd engine is its backward.
Then each block gets its category from where it was made and how long it lived:

| made | lived | category |
|---|---|---|
| by cuBLAS or cuDNN for themselves | | workspace |
| in backward | beyond it | gradient (what backward puts into `.grad` always) |
| in the optimizer | beyond it | optimizer state; parameter where a parameter of its size is given back just there |
| in forward, or recomputed in backward | beyond the call of its layer | activation |
| outside layers, backward and optimizer | until backward gives it back | activation |
| before the first step, by layers built, moved or loaded | into it | parameter, buffer where no gradient fits |
| outside, or by a DataLoader | into the next forward | input |
| in any of these | less | temporary |

Blocks that were there before the history began have no stack. What `zero_grad` gives back is a gradient, what the
optimizer gives back is its state, what backward gives back is an activation. Blocks that stay are parameters and what
belongs to them: as many of each size as there are gradients of that size are parameters, as many again the gradients
where backward makes none, and the rest optimizer state; which of several blocks of one size is which cannot be told.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import lifetimes
from memexplore.snapshot.stacks import Origin, Stacks
from memexplore.tape import Action, Category, Phase, Tape

Rows = NDArray[np.int64]

WORKSPACE_SIZE = 8_519_680
"""Bytes of a cuBLAS workspace on most cards (aten/src/ATen/cuda/CublasHandlePool.cpp); no tensor has this size."""

_PHASE_OF = {
    Origin.FORWARD: Phase.FORWARD,
    Origin.BACKWARD: Phase.BACKWARD,
    Origin.RECOMPUTE: Phase.BACKWARD,
    Origin.ACCUMULATE: Phase.BACKWARD,
    Origin.OPTIMIZER: Phase.OPTIMIZER,
}
_KEPT = ("time", "action", "address", "size", "stream", "op", "module", "stack")
_SEGMENT_ROWS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
_SILENT = -1
"""Evidence of a row that tells nothing: what stands around it decides."""


def understand(tape: Tape, stacks: Stacks, recorded: Rows) -> Tape:
    """The tape with the steps, phases and categories that its stacks and lifetimes tell.

    ``recorded`` is the number of each row's stack in ``stacks``, -1 for none.
    """
    if not len(tape):
        return tape
    origin = stacks.origin[recorded]
    known = stacks.category[recorded]
    # Memory that was reserved for a request belongs to it, as in a replay.
    row, place = np.arange(len(tape)), np.isin(tape.action, _SEGMENT_ROWS)
    following = np.minimum.accumulate(np.where(place, len(tape) - 1, row)[::-1])[::-1]
    reserving = np.flatnonzero(place & (tape.action[following] == Action.ALLOC))
    request = following[reserving]
    proven = _evidence(tape, origin, known, stacks)
    proven[request] = np.where(proven[request] == _SILENT, proven[reserving], proven[request])
    phase, step = phases_and_steps(proven)
    phase[reserving], step[reserving] = phase[request], step[request]
    life = lifetimes(tape)
    category = _categories(tape, stacks, recorded, origin, phase, step)
    category[known[life.born] >= 0] = known[life.born][known[life.born] >= 0]
    column = np.full(len(tape) + 1, Category.UNKNOWN, dtype=np.uint8)
    # A free tells the category of its block; the extra last row takes what is never freed.
    for rows in (life.born, life.requested, life.completed):
        column[rows] = category
    taken = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING, Action.FREE_REQUESTED, Action.FREE_COMPLETED))
    column[:-1][~taken] = Category.UNKNOWN
    column[reserving] = column[request]
    return Tape.from_columns(
        {
            **{name: getattr(tape, name) for name in _KEPT},
            "category": column[:-1],
            "phase": phase,
            "step": step,
        },
        meta=tape.meta,
        ops=tape.ops,
        modules=tape.modules,
        stacks=tape.stacks,
    )


def _evidence(tape: Tape, origin: Rows, known: Rows, stacks: Stacks) -> Rows:
    """The phase that each row proves by itself, `_SILENT` where it proves none."""
    proves = np.full(len(Origin), _SILENT)
    for kind, phase in _PHASE_OF.items():
        proves[kind] = phase
    for kind in (Origin.ZERO_GRAD, Origin.MODEL, Origin.DATA):
        proves[kind] = Phase.OTHER
    result = proves[origin]
    if np.any(known >= 0):
        # memexplore's own files give backward rows the line of their forward op, so categories tell more than lines.
        backward = np.array([*("backward" in op for op in tape.ops), False], dtype=bool)[tape.op]
        result[known >= 0] = np.where(origin == Origin.OPTIMIZER, Phase.OPTIMIZER, _SILENT)[known >= 0]
        result[(known == Category.ACTIVATION) & (origin != Origin.OPTIMIZER)] = Phase.FORWARD
        result[(known == Category.OPTIMIZER_STATE)] = Phase.OPTIMIZER
        result[(known == Category.GRADIENT) | (backward & (known >= 0))] = Phase.BACKWARD
        result[tape.action != Action.ALLOC] = _SILENT
    elif not stacks.native:
        # Python has no frame in the autograd engine's thread.
        silent = (tape.action == Action.ALLOC) & (origin == Origin.NONE)
        if np.any(origin == Origin.FORWARD):
            result[silent] = Phase.BACKWARD
    result[tape.action == Action.PREEXISTING] = _SILENT
    return result


def phases_and_steps(evidence: Rows) -> tuple[Rows, Rows]:
    """Phase and step of each row from what some rows prove (-1: nothing).

    >>> phases, steps = phases_and_steps(np.array([-1, 0, -1, 1, -1, 1, 2, -1, 0]))
    >>> phases.tolist(), steps.tolist()
    ([3, 0, 0, 1, 1, 1, 2, 3, 0], [0, 1, 1, 1, 1, 1, 1, 2, 2])
    """
    count = len(evidence)
    position = np.arange(count)
    proven = evidence != _SILENT
    before = np.maximum.accumulate(np.where(proven, position, -1))
    after = np.minimum.accumulate(np.where(proven, position, count)[::-1])[::-1]
    with_ends = np.append(evidence, _SILENT)
    left, right = with_ends[before], with_ends[np.minimum(after, count)]
    phase = np.where(left == right, left, Phase.OTHER)
    # What follows the layers is the loss, until backward begins.
    phase[(left == Phase.FORWARD) & ((right == Phase.BACKWARD) | (right == _SILENT))] = Phase.FORWARD
    phase[proven] = evidence[proven]
    phase[phase == _SILENT] = Phase.OTHER

    working = np.flatnonzero(proven & (evidence != Phase.OTHER))
    step = np.zeros(count, dtype=np.int64)
    if not len(working):
        return phase, step
    kinds = evidence[working]
    # A step ends with the last row of its optimizer; with its backward where no optimizer is seen.
    last = Phase.OPTIMIZER if np.any(kinds == Phase.OPTIMIZER) else Phase.BACKWARD
    ends = working[:-1][(kinds[:-1] == last) & (kinds[1:] != last)] + 1
    step[working[0] :] = 1
    step[ends[ends < count]] += 1
    step = np.where(step == 0, 0, 1) if not len(ends) else _count_up(working[0], ends, count)
    return phase, step


def _count_up(first: int, ends: Rows, count: int) -> Rows:
    step = np.zeros(count, dtype=np.int64)
    step[first] = 1
    step[ends] += 1
    return np.cumsum(step)


def _categories(tape: Tape, stacks: Stacks, recorded: Rows, origin: Rows, phase: Rows, step: Rows) -> NDArray[np.uint8]:
    """The category of each block, in the order of `lives(tape).born`."""
    life, count = lifetimes(tape), len(tape)
    born, gone = life.born, life.requested
    made_by, made_in = origin[born], phase[born]
    before = tape.action[born] == Action.PREEXISTING
    run_ends = _run_ends(phase, step)
    ends = run_ends[born]
    lasting = gone >= ends
    sizes = tape.size[born]
    result = np.full(len(born), Category.UNKNOWN, dtype=np.uint8)

    def set_where(chosen: NDArray[np.bool_], kind: Category, otherwise: Category = Category.TEMPORARY) -> None:
        result[chosen] = np.where(lasting, kind, otherwise)[chosen]

    seen = ~before
    call_end = _call_ends(tape, stacks, recorded)[born]
    forward = seen & ((made_in == Phase.FORWARD) | (made_by == Origin.RECOMPUTE))
    in_call = forward & (call_end >= 0)
    set_where(forward, Category.ACTIVATION)
    result[in_call] = np.where(gone >= call_end, Category.ACTIVATION, Category.TEMPORARY)[in_call]

    backward = seen & (made_in == Phase.BACKWARD) & ~forward
    set_where(backward, Category.GRADIENT)
    set_where(seen & (made_in == Phase.OPTIMIZER), Category.OPTIMIZER_STATE)

    forwards = np.append(np.flatnonzero((phase == Phase.FORWARD) & (np.roll(phase, 1) != Phase.FORWARD)), count)
    next_forward = forwards[np.searchsorted(forwards[:-1], born, side="right")]
    waits = (gone > next_forward) & (next_forward < count)
    other = seen & (made_in == Phase.OTHER)
    result[other & (gone < count)] = Category.TEMPORARY
    freed_in = np.append(phase, Phase.OTHER)[gone]
    result[other & (freed_in == Phase.BACKWARD)] = Category.ACTIVATION
    result[other & waits] = Category.INPUT
    built = (made_by == Origin.MODEL) & (seen | before)
    result[built & (waits | (gone == count))] = Category.PARAMETER
    for kind, stands_for in (
        (Origin.WORKSPACE, Category.WORKSPACE),
        (Origin.ACCUMULATE, Category.GRADIENT),
        (Origin.DATA, Category.INPUT),
    ):
        result[(made_by == kind) & lasting] = stands_for
    result[made_by == Origin.WORKSPACE] = Category.WORKSPACE
    result[(sizes == WORKSPACE_SIZE) & (gone == count) & (made_by != Origin.MODEL)] = Category.WORKSPACE

    unfinished = backward & (ends == count) & (made_by != Origin.ACCUMULATE)
    parameters = _parameter_counts(result, sizes, step[born], made_in)
    if np.any(unfinished):
        known_sizes = set(sizes[result == Category.PARAMETER].tolist()) | set(
            sizes[backward & (ends < count) & (result == Category.GRADIENT)].tolist()
        )
        fits = np.isin(sizes, list(known_sizes)) if known_sizes else np.zeros(len(sizes), dtype=bool)
        result[unfinished & ~fits] = Category.TEMPORARY
    _state_of_set_up(result, sizes, step[born], parameters)
    _before(tape, result, before & ~built, origin, phase, gone, parameters)
    _buffers(result, sizes, parameters)
    _replaced(tape, result, seen & (made_in == Phase.OPTIMIZER) & lasting, phase, run_ends)
    return result


def _run_ends(phase: Rows, step: Rows) -> Rows:
    """For each row the first row of the next phase or step, the number of rows where there is none."""
    count = len(phase)
    changes = np.flatnonzero((phase[1:] != phase[:-1]) | (step[1:] != step[:-1])) + 1
    edges = np.append(changes, count)
    return edges[np.searchsorted(changes, np.arange(count), side="right")]


def _call_ends(tape: Tape, stacks: Stacks, recorded: Rows) -> Rows:
    """For each row the first later row that lies outside the innermost layer call it was made in, -1 outside any call.

    A call ends where the calls that two following rows have in common are fewer than those that were open.
    """
    count = len(tape)
    depth = np.array([len(calls) for calls in stacks.calls])[recorded]
    result = np.full(count, -1, dtype=np.int64)
    # Rows without a stack (segments, the engine) tell nothing of calls.
    telling = np.flatnonzero(recorded >= 0)
    if not len(telling) or not depth.any():
        return result
    numbers = recorded[telling]
    pairs, place = np.unique(np.stack([numbers[:-1], numbers[1:]], axis=1), axis=0, return_inverse=True)
    common = np.array([stacks.shared(one, other) for one, other in pairs.tolist()], dtype=np.int64)
    kept = np.append(common[place.reshape(-1)], -1)  # calls still open between a row and the next; none at the end
    deep = depth[telling]
    positions = np.arange(len(telling))
    following = np.append(telling, count)
    for level in range(1, int(deep.max()) + 1):
        here = np.flatnonzero(deep == level)
        if len(here):
            ended = np.where(kept < level, positions + 1, len(telling))
            ends = np.minimum.accumulate(ended[::-1])[::-1]
            result[telling[here]] = following[ends[here]]
    return result


def _parameter_counts(result: NDArray[np.uint8], sizes: Rows, step: Rows, made_in: Rows) -> dict[int, int]:
    """How many parameters of each size there are: as many as gradients are made in one step."""
    most: dict[int, int] = defaultdict(int)
    for kind, phase in ((Category.GRADIENT, Phase.BACKWARD), (Category.OPTIMIZER_STATE, Phase.OPTIMIZER)):
        chosen = (result == kind) & (made_in == phase)
        for (_, size), count in Counter(zip(step[chosen].tolist(), sizes[chosen].tolist(), strict=True)).items():
            most[size] = max(most[size], count)
        if most:
            break
    return dict(most)


def _state_of_set_up(result: NDArray[np.uint8], sizes: Rows, step: Rows, parameters: dict[int, int]) -> None:
    """An optimizer may make its state when it is built, after the model: what is beyond one block a gradient."""
    there = Counter(sizes[result == Category.PARAMETER].tolist())
    used: dict[int, int] = defaultdict(int)
    for block in np.flatnonzero((result == Category.PARAMETER) & (step == 0)).tolist():
        size = int(sizes[block])
        wanted = parameters.get(size, 0)
        used[size] += 1
        if wanted and wanted < used[size] <= there[size] // wanted * wanted:
            result[block] = Category.OPTIMIZER_STATE


def _before(
    tape: Tape,
    result: NDArray[np.uint8],
    before: NDArray[np.bool_],
    origin: Rows,
    phase: Rows,
    gone: Rows,
    parameters: dict[int, int],
) -> None:
    """Decide what was there before the history began."""
    count, sizes = len(tape), tape.size[lifetimes(tape).born]
    freed_by, freed_in = np.append(origin, Origin.NONE)[gone], np.append(phase, Phase.OTHER)[gone]
    open_ = before & (result == Category.UNKNOWN) & (sizes > 0)
    went = open_ & (gone < count)
    result[went & (freed_in == Phase.FORWARD)] = Category.INPUT
    result[went & (freed_in == Phase.BACKWARD)] = Category.ACTIVATION
    result[went & (freed_in == Phase.OPTIMIZER)] = Category.OPTIMIZER_STATE
    result[went & (freed_by == Origin.ZERO_GRAD)] = Category.GRADIENT
    outside = went & (freed_in == Phase.OTHER) & (freed_by != Origin.ZERO_GRAD)
    result[outside & np.isin(sizes, list(parameters))] = Category.GRADIENT
    stays = np.flatnonzero(open_ & (gone == count))
    if not parameters and np.any(went & (freed_by == Origin.ZERO_GRAD)):
        parameters.update(Counter(sizes[went & (freed_by == Origin.ZERO_GRAD)].tolist()))
    made_elsewhere = bool(np.any(result == Category.GRADIENT))
    used: dict[int, int] = defaultdict(int)
    there = Counter(sizes[stays].tolist())
    for block, size in zip(stays.tolist(), sizes[stays].tolist(), strict=True):
        wanted, place = parameters.get(size, 0), used[size]
        used[size] += 1
        if not wanted or place < wanted:
            result[block] = Category.PARAMETER
        elif not made_elsewhere and place < 2 * wanted and there[size] // wanted in (2, 4):
            result[block] = Category.GRADIENT
        elif place < there[size] // wanted * wanted:
            result[block] = Category.OPTIMIZER_STATE


def _buffers(result: NDArray[np.uint8], sizes: Rows, parameters: dict[int, int]) -> None:
    """Blocks of the model without a gradient are buffers, unless they are most of it: then they are frozen."""
    model = result == Category.PARAMETER
    without = model & ~np.isin(sizes, list(parameters))
    if parameters and 2 * int(sizes[without].sum()) < int(sizes[model].sum()):
        result[without] = Category.BUFFER


def _replaced(tape: Tape, result: NDArray[np.uint8], chosen: NDArray[np.bool_], phase: Rows, run_ends: Rows) -> None:
    """An optimizer that writes ``p.data = p.data - update`` makes new parameters and gives the old ones back.

    The lasting block that is made nearest to where a parameter of its size is given back takes its place.
    """
    life, count = lifetimes(tape), len(tape)
    born, gone, sizes = life.born, life.requested, tape.size[life.born]
    makers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for block in np.flatnonzero(chosen).tolist():
        makers[int(run_ends[born[block]]), int(sizes[block])].append(block)
    if not makers:
        return
    in_optimizer = (gone < count) & (np.append(phase, Phase.OTHER)[gone] == Phase.OPTIMIZER)
    freed = np.flatnonzero(in_optimizer)
    model = np.isin(result, (Category.PARAMETER, Category.BUFFER))
    # In the order of time, because what is found to be a parameter may itself be replaced in the next step.
    for block in freed[np.argsort(gone[freed], kind="stable")].tolist():
        if not model[block]:
            continue
        row = int(gone[block])
        candidates = makers.get((int(run_ends[row]), int(sizes[block])), [])
        if candidates:
            nearest = min(candidates, key=lambda maker: abs(int(born[maker]) - row))
            candidates.remove(nearest)
            result[nearest] = result[block]
            model[nearest] = True
