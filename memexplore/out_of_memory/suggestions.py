"""Suggest changes of the code, the change that cures the cause first."""

from __future__ import annotations

import numpy as np

from memexplore.analysis.budget import is_limited_by_settings, limit_setter
from memexplore.analysis.curves import block_bytes
from memexplore.out_of_memory.cause import Cause, Finding
from memexplore.out_of_memory.continuation import continuation
from memexplore.out_of_memory.counterfactual import alive, bytes_of, fits_without
from memexplore.out_of_memory.cures import CURES, GRADIENT, cure_of
from memexplore.out_of_memory.evidence_types import Evidence
from memexplore.out_of_memory.held import LAST_ERROR, SCALAR, went_backward
from memexplore.out_of_memory.held_types import HeldGroup, WhyHeld
from memexplore.out_of_memory.needs import ever_longer, of_need
from memexplore.out_of_memory.processes import MOST_PROCESSES, named_processes
from memexplore.out_of_memory.suggestion import Suggestion
from memexplore.tape import Category, Tape
from memexplore.text.units import size_text

_LITTLE = 0.01
"""Share of the allocated bytes below which what is held is not worth a change."""


def suggestions(tape: Tape, finding: Finding, evidence: Evidence | None) -> tuple[Suggestion, ...]:
    """Return what to change, the change that cures the cause first."""
    result: list[Suggestion] = []
    if finding.cause is Cause.FRAGMENTATION:
        result += [_expandable(tape), *of_need(tape, evidence)]
    if finding.cause is Cause.ANOTHER_PROCESS:
        result.append(_other_process(finding))
    cures = finding.cause in (Cause.LEAK, Cause.HELD)
    least = _LITTLE * block_bytes(tape)[alive(tape)].sum()
    groups = [group for number, group in enumerate(finding.held) if group.size >= least or (cures and not number)]
    result += [
        (_of_library(tape, group, evidence) or _of_group(tape, group, evidence))._replace(
            fits=cures and group.rows == finding.held[0].rows
        )
        for group in groups
    ]
    if finding.cause is Cause.LEAK and (longer := ever_longer(tape)) is not None:
        result.insert(0, longer)
    if finding.cause is Cause.TOO_MUCH:
        result = [*_of_evaluation(tape, finding, evidence), *of_need(tape, evidence), *result]
    # What is built often replaces a model that is still there, and a model waits on the CPU as well as on the GPU.
    is_building = evidence is not None and evidence.building
    for group in sorted(finding.not_reached, key=lambda group: group.size):
        if group.size >= least:
            waits = not is_building and _is_model(tape, group)
            unused = (_of_waiting(group) if waits else _of_group(tape, group, evidence))._replace(
                fits=group.size >= finding.missing and fits_without(tape, group.rows)
            )
            is_need = finding.cause is Cause.TOO_MUCH and (waits or group.what is WhyHeld.COLLECTED)
            is_first = is_building or (is_need and unused.fits)
            result.insert(0 if is_first else len(result), unused)
    if finding.cause is Cause.TOO_MUCH and finding.fits_expandable:
        result.append(_expandable(tape))
    if finding.fits_without_limit and finding.cause is not Cause.LEAK:
        result.insert(0 if finding.cause is Cause.TOO_MUCH else len(result), _higher_limit(tape))
    kept: dict[str, Suggestion] = {}
    for suggestion in result:
        kept.setdefault(suggestion.text, suggestion)
    return tuple(kept.values())


_EXPANDABLE = 'import os; os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"'


def _expandable(tape: Tape) -> Suggestion:
    text = "Let segments grow, so that gaps between blocks are used: set this before torch is imported."
    if continuation(tape) is None:
        text += " What the program asks for next is not part of the replay."
    return Suggestion(text, _EXPANDABLE, 0, True, ("settings",))


def _higher_limit(tape: Tape) -> Suggestion:
    meta = tape.meta
    free = size_text((meta.capacity_without_limit or 0) - (meta.capacity or 0))
    text = (
        f"Raise the limit of this process, which {limit_setter(meta)} sets: the GPU had {free} more. What the rest of "
        "the step needs is not part of the replay."
    )
    code = "" if is_limited_by_settings(meta) else "torch.cuda.set_per_process_memory_fraction(1.0)"
    return Suggestion(text, code, 0, True)


def _other_process(finding: Finding) -> Suggestion:
    count, names = len(finding.processes), named_processes(finding.processes)
    if count > MOST_PROCESSES:
        who = f"some of the {count} other processes, the largest of which are {names},"
    else:
        who = f"process {names}" if count == 1 else f"the processes {names}" if names else "other processes"
    return Suggestion(
        f"End {who} on this GPU, or use another GPU: nvidia-smi lists the processes.", "", finding.others, True
    )


def _of_evaluation(tape: Tape, finding: Finding, evidence: Evidence | None) -> list[Suggestion]:
    """Return what libraries offer against what their objects keep in an evaluation, where it is what is missing."""
    if evidence is None or not evidence.evaluating:
        return []
    row_at = {int(tape.address[row]): int(row) for row in alive(tape)}
    result = []
    for holder in evidence.of_libraries:
        size = bytes_of(tape, [row_at[address] for address in holder.addresses if address in row_at])
        cure = cure_of(holder.classes)
        if cure is not None and size >= finding.missing:
            result.append(Suggestion(cure.text.format(holder=holder.name), cure.code, size, False))
    return result


def _of_library(tape: Tape, group: HeldGroup, evidence: Evidence | None) -> Suggestion | None:
    """Return what the library of an object offers that keeps the group; None where no row of `cures` is for it."""
    names = group.holder.split(", ")
    kept = frozenset(tape.address[list(group.rows)].tolist())
    holders = (*evidence.holders, *evidence.in_use) if evidence is not None else ()
    found = (cure_of(holder.classes) for holder in holders if holder.addresses <= kept or kept <= holder.addresses)
    cure = next(filter(None, found), None)
    if cure is None:
        return None
    return Suggestion(cure.text.format(holder="`, `".join(names)), cure.code, group.size, False)


def _of_group(tape: Tape, group: HeldGroup, evidence: Evidence | None) -> Suggestion:
    variables = ", ".join(variable for variable in group.holder.split(", ") if variable != LAST_ERROR) or group.holder
    if variables != group.holder:
        alone = _of_group(tape, group._replace(holder=variables), evidence)
        text = f"{alone.text} The frames of the earlier error hold it too: free both."
        return alone._replace(text=text, code=f"%memoom free\n{alone.code}")
    names = group.holder.replace(", ", "`, `")
    loss = "loss" if group.is_container else group.holder.split(", ")[0]
    text, code = {
        WhyHeld.GROWS: _of_growing(tape, group, evidence),
        WhyHeld.SUMMED_GRAPHS: (
            f"Call backward on each loss, and keep numbers (`.item()`) in `{names}`: gradients add up from zero_grad "
            "on, and each graph is freed.",
            "loss.backward()  # in the loop; what is kept: loss.item()",
        ),
        WhyHeld.LONG_GRAPH: (
            "Detach what a step takes over from the step before, such as a hidden state: its graph reaches back over "
            "all of them.",
            "hidden = hidden.detach()",
        ),
        WhyHeld.EARLIER_GRAPH: (
            f"Let go of the graph of `{names}` before the next forward pass: call backward on it first, without "
            "retain_graph=True, or delete it.",
            f"{loss}.backward()  # or: del {group.holder}",
        ),
        WhyHeld.STALE_GRADIENTS: (
            "Set the gradients to None before the forward pass, not after it.",
            "optimizer.zero_grad(set_to_none=True)",
        ),
        WhyHeld.CAST_WEIGHTS: (
            "Keep no copies of the weights: switch autocast's cache off, or load the model in 16 bits.",
            'with torch.autocast("cuda", cache_enabled=False):\n    output = model(batch)',
        ),
        WhyHeld.NO_BACKWARD: _WITHOUT_GRAPH,
        WhyHeld.NO_OPTIMIZER: _WITHOUT_GRAPH,
        WhyHeld.NO_UPDATE: _of_idle(group, names),
        WhyHeld.OLD_VALUE: (
            f"Delete `{names}` before the next call, if nothing else reads it: it has the result of an earlier one.",
            f"del {group.holder}",
        ),
        WhyHeld.BEFORE: _of_unused(group, names),
        WhyHeld.NOT_REACHED: _of_unused(group, names),
        WhyHeld.COLLECTED: (
            f"Keep what `{names}` collects on the CPU, and move each part to the GPU when it is used.",
            "part = part.cpu()  # later: part.cuda()",
        ),
        WhyHeld.LEFT_BY_LAYERS: _of_left(group),
        WhyHeld.OUTPUT: (
            f"Drop the notebook's output `{names}`, and end such a cell with a semicolon or assign its value.",
            "%memoom free --out",
        ),
        WhyHeld.LAST_ERROR: ("Free what the frames of the earlier error hold.", "%memoom free"),
        WhyHeld.KEPT_ERROR: (
            f"Keep the text of the error in `{names}`, not the error: its traceback keeps the frames of the failed "
            "call and all their tensors.",
            "str(error)  # or: error.with_traceback(None)",
        ),
        WhyHeld.HANDLED_ERROR: (
            "Try again after the `except` block, not inside it: until the block ends, the error keeps the frames "
            "of the failed call and all their tensors.",
            f"failed = False\ntry:\n    ...\nexcept {names}:\n    failed = True\nif failed: ...  # the second attempt",
        ),
        WhyHeld.CYCLE: (
            f"Call gc.collect() when a round ends, or break the reference cycle ({group.holder}): objects that only "
            "refer to each other wait for the garbage collector.",
            "import gc; gc.collect()",
        ),
        WhyHeld.OWN_GRADIENT: CURES[GRADIENT][:2],
        WhyHeld.LIBRARY: (
            f"Clear `{names}` {_when_filled(tape, group)}: the failing call does not use it.",
            "" if ", " in group.holder else f"{group.holder}.clear()",
        ),
    }[group.what]
    return Suggestion(text, code, group.size, False)


_WITHOUT_GRAPH = (
    "Evaluate without a graph, if no backward pass follows.",
    "with torch.no_grad():\n    output = model(batch)",
)


def _when_filled(tape: Tape, group: HeldGroup) -> str:
    is_of_step = bool(np.all(tape.step[list(group.rows)] == tape.step[-1]))
    return "between the layers that fill it, within the step" if is_of_step else "when a round ends"


def _of_unused(group: HeldGroup, names: str) -> tuple[str, str]:
    return f"Delete `{names}` if nothing reads it any more.", f"del {group.holder}"


def _of_left(group: HeldGroup) -> tuple[str, str]:
    layer, _, attribute = group.holder.rpartition(".")
    layers = f"{group.blocks} layers leave" if group.blocks > 1 else f"`{layer}` leaves"
    text = f"{layers} `{group.holder}` until the next call: set it to None after its last use, or keep a CPU copy."
    return text, f"layer.{attribute} = None"


def _is_model(tape: Tape, group: HeldGroup) -> bool:
    return bool(np.isin(tape.category[list(group.rows)], (Category.PARAMETER, Category.BUFFER)).all())


def _of_waiting(group: HeldGroup) -> Suggestion:
    """Return the change for models of which the failing call uses nothing."""
    names = group.holder.split(", ")
    # Of several variables with the same models, one is enough.
    models = [name for name in names if name.partition(".")[0] == names[0].partition(".")[0]]
    them = "them" if len(models) > 1 else "it"
    text = f"Keep `{'`, `'.join(models)}` on the CPU while the failing call does not use {them}."
    return Suggestion(text, "\n".join(f"{name}.cpu()" for name in models), group.size, False)


def _of_idle(group: HeldGroup, names: str) -> tuple[str, str]:
    """Return the change for weights that no optimizer updates: frozen, a graph leads to them no longer."""
    if not group.holder:
        return (
            "Freeze the weights that no optimizer updates, so that nothing is kept for their gradients.",
            'updated = {id(weight) for group in optimizer.param_groups for weight in group["params"]}\n'
            "for weight in model.parameters():\n"
            "    weight.requires_grad_(id(weight) in updated)",
        )
    if ", " in group.holder:
        text = f"No optimizer updates `{names}`: freeze their weights, so that nothing is kept for their gradients."
        return text, f"for part in ({group.holder}):\n    part.requires_grad_(False)"
    text = (
        f"No optimizer updates `{names}`: call it under torch.no_grad(), or freeze its weights where a gradient has to "
        "pass through it."
    )
    return text, f"{group.holder}.requires_grad_(False)  # or: with torch.no_grad(): around its call"


def _of_growing(tape: Tape, group: HeldGroup, evidence: Evidence | None) -> tuple[str, str]:
    name = group.holder.replace(", ", "`, `")
    if not name:
        return (
            "Keep nothing of earlier steps or calls on the GPU: move it to the CPU without its graph "
            "(`.detach().cpu()`), or let go of it.",
            "",
        )
    keep = "keep" if ", " in name else "keeps"
    kept, premise = f"`{name}` {keep} tensors of every step", ""
    rows = list(group.rows)
    kinds = {Category(kind) for kind in tape.category[rows]}
    if Category.PARAMETER in kinds and kinds & {Category.GRADIENT, Category.OPTIMIZER_STATE}:
        text = (
            f"`{name}` {keep} the models of earlier rounds: keep the numbers that you need, or move each model to the "
        )
        return f"{text}CPU when its round ends, and let go of its optimizer.", "model.cpu()"
    own, in_graph = _kept(tape, group, evidence)
    if in_graph and not went_backward(tape, [min(rows)]):
        kept, premise = f"{kept} with their graphs", "if no backward pass needs them together, "
    if own and np.all(tape.size[own] <= SCALAR):
        return f"{kept}: {premise}keep numbers without a graph (`.item()`).", "value.item()"
    return (
        f"{kept}: {premise}keep copies without a graph on the CPU, or the numbers that you need.",
        "value.detach().cpu()",
    )


def _kept(tape: Tape, group: HeldGroup, evidence: Evidence | None) -> tuple[list[int], list[int]]:
    """Return the blocks that the variables with most of a group have themselves, and those that their graphs keep."""
    holders = (*evidence.holders, *evidence.in_use) if evidence is not None else ()
    at = {int(tape.address[row]): row for row in group.rows}
    own: set[int] = set()
    in_graph: set[int] = set()
    for holder in holders:
        blocks = holder.addresses & at.keys()
        if 2 * bytes_of(tape, [at[address] for address in blocks]) > group.size:
            own |= holder.addresses - holder.in_graph
            in_graph |= blocks & holder.in_graph
    row_at = {int(tape.address[row]): int(row) for row in alive(tape)}
    return [row_at[address] for address in own & row_at.keys()], [at[address] for address in in_graph]
