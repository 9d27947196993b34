"""Infer steps, phases and categories of an imported tape from stacks and lifetimes.

A snapshot records no layers, steps or categories. `annotate` takes the tape and its `stacks.Stacks`, spreads the
evidence of single rows (`stacks.Origin`) over the rows between them, and returns the tape with the three columns. A
step lasts from the first layer call until the optimizer has run; the rows of the autograd engine are its backward.
A block's category follows from where it was allocated and how long it lived:

| allocated | lived | category |
|---|---|---|
| by cuBLAS or cuDNN for themselves | | workspace |
| in backward | beyond backward | gradient (a block stored in `.grad` in any case) |
| in the optimizer | beyond it and the next allocation | optimizer state; parameter if one of its size is freed nearby |
| in forward, or recomputed in backward | beyond the call of its layer | activation |
| outside layers, backward and optimizer | until freed in backward | activation |
| before the first step, by layers built, moved or loaded | into the step | parameter; buffer without a gradient |
| outside, or by a DataLoader | into the next forward | input |
| in any of these | less | temporary |

Blocks from before the history have no stack. A block freed by `zero_grad` is a gradient, one freed by the optimizer
is optimizer state, one freed in backward is an activation. Blocks that remain are parameters and what belongs to
them: of each size as many parameters as there are gradients of that size, then as many gradients if backward allocates
none, then optimizer state. Among blocks of one size the assignment is arbitrary. Where the history shows no layer,
backward or optimizer, nothing says what they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.actions import SEGMENT_ACTIONS
from memexplore.analysis.curves import lifetimes
from memexplore.snapshot.stacks import Origin, Stacks
from memexplore.tape import Action, Category, Phase, Tape

Rows = NDArray[np.int64]

WORKSPACE_SIZE = 8_519_680
"""Bytes of a cuBLAS workspace on most GPUs (aten/src/ATen/cuda/CublasHandlePool.cpp), and rarely a tensor size."""

_PHASE_OF = {
    Origin.FORWARD: Phase.FORWARD,
    Origin.BACKWARD: Phase.BACKWARD,
    Origin.RECOMPUTE: Phase.BACKWARD,
    Origin.ACCUMULATE: Phase.BACKWARD,
    Origin.OPTIMIZER: Phase.OPTIMIZER,
}
_KEPT = ("time", "action", "address", "size", "stream", "op", "module", "stack")
_NO_EVIDENCE = -1
"""Evidence of a row that shows no phase; the rows around it decide."""


def annotate(tape: Tape, stacks: Stacks, recorded: Rows) -> Tape:
    """Return the tape with the steps, phases and categories inferred from its stacks and lifetimes.

    `recorded` is the number of each row's stack in `stacks`, -1 for none.
    """
    if not len(tape):
        return tape
    origin = stacks.origin[recorded]
    labelled = stacks.category[recorded]
    # A segment row belongs to the request that follows it, as in a replay.
    row, is_segment = np.arange(len(tape)), np.isin(tape.action, SEGMENT_ACTIONS)
    following = np.minimum.accumulate(np.where(is_segment, len(tape) - 1, row)[::-1])[::-1]
    reserving = np.flatnonzero(is_segment & (tape.action[following] == Action.ALLOC))
    request = following[reserving]
    evidence = _evidence(tape, origin, labelled, stacks)
    evidence[request] = np.where(evidence[request] == _NO_EVIDENCE, evidence[reserving], evidence[request])
    phase, step = phases_and_steps(evidence)
    phase[reserving], step[reserving] = phase[request], step[request]
    life = lifetimes(tape)
    category = _categories(tape, stacks, recorded, origin, phase, step)
    label = labelled[life.born]
    category[label >= 0] = label[label >= 0]
    column = np.full(len(tape) + 1, Category.UNKNOWN, dtype=np.uint8)
    # A free has the category of its block; the extra last row absorbs blocks that are never freed.
    for rows in (life.born, life.requested, life.completed):
        column[rows] = category
    of_block = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING, Action.FREE_REQUESTED, Action.FREE_COMPLETED))
    column[:-1][~of_block] = Category.UNKNOWN
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


def _evidence(tape: Tape, origin: Rows, labelled: Rows, stacks: Stacks) -> Rows:
    """Return the phase that each row shows by itself, `_NO_EVIDENCE` for none."""
    phase_of = np.full(len(Origin), _NO_EVIDENCE)
    for kind, phase in _PHASE_OF.items():
        phase_of[kind] = phase
    for kind in (Origin.ZERO_GRAD, Origin.MODEL, Origin.DATA):
        phase_of[kind] = Phase.OTHER
    result = phase_of[origin]
    if np.any(labelled >= 0):
        # memexplore's own files give backward rows the line of their forward op: categories are the better evidence.
        backward = np.array([*("backward" in op for op in tape.ops), False], dtype=bool)[tape.op]
        result[labelled >= 0] = np.where(origin == Origin.OPTIMIZER, Phase.OPTIMIZER, _NO_EVIDENCE)[labelled >= 0]
        result[(labelled == Category.ACTIVATION) & (origin != Origin.OPTIMIZER)] = Phase.FORWARD
        result[(labelled == Category.OPTIMIZER_STATE)] = Phase.OPTIMIZER
        result[(labelled == Category.GRADIENT) | (backward & (labelled >= 0))] = Phase.BACKWARD
        result[tape.action != Action.ALLOC] = _NO_EVIDENCE
    elif not stacks.native:
        # Without C++ frames the rows of the autograd engine's thread have no stack.
        without_stack = (tape.action == Action.ALLOC) & (origin == Origin.NONE)
        if np.any(origin == Origin.FORWARD):
            result[without_stack] = Phase.BACKWARD
    result[tape.action == Action.PREEXISTING] = _NO_EVIDENCE
    return result


def phases_and_steps(evidence: Rows) -> tuple[Rows, Rows]:
    """Return phase and step of each row from the phases that some rows show (-1: none).

    >>> phases, steps = phases_and_steps(np.array([-1, 0, -1, 1, -1, 1, 2, -1, 0]))
    >>> phases.tolist(), steps.tolist()
    ([3, 0, 0, 1, 1, 1, 2, 3, 0], [0, 1, 1, 1, 1, 1, 1, 2, 2])
    """
    count = len(evidence)
    position = np.arange(count)
    evident = evidence != _NO_EVIDENCE
    before = np.maximum.accumulate(np.where(evident, position, -1))
    after = np.minimum.accumulate(np.where(evident, position, count)[::-1])[::-1]
    with_ends = np.append(evidence, _NO_EVIDENCE)
    left, right = with_ends[before], with_ends[np.minimum(after, count)]
    phase = np.where(left == right, left, Phase.OTHER)
    # Between the layers and backward runs the loss, which belongs to forward.
    phase[(left == Phase.FORWARD) & ((right == Phase.BACKWARD) | (right == _NO_EVIDENCE))] = Phase.FORWARD
    phase[evident] = evidence[evident]
    phase[phase == _NO_EVIDENCE] = Phase.OTHER

    working = np.flatnonzero(evident & (evidence != Phase.OTHER))
    step = np.zeros(count, dtype=np.int64)
    if not len(working):
        return phase, step
    kinds = evidence[working]
    # A step ends with the last row of its optimizer; with its backward if no optimizer appears.
    last = Phase.OPTIMIZER if np.any(kinds == Phase.OPTIMIZER) else Phase.BACKWARD
    ends = working[:-1][(kinds[:-1] == last) & (kinds[1:] != last)] + 1
    step[working[0]] = 1
    step[ends] += 1
    return phase, np.cumsum(step)


def _categories(tape: Tape, stacks: Stacks, recorded: Rows, origin: Rows, phase: Rows, step: Rows) -> NDArray[np.uint8]:
    """Return the category of each block, in the order of `lifetimes(tape).born`."""
    life, count = lifetimes(tape), len(tape)
    born, freed = life.born, life.requested
    birth_origin, birth_phase = origin[born], phase[born]
    preexisting = tape.action[born] == Action.PREEXISTING
    run_ends = _run_ends(phase, step)
    ends = run_ends[born]
    lasting = freed >= ends
    sizes = tape.size[born]
    result = np.full(len(born), Category.UNKNOWN, dtype=np.uint8)

    def set_where(chosen: NDArray[np.bool_], kind: Category, otherwise: Category = Category.TEMPORARY) -> None:
        result[chosen] = np.where(lasting, kind, otherwise)[chosen]

    recorded_birth = ~preexisting
    call_end = _call_ends(tape, stacks, recorded)[born]
    forward = recorded_birth & ((birth_phase == Phase.FORWARD) | (birth_origin == Origin.RECOMPUTE))
    in_call = forward & (call_end >= 0)
    set_where(forward, Category.ACTIVATION)
    result[in_call] = np.where(freed >= call_end, Category.ACTIVATION, Category.TEMPORARY)[in_call]

    backward = recorded_birth & (birth_phase == Phase.BACKWARD) & ~forward
    set_where(backward, Category.GRADIENT)
    set_where(recorded_birth & (birth_phase == Phase.OPTIMIZER), Category.OPTIMIZER_STATE)

    forwards = np.append(np.flatnonzero((phase == Phase.FORWARD) & (np.roll(phase, 1) != Phase.FORWARD)), count)
    next_forward = forwards[np.searchsorted(forwards[:-1], born, side="right")]
    until_forward = (freed > next_forward) & (next_forward < count)
    other = recorded_birth & (birth_phase == Phase.OTHER)
    result[other & (freed < count)] = Category.TEMPORARY
    freed_in = np.append(phase, Phase.OTHER)[freed]
    result[other & (freed_in == Phase.BACKWARD)] = Category.ACTIVATION
    result[other & until_forward] = Category.INPUT
    built = birth_origin == Origin.MODEL
    result[built & (until_forward | (freed == count))] = Category.PARAMETER
    result[_last_temporaries(tape, birth_origin, birth_phase, ends, preexisting)] = Category.TEMPORARY
    for kind, category in (
        (Origin.WORKSPACE, Category.WORKSPACE),
        (Origin.ACCUMULATE, Category.GRADIENT),
        (Origin.DATA, Category.INPUT),
    ):
        result[(birth_origin == kind) & lasting] = category
    result[birth_origin == Origin.WORKSPACE] = Category.WORKSPACE
    result[(sizes == WORKSPACE_SIZE) & (freed == count) & (birth_origin != Origin.MODEL)] = Category.WORKSPACE

    unfinished = backward & (ends == count) & (birth_origin != Origin.ACCUMULATE)
    parameters = _parameter_counts(result, sizes, step[born], birth_phase)
    if np.any(unfinished):
        parameter_sizes = set(sizes[result == Category.PARAMETER].tolist()) | set(
            sizes[backward & (ends < count) & (result == Category.GRADIENT)].tolist()
        )
        result[unfinished & ~np.isin(sizes, list(parameter_sizes))] = Category.TEMPORARY
    _classify_eager_state(result, sizes, step[born], parameters)
    if np.any(phase != Phase.OTHER):
        _classify_preexisting(tape, result, preexisting & ~built, origin, phase, parameters)
    _classify_buffers(result, sizes, parameters)
    _classify_replaced(tape, result, recorded_birth & (birth_phase == Phase.OPTIMIZER) & lasting, phase, run_ends)
    return result


def _last_temporaries(
    tape: Tape, birth_origin: Rows, birth_phase: Rows, ends: Rows, preexisting: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return which blocks outlive the last allocation of their phase only, which ends at `ends`, as temporaries do.

    A free shows no phase by itself. Gradients may be freed as early, but have the size of a block of the model.
    """
    life, count = lifetimes(tape), len(tape)
    freed, sizes = life.requested, tape.size[life.born]
    allocations = np.append(np.flatnonzero(tape.action == Action.ALLOC), count)
    following = allocations[np.searchsorted(allocations[:-1], ends)]
    at_border = ~preexisting & (ends <= freed) & (freed < following)
    optimizer = birth_phase == Phase.OPTIMIZER
    # A file may end with the first update and the end of the program, which frees its state.
    is_known = (following < count) | (ends > ends[optimizer].min(initial=count))
    backward = (birth_phase == Phase.BACKWARD) & ~np.isin(birth_origin, (Origin.ACCUMULATE, Origin.RECOMPUTE))
    model = sizes[preexisting | (birth_origin == Origin.MODEL)]
    others = sizes[backward & (ends <= freed) & ~at_border]
    of_no_weight = backward & ~np.isin(sizes, np.concatenate([model, others])) & (len(model) > 0)
    return at_border & ((optimizer & is_known) | of_no_weight)


def _run_ends(phase: Rows, step: Rows) -> Rows:
    """Return for each row the first row of the next phase or step, the number of rows after the last."""
    count = len(phase)
    changes = np.flatnonzero((phase[1:] != phase[:-1]) | (step[1:] != step[:-1])) + 1
    edges = np.append(changes, count)
    return edges[np.searchsorted(changes, np.arange(count), side="right")]


def _call_ends(tape: Tape, stacks: Stacks, recorded: Rows) -> Rows:
    """Return for each row the first later row outside its innermost layer call, -1 for a row outside every call.

    A call ends where two consecutive rows have fewer calls in common than were open.
    """
    count = len(tape)
    depth = np.array([len(calls) for calls in stacks.calls])[recorded]
    result = np.full(count, -1, dtype=np.int64)
    # Rows without a stack (segments, the autograd engine) are no evidence of calls.
    with_stack = np.flatnonzero(recorded >= 0)
    if not len(with_stack) or not depth.any():
        return result
    numbers = recorded[with_stack]
    pairs, inverse = np.unique(np.stack([numbers[:-1], numbers[1:]], axis=1), axis=0, return_inverse=True)
    common = np.array([stacks.common_calls(one, other) for one, other in pairs.tolist()], dtype=np.int64)
    still_open = np.append(common[inverse.reshape(-1)], -1)  # calls open between a row and the next; none at the end
    depths = depth[with_stack]
    positions = np.arange(len(with_stack))
    following = np.append(with_stack, count)
    for level in np.unique(depths[depths > 0]).tolist():
        at_level = np.flatnonzero(depths == level)
        ended = np.where(still_open < level, positions + 1, len(with_stack))
        ends = np.minimum.accumulate(ended[::-1])[::-1]
        result[with_stack[at_level]] = following[ends[at_level]]
    return result


def _parameter_counts(result: NDArray[np.uint8], sizes: Rows, step: Rows, birth_phase: Rows) -> dict[int, int]:
    """Return the number of parameters of each size: the number of gradients of that size allocated in one step.

    Without gradients the optimizer state counts instead.
    """
    largest: dict[int, int] = defaultdict(int)
    for kind, phase in ((Category.GRADIENT, Phase.BACKWARD), (Category.OPTIMIZER_STATE, Phase.OPTIMIZER)):
        chosen = (result == kind) & (birth_phase == phase)
        for (_, size), count in Counter(zip(step[chosen].tolist(), sizes[chosen].tolist(), strict=True)).items():
            largest[size] = max(largest[size], count)
        if largest:
            break
    return dict(largest)


def _classify_eager_state(result: NDArray[np.uint8], sizes: Rows, step: Rows, parameters: dict[int, int]) -> None:
    """Mark as optimizer state the blocks beyond one for each gradient: some optimizers allocate it when constructed."""
    totals = Counter(sizes[result == Category.PARAMETER].tolist())
    used: dict[int, int] = defaultdict(int)
    for block in np.flatnonzero((result == Category.PARAMETER) & (step == 0)).tolist():
        size = int(sizes[block])
        wanted = parameters.get(size, 0)
        used[size] += 1
        if wanted and wanted < used[size] <= totals[size] // wanted * wanted:
            result[block] = Category.OPTIMIZER_STATE


def _classify_preexisting(
    tape: Tape,
    result: NDArray[np.uint8],
    preexisting: NDArray[np.bool_],
    origin: Rows,
    phase: Rows,
    parameters: dict[int, int],
) -> None:
    """Decide the categories of blocks from before the history."""
    life, count = lifetimes(tape), len(tape)
    sizes, freed = tape.size[life.born], life.requested
    freed_by, freed_in = np.append(origin, Origin.NONE)[freed], np.append(phase, Phase.OTHER)[freed]
    undecided = preexisting & (result == Category.UNKNOWN) & (sizes > 0)
    freed_later = undecided & (freed < count)
    by_zero_grad = freed_later & (freed_by == Origin.ZERO_GRAD)
    result[freed_later & (freed_in == Phase.FORWARD)] = Category.INPUT
    result[freed_later & (freed_in == Phase.BACKWARD)] = Category.ACTIVATION
    result[freed_later & (freed_in == Phase.OPTIMIZER)] = Category.OPTIMIZER_STATE
    result[by_zero_grad] = Category.GRADIENT
    outside = freed_later & (freed_in == Phase.OTHER) & (freed_by != Origin.ZERO_GRAD)
    result[outside & np.isin(sizes, list(parameters))] = Category.GRADIENT
    remaining = np.flatnonzero(undecided & (freed == count))
    if not parameters and np.any(by_zero_grad):
        parameters.update(Counter(sizes[by_zero_grad].tolist()))
    has_gradients = bool(np.any(result == Category.GRADIENT))
    used: dict[int, int] = defaultdict(int)
    totals = Counter(sizes[remaining].tolist())
    for block, size in zip(remaining.tolist(), sizes[remaining].tolist(), strict=True):
        wanted, number = parameters.get(size, 0), used[size]
        used[size] += 1
        if not wanted or number < wanted:
            result[block] = Category.PARAMETER
        elif not has_gradients and number < 2 * wanted and totals[size] // wanted in (2, 4):
            result[block] = Category.GRADIENT
        elif number < totals[size] // wanted * wanted:
            result[block] = Category.OPTIMIZER_STATE


def _classify_buffers(result: NDArray[np.uint8], sizes: Rows, parameters: dict[int, int]) -> None:
    """Mark as buffers the model's blocks without a gradient, unless they are most of it: those are frozen weights."""
    model = result == Category.PARAMETER
    without = model & ~np.isin(sizes, list(parameters))
    if parameters and 2 * int(sizes[without].sum()) < int(sizes[model].sum()):
        result[without] = Category.BUFFER


def _classify_replaced(
    tape: Tape, result: NDArray[np.uint8], chosen: NDArray[np.bool_], phase: Rows, run_ends: Rows
) -> None:
    """Give each replacement of a parameter the category of the parameter it replaces.

    An optimizer that runs `p.data = p.data - update` allocates new parameters and frees the old ones. The lasting
    block of the same size that is allocated nearest to the free of a parameter replaces it.
    """
    life, count = lifetimes(tape), len(tape)
    born, freed, sizes = life.born, life.requested, tape.size[life.born]
    candidates_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for block in np.flatnonzero(chosen).tolist():
        candidates_of[int(run_ends[born[block]]), int(sizes[block])].append(block)  # in order of birth
    if not candidates_of:
        return
    freed_in_optimizer = (freed < count) & (np.append(phase, Phase.OTHER)[freed] == Phase.OPTIMIZER)
    blocks = np.flatnonzero(freed_in_optimizer)
    model = np.isin(result, (Category.PARAMETER, Category.BUFFER))
    # In order of time, because a block that becomes a parameter here may itself be replaced in the next step.
    for block in blocks[np.argsort(freed[blocks], kind="stable")].tolist():
        if not model[block]:
            continue
        row = int(freed[block])
        candidates = candidates_of.get((int(run_ends[row]), int(sizes[block])), [])
        if candidates:
            after = bisect_left(candidates, row, key=lambda candidate: int(born[candidate]))
            around = range(max(after - 1, 0), min(after + 1, len(candidates)))
            nearest = candidates.pop(min(around, key=lambda at: abs(int(born[candidates[at]]) - row)))
            result[nearest] = result[block]
            model[nearest] = True
