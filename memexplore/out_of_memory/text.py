"""A `PostMortem` as plain text: for the command line, and for a terminal after the traceback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memexplore.analysis import tables
from memexplore.analysis.places import place
from memexplore.text.tensor_text import tensor_text
from memexplore.text.units import size_text

if TYPE_CHECKING:
    from memexplore.out_of_memory.value import PostMortem

_ROWS = 8


def search_ended(found: PostMortem) -> str:
    """Return why the search for holders did not find all, empty if it came to its end."""
    if found.search_error:
        return f"The search for holders could not read all objects: {found.search_error}"
    return "" if found.complete else "The search for holders was ended after its time"


def text(found: PostMortem) -> str:
    """Return the sentences, who had the memory, and what to change."""
    lines = ["Out of memory" if found.request is not None else "Layout of memory", *found.sentences]
    for title, table in (("Who had the memory", who(found)), ("Largest tensors", largest(found))):
        if table:
            lines += ["", f"{title}:", *_aligned(table)]
    if ended := search_ended(found):
        lines.append(f"  ({ended[0].lower()}{ended[1:]})")
    if found.suggestions:
        lines += ["", "What to change:"]
        for number, each in enumerate(found.suggestions, 1):
            frees = f" It saves {size_text(each.frees)}." if each.frees else ""
            fits = " The request then fits (replayed)." if each.fits else ""
            lines.append(f"  {number}. {each.text}{frees}{fits}")
            if each.code:
                lines += [f"     {line}" for line in each.code.splitlines()]
    return "\n".join(lines)


def who(found: PostMortem) -> list[tuple[str, ...]]:
    """Return size, share and name of each category, then of what nothing needs and of the holders."""
    allocated = max(found.memory.allocated, 1)

    def row(name: str, size: int) -> tuple[str, ...]:
        return size_text(size), f"{size / allocated * 100:.0f} %", name

    rows = [row(kind, size) for kind, size in found.by_category]
    named = {group.holder for group in found.held}
    for group in found.held[:_ROWS]:
        holder = f" in {group.holder}" if group.holder else ""
        line = f", {place(group.line).text}" if group.line else ""
        rows.append(row(f"not needed: {group.what.value}{holder}{line}", group.size))
    others = [each for each in found.holders[:_ROWS] if each.name not in named]
    return rows + [row(f"held by {each.name} ({each.use.value})", each.size) for each in others]


def largest(found: PostMortem) -> list[tuple[str, ...]]:
    """Return the largest tensors that were alive: size, category, tensor, layer and line."""
    table = tables.tensors(found.tape, len(found.tape) - 1, _ROWS)
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
