"""A `PostMortem` as plain text: for the command line, and for a terminal after the traceback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memexplore.analysis import tables
from memexplore.analysis.places import place
from memexplore.out_of_memory.evidence_types import Holder, VariableUse
from memexplore.text.tensor_text import tensor_text
from memexplore.text.units import size_text

if TYPE_CHECKING:
    from memexplore.out_of_memory.value import PostMortem

_ROWS = 8


def search_ended(post_mortem: PostMortem) -> str:
    """Return why the search for holders did not find all, empty if it came to its end."""
    if post_mortem.search_error:
        return f"The search for holders could not read all objects: {post_mortem.search_error}"
    return "" if post_mortem.complete else "The search for holders was ended after its time"


def text(post_mortem: PostMortem) -> str:
    """Return the sentences, who had the memory, and what to change."""
    lines = ["Out of memory" if post_mortem.request is not None else "Layout of memory", *post_mortem.sentences]
    for title, table in (("Who had the memory", who(post_mortem)), ("Largest tensors", largest(post_mortem))):
        if table:
            lines += ["", f"{title}:", *_aligned(table)]
    if ended := search_ended(post_mortem):
        lines.append(f"  ({ended[0].lower()}{ended[1:]})")
    if post_mortem.suggestions:
        lines += ["", "What to change:"]
        for number, suggestion in enumerate(post_mortem.suggestions, 1):
            frees = f" It saves {size_text(suggestion.frees)}." if suggestion.frees else ""
            fits = " The request then fits (replayed)." if suggestion.fits else ""
            costs = f" {suggestion.costs}" if suggestion.costs else ""
            lines.append(f"  {number}. {suggestion.text}{frees}{fits}{costs}")
            if suggestion.code:
                lines += [f"     {line}" for line in suggestion.code.splitlines()]
    return "\n".join(lines)


def who(post_mortem: PostMortem) -> list[tuple[str, ...]]:
    """Return size, share and name of each category, then of what nothing needs and of the holders."""
    allocated = max(post_mortem.memory.allocated, 1)

    def row(name: str, size: int) -> tuple[str, ...]:
        return size_text(size), f"{size / allocated * 100:.0f} %", name

    rows = [row(kind, size) for kind, size in post_mortem.by_category]
    named = {group.holder for group in post_mortem.held}
    for group in post_mortem.held[:_ROWS]:
        holder = f" in {group.holder}" if group.holder else ""
        line = f", {place(group.line).text}" if group.line else ""
        rows.append(row(f"not needed: {group.what.value}{holder}{line}", group.size))
    others = [holder for holder in post_mortem.holders[:_ROWS] if holder.name not in named]
    return rows + [row(f"held by {holder.name} ({_use(holder)})", holder.size) for holder in others]


def _use(holder: Holder) -> str:
    if holder.use is VariableUse.ATTRIBUTE:
        return f"left by {holder.tensors} layer{'s' if holder.tensors > 1 else ''} until the next call"
    return holder.use.value


def largest(post_mortem: PostMortem) -> list[tuple[str, ...]]:
    """Return the largest tensors that were alive: size, category, tensor, layer and line."""
    table = tables.tensors(post_mortem.tape, len(post_mortem.tape) - 1, _ROWS)
    return [
        (
            size_text(size),
            category,
            tensor_text(shape, dtype) if dtype else "",
            layer,
            place(line).text if line else "",
        )
        for size, category, shape, dtype, layer, line in zip(
            *(table[name] for name in ("size", "category", "shape", "dtype", "layer", "line")), strict=True
        )
    ]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if not column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
