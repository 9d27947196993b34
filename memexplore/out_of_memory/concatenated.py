"""Suggest what to change where tensors are concatenated on a full GPU, which holds them twice then."""

from __future__ import annotations

import numpy as np

from memexplore.analysis.curves import Rows, block_bytes
from memexplore.out_of_memory.counterfactual import asks_for_more, fits_without
from memexplore.out_of_memory.evidence_types import Evidence
from memexplore.out_of_memory.suggestion import Suggestion
from memexplore.tape import Category, Phase, Tape

ALIKE = 3
"""Blocks of one place from which they are said to be parts of the same."""
OF_DATA = ("aten::_to_copy", "aten::copy_", "aten::clone", "aten::to")
"""Ops that move data to the GPU."""
OF_LAYER = (
    Category.PARAMETER,
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
    Category.GATHERED_PARAMETER,
    Category.GRADIENT_BUCKET,
)


def joins_results(tape: Tape) -> bool:
    """Return whether the failing call concatenates outside of any layer."""
    last = len(tape) - 1
    return tape.op[last] >= 0 and tape.ops[tape.op[last]] in _CONCATENATE and tape.module[last] < 0


def again(tape: Tape) -> Suggestion | None:
    """Return the suggestion for a result that is concatenated again with each call, and so is there twice."""
    last = len(tape) - 1
    if tape.op[last] < 0 or tape.ops[tape.op[last]] not in _CONCATENATE or not asks_for_more(tape):
        return None
    if tape.module[last] >= 0:
        text = "Make the whole before the loop, and write each part into it: here each call makes a longer copy of all."
        code = "cache = torch.empty(longest, *part.shape[1:], dtype=part.dtype, device=part.device)  # before the loop"
        return Suggestion(text, f"{code}\ncache[first : first + len(part)] = part", 0, False)
    return Suggestion(
        "Keep the parts on the CPU, and concatenate them once, after the loop: here each call makes a longer copy of "
        "all parts. Where all are needed on the GPU, make the whole before the loop, and write the parts into it.",
        "parts.append(part.cpu())  # after the loop: torch.cat(parts)",
        0,
        False,
    )


def at_last(tape: Tape, rows: Rows, evidence: Evidence | None) -> list[Suggestion]:
    """Return the suggestions for results that are concatenated once: then all of them are there twice."""
    last = len(tape) - 1
    if tape.op[last] < 0 or tape.ops[tape.op[last]] not in _CONCATENATE or tape.phase[last] not in _NO_UPDATE:
        return []
    # The graph of a training step needs the parts where they are.
    no_parts = (*OF_LAYER, Category.ACTIVATION, Category.BUFFER, Category.WORKSPACE)
    candidates = rows[~np.isin(tape.category[rows], no_parts)]
    places, of_place = np.unique(
        np.stack([tape.op[candidates], tape.module[candidates], tape.stack[candidates]]), axis=1, return_inverse=True
    )
    counts = np.bincount(of_place.ravel(), minlength=places.shape[1])
    totals = np.bincount(of_place.ravel(), weights=tape.size[candidates], minlength=places.shape[1])
    many = np.flatnonzero((counts >= ALIKE) & (totals >= _PARTS * tape.size[last]))
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
    if tape.ops[tape.op[parts[0]]] in OF_DATA:
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
