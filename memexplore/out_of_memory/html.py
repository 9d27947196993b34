"""A `PostMortem` as HTML without scripts: sentences, tables and suggestions, for notebooks and pages."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from memexplore.out_of_memory.text import largest, search_ended, who
from memexplore.text.units import size_text

if TYPE_CHECKING:
    from memexplore.out_of_memory.value import PostMortem


def html(found: PostMortem) -> str:
    """Return the post-mortem as one element."""
    first, *rest = found.sentences
    parts = [
        f"<p><b>{'Out of memory. ' if found.request is not None else ''}{_with_code(first)}</b> "
        f"{_with_code(' '.join(rest))}</p>"
    ]
    if found.suggestions:
        items = "".join(
            f"<li>{_with_code(each.text)}"
            + (f" It saves {escape(size_text(each.frees))}." if each.frees else "")
            + (" The request then fits (replayed)." if each.fits else "")
            + (f"<br><code style='white-space:pre-wrap'>{escape(each.code)}</code>" if each.code else "")
            + "</li>"
            for each in found.suggestions
        )
        parts.append(f"<p>What to change:</p><ol>{items}</ol>")
    parts.append(_table("Who had the memory", who(found)))
    parts.append(_table("Largest tensors", largest(found)))
    if ended := search_ended(found):
        parts.append(f"<p>{escape(ended)}.</p>")
    return f'<div class="memexplore-post-mortem">{"".join(parts)}</div>'


def _with_code(text: str) -> str:
    """Return text as HTML, in which names between backticks are code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


_SIZE, _TEXT = "text-align:right;white-space:nowrap", "text-align:left"


def _table(title: str, rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    cells = "".join(
        "<tr>"
        + "".join(
            f'<td style="{_TEXT if column else _SIZE};padding:.2em 1em .2em 0">{escape(cell)}</td>'
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<details><summary>{escape(title)}</summary><table>{cells}</table></details>"
