"""`memexplore compare`: run a script on the GPU of this machine and on the virtual one, and compare."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from memexplore.cli.options import ERROR, FITS, AddCommand, UsageError, check_output, reading, write_output
from memexplore.text import result_files

if TYPE_CHECKING:
    from memexplore.analysis.comparison import Comparison

_STEPS = 3


def add(add_command: AddCommand) -> None:
    """Add the parser of the command."""
    comparing = add_command(
        "compare",
        "Run the first steps of a script on the GPU of this machine and on the virtual one of its name, and say what "
        "differs. Two tapes, measured and predicted, are compared on any machine.",
    )
    comparing.add_argument("script", type=pathlib.Path, help="a Python file, or a measured tape; arguments after --")
    comparing.add_argument("predicted", nargs="?", type=pathlib.Path, help="the predicted tape")
    comparing.add_argument(
        "--steps",
        type=int,
        default=_STEPS,
        metavar="N",
        help=f"end the script after so many steps of its optimizers; default: {_STEPS}",
    )
    comparing.add_argument(
        "--share",
        metavar="FILE",
        help="write card, versions, peaks and the requests that differ to a file for an issue, after showing it; it "
        "has no names, paths, code or values",
    )
    comparing.add_argument("--html", metavar="FILE", help="write a stand-alone HTML page with both runs")
    comparing.add_argument("--yes", action="store_true", help="write that file without asking")
    comparing.add_argument("--json", action="store_true", help="print one JSON object")


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print the comparison, and return the exit status; `arguments` are those of the script.

    Raises UsageError for options that cannot be followed.
    """
    check_output("--share", options.share, result_files.MEASUREMENT)
    check_output("--html", options.html, result_files.PAGE)
    if options.steps < 1:
        raise UsageError("--steps: at least one step is compared")
    comparison = _comparison(options, arguments)
    from memexplore.run.shared_measurement import shared

    print(json.dumps(shared(comparison), indent=2) if options.json else comparison)
    if options.html is not None:
        from memexplore.page.report import comparison_html

        page = comparison_html(comparison)
        write_output(pathlib.Path(options.html), lambda to: to.write_text(page, encoding="utf-8"))
    return FITS if options.share is None else _share(pathlib.Path(options.share), shared(comparison), options)


def _comparison(options: argparse.Namespace, arguments: list[str]) -> Comparison:
    from memexplore.run.comparing import NoGpuError, compare
    from memexplore.run.programs.limit import FailureLimit
    from memexplore.run.programs.script import Script
    from memexplore.tape import Tape

    if options.predicted is not None:
        tapes = []
        for path in (options.script, options.predicted):
            with reading(path):
                tapes.append(Tape.load(path))
        return compare(*tapes)
    if not options.script.is_file():
        raise UsageError(f"no script {str(options.script)!r}; give the path of a Python file")
    try:
        return compare(Script(options.script, tuple(arguments), FailureLimit(float("inf"), options.steps)))
    except NoGpuError as error:
        raise UsageError(str(error)) from None


def _share(path: pathlib.Path, content: dict[str, Any], options: argparse.Namespace) -> int:
    text = json.dumps(content, indent=2) + "\n"
    print(f"\n{path} gets this, and nothing else:\n{text}", file=sys.stderr)
    if not options.yes:
        try:
            answer = input("Write it? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            print("memexplore: nothing is written (--yes writes without asking)", file=sys.stderr)
            return ERROR
    write_output(path, lambda to: to.write_text(text, encoding="utf-8"))
    return FITS
