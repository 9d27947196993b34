"""What `memexplore run` is asked for: its options, and `RunOptions`, which are checked."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memexplore.cli.live_run import NO_FOLDER
from memexplore.cli.options import AddCommand, UsageError, check_output, check_release, find_gpu
from memexplore.tape import Os
from memexplore.text import result_files
from memexplore.virtual_gpu.values.setting import Values

if TYPE_CHECKING:
    from memexplore.run.knobs.knobs import Knobs
    from memexplore.run.machine import Machine

ALL_RANKS = "all"
_OF_THE_MACHINE = ("gpu", "release", "os", "driver", "values")
"""Options that name the machine, apart from the rank."""
_OF_ONE_RANK = {"live": "--live", "advise": "--advise", "knob": "--knob"}
"""Options whose result is that of one rank."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """A checked command line of `memexplore run`. Make one with `run_options`."""

    target: pathlib.Path | str
    """A Python file, or the name of a module."""
    arguments: tuple[str, ...]
    """Those of the program."""
    machine: Machine
    """With what the knobs say of it; of several ranks that of the first."""
    machine_words: tuple[str, ...]
    """The words of the command line that name the machine, for processes of other ranks."""
    knobs: Knobs
    ranks: tuple[int, ...]
    """The ranks to run, none without `--world`."""
    stops_equal_ranks: bool
    """Whether ranks that equal others are run only until the end of their first optimizer step."""
    live: pathlib.Path | None
    """Folder of a watched run, `NO_FOLDER` for one that is only shown; None where everything is recorded."""
    advises: bool
    """Whether settings are searched with which a script that runs out of memory would have fitted."""
    html: pathlib.Path | None
    output: pathlib.Path | None
    """Where the tape is saved, or of several ranks their tapes."""
    prints_json: bool

    def command_of(self, script: pathlib.Path) -> list[str]:
        """Return the command line that runs another script in the place of this one, and prints its result as JSON."""
        return [*self._command, str(script), "--", *self.arguments]

    @property
    def _command(self) -> list[str]:
        return [sys.executable, "-m", "memexplore", "run", "--json", *self.machine_words]

    def command_of_rank(self, rank: int, files: Sequence[str] = ()) -> list[str]:
        """Return the command line of a process that runs another rank; `files` are the options of files to write."""
        world = ["--world", str(self.machine.world), "--rank", str(rank)]
        program = ["-m", self.target] if isinstance(self.target, str) else [str(self.target), "--"]
        return [*self._command, *world, *files, *program, *self.arguments]


def add(add_command: AddCommand) -> None:
    """Add the parser of the command."""
    running = add_command(
        "run",
        "Run a training script and report its memory. Exit status: 0 fits, 1 the script ended by an error, 2 wrong "
        "command line, 3 out of memory, 4 nothing ran on the GPU or child processes were not measured; a status that "
        "the script exits with comes first.",
    )
    program = running.add_mutually_exclusive_group(required=True)
    program.add_argument("script", nargs="?", type=pathlib.Path, help="a Python file; give its own arguments after --")
    program.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m; its arguments follow")
    running.add_argument(
        "--gpu",
        help="a catalogue name, a size such as 24GiB, cuda or cpu; default: the real GPU if usable, else a virtual T4",
    )
    running.add_argument("--release", metavar="RELEASE", help="follow the rules of this torch release, such as 2.11")
    running.add_argument(
        "--os",
        choices=[system.value for system in Os],
        metavar="SYSTEM",
        help="the system whose driver places segments; up to torch 2.11 this can change peaks; default: linux",
    )
    running.add_argument(
        "--driver",
        metavar="VERSION",
        help="the GPU's driver, such as 470.82: before 515 all kernels of CUDA's libraries are loaded, which takes "
        "memory outside the allocator",
    )
    running.add_argument(
        "--values",
        choices=[setting.value for setting in Values],
        help="values of virtual tensors that are computed: none, those that follow from known ones (the default), or "
        "real: all of them, on the CPU",
    )
    running.add_argument(
        "--world",
        type=int,
        metavar="N",
        help="run the script as one of N processes that torchrun starts, on nodes of eight GPUs; nothing is sent to "
        "the other ones",
    )
    running.add_argument(
        "--rank",
        metavar="RANKS",
        help="the ranks that are run with --world: a number, several such as 0,4-7, or all, which runs ranks that "
        "equal others only until the end of their first optimizer step; default: 0",
    )
    running.add_argument(
        "--knob",
        action="append",
        metavar="NAME=VALUE",
        help="run the script with another value of a knob, such as batch=16, precision=bf16 or checkpoint='every 2'; "
        "may be repeated",
    )
    running.add_argument(
        "--live",
        type=pathlib.Path,
        nargs="?",
        const=NO_FOLDER,
        metavar="FOLDER",
        help="watch the training steps instead of recording everything, show them while they run, and write them to a "
        "folder that `memexplore open FOLDER` follows; a name that ends with .py is the script",
    )
    running.add_argument(
        "--advise",
        action="store_true",
        help="after an out-of-memory error, run the script again with other settings on a virtual GPU, and show "
        "those that fit",
    )
    running.add_argument(
        "--html",
        metavar="FILE",
        help="write a stand-alone HTML page; of several ranks that of the worst, or a folder with one each",
    )
    running.add_argument("--json", action="store_true", help="print one JSON object; the script prints to stderr")
    running.add_argument(
        "-o",
        "--output",
        metavar="FILE.tape",
        help="save the tape, for other programs as FILE.parquet; of several ranks a folder of tapes",
    )


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of memexplore and those of the program that it runs.

    The arguments of a script follow `--`; those of a module follow its name, as with `python -m`, or `--`.
    """
    if arguments[:1] not in (["run"], ["compare"]):
        return arguments, []
    split = len(arguments)
    if arguments[0] == "run" and "-m" in arguments:
        split = min(split, arguments.index("-m") + 2)
    if "--" in arguments:
        split = arguments.index("--")
    rest = arguments[split:]
    return normalized(arguments[:split]), rest[1:] if rest[:1] == ["--"] else rest


def normalized(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `run`, with ``--live`` and the folder after it as one.

    A name after ``--live`` that ends with ``.py`` or is a file is the script.

    >>> normalized(["run", "--live", "train.py"]), normalized(["run", "train.py", "--live", "runs/a", "--gpu", "T4"])
    (['run', '--live=', 'train.py'], ['run', 'train.py', '--live=runs/a', '--gpu', 'T4'])
    """
    result: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--live":
            following = waiting[0] if waiting else "-"
            has_folder = not (
                following.startswith("-") or following.endswith(".py") or pathlib.Path(following).is_file()
            )
            argument = f"--live={waiting.pop(0) if has_folder else ''}"
        result.append(argument)
    return result


def run_options(options: argparse.Namespace, arguments: list[str]) -> RunOptions:
    """Return the checked options; `arguments` are those of the program. Imports torch if they are right so far.

    Raises UsageError for options that cannot be followed.
    """
    if options.script is not None and not options.script.is_file():
        raise UsageError(f"no script {str(options.script)!r}; give the path of a Python file")
    check_release(options.release)
    if options.gpu is not None and options.gpu not in ("cuda", "cpu"):
        find_gpu(options.gpu)
    ranks = ranks_of(options.world, options.rank)
    html, output = (None if text is None else pathlib.Path(text) for text in (options.html, options.output))
    if len(ranks) > 1:
        _check_several_ranks(ranks, options, html, output)
    else:
        _check_files(options.html, options.output)
        if options.live is not None:
            _check_live(options)
    from memexplore.run.knobs.knobs import Knobs

    knobs, machine = Knobs(), _machine(options, next(iter(ranks), 0))
    if options.knob:
        knobs, machine = _changed_by(options.knob, machine)
    given = {name: getattr(options, name) for name in _OF_THE_MACHINE}
    return RunOptions(
        target=options.script or options.module,
        arguments=tuple(arguments),
        machine=machine,
        machine_words=tuple(
            word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))
        ),
        knobs=knobs,
        ranks=ranks,
        stops_equal_ranks=options.rank == ALL_RANKS,
        live=_absolute(options.live) if options.live != NO_FOLDER else NO_FOLDER,
        advises=options.advise,
        html=_absolute(html),
        output=_absolute(output),
        prints_json=options.json,
    )


def _absolute(path: pathlib.Path | None) -> pathlib.Path | None:
    """Return a path of the folder in which the command was given: the program may change it."""
    return None if path is None else path.absolute()


def ranks_of(world: int | None, text: str | None) -> tuple[int, ...]:
    """Return the ranks that are run, in order; none without `--world`.

    >>> ranks_of(8, "0,5-7"), ranks_of(2, "all"), ranks_of(8, None), ranks_of(None, None)
    ((0, 5, 6, 7), (0, 1), (0,), ())

    Raises UsageError for text that names no ranks of the world.
    """
    if world is None:
        if text is not None:
            raise UsageError("--rank needs the number of processes: write --world 8 as well")
        return ()
    if world < 1:
        raise UsageError(f"--world {world} is no number of processes: write 1 or more")
    if text == ALL_RANKS:
        return tuple(range(world))
    ranks: set[int] = set()
    for part in (text or "0").split(","):
        first, _, last = part.strip().partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()):
            raise UsageError(f"--rank {text!r} names no ranks: write a number, several such as 0,4-7, or all")
        ranks.update(range(int(first), int(last) + 1))
    if not ranks or max(ranks) >= world:
        raise UsageError(f"--rank {text!r} names ranks that a world of {world} does not have: write 0 to {world - 1}")
    return tuple(sorted(ranks))


def _check_several_ranks(
    ranks: Sequence[int], options: argparse.Namespace, html: pathlib.Path | None, output: pathlib.Path | None
) -> None:
    """Raise UsageError for options whose result is that of one rank, and for results that cannot be written."""
    for name, option in _OF_ONE_RANK.items():
        if getattr(options, name) not in (None, False):
            raise UsageError(f"{option} is for one rank: name it, such as --rank {ranks[0]}")
    if is_page(html):
        check_output("--html", options.html, result_files.PAGE)
    folders = {"-o": output, "--html": None if is_page(html) else html}
    for option, path in folders.items():
        if path is None:
            continue
        above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not above.is_dir():
            raise UsageError(f"{option}: {str(above)!r} is a file; several ranks are written to a folder")
        if path.is_dir() and any(path.iterdir()):
            raise UsageError(f"{option}: the folder {str(path)!r} is not empty; name another one, or empty it")
    if html is not None and html == output:
        raise UsageError(f"--html and -o name the same folder {str(html)!r}; write two names")


def is_page(path: pathlib.Path | None) -> bool:
    """Return whether a path names a page, and not a folder of pages."""
    return path is not None and path.suffix.lower() in (".html", ".htm")


def _check_files(html: str | None, output: str | None) -> None:
    """Raise UsageError for results of one run that cannot be written."""
    check_output("--html", html, result_files.PAGE)
    check_output("-o", output, result_files.tape_kind(output or ""))
    if html is not None and output is not None and os.path.realpath(html) == os.path.realpath(output):
        raise UsageError(f"--html and -o name the same file {html!r}; write two names")


def _check_live(options: argparse.Namespace) -> None:
    """Raise UsageError for a folder that cannot be written, and for options that need all calls recorded."""
    _check_folder(options.live)
    if options.advise:
        raise UsageError("--advise needs all calls recorded: leave out --live")
    if options.knob:
        raise UsageError("--knob changes a run that is recorded completely: leave out --live")


def _check_folder(folder: pathlib.Path) -> None:
    """Raise UsageError for a folder that cannot take the run of this process."""
    from memexplore.ranks.writer import rank_of_environment

    if folder == NO_FOLDER:
        return
    try:
        rank, _ = rank_of_environment()
    except ValueError as error:
        raise UsageError(str(error)) from None
    own = folder / f"rank={rank}"
    if own.exists():
        raise UsageError(f"--live: {str(own)!r} exists already; name another folder, or remove this one")
    above = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if not above.is_dir():
        raise UsageError(f"--live: {str(above)!r} is a file; name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--live: the folder {str(folder)!r} cannot be made: {error.strerror}") from None


def _machine(options: argparse.Namespace, rank: int) -> Machine:
    """Return the machine that the options name. Default: the real GPU if usable, else a virtual T4.

    Raises UsageError for a real device with options of a virtual one, or that is not there.
    """
    from memexplore.run.machine import machine_of

    try:
        machine = machine_of(options.gpu)
        if machine.is_virtual:
            gpu = machine.gpu if options.driver is None else machine.gpu.with_driver(options.driver)
            return machine_of(
                gpu,
                release=options.release,
                os=options.os or Os.LINUX,
                values=options.values or Values.KNOWN,
                world=options.world,
                rank=rank,
            )
    except ValueError as error:
        raise UsageError(str(error)) from None
    for option in ("release", "os", "driver", "values", "world"):
        if getattr(options, option) is not None:
            raise UsageError(f"--{option} needs a virtual GPU; name one with --gpu")
    return machine


def _changed_by(texts: Sequence[str], machine: Machine) -> tuple[Knobs, Machine]:
    """Return the knobs of ``--knob``, and the machine with what they say of it."""
    from memexplore.run.knobs.applying.on_machine import on_machine
    from memexplore.run.knobs.knobs import knobs_of

    try:
        knobs = knobs_of(texts)
        return knobs, on_machine(knobs, machine)
    except ValueError as error:
        raise UsageError(f"--knob: {error}") from None
