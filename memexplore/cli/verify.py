"""`memexplore verify`: replay a recorded snapshot through the allocator model and compare."""

from __future__ import annotations

import argparse
import json
import pathlib

from memexplore.cli.options import FITS, AddCommand, reading
from memexplore.cli.report_text import text_table


def add(add_command: AddCommand) -> None:
    """Add the parser of the command."""
    verify = add_command("verify", "Replay a recorded snapshot through the allocator model and compare.")
    verify.add_argument("file", type=pathlib.Path)
    verify.add_argument("--json", action="store_true", help="print one JSON object")


def main(options: argparse.Namespace) -> int:
    """Print how many addresses the model gets right, and return the exit status."""
    from memexplore import snapshot

    with reading(options.file):
        result = snapshot.verify(options.file)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        rows = [("device", "", "as recorded", "of")] + [
            (str(device["device"]), name.replace("_", " "), *map(str, value))
            for device in result["devices"]
            for name, value in device.items()
            if isinstance(value, (list, tuple))
        ]
        print("\n".join(text_table(rows, "llrr")))
    return FITS
