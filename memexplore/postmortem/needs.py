"""What lowers the need of a step that asks for too much memory: a tape and the evidence go in, suggestions come out."""

from __future__ import annotations

import numpy as np

from memexplore.analysis.curves import Rows, block_bytes
from memexplore.analysis.levers import is_short, recomputes
from memexplore.analysis.places import place
from memexplore.analysis.tables import user_line
from memexplore.postmortem.counterfactual import alive, asks_for_more, fits_without
from memexplore.postmortem.evidence_types import Evidence, State
from memexplore.postmortem.suggestion import Suggestion
from memexplore.tape import Category, Phase, Tape

_DOMINATES = 0.75
"""Share of the allocated bytes from which one layer is named."""
_WAITING = 0.5
"""Share of the allocated bytes from which inputs that wait on the GPU are named."""
_ALIKE = 3


def of_need(tape: Tape, evidence: Evidence | None) -> list[Suggestion]:
    """Return what lowers the need of a step, the largest part of it first."""
    rows, last = alive(tape), len(tape) - 1
    sizes = block_bytes(tape)[rows]
    foreach = _foreach(tape, rows)
    less = _less_of_model(tape, rows, evidence.state if evidence is not None else State.UNKNOWN)
    updates = tape.phase[last] == Phase.OPTIMIZER
    result = [each for each in (foreach, less if updates and foreach is None else None) if each is not None]
    layer = _dominating(tape, rows, sizes)
    result[:0] = filter(None, (_concatenated(tape), _waiting_inputs(tape, rows, sizes), layer))
    whole = _whole_of_parts(tape, rows, evidence)
    of_batch = _of_batch(tape, rows)
    smaller = _RESULTS if _evaluates(tape, rows) else _smaller_batch(tape, rows)
    of_model = int(sizes[np.isin(tape.category[rows], (*_OF_LAYER, Category.BUFFER))].sum())
    # Parts of a whole are as much with smaller batches, only more of them.
    by_size = [(of_batch + int(tape.size[last]) * (not updates), None if whole else smaller), (of_model, less)]
    of_size = [each for size, each in sorted(by_size, key=lambda item: -item[0]) if size and each is not None]
    result += [each for each in of_size if each not in result]
    return [*whole, *result]


def _of_batch(tape: Tape, rows: Rows) -> int:
    kinds = (Category.ACTIVATION, Category.TEMPORARY, Category.INPUT)
    return int(block_bytes(tape)[rows][np.isin(tape.category[rows], kinds)].sum())


_OF_DATA = ("aten::_to_copy", "aten::copy_", "aten::clone", "aten::to")
"""Ops that move data to the GPU."""
_OF_LAYER = (
    Category.PARAMETER,
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
    Category.GATHERED_PARAMETER,
    Category.GRADIENT_BUCKET,
)
_RESULTS = Suggestion(
    "Take a smaller batch, keep results on the CPU, or run the model in 16 bits.",
    "results.append(output.cpu())",
    0,
    False,
)


def _less_of_model(tape: Tape, rows: Rows, state: State) -> Suggestion | None:
    """Return the suggestion for weights, gradients and states: what lowers them and is not in use in the run."""
    is_long = not is_short(tape, rows, Category.PARAMETER)
    if _evaluates(tape, rows):
        return Suggestion("Keep the weights in 16 bits.", _IN_16_BITS, 0, False) if is_long else None
    if (tape.category == Category.OPTIMIZER_STATE).any() or tape.phase[-1] == Phase.OPTIMIZER:
        state = State.KEPT
    elif state is State.UNKNOWN and tape.step[-1] > 1:
        # An optimizer has made a step without state, as SGD without momentum does.
        state = State.NONE
    if state is State.KEPT:
        text = "Use an optimizer with less state, such as SGD, Adafactor or 8-bit AdamW"
        code = "torch.optim.SGD(model.parameters(), lr=lr)"
        return Suggestion(f"{text}, or weights in 16 bits." if is_long else f"{text}.", code, 0, False)
    fewer = "train fewer of them: freeze layers, or add LoRA to them"
    if state is State.UNKNOWN:
        fewer = f"{fewer}. An optimizer with less state lowers what the first update adds"
    if is_long:
        return Suggestion(f"Keep the weights in 16 bits, or {fewer}.", _IN_16_BITS, 0, False)
    text = fewer.replace("fewer of them", "fewer weights")
    return Suggestion(f"{text[0].upper()}{text[1:]}.", "layer.requires_grad_(False)", 0, False)


_IN_16_BITS = "model.to(torch.bfloat16)"


def _smaller_batch(tape: Tape, rows: Rows) -> Suggestion:
    """Return the suggestion for tensors of the batch: what lowers them and is not in use in the run."""
    ways = ["take a smaller batch or micro-batches"]
    if not recomputes(tape):
        ways.append("checkpoint the activations")
    if not is_short(tape, rows, Category.ACTIVATION):
        ways.append("train in mixed precision")
    text = f"{', '.join(ways[:-1])}{',' * (len(ways) > 2)} or {ways[-1]}" if len(ways) > 1 else ways[0]
    return Suggestion(f"{text[0].upper()}{text[1:]}.", "", 0, False)


def _concatenated(tape: Tape) -> Suggestion | None:
    """Return the suggestion for a result that is concatenated again with each call, and so is there twice."""
    last = len(tape) - 1
    if tape.op[last] < 0 or tape.ops[tape.op[last]] not in _CONCATENATE or not asks_for_more(tape):
        return None
    return Suggestion(
        "Keep the parts on the CPU, and concatenate them once, after the loop: here each call makes a longer copy of "
        "all parts. Where all are needed on the GPU, make the whole before the loop, and write the parts into it.",
        "parts.append(part.cpu())  # after the loop: torch.cat(parts)",
        0,
        False,
    )


def _whole_of_parts(tape: Tape, rows: Rows, evidence: Evidence | None) -> list[Suggestion]:
    """Return the suggestions for results that are concatenated once: then all of them are there twice."""
    last = len(tape) - 1
    if tape.op[last] < 0 or tape.ops[tape.op[last]] not in _CONCATENATE or tape.phase[last] not in _NO_UPDATE:
        return []
    # The graph of a training step needs the parts where they are.
    candidates = rows[~np.isin(tape.category[rows], (*_OF_LAYER, Category.ACTIVATION))]
    places, of_place = np.unique(
        np.stack([tape.op[candidates], tape.module[candidates], tape.stack[candidates]]), axis=1, return_inverse=True
    )
    counts = np.bincount(of_place.ravel(), minlength=places.shape[1])
    totals = np.bincount(of_place.ravel(), weights=tape.size[candidates], minlength=places.shape[1])
    many = np.flatnonzero((counts >= _ALIKE) & (totals >= _PARTS * tape.size[last]))
    if not len(many):
        return []
    parts = candidates[of_place.ravel() == many[np.argmax(totals[many])]]
    size = int(block_bytes(tape)[parts].sum())
    name = _container(tape, parts, evidence)
    keeps = f"`{name}` keeps {len(parts)} tensors" if name else f"{len(parts)} tensors are kept"
    twice = f"{keeps} on the GPU, and the concatenated one is as large as all of them"
    name = name or "parts"
    join = tape.ops[tape.op[last]].replace("aten::", "torch.")
    before = Suggestion(
        f"Make the whole before the loop, and write each part into it: {twice}.",
        _written_into(len(parts), join),
        size,
        fits_without(tape, parts[1:].tolist()),
    )
    if tape.ops[tape.op[parts[0]]] in _OF_DATA:
        text = f"Concatenate on the CPU, and move the whole: {twice}."
        return [Suggestion(text, f"{join}({name}).cuda()  # {name}: tensors on the CPU", size, False), before]
    if tape.module[last] >= 0:
        return [before]
    text = f"Move each result to the CPU, and concatenate there: {twice}."
    return [Suggestion(text, f"{name}.append(result.cpu())  # after the loop: {join}({name})", size, False), before]


def _written_into(count: int, join: str) -> str:
    if join == "torch.stack":
        return (
            f"whole = torch.empty({count}, *part.shape, dtype=part.dtype, device=part.device)  # before the loop\n"
            "whole[number] = part"
        )
    return (
        "whole = torch.empty(rows, *part.shape[1:], dtype=part.dtype, device=part.device)  # before the loop\n"
        "whole[first : first + len(part)] = part"
    )


_CONCATENATE = ("aten::cat", "aten::stack")
_NO_UPDATE = (Phase.FORWARD, Phase.OTHER)
_PARTS = 0.5
"""Share of a concatenated tensor from which blocks of one place are its parts; the others have another size."""


def _container(tape: Tape, parts: Rows, evidence: Evidence | None) -> str:
    """Return the variable of the failing call that has most of some blocks, "" where it is not known."""
    addresses = set(tape.address[parts].tolist())
    for holder in evidence.in_use if evidence is not None else ():
        if 2 * len(addresses & holder.addresses) > len(addresses):
            return holder.name
    return ""


def _waiting_inputs(tape: Tape, rows: Rows, sizes: Rows) -> Suggestion | None:
    """Return the suggestion for data of which the most waits on the GPU to be used: several tensors of one line."""
    outside = (tape.module[rows] < 0) & (tape.phase[rows] == Phase.OTHER)
    copied = np.array([*(op in _OF_DATA for op in tape.ops), False])[tape.op[rows]]
    chosen, bytes_chosen = rows[outside & copied], sizes[outside & copied]
    if not len(chosen):
        return None
    lines, of_line = np.unique(tape.stack[chosen], return_inverse=True)
    totals = np.bincount(of_line, weights=bytes_chosen)
    largest = int(np.argmax(totals))
    waiting = bytes_chosen[of_line == largest]
    if len(waiting) < _ALIKE or waiting.sum() < _WAITING * sizes.sum() or lines[largest] < 0:
        return None
    line = place(user_line(tape.stacks[lines[largest]])).text
    text = f"Keep the data on the CPU, and move each batch when it is used: {len(waiting)} tensors of {line} wait."
    return Suggestion(text, "for batch in batches: batch = batch.cuda()", int(waiting.sum() - waiting.max()), False)


def _evaluates(tape: Tape, rows: Rows) -> bool:
    """Return whether a forward pass, or what comes after it, keeps nothing for a backward pass: `torch.no_grad()`."""
    last = len(tape) - 1
    made = rows[(tape.step[rows] == tape.step[last]) & (tape.phase[rows] == Phase.FORWARD) & (rows < last)]
    went_backward = np.any((tape.step == tape.step[last]) & (tape.phase == Phase.BACKWARD))
    return bool(
        (tape.phase[last] == Phase.FORWARD or (tape.phase[last] == Phase.OTHER and not went_backward))
        and (tape.category[made] == Category.TEMPORARY).any()
        and not (tape.category[rows] == Category.ACTIVATION).any()
    )


def _foreach(tape: Tape, rows: Rows) -> Suggestion | None:
    """Return the suggestion for an optimizer that updates all weights at once, None for another failure."""
    last = len(tape) - 1
    if tape.phase[last] != Phase.OPTIMIZER:
        return None
    is_foreach = np.array([*("_foreach_" in op for op in tape.ops), False])
    chosen = rows[
        is_foreach[tape.op[rows]]
        & (tape.phase[rows] == Phase.OPTIMIZER)
        & (tape.step[rows] == tape.step[last])
        & (tape.category[rows] == Category.TEMPORARY)
    ]
    if not (is_foreach[tape.op[last]] or len(chosen)):
        return None
    text = "Update one weight after the other: the temporaries of the foreach update take as much as all weights."
    size = int(block_bytes(tape)[chosen].sum())
    return Suggestion(
        text, "optimizer = torch.optim.AdamW(..., foreach=False)", size, fits_without(tape, chosen.tolist())
    )


def _dominating(tape: Tape, rows: Rows, sizes: Rows) -> Suggestion | None:
    """Return the suggestion for a layer whose weights, gradients and states are most of the memory."""
    of_model = np.isin(tape.category[rows], _OF_LAYER)
    # A state that the failed step has begun to make has not outlived it.
    of_model |= (tape.phase[rows] == Phase.OPTIMIZER) & (tape.category[rows] == Category.TEMPORARY)
    modules = tape.module[rows][of_model]
    if not len(modules) or not np.any(modules >= 0):
        return None
    totals = np.bincount(modules[modules >= 0], weights=sizes[of_model][modules >= 0])
    largest = int(np.argmax(totals))
    request = int(tape.size[-1]) * (tape.module[-1] == largest)
    total, allocated = int(totals[largest]) + request, int(sizes.sum()) + int(tape.size[-1])
    if total < _DOMINATES * allocated or np.count_nonzero(totals) < 2:
        return None
    name = tape.modules[largest]
    share = total / allocated * 100
    if "Embedding" in (tape.classes[largest] if tape.classes else ""):
        text = (
            f"Give the embedding {name} fewer rows or columns, or sparse gradients: its weights, gradients and "
            f"optimizer state take {share:.0f} % of the memory."
        )
        code = "torch.nn.Embedding(rows, columns, sparse=True)  # with torch.optim.SparseAdam, or SGD"
        return Suggestion(text, code, total, False)
    text = (
        f"Make the layer {name} smaller, such as by pooling its input: its weights, gradients and optimizer state "
        f"take {share:.0f} % of the memory."
    )
    return Suggestion(text, "torch.nn.AdaptiveAvgPool2d(1)", total, False)
