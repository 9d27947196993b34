"""The first line of a profiled cell: how it is read."""

from __future__ import annotations

import contextlib
import pathlib
import re
from typing import Any, NamedTuple

from IPython.core.magic_arguments import MagicArgumentParser

_FIRST_LINE = re.compile(r"%%memprofile(?![\w?])(?P<options>[^\n]*)")
_OPTION = re.compile(r"""\s*(?P<option>-[^\s="']+)(?:(?:\s*=\s*|\s+)(?P<value>"[^"]*"|'[^']*'|[^\s"'-]\S*))?""")
_WITHOUT_VALUE = ("--explore",)


class Options(NamedTuple):
    """The options of one profile."""

    gpu: str | None
    release: str | None
    name: str | None
    html: pathlib.Path | None
    explore: bool
    sliders: list[tuple[str, list[Any]]]


def begin_natively(lines: list[str]) -> list[str]:
    """Turn the first line `%%memprofile OPTIONS` into a call, so that the rest of the cell runs as any other cell does.

    The cell keeps its lines, hence the line numbers of its tracebacks; it may `await`, and end in an expression.

    >>> begin_natively(["%%memprofile --gpu T4\\n", "train()\\n"])
    ["get_ipython().run_line_magic('_memprofile_cell', '--gpu T4')\\n", 'train()\\n']
    >>> begin_natively(["train()\\n"])
    ['train()\\n']
    """
    match = _FIRST_LINE.match(lines[0]) if lines else None
    # A lone first line is left to the real cell magic, which says that the cell is empty.
    if match is None or not any(line.strip() for line in lines[1:]):
        return lines
    return [f"get_ipython().run_line_magic('_memprofile_cell', {match['options'].strip()!r})\n", *lines[1:]]


def split_options(line: str) -> tuple[list[str], str]:
    """Split a line into the options at its front and the statement after them; `--` ends the options early.

    >>> split_options("--gpu 'RTX 4090' -o tape x = a - b")
    (['--gpu', 'RTX 4090', '-o', 'tape'], 'x = a - b')
    >>> split_options("--explore x = 1")
    (['--explore'], 'x = 1')
    """
    options: list[str] = []
    position = 0
    while (match := _OPTION.match(line, position)) is not None:
        if match["option"] == "--":
            return options, line[match.end("option") :].strip()
        options.append(match["option"])
        if match["option"] in _WITHOUT_VALUE:
            position = match.end("option")
            continue
        if match["value"] is not None:
            options.append(match["value"].strip("\"'"))
        position = match.end()
    return options, line[position:].strip()


def parser() -> MagicArgumentParser:
    """What reads the options at the front of a line."""
    parser = MagicArgumentParser("%%memprofile")
    parser.add_argument("--gpu", help="a virtual GPU: a name that mx.gpus() lists, or a size such as 24GiB")
    parser.add_argument("--release", help="the PyTorch release whose rules the virtual GPU follows, such as 2.13")
    parser.add_argument("-o", dest="name", help="keep the Tape in this variable")
    parser.add_argument("--html", type=pathlib.Path, help="write a stand-alone page to this file")
    parser.add_argument("--explore", action="store_true", help="show the knobs beside the picture")
    parser.add_argument(
        "--slider", dest="sliders", action="append", default=[], type=slider, help="NAME=LOW:HIGH:STEP, a slider"
    )
    return parser


def slider(text: str) -> tuple[str, list[Any]]:
    """Read the option of a slider: a variable and its values, LOW to HIGH, both included, by STEP (1 unless given).

    >>> slider("batch=8:32:8")
    ('batch', [8, 16, 24, 32])
    >>> slider("rate=0.1:0.3:0.1")
    ('rate', [0.1, 0.2, 0.3])

    Raises ValueError for what is no slider.
    """
    name, _, span = text.partition("=")
    numbers = [_number(part) for part in span.split(":")]
    if not name.isidentifier() or len(numbers) not in (2, 3) or None in numbers:
        raise ValueError(f"{text!r} is no slider: write NAME=LOW:HIGH:STEP, such as batch=8:256:8")
    low, high, step = (*numbers, 1)[:3]
    if not step > 0 or high < low or (high - low) / step > 1000:
        raise ValueError(f"{text!r} is no slider: it must rise from LOW to HIGH in at most 1000 steps")
    # Decimal steps are not exact in binary: 0.1 + 0.2 is not 0.3.
    count = int((high - low) / step + 1e-9)
    return name, [
        value if isinstance(value := low + step * number, int) else round(value, 12) for number in range(count + 1)
    ]


def _number(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None
