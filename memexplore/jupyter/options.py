"""Options of `%%memprofile`: from the first line of a cell to their values and the statement after them."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import keyword
import pathlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from memexplore.allocator.placement import system_of
from memexplore.tape import Os
from memexplore.text import result_files
from memexplore.virtual_gpu.values.setting import Values

if TYPE_CHECKING:
    from memexplore.run.machine import Machine

_FIRST_LINE = re.compile(r"%%memprofile(?![\w?])(?P<options>[^\n]*)")
_OPTION = re.compile(r"""\s*(?P<option>-[^\s="']+)(?:(?:\s*=\s*|\s+)(?P<value>"[^"]*"|'[^']*'|[^\s"'-]\S*))?""")
_GPU_OPTION = re.compile(r"--(values|world|rank)[ =]+([^\s-]\S*)")
_WITHOUT_VALUE = ("--explore", "--live", "--line", "--dry-run")
_DRY_RUN = "--dry-run"
_MAX_SLIDER_STEPS = 1000
_MAX_SLIDER_VALUE = 1e15
"""Beyond it a float no longer has every integer's successor."""
_RANK_ALONE = "--rank needs the number of processes: write --world 8 as well"
_SHOWN = 60
"""Characters of a wrong slider that its error shows."""
_NAMES_OF_IPYTHON = ("In", "Out", "get_ipython", "exit", "quit", "_", "__", "___", "__builtins__", "__name__")


class Options(NamedTuple):
    """The options of one profile."""

    gpu: str | None
    release: str | None
    os: Os | None
    values: Values | None
    name: str | None
    html: pathlib.Path | None
    explore: bool
    live: bool
    line: bool
    sliders: list[tuple[str, list[Any]]]
    dry_run: bool
    world: int | None
    rank: int | None

    def machine(self) -> Machine:
        """Return the machine that the options name.

        Raises UsageError for one that cannot be had.
        """
        from memexplore.run.machine import machine_of

        try:
            return machine_of(
                self.gpu,
                release=self.release,
                os=self.os or Os.LINUX,
                values=self.values or Values.KNOWN,
                world=self.world,
                rank=self.rank or 0,
            )
        except (ValueError, RuntimeError) as error:
            raise UsageError(str(error)) from None

    @property
    def runs_again(self) -> bool:
        """Whether an explorer will run the cell again."""
        return self.explore or bool(self.sliders)


def rewrite_first_line(lines: list[str]) -> list[str]:
    """Replace the first line `%%memprofile OPTIONS` by a call, so that IPython runs the cell as an ordinary cell.

    The cell keeps its line numbers in tracebacks, and may use `await` and end in an expression.

    >>> rewrite_first_line(["%%memprofile --gpu T4\\n", "train()\\n"])
    ["get_ipython().run_line_magic('_memprofile_cell', '--gpu T4')\\n", 'train()\\n']
    >>> rewrite_first_line(["%%memprofile --dry-run\\n", "train()\\n"])
    ['%%memprofile --dry-run\\n', 'train()\\n']
    >>> rewrite_first_line(["train()\\n"])
    ['train()\\n']
    """
    match = _FIRST_LINE.match(lines[0]) if lines else None
    # A first line without a cell below is left to the cell magic, which raises the error; a cell that must not run is
    # left to it as well.
    if match is None or not any(line.strip() for line in lines[1:]):
        return lines
    if _DRY_RUN in split_options(match["options"].strip())[0]:
        return lines
    return [f"get_ipython().run_line_magic('_memprofile_cell', {match['options'].strip()!r})\n", *lines[1:]]


def split_options(line: str) -> tuple[list[str], str]:
    """Split a line into its leading options and the statement after them; `--` ends the options.

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


def parse(line: str) -> tuple[Options, str]:
    """Return the options of a line and the statement after them. Raises UsageError before anything runs."""
    arguments, statement = split_options(line)
    options = Options(**vars(_parser().parse_args(arguments)))
    if options.name is not None and (not options.name.isidentifier() or keyword.iskeyword(options.name)):
        raise UsageError(f"{options.name!r} is not a variable name; write -o NAME, such as -o tape")
    if options.name is not None and (hasattr(builtins, options.name) or options.name in _NAMES_OF_IPYTHON):
        raise UsageError(f"{options.name!r} is a name of Python or IPython; write another one, such as -o tape")
    if options.live and options.runs_again:
        raise UsageError("--live shows the cell while it runs, --explore and --slider run it again: write one of them")
    if options.line and not options.live:
        raise UsageError("--line is the form of a watched run: write --live --line")
    if options.dry_run and (options.live or options.runs_again):
        raise UsageError("--dry-run answers whether the cell fits and shows no controls: remove the other option")
    if options.world is not None and (options.dry_run or options.runs_again):
        raise UsageError("--dry-run, --explore and --slider run the cell as the only process: remove --world")
    if options.rank is not None and options.world is None:
        raise UsageError(_RANK_ALONE)
    if options.values is not None and options.dry_run:
        raise UsageError("--dry-run runs the cell with --values known: remove --values")
    if options.values is not None and options.runs_again:
        raise UsageError("--explore and --slider run the cell with --values known: remove --values")
    if options.html is not None:
        try:
            result_files.check(options.html.expanduser(), result_files.PAGE)
        except ValueError as error:
            raise UsageError(f"--html: {error}") from None
    return options, statement


def _parser() -> MagicArgumentParser:
    parser = MagicArgumentParser("%%memprofile")
    parser.add_argument("--gpu", help="a virtual GPU: a name that mx.gpus() lists, or a size such as 24GiB")
    parser.add_argument("--release", help="the PyTorch release whose rules the virtual GPU follows, such as 2.13")
    parser.add_argument(
        "--os", type=_system, help="the system whose driver places segments: linux (default), wsl or windows"
    )
    parser.add_argument("--values", type=_setting, help="values of the GPU's tensors: none, known (default) or real")
    parser.add_argument("--world", type=int, help="run the cell as one of this many processes, as torchrun starts them")
    parser.add_argument("--rank", type=int, help="which of the processes of --world the cell is; default: 0")
    parser.add_argument("-o", dest="name", help="store the Tape in this variable")
    parser.add_argument("--html", type=pathlib.Path, help="write a stand-alone page to this file")
    parser.add_argument("--explore", action="store_true", help="show controls for the knobs next to the chart")
    parser.add_argument("--live", action="store_true", help="show every training step while the cell runs")
    parser.add_argument("--line", action="store_true", help="with --live: as one line, which a button opens")
    parser.add_argument(
        _DRY_RUN, action="store_true", help="run the cell on the virtual GPU only, in a copy of the names"
    )
    parser.add_argument(
        "--slider", dest="sliders", action="append", default=[], type=slider, help="NAME=LOW:HIGH:STEP, a slider"
    )
    return parser


def _system(text: str) -> Os:
    try:
        return system_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _setting(text: str) -> Values:
    try:
        return Values.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("values=")) from None


class GpuLine(NamedTuple):
    """The line of `%memgpu`."""

    name: str
    """The GPU, empty without one."""
    values: Values | None
    world: int | None
    rank: int


def gpu_line(line: str) -> GpuLine:
    """Split the line of `%memgpu` into the GPU's name and the options.

    >>> gpu_line("RTX 4090 --values real")
    GpuLine(name='RTX 4090', values=<Values.REAL: 'real'>, world=None, rank=0)
    >>> gpu_line("H100 --world 8 --rank 3")
    GpuLine(name='H100', values=None, world=8, rank=3)

    Raises UsageError for another option, and for a wrong value of one.
    """
    options = dict(_GPU_OPTION.findall(line))
    name = _GPU_OPTION.sub("", line).strip().strip("\"'")
    if "--" in name:
        raise UsageError(f"cannot read {name[name.index('--') :]}: write --values SETTING, --world N or --rank R")
    for option in ("world", "rank"):
        if not options.get(option, "0").isdecimal():
            raise UsageError(f"--{option} is {options[option]!r}: write a whole number")
    if "rank" in options and "world" not in options:
        raise UsageError(_RANK_ALONE)
    try:
        values = Values.of(options["values"]) if "values" in options else None
    except ValueError as error:
        raise UsageError(str(error).replace("values=", "--values ", 1)) from None
    return GpuLine(name, values, int(options["world"]) if "world" in options else None, int(options.get("rank", 0)))


def slider(text: str) -> tuple[str, list[Any]]:
    """Parse ``NAME=LOW:HIGH:STEP`` to a variable and its values from LOW to HIGH, both included (STEP is 1 by default).

    >>> slider("batch=8:32:8")
    ('batch', [8, 16, 24, 32])
    >>> slider("rate=0.1:0.3:0.1")
    ('rate', [0.1, 0.2, 0.3])

    Raises ArgumentTypeError for other text.
    """
    name, _, span = text.partition("=")
    numbers = [_number(part) for part in span.split(":")]
    shown = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
    if not name.isidentifier() or keyword.iskeyword(name) or len(numbers) not in (2, 3) or None in numbers:
        raise argparse.ArgumentTypeError(f"{shown} is not a slider; write NAME=LOW:HIGH:STEP, such as batch=8:256:8")
    if any(not abs(number) <= _MAX_SLIDER_VALUE for number in numbers):
        raise argparse.ArgumentTypeError(f"{shown} has a number over {_MAX_SLIDER_VALUE:.0e}: write smaller ones")
    low, high, step = (*numbers, 1)[:3]
    if not step > 0 or high < low or (high - low) / step > _MAX_SLIDER_STEPS:
        raise argparse.ArgumentTypeError(
            f"{shown} does not rise from LOW to HIGH in at most {_MAX_SLIDER_STEPS} steps: change them"
        )
    # Decimal steps are not exact in binary: 0.1 + 0.2 is not 0.3.
    count = int((high - low) / step + 1e-9)
    values = [low + step * number for number in range(count + 1)]
    return name, [value if isinstance(value, int) else round(value, 12) for value in values]


def _number(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None
