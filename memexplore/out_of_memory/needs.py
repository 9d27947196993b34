"""Suggest what lowers the need of a step that asks for too much memory."""

from __future__ import annotations

import numpy as np

from memexplore.analysis.curves import Rows, block_bytes
from memexplore.analysis.levers import is_short, recomputes
from memexplore.analysis.places import place
from memexplore.analysis.tables import user_line
from memexplore.out_of_memory.counterfactual import alive, asks_for_more, fits_without, largest_before
from memexplore.out_of_memory.earlier_periods import larger_period
from memexplore.out_of_memory.ended_calls import of_ended_calls
from memexplore.out_of_memory.evidence_types import Evidence, State
from memexplore.out_of_memory.suggestion import Suggestion
from memexplore.tape import Category, Phase, Tape
from memexplore.text.tensor_text import shape_of
from memexplore.text.units import size_text

_DOMINATES = 0.75
"""Share of the allocated bytes from which one layer is named."""
_UNTRAINED = 0.05
"""Share of the allocated bytes from which the weights of models that are not trained are named."""
_TRAINED = 0.05
"""Share of all weights from which the gradients and states of those that are trained are worth a change."""
_WORTH = 0.01
"""Share of the allocated bytes below which what a change concerns is not worth it, if another change concerns more."""
_LARGER_REQUEST = 4
"""Times the largest request of the same call before, from which a request is said to be large."""
_LARGER_INPUT = 2
"""Times the largest period before, from which an input is said to be large."""
_ALIKE = 3
"""Tensors of one line from which they are said to wait."""
_OF_DATA = ("aten::_to_copy", "aten::copy_", "aten::clone", "aten::to")
"""Ops that move data to the GPU."""
_JOINING = ("aten::cat", "aten::stack", "aten::constant_pad_nd")
_OF_LAYER = (
    Category.PARAMETER,
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
    Category.GATHERED_PARAMETER,
    Category.GRADIENT_BUCKET,
)
_WAITING = 0.5
"""Share of the allocated bytes from which inputs that wait on the GPU are named."""


def of_need(tape: Tape, evidence: Evidence | None) -> list[Suggestion]:
    """Return what lowers the need of a step, the largest part of it first."""
    rows, last = alive(tape), len(tape) - 1
    sizes = block_bytes(tape)[rows]
    foreach = _foreach(tape, rows)
    less = _less_of_model(tape, rows, evidence)
    updates = tape.phase[last] == Phase.OPTIMIZER
    result = [
        suggestion for suggestion in (foreach, less if updates and foreach is None else None) if suggestion is not None
    ]
    layer = _dominating(tape, rows, sizes)
    longer = ever_longer(tape)
    result[:0] = filter(None, (longer, _larger_than_before(tape), _waiting_inputs(tape, rows, sizes), layer))
    of_batch = _of_batch(tape, rows)
    smaller = (
        _PARTS_OF_DATA if _computes_only(tape) else _RESULTS if _evaluates(tape, rows) else _smaller_batch(tape, rows)
    )
    has_batch = longer is None and not (evidence is not None and evidence.building)
    idle = _of_untrained(tape, rows, evidence)
    of_model = int(sizes[np.isin(tape.category[rows], (*_OF_LAYER, Category.BUFFER))].sum())
    # Parts of a whole are as much with smaller batches, only more of them.
    by_size = [
        (0 if idle is None else 2 * idle.frees, idle),
        (of_batch + int(tape.size[last]) * (not updates), smaller if has_batch else None),
        (of_model - (0 if idle is None else 2 * idle.frees), less),
    ]
    of_size = [
        (size, suggestion)
        for size, suggestion in sorted(by_size, key=lambda item: -item[0])
        if size and suggestion is not None
    ]
    least = _WORTH * (sizes.sum() + int(tape.size[last]))
    worth = [suggestion for size, suggestion in of_size if size >= least]
    if not (worth or result):
        worth = [suggestion for _, suggestion in of_size]
    return result + [suggestion for suggestion in worth if suggestion not in result]


def ever_longer(tape: Tape) -> Suggestion | None:
    """Return the suggestion for a call that asks for more each time, such as one that joins all parts so far.

    A layer that joins nothing asks for more because its inputs are longer.
    """
    joins = tape.op[-1] >= 0 and tape.ops[tape.op[-1]] in _JOINING
    if not asks_for_more(tape) or (tape.module[-1] >= 0 and not joins):
        return None
    text = (
        "Each of these calls asks for more than the one before, such as for a longer copy of all parts: keep the parts "
        "on the CPU and join them after the loop, or make the whole before the loop and write each part into it."
    )
    return Suggestion(text, "parts.append(part.cpu())  # after the loop: torch.cat(parts)", 0, False)


def _of_untrained(tape: Tape, rows: Rows, evidence: Evidence | None) -> Suggestion | None:
    """Return the suggestion for the weights of models that are not trained, if they are not little."""
    models = evidence.untrained if evidence is not None else None
    if models is None:
        return None
    sizes = block_bytes(tape)[rows]
    size = int(sizes[np.isin(tape.address[rows], list(models.addresses))].sum())
    if size < _UNTRAINED * sizes.sum():
        return None
    names = models.name.replace(", ", "`, `")
    whose = f"of `{names}`, which no optimizer trains," if names else "of models that no optimizer trains"
    text = f"Keep the weights {whose} in 16 bits, unless the program changes them itself, as for a moving average."
    call_text = 'with torch.autocast("cuda", torch.bfloat16): around its call'
    code = f"{models.name}.to(torch.bfloat16)  # and {call_text}"
    if not names or ", " in models.name:
        models_text = f"({models.name})" if names else "models"
        code = f"for each in {models_text}:\n    each.to(torch.bfloat16)  # and {call_text}"
    return Suggestion(text, code, size // 2, False)


def _of_batch(tape: Tape, rows: Rows) -> int:
    kinds = (Category.ACTIVATION, Category.TEMPORARY, Category.INPUT)
    return int(block_bytes(tape)[rows][np.isin(tape.category[rows], kinds)].sum())


_RESULTS = Suggestion(
    "Take a smaller batch, keep results on the CPU, or run the model in 16 bits.",
    "results.append(output.cpu())",
    0,
    False,
    ("precision",),
)
_PARTS_OF_DATA = Suggestion(
    "Make the tensors smaller, such as by going through the data in parts, or keep the numbers in 16 bits.",
    "for part in data.split(rows): ...",
    0,
    False,
)


def _less_of_model(tape: Tape, rows: Rows, evidence: Evidence | None) -> Suggestion | None:
    """Return the suggestion for weights, gradients and states: what lowers them and is not in use in the run."""
    is_long = not is_short(tape, rows, Category.PARAMETER)
    state = evidence.state if evidence is not None else State.UNKNOWN
    if _evaluates(tape, rows) or _has_only_evaluated(tape, evidence) or _trains_little(tape, rows, evidence):
        text = "Keep the weights in 16 bits."
        return Suggestion(text, _IN_16_BITS, 0, False, ("precision",)) if is_long else None
    if (tape.category == Category.OPTIMIZER_STATE).any() or tape.phase[-1] == Phase.OPTIMIZER:
        state = State.KEPT
    elif tape.step[-1] > 1:
        # An optimizer has made a step without state, as SGD without momentum does.
        state = State.NONE
    if state is State.KEPT:
        text = "Use an optimizer with less state, such as SGD, Adafactor or 8-bit Adam"
        code = "torch.optim.SGD(model.parameters(), lr=lr)"
        if is_long:
            return Suggestion(f"{text}, or weights in 16 bits.", code, 0, False, ("optimizer", "precision"))
        return Suggestion(f"{text}.", code, 0, False, ("optimizer",))
    fewer = "train fewer of them: freeze layers, or add LoRA to them"
    if state is State.UNKNOWN:
        fewer = f"{fewer}. An optimizer with less state lowers what the first update adds"
    if is_long:
        text = f"Keep the weights in 16 bits, or {fewer}."
        return Suggestion(text, _IN_16_BITS, 0, False, ("precision", "frozen", "lora"))
    text = fewer.replace("fewer of them", "fewer weights")
    code = "layer.requires_grad_(False)"
    return Suggestion(f"{text[0].upper()}{text[1:]}.", code, 0, False, ("frozen", "lora"))


_IN_16_BITS = "model.to(torch.bfloat16)"


def _smaller_batch(tape: Tape, rows: Rows) -> Suggestion:
    """Return the suggestion for tensors of the batch: what lowers them and is not in use in the run."""
    ways, knobs = ["take a smaller batch or micro-batches"], ["batch", "accumulation"]
    if not recomputes(tape):
        ways.append("checkpoint the activations")
        knobs.append("checkpoint")
    if not is_short(tape, rows, Category.ACTIVATION):
        ways.append("train in mixed precision")
        knobs.append("precision")
    text = f"{', '.join(ways[:-1])}{',' * (len(ways) > 2)} or {ways[-1]}" if len(ways) > 1 else ways[0]
    return Suggestion(f"{text[0].upper()}{text[1:]}.", "", 0, False, tuple(knobs))


def _larger_than_before(tape: Tape) -> Suggestion | None:
    """Return the suggestion for an input, or a request, that is much larger than those before it."""
    larger, request = larger_period(tape), largest_before(tape)
    longer = None if larger is None or larger.size < _LARGER_INPUT * larger.before else larger.longer_inputs
    if larger is not None and longer is not None:
        text, saved = "Shorten data of this size, go through them in parts", larger.size - larger.before
        before = f"earlier inputs were at most {longer.before}"
    elif request is not None and int(tape.size[-1]) >= _LARGER_REQUEST * request:
        text, saved = "Go through data of this size in parts, or on the CPU", int(tape.size[-1]) - request
        before = f"earlier rounds asked for at most {size_text(request)} here"
    else:
        return None
    return Suggestion(f"{text}, or leave them out: {before}.", "", saved, False)


def _waiting_inputs(tape: Tape, rows: Rows, sizes: Rows) -> Suggestion | None:
    """Return the suggestion for data that mostly waits on the GPU to be used: several tensors of one line."""
    outside = (tape.module[rows] < 0) & (tape.phase[rows] == Phase.OTHER)
    copied = np.array([*(op in _OF_DATA for op in tape.ops), False])[tape.op[rows]]
    chosen, bytes_chosen = rows[outside & copied], sizes[outside & copied]
    if not len(chosen):
        return None
    lines, of_line = np.unique(tape.stack[chosen], return_inverse=True)
    totals = np.bincount(of_line, weights=bytes_chosen)
    largest = int(np.argmax(totals))
    waiting = bytes_chosen[of_line == largest]
    if waiting.sum() < _WAITING * sizes.sum() or lines[largest] < 0:
        return None
    line = place(user_line(tape.stacks[lines[largest]])).text
    if len(waiting) >= _ALIKE:
        text = f"Keep the data on the CPU, and move each batch when it is used: {len(waiting)} tensors of {line} wait."
        return Suggestion(text, "for batch in batches: batch = batch.cuda()", int(waiting.sum() - waiting.max()), False)
    row_of_data = int(chosen[of_line == largest][np.argmax(waiting)])
    if not _is_used_in_parts(tape, rows, row_of_data):
        return None
    text = f"Keep the data on the CPU, and move each batch when it is used: the tensor of {line} has all of it."
    return Suggestion(text, "batch = data[first:last].cuda()", int(waiting.max()), False)


def _is_used_in_parts(tape: Tape, rows: Rows, row_of_data: int) -> bool:
    """Return whether what the layers have made has fewer rows than a tensor of data, so that they see a part of it."""
    made = rows[(tape.module[rows] >= 0) & np.isin(tape.category[rows], (Category.ACTIVATION, Category.TEMPORARY))]
    texts = [tape.tensor_texts[number] for number in tape.tensor[[row_of_data, *made]] if number >= 0]
    firsts = [shape[0] for text in texts if (shape := shape_of(text))]
    return len(firsts) > 1 and max(firsts[1:]) < firsts[0]


def _computes_only(tape: Tape) -> bool:
    """Return whether a program calls no model and takes no derivatives."""
    return bool((tape.phase == Phase.OTHER).all() and not np.isin(tape.category, _OF_TRAINING).any())


_OF_TRAINING = (Category.PARAMETER, Category.ACTIVATION, Category.GRADIENT, Category.OPTIMIZER_STATE)


def _evaluates(tape: Tape, rows: Rows) -> bool:
    """Return whether a forward pass, or what comes after it, keeps nothing for a backward pass: `torch.no_grad()`."""
    last = len(tape) - 1
    made = rows[(tape.step[rows] == tape.step[last]) & (tape.phase[rows] == Phase.FORWARD) & (rows < last)]
    went_backward = np.any((tape.step == tape.step[last]) & (tape.phase == Phase.BACKWARD))
    return bool(
        (tape.phase[last] == Phase.FORWARD or (tape.phase[last] == Phase.OTHER and not went_backward))
        and (tape.category[of_ended_calls(tape, made)] == Category.TEMPORARY).any()
        and not (tape.category[made] == Category.ACTIVATION).any()
    )


def _trains_little(tape: Tape, rows: Rows, evidence: Evidence | None) -> bool:
    """Return whether optimizers update a little part of the weights, such as those of LoRA."""
    if evidence is None or evidence.trained is None:
        return False
    weights = int(tape.size[rows[tape.category[rows] == Category.PARAMETER]].sum())
    return evidence.trained < _TRAINED * weights


def _has_only_evaluated(tape: Tape, evidence: Evidence | None) -> bool:
    """Return whether a program without an optimizer has called models before the failing call, never with a graph."""
    return (
        evidence is not None
        and not evidence.may_train
        and tape.phase[-1] != Phase.FORWARD
        and bool((tape.phase == Phase.FORWARD).any())
        and not (tape.category == Category.ACTIVATION).any()
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
    code = 'for group in optimizer.param_groups:\n    group["foreach"] = False  # or in its constructor: foreach=False'
    return Suggestion(text, code, size, fits_without(tape, chosen.tolist()), ("update",))


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
