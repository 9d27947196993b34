"""Say what happened in at most three sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memexplore.analysis.budget import limit_text, short_name
from memexplore.analysis.places import place
from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.continuation import replayed_text, rest_replayed_text
from memexplore.out_of_memory.counterfactual import largest_before
from memexplore.out_of_memory.earlier_periods import larger_period
from memexplore.out_of_memory.held_types import HeldGroup, WhyHeld
from memexplore.out_of_memory.processes import MOST_PROCESSES, named_processes
from memexplore.tape import Phase, Tape
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


def sentences(post_mortem: PostMortem) -> tuple[str, ...]:
    """Return the failed request, the memory of the device then, and the cause."""
    if post_mortem.request is None:
        return _of_layout(post_mortem)
    return _request(post_mortem), _memory(post_mortem), _cause(post_mortem)


def _of_layout(post_mortem: PostMortem) -> tuple[str, ...]:
    memory = post_mortem.memory
    return (
        "The file has no events: it does not say whether a request failed, nor where.",
        f"When it was written, {size_text(memory.allocated)} were allocated of "
        f"{size_text(memory.reserved)} reserved, {size_text(memory.gaps)} in gaps between blocks.",
        'Record the history with torch.cuda.memory._record_memory_history(context="alloc", stacks="python") before the '
        "job, and its dump names the failed request.",
    )


def _request(post_mortem: PostMortem) -> str:
    request = post_mortem.request
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


def _memory(post_mortem: PostMortem) -> str:
    memory = post_mortem.memory
    device = short_name(post_mortem.tape.meta.gpu or post_mortem.tape.meta.device)
    parts = [f"{size_text(memory.allocated)} allocated", f"{size_text(memory.reserved)} reserved"]
    if memory.gaps:
        parts[1] += f" ({size_text(memory.gaps)} of it in gaps between blocks)"
    if memory.free is not None:
        parts.append(f"{size_text(memory.free)} free")
    if memory.outside:
        parts.append(f"{size_text(memory.outside)} outside the allocator")
    size = memory.total or memory.capacity
    of_device = f"Of {size_text(size)}, {device}" if size else device[0].upper() + device[1:]
    limit = limit_text(post_mortem.tape.meta)
    return f"{of_device} had {', '.join(parts[:-1])} and {parts[-1]}{f'; {limit}' if limit else ''}."


def _cause(post_mortem: PostMortem) -> str:
    text = {
        Cause.TOO_MUCH: _too_much,
        Cause.FRAGMENTATION: _fragmentation,
        Cause.LEAK: _leak,
        Cause.HELD: _held,
        Cause.ANOTHER_PROCESS: _another_process,
    }[post_mortem.cause](post_mortem)
    return f"The cause is {'a ' if post_mortem.cause is Cause.LEAK else ''}{post_mortem.cause.value}: {text}."


def _too_much(post_mortem: PostMortem) -> str:
    allocated = max(post_mortem.memory.allocated, 1)
    shares = [
        f"{size / allocated * 100:.0f} % {_PLURALS.get(kind, kind)}"
        for kind, size in post_mortem.by_category[:2]
        if size / allocated >= 0.005
    ]
    room = "the GPU" if post_mortem.memory.limit is None else "what this process may use"
    holds = f"{' and '.join(shares)} fill {room}" if shares else f"the request is larger than {room}"
    unlimited = "; without the limit the request fits (replayed)" if post_mortem.fits_without_limit else ""
    unlimited += _compared(post_mortem.tape)
    free = post_mortem.memory.usable
    if post_mortem.missing and post_mortem.state_to_come > free:
        return (
            f"{holds}, the optimizer has at least {size_text(post_mortem.state_to_come)} of its state still to "
            f"allocate, and {size_text(free)} are free{unlimited}"
        )
    if post_mortem.missing:
        return f"{holds}, and at least {size_text(post_mortem.missing)} are missing{unlimited}"
    return f"{holds}, and the {size_text(free)} that are free are in pieces{unlimited}"


def _compared(tape: Tape) -> str:
    """Return how the failed request and its period compare with those before; empty where they are not larger."""
    larger, request = larger_period(tape), largest_before(tape)
    inputs = ""
    if larger is not None and larger.inputs is not None:
        inputs = f", with an input of {larger.inputs.before} instead of {larger.inputs.now}"
    if request is not None and int(tape.size[-1]) >= 2 * request:
        return f". Before, the same call asked for at most {size_text(request)}{inputs}"
    if larger is None:
        return ""
    return (
        f". This {larger.unit} is larger than those before it: it has allocated {size_text(larger.size)} besides the "
        f"weights and their states, and the others at most {size_text(larger.before)}{inputs}"
    )


def _fragmentation(post_mortem: PostMortem) -> str:
    free = post_mortem.memory.usable
    how = replayed_text(post_mortem.tape)
    return f"{size_text(free)} are free in pieces, and with expandable segments the same requests fit ({how})"


def _leak(post_mortem: PostMortem) -> str:
    group = post_mortem.held[0]
    by_step = post_mortem.growth or group.what is WhyHeld.LONG_GRAPH
    growth = f"by {size_text(post_mortem.growth or group.each)} {_each(post_mortem) if by_step else 'with each call'}"
    if group.what is WhyHeld.LONG_GRAPH:
        return (
            f"the graph of this step reaches back over earlier ones, keeps {size_text(group.size)} and grows {growth}"
        )
    if group.holder:
        names, several = group.holder.replace(", ", "` and `"), ", " in group.holder
        keep, grow = ("keep", "grow") if several else ("keeps", "grows")
        return f"`{names}` {keep} {size_text(group.size)} of {group.blocks} calls, and {grow} {growth}"
    return f"memory grows {growth}, allocated at {place(group.line).text}" if group.line else f"memory grows {growth}"


def _each(post_mortem: PostMortem) -> str:
    return "an iteration" if post_mortem.period == "iteration" else "a step"


def _held(post_mortem: PostMortem) -> str:
    groups = post_mortem.held
    first = _held_text(groups[0])
    enough = _named(post_mortem)
    if len(enough) > 1:
        others = ", ".join(_held_text(group) for group in enough[1:3])
        return f"{first}, and {others}"
    return f"{first}; without this memory the request fits ({rest_replayed_text(post_mortem.tape)})"


def _named(post_mortem: PostMortem) -> list[HeldGroup]:
    """Return the groups that are needed to make room: one if it is large enough."""
    total, result = 0, []
    for group in post_mortem.held:
        result.append(group)
        total += group.size
        if total >= post_mortem.missing:
            break
    return result


_REASONS = {
    WhyHeld.GROWS: "{size} of earlier calls, kept by `{holder}`",
    WhyHeld.SUMMED_GRAPHS: "{size} are the graphs of several calls, which `{holder}` keeps",
    WhyHeld.LONG_GRAPH: "{size} of earlier steps are in the graph of this one",
    WhyHeld.EARLIER_GRAPH: "{size} are the graph of an earlier forward pass, which `{holder}` keeps",
    WhyHeld.STALE_GRADIENTS: "{size} are gradients of the step before, which the forward pass does not need",
    WhyHeld.CAST_WEIGHTS: "{size} are copies of weights in autocast's cache",
    WhyHeld.NO_BACKWARD: "{size} are activations for a backward pass, and the model is in evaluation mode",
    WhyHeld.NO_OPTIMIZER: (
        "{size} are activations of several passes, kept for a backward pass, and the program has no optimizer and has "
        "run no backward pass"
    ),
    WhyHeld.NO_UPDATE: "{size} are kept for gradients of `{holder}`, which no optimizer updates",
    WhyHeld.OLD_VALUE: "{size} are in `{holder}` from an earlier call, and this one does not use them",
    WhyHeld.OUTPUT: "{size} are in the notebook's output `{holder}`",
    WhyHeld.LAST_ERROR: "{size} are held by the frames of an earlier error (`{holder}`)",
    WhyHeld.KEPT_ERROR: "{size} are held by the frames of an error that `{holder}` keeps",
    WhyHeld.HANDLED_ERROR: "{size} are held by the frames of the error that is being handled (`{holder}`)",
    WhyHeld.CYCLE: "{size} are in objects that only refer to each other ({holder})",
    WhyHeld.OWN_GRADIENT: "{size} are in `{holder}` with a graph, and in that graph, which refer to each other",
    WhyHeld.LIBRARY: "{size} are in the global variable `{holder}`, which the failing call does not use",
    WhyHeld.BEFORE: "{size} are in `{holder}` from before, and the failing call does not use them",
}


def _held_text(group: HeldGroup) -> str:
    reason = _REASONS[group.what]
    if not group.holder:
        reason = reason.replace("`{holder}`", "weights" if group.what is WhyHeld.NO_UPDATE else "a variable")
    between = ", " if group.what is WhyHeld.CYCLE else "`, `"
    return reason.format(size=size_text(group.size), holder=group.holder.replace(", ", between))


def _another_process(post_mortem: PostMortem) -> str:
    memory = post_mortem.memory
    total = memory.total or memory.capacity or 0
    count = len(post_mortem.processes)
    if count > MOST_PROCESSES:
        who = f"{count} processes, the largest of which are {named_processes(post_mortem.processes)},"
    else:
        who = ", ".join(f"process {process}" for process, _ in post_mortem.processes) or "other processes"
    holds = "holds" if count == 1 else "hold"
    share = f"{size_text(post_mortem.others)} of {size_text(total)}" if total else size_text(post_mortem.others)
    return f"{who} {holds} about {share}, and with that memory the request fits ({replayed_text(post_mortem.tape)})"
