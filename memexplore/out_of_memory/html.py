"""A `PostMortem` as HTML without scripts: sentences, tables and suggestions, for notebooks and pages."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from memexplore.out_of_memory.text import largest, search_ended, who
from memexplore.text.units import size_text

if TYPE_CHECKING:
    from memexplore.out_of_memory.value import PostMortem


def html(post_mortem: PostMortem) -> str:
    """Return the post-mortem as one element."""
    first, *rest = post_mortem.sentences
    parts = [
        f"<p><b>{'Out of memory. ' if post_mortem.request is not None else ''}{_with_code(first)}</b> "
        f"{_with_code(' '.join(rest))}</p>"
    ]
    if post_mortem.suggestions:
        items = "".join(
            f"<li>{_with_code(suggestion.text)}"
            + (f" It saves {escape(size_text(suggestion.frees))}." if suggestion.frees else "")
            + (" The request then fits (replayed)." if suggestion.fits else "")
            + (f" {escape(suggestion.costs)}" if suggestion.costs else "")
            + (f"<br><code style='white-space:pre-wrap'>{escape(suggestion.code)}</code>" if suggestion.code else "")
            + "</li>"
            for suggestion in post_mortem.suggestions
        )
        parts.append(f"<p>What to change:</p><ol>{items}</ol>")
    parts.append(_table("Who had the memory", who(post_mortem)))
    parts.append(_table("Largest tensors", largest(post_mortem)))
    if ended := search_ended(post_mortem):
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
