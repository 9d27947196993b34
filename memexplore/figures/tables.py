"""Write HTML tables of a Tape: tensors, categories, lines and growth. `data-value` of a cell is its sort key."""

from __future__ import annotations

import html

from memexplore.analysis.curves import category_bytes, peak
from memexplore.analysis.groups import by_line
from memexplore.analysis.growth import growth, shown_steps
from memexplore.analysis.periods import periods
from memexplore.analysis.streams import stream_text
from memexplore.analysis.tables import tensors
from memexplore.figures.palette import COLOURS
from memexplore.tape import Category, Tape
from memexplore.text.tensor_text import tensor_text
from memexplore.text.units import size_text

_FRAMES = 60
"""Frames in the tooltip of a tensor, the innermost ones."""


def tensors_table(tape: Tape, row: int | None = None, count: int = 25) -> str:
    """Return the largest tensors alive after a row (default: the peak allocated) as an HTML table, largest first.

    `data-value` of a size is its bytes; the tooltip of a line is its stack.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [1024]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> "1.00 KiB" in tensors_table(tape)
    True

    Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
    """
    table = tensors(tape, row, count)
    streams = ("stream",) if "stream" in table else ()
    rows = []
    for entry in table.to_dict("records"):
        stack = "\n".join(f"{frame.filename}:{frame.line} {frame.function}" for frame in entry["stack"][:_FRAMES])
        text = tensor_text(entry["shape"], entry["dtype"]) if entry["dtype"] else ""
        step = f"{entry['step']}, {entry['phase']}" if entry["step"] else "set-up"
        stream = f'<td class="short">{stream_text(entry["stream"])}</td>' if streams else ""
        rows.append(
            f'<tr><td class="number" data-value="{entry["size"]}">{size_text(entry["size"])}</td>'
            f'<td class="short">{_swatch(entry["category"])}{html.escape(entry["category"])}</td>'
            f'<td class="short">{_code(text)}</td>'
            f'<td>{_code(entry["layer"])}</td><td>{_code(entry["op"])}</td><td class="short">{step}</td>{stream}'
            f'<td title="{html.escape(stack)}">{_code(_short(entry["line"]))}</td></tr>'
        )
    return _table(("size", "category", "tensor", "layer", "op", "step", *streams, "line"), rows)


def categories_table(tape: Tape) -> str:
    """Return the bytes of each category at the peak allocated and their shares as an HTML table, largest first.

    Raises ValueError for a tape that is not placed.
    """
    allocated, row = peak(tape)
    shares = category_bytes(tape, row).tolist()
    rows = [
        f'<tr><td class="short">{_swatch(kind.text)}{kind.text}</td>'
        f'<td class="number" data-value="{shares[kind]}">{size_text(shares[kind])}</td>'
        f'<td class="number" data-value="{shares[kind]}">{_percent(shares[kind] / allocated)}</td></tr>'
        for kind in sorted(Category, key=lambda kind: -shares[kind])
        if shares[kind]
    ]
    return _table(("category", "allocated", "share"), rows)


def lines_table(tape: Tape, row: int | None = None, count: int = 25) -> str:
    """Return allocated bytes after a row (default: the peak) by line of user code as an HTML table, largest first.

    Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
    """
    rows = [
        f'<tr><td class="number" data-value="{entry["size"]}">{size_text(entry["size"])}</td>'
        f'<td class="number">{entry["count"]}</td>'
        f'<td class="short">{_swatch(entry["category"])}{entry["category"]}</td>'
        f'<td title="{html.escape(entry["line"])}">{_code(_short(entry["line"]))}</td></tr>'
        for entry in by_line(tape, row).head(count).to_dict("records")
    ]
    return _table(("size", "blocks", "main category", "line"), rows)


def growth_table(tape: Tape, count: int = 25) -> str:
    """Return the memory that grows from step to step as an HTML table, most growth first.

    Columns of bytes for the first, the second last and the last period.

    Raises ValueError for a tape that is not placed.
    """
    table = growth(tape)
    steps, unit = shown_steps(table), periods(tape).unit
    rows = []
    for entry in table.head(count).to_dict("records"):
        sizes = "".join(
            f'<td class="number" data-value="{entry[step]}">{size_text(entry[step])}</td>' for step in steps
        )
        rows.append(
            f'<tr><td class="number" data-value="{entry["grew"]}">+{size_text(entry["grew"])}</td>'
            f'<td class="short">{_swatch(entry["category"])}{entry["category"]}</td><td>{_code(entry["layer"])}</td>'
            f'{sizes}<td title="{html.escape(entry["line"])}">{_code(_short(entry["line"]))}</td></tr>'
        )
    return _table(("growth", "category", "layer", *(f"{unit} {step}" for step in steps), "line"), rows)


def _percent(share: float) -> str:
    return "&lt;0.1 %" if share < 0.0005 else f"{share * 100:.1f} %"


def _table(headings: tuple[str, ...], rows: list[str]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return f'<table class="memexplore"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _swatch(category: str) -> str:
    colour = next(COLOURS[kind] for kind in Category if kind.text == category)
    return f'<span style="display:inline-block;width:0.8em;height:0.8em;margin-right:0.4em;background:{colour}"></span>'


def _short(line: str) -> str:
    """Return a ``file:line`` with the last folder only; the tooltip has the whole path."""
    return "/".join(line.replace("\\", "/").split("/")[-2:])


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>" if text else "–"
