"""The commands of `memexplore`: text or JSON to stdout, and an exit status."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from memexplore.cli import compare, doctor, examples, export, gpus, lab, open, run, run_options, verify
from memexplore.cli.options import ERROR, FITS, USAGE, UsageError
from memexplore.text.package import VERSION

_COMMANDS = {"open": open, "export": export, "verify": verify, "gpus": gpus}
"""Commands that take nothing but their options."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 success or fits, 1 error, 2 usage error, 3 out of memory, 4 nothing ran on the GPU or child processes were not
    measured, 130 interrupted.
    """
    arguments, script_arguments = run_options.split_arguments(list(sys.argv[1:] if argv is None else argv))
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "lab":
        parser.error(f"unrecognized arguments: {' '.join(rest)}" + _hint(options.command))
    try:
        match options.command:
            case "run":
                return run.run(options, script_arguments)
            case "compare":
                return compare.main(options, script_arguments)
            case "lab":
                return lab.lab(rest)
            case "doctor":
                return FITS if doctor.report() else ERROR
            case name:
                return _COMMANDS[name].main(options)
    except UsageError as error:
        print(f"memexplore {options.command}: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader closed the pipe (`| head`): without a new stdout the interpreter would fail to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR


def _hint(command: str) -> str:
    return " (give the arguments of the script after --)" if command in ("run", "compare") else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memexplore",
        description="See where GPU memory goes while a PyTorch model trains, with or without a GPU.",
        epilog=examples.text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"memexplore {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help_text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=help_text,
            description=textwrap.fill(help_text, shutil.get_terminal_size().columns - 2),
            epilog=examples.text(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    run_options.add(command)
    compare.add(command)
    for name in ("open", "export", "verify", "gpus"):
        _COMMANDS[name].add(command)
    command("lab", "Open JupyterLab on the first notebook; further arguments go to JupyterLab.")
    command("doctor", "Report what this machine has and what is missing.")
    return parser
