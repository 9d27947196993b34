"""What to change: a finding goes in, changes of the code come out, the one that cures the cause first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memexplore.analysis.curves import Rows, block_bytes
from memexplore.analysis.levers import is_short, recomputes
from memexplore.analysis.places import place
from memexplore.analysis.tables import user_line
from memexplore.postmortem.cause import Cause, Finding
from memexplore.postmortem.counterfactual import alive, asks_for_more, fits_without
from memexplore.postmortem.held import LAST_ERROR, Held, What
from memexplore.tape import Category, Phase, Tape
from memexplore.units import size_text

_DOMINATES = 0.75
"""Share of the allocated bytes from which one layer is named."""
_WAITING = 0.5
"""Share of the allocated bytes from which inputs that wait on the GPU are named."""
_ALIKE = 3
_LITTLE = 0.01
"""Share of the allocated bytes below which what is held is not worth a change."""


class Suggestion(NamedTuple):
    """One change of the code."""

    text: str
    """What to do, as a sentence."""
    code: str
    """Line to write, empty where there is none."""
    frees: int
    """Bytes that it gives back, 0 where they are not known."""
    fits: bool
    """Whether the failed request succeeds with it, by replaying the tape."""


def suggestions(tape: Tape, found: Finding) -> tuple[Suggestion, ...]:
    """Return what to change, the change that cures the cause first."""
    result: list[Suggestion] = []
    if found.cause is Cause.FRAGMENTATION:
        result += [_EXPANDABLE, *_of_need(tape)]
    if found.cause is Cause.ANOTHER_PROCESS:
        result.append(_other_process(found))
    cures = found.cause in (Cause.LEAK, Cause.HELD)
    least = _LITTLE * block_bytes(tape)[alive(tape)].sum()
    groups = [each for number, each in enumerate(found.held) if each.size >= least or (cures and not number)]
    result += [_of_group(tape, group)._replace(fits=cures and group.rows == found.held[0].rows) for group in groups]
    if found.cause is Cause.TOO_MUCH:
        result = [*_of_need(tape), *result]
        if found.fits_expandable:
            result.append(_EXPANDABLE)
    kept: dict[str, Suggestion] = {}
    for each in result:
        kept.setdefault(each.text, each)
    return tuple(kept.values())


_EXPANDABLE = Suggestion(
    "Let segments grow, so that gaps between blocks are used: set this before torch is imported. What the rest of the "
    "step needs is not part of the replay.",
    'import os; os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
    0,
    True,
)


def _other_process(found: Finding) -> Suggestion:
    names = ", ".join(f"{process} ({size_text(size)})" for process, size in found.processes)
    who = f"process {names}" if len(found.processes) == 1 else f"the processes {names}" if names else "other processes"
    return Suggestion(
        f"End {who} on this GPU, or use another GPU: nvidia-smi lists the processes.", "", found.others, True
    )


def _of_group(tape: Tape, group: Held) -> Suggestion:
    variables = ", ".join(each for each in group.holder.split(", ") if each != LAST_ERROR) or group.holder
    if variables != group.holder:
        alone = _of_group(tape, group._replace(holder=variables))
        text = f"{alone.text} The frames of the earlier error hold it too: free both."
        return alone._replace(text=text, code=f"%memoom free\n{alone.code}")
    names = group.holder.replace(", ", "`, `")
    loss = "loss" if group.is_container else group.holder.split(", ")[0]
    text, code = {
        What.GROWS: _of_growing(group),
        What.LONG_GRAPH: (
            "Detach what a step takes over from the step before, such as a hidden state: its graph reaches back over "
            "all of them.",
            "hidden = hidden.detach()",
        ),
        What.EARLIER_GRAPH: (
            f"Let go of the graph of `{names}` before the next forward pass: call backward on it first, or delete it.",
            f"{loss}.backward()  # or: del {group.holder}",
        ),
        What.RETAINED_GRAPH: (
            f"Call backward without retain_graph=True, or delete `{names}` before the next forward pass.",
            f"{loss}.backward()",
        ),
        What.STALE_GRADIENTS: (
            "Set the gradients to None before the forward pass, not after it.",
            "optimizer.zero_grad(set_to_none=True)",
        ),
        What.CAST_WEIGHTS: (
            "Keep no copies of the weights: switch autocast's cache off, or load the model in 16 bits.",
            'with torch.autocast("cuda", cache_enabled=False):',
        ),
        What.NO_BACKWARD: ("Evaluate without a graph: no backward pass follows.", "with torch.no_grad():"),
        What.OLD_VALUE: (f"Delete `{names}` before this line: no later line reads it.", f"del {group.holder}"),
        What.OUTPUT: (
            f"Drop the notebook's output `{names}`, and end such a cell with a semicolon or assign its value.",
            "%memoom free --out",
        ),
        What.LAST_ERROR: ("Free what the frames of the earlier error hold.", "%memoom free"),
        What.OTHER_CELL: _of_other_cell(tape, group, names),
    }[group.what]
    return Suggestion(text, code, group.size, False)


def _of_other_cell(tape: Tape, group: Held, names: str) -> tuple[str, str]:
    holder = group.holder
    optimizer = holder.removesuffix(".state")
    if optimizer != holder and (tape.category[list(group.rows)] == Category.OPTIMIZER_STATE).all():
        return (
            f"This cell does not use `{holder}`: save and empty it, and load it before training goes on.",
            f'torch.save({optimizer}.state_dict(), "{optimizer}.pt"); {holder}.clear()',
        )
    return f"Delete `{names}` if it is not used any more: this cell does not use it.", f"del {holder}"


def _of_growing(group: Held) -> tuple[str, str]:
    name = group.holder
    if not name:
        return "Keep no tensors from step to step: store numbers (`.item()`), or copies without a graph on the CPU.", ""
    return (
        f"`{name}` keeps tensors of every step: keep numbers (`.item()`), or copies without a graph on the CPU.",
        "value.item()  # or: value.detach().cpu()",
    )


# -- too much memory


def _of_need(tape: Tape) -> list[Suggestion]:
    """Return what lowers the need of a step, the largest part of it first."""
    rows, last = alive(tape), len(tape) - 1
    sizes = block_bytes(tape)[rows]
    result = []
    foreach = _foreach(tape, rows)
    if foreach is not None:
        result.append(foreach)
    shares = {kind: int(sizes[tape.category[rows] == kind].sum()) for kind in Category}
    evaluates = _evaluates(tape, rows)
    less = _WEIGHTS_IN_16_BITS if evaluates else _WEIGHTS if _has_no_state(tape) else _STATE
    smaller = _RESULTS if evaluates else _smaller_batch(tape, rows)
    if tape.phase[last] == Phase.OPTIMIZER and foreach is None:
        result.append(less)
    layer = _dominating(tape, rows, sizes)
    result[:0] = filter(None, (_concatenated(tape), _waiting_inputs(tape, rows, sizes), layer))
    of_model = sum(shares[kind] for kind in (*_OF_LAYER, Category.BUFFER))
    of_batch = shares[Category.ACTIVATION] + shares[Category.TEMPORARY] + shares[Category.INPUT]
    by_size = [(of_batch + int(tape.size[last]) * (tape.phase[last] != Phase.OPTIMIZER), smaller), (of_model, less)]
    result += [each for size, each in sorted(by_size, key=lambda item: -item[0]) if size and each not in result]
    return result


_OF_DATA = ("aten::_to_copy", "aten::copy_", "aten::clone", "aten::to")
"""Ops that move data to the GPU."""
_OF_LAYER = (
    Category.PARAMETER,
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
    Category.GATHERED_PARAMETER,
    Category.GRADIENT_BUCKET,
)
_STATE = Suggestion(
    "Use an optimizer with less state, such as SGD, Adafactor or 8-bit AdamW, or weights in 16 bits.",
    "torch.optim.SGD(model.parameters(), lr=lr)",
    0,
    False,
)
_WEIGHTS = Suggestion(
    "Keep the weights in 16 bits, or train fewer of them: freeze layers, or add LoRA to them.",
    "model.to(torch.bfloat16)",
    0,
    False,
)
_RESULTS = Suggestion(
    "Take a smaller batch, keep results on the CPU, or run the model in 16 bits.",
    "results.append(output.cpu())",
    0,
    False,
)
_WEIGHTS_IN_16_BITS = Suggestion("Keep the weights in 16 bits.", "model.to(torch.bfloat16)", 0, False)


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
    if tape.op[last] < 0 or tape.ops[tape.op[last]] not in ("aten::cat", "aten::stack") or not asks_for_more(tape):
        return None
    return Suggestion(
        "Keep the parts on the CPU, and concatenate them once, after the loop: here each call makes a longer copy of "
        "all parts. Where all are needed on the GPU, make the whole before the loop, and write the parts into it.",
        "parts.append(part.cpu())  # after the loop: torch.cat(parts)",
        0,
        False,
    )


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
    """Return whether a forward pass fails that keeps nothing for a backward pass, as under `torch.no_grad()`."""
    last = len(tape) - 1
    made = rows[(tape.step[rows] == tape.step[last]) & (tape.phase[rows] == Phase.FORWARD) & (rows < last)]
    kinds = tape.category[made]
    return bool(
        tape.phase[last] == Phase.FORWARD
        and (kinds == Category.TEMPORARY).any()
        and not (tape.category[rows] == Category.ACTIVATION).any()
    )


def _has_no_state(tape: Tape) -> bool:
    """Return whether an optimizer has made a step without state, as SGD without momentum does."""
    return bool(tape.step[-1] > 1) and not (tape.category == Category.OPTIMIZER_STATE).any()


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
