"""The code in the Markdown pages: the README and docs/.

In: a page. Out: its blocks in order, and the hidden ones that prepare them.

An HTML comment prepares the blocks after it and is invisible in the page: `<!-- setup` followed by Python code,
`<!-- file NAME` followed by the content of a file, or `<!-- not run: REASON -->` before a block that is not run.
"""

from __future__ import annotations

import enum
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

REPOSITORY = pathlib.Path(__file__).parents[1]
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *REPOSITORY.glob("docs/*.md")])
_BLOCK = re.compile(
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```$|^<!-- (?P<comment>setup|file|not run)(?P<rest>.*?)-->$",
    re.MULTILINE | re.DOTALL,
)


class Kind(enum.Enum):
    """How a block is run."""

    CELL = "python"
    """As a cell of a notebook, magics included."""
    SHELL = "bash"
    FILE = "file"


class Block(NamedTuple):
    """One block that is run; `line` is its first line in the page."""

    kind: Kind
    code: str
    line: int
    name: str = ""


def blocks_of(page: pathlib.Path) -> Iterator[Block]:
    """Yield the blocks of a page that are run, in order."""
    text = page.read_text()
    skipped = False
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        comment, language = match["comment"], match["language"]
        if comment == "setup":
            yield Block(Kind.CELL, match["rest"].strip("\n"), line)
        elif comment == "file":
            name, _, content = match["rest"].partition("\n")
            yield Block(Kind.FILE, content, line, name.strip())
        elif comment == "not run":
            skipped = True
            continue
        elif not skipped and language in ("python", "bash"):
            yield Block(Kind(language), match["code"], line)
        skipped = False


def languages_of(page: pathlib.Path) -> list[str]:
    """Return the language of each fenced block of a page, empty where none is given."""
    fences = re.findall(r"^```(\S*)", page.read_text(), re.MULTILINE)
    return fences[::2]
