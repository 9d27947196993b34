"""What happened, in at most three sentences: a `PostMortem` goes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memexplore.analysis.budget import limit_text, short_name
from memexplore.analysis.places import place
from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.held_types import Held, What
from memexplore.out_of_memory.processes import MOST_PROCESSES, named_processes
from memexplore.tape import Phase
from memexplore.text.units import size_text

if TYPE_CHECKING:
    from memexplore.out_of_memory.value import PostMortem

_PLURALS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "activation": "activations",
    "input": "inputs",
    "temporary": "temporaries",
    "workspace": "workspaces",
    "unknown": "of unknown kind",
}


def sentences(found: PostMortem) -> tuple[str, ...]:
    """Return the failed request, the memory of the device then, and the cause."""
    if found.request is None:
        return _of_layout(found)
    return _request(found), _memory(found), _cause(found)


def _of_layout(found: PostMortem) -> tuple[str, ...]:
    memory = found.memory
    return (
        "The file has no events: it does not say whether a request failed, nor where.",
        f"When it was written, {size_text(memory.allocated)} were allocated of "
        f"{size_text(memory.reserved)} reserved, {size_text(memory.gaps)} in gaps between blocks.",
        'Record the history with torch.cuda.memory._record_memory_history(context="alloc", stacks="python") before the '
        "job, and its dump names the failed request.",
    )


def _request(found: PostMortem) -> str:
    request = found.request
    assert request is not None
    who = request.op or "A request"
    words = []
    if request.phase != Phase.OTHER.text:
        words.append(f"in the {'optimizer step' if request.phase == Phase.OPTIMIZER.text else f'{request.phase} pass'}")
    if request.layer:
        layer = f"layer {request.layer}" if request.layer.isdecimal() else request.layer
        words.append(f"{'of' if words else 'in'} {layer}")
    if request.step:
        words.append(f"of step {request.step}" if not request.layer else f"(step {request.step})")
    line = f", {place(request.line).text}," if request.line else ""
    return f"{' '.join([who, *words])}{line} asked for {size_text(request.size)}."


def _memory(found: PostMortem) -> str:
    memory = found.memory
    device = short_name(found.tape.meta.gpu or found.tape.meta.device)
    parts = [f"{size_text(memory.allocated)} allocated", f"{size_text(memory.reserved)} reserved"]
    if memory.gaps:
        parts[1] += f" ({size_text(memory.gaps)} of it in gaps between blocks)"
    if memory.free is not None:
        parts.append(f"{size_text(memory.free)} free")
    if memory.outside:
        parts.append(f"{size_text(memory.outside)} outside the allocator")
    size = memory.total or memory.capacity
    whole = f"Of {size_text(size)}, {device}" if size else device[0].upper() + device[1:]
    limit = limit_text(found.tape.meta)
    return f"{whole} had {', '.join(parts[:-1])} and {parts[-1]}{f'; {limit}' if limit else ''}."


def _cause(found: PostMortem) -> str:
    text = {
        Cause.TOO_MUCH: _too_much,
        Cause.FRAGMENTATION: _fragmentation,
        Cause.LEAK: _leak,
        Cause.HELD: _held,
        Cause.ANOTHER_PROCESS: _another_process,
    }[found.cause](found)
    return f"The cause is {'a ' if found.cause is Cause.LEAK else ''}{found.cause.value}: {text}."


def _too_much(found: PostMortem) -> str:
    request = found.request
    assert request is not None
    allocated = max(found.memory.allocated, 1)
    shares = [
        f"{size / allocated * 100:.0f} % {_PLURALS.get(kind, kind)}"
        for kind, size in found.by_category[:2]
        if size / allocated >= 0.005
    ]
    room = "the GPU" if found.memory.limit is None else "what this process may use"
    holds = f"{' and '.join(shares)} fill {room}" if shares else f"the request is larger than {room}"
    unlimited = "; without the limit the request fits (replayed)" if found.fits_without_limit else ""
    free = found.memory.usable
    if found.missing and found.state_to_come > free:
        return (
            f"{holds}, the optimizer has at least {size_text(found.state_to_come)} of its state still to allocate, and "
            f"{size_text(free)} are free{unlimited}"
        )
    if found.missing:
        return f"{holds}, and at least {size_text(found.missing)} are missing{unlimited}"
    return f"{holds}, and the {size_text(free)} that are free are in pieces{unlimited}"


def _fragmentation(found: PostMortem) -> str:
    free = found.memory.usable
    return f"{size_text(free)} are free in pieces, and with expandable segments the same requests fit (replayed)"


def _leak(found: PostMortem) -> str:
    group = found.held[0]
    by_step = found.growth or group.what is What.LONG_GRAPH
    growth = f"by {size_text(found.growth or group.each)} {'a step' if by_step else 'with each call'}"
    if group.what is What.LONG_GRAPH:
        return (
            f"the graph of this step reaches back over earlier ones, keeps {size_text(group.size)} and grows {growth}"
        )
    if group.holder:
        names, several = group.holder.replace(", ", "` and `"), ", " in group.holder
        keep, grow = ("keep", "grow") if several else ("keeps", "grows")
        return f"`{names}` {keep} {size_text(group.size)} of {group.blocks} calls, and {grow} {growth}"
    return f"memory grows {growth}, allocated at {place(group.line).text}" if group.line else f"memory grows {growth}"


def _held(found: PostMortem) -> str:
    groups = found.held
    first = _held_text(groups[0])
    enough = _named(found)
    if len(enough) > 1:
        others = ", ".join(_held_text(group) for group in enough[1:3])
        return f"{first}, and {others}"
    return f"{first}; without this memory the request fits (replayed)"


def _named(found: PostMortem) -> list[Held]:
    """Return the groups that are needed to make room: one if it is large enough."""
    total, result = 0, []
    for group in found.held:
        result.append(group)
        total += group.size
        if total >= found.missing:
            break
    return result


_REASONS = {
    What.GROWS: "{size} of earlier calls, kept by `{holder}`",
    What.SUMMED_GRAPHS: "{size} are the graphs of several calls, which `{holder}` keeps",
    What.LONG_GRAPH: "{size} of earlier steps are in the graph of this one",
    What.EARLIER_GRAPH: "{size} are the graph of an earlier forward pass, which `{holder}` keeps",
    What.JOINT_LOSS: "{size} are the graph of `{holder}`, which waits for one backward pass over several losses",
    What.RETAINED_GRAPH: "{size} are a graph that retain_graph keeps after its backward pass, through `{holder}`",
    What.STALE_GRADIENTS: "{size} are gradients of the step before, which the forward pass does not need",
    What.CAST_WEIGHTS: "{size} are copies of weights in autocast's cache",
    What.NO_BACKWARD: "{size} are activations for a backward pass, and the model only evaluates",
    What.NO_UPDATE: "{size} are kept for gradients of `{holder}`, which no optimizer updates",
    What.OLD_VALUE: "{size} are in `{holder}`, which no later line reads",
    What.OUTPUT: "{size} are in the notebook's output `{holder}`",
    What.LAST_ERROR: "{size} are held by the frames of an earlier error (`{holder}`)",
    What.OTHER_CELL: "{size} are in `{holder}` of another cell",
}


def _held_text(group: Held) -> str:
    reason = _REASONS[group.what]
    if not group.holder:
        reason = reason.replace("`{holder}`", "weights" if group.what is What.NO_UPDATE else "a variable")
    return reason.format(size=size_text(group.size), holder=group.holder.replace(", ", "`, `"))


def _another_process(found: PostMortem) -> str:
    memory = found.memory
    total = memory.total or memory.capacity or 0
    count = len(found.processes)
    if count > MOST_PROCESSES:
        who = f"{count} processes, the largest of which are {named_processes(found.processes)},"
    else:
        who = ", ".join(f"process {process}" for process, _ in found.processes) or "other processes"
    holds = "holds" if count == 1 else "hold"
    share = f"{size_text(found.others)} of {size_text(total)}" if total else size_text(found.others)
    return f"{who} {holds} about {share}, and with that memory the request fits (replayed)"
