"""`python -m docs.knobs`: write the table of all knobs into docs/settings.md."""

from __future__ import annotations

import pathlib
import re

from memexplore.run.knobs.knobs import KNOBS

PAGE = pathlib.Path(__file__).parent / "settings.md"
_TABLE = re.compile(r"(?<=<!-- knobs -->\n).*?(?=<!-- end of knobs -->)", re.DOTALL)


def table() -> str:
    """Return the table in Markdown."""
    rows = (f"| `{name}` | {knob.values.listed} | {knob.summary} | {knob.costs} |" for name, knob in KNOBS.items())
    return "\n".join(["| knob | values | | costs |", "|---|---|---|---|", *rows, ""])


def with_table(page: str) -> str:
    """Return a page with the table between its two comments."""
    return _TABLE.sub(lambda _: table(), page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
