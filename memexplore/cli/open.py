"""`memexplore open`: a snapshot, a tape, or a folder, as text, JSON or an HTML page."""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from memexplore.cli import folder, snapshot_folder
from memexplore.cli.options import ERROR, FITS, INTERRUPTED, AddCommand, check_output, reading, write_output
from memexplore.cli.report_text import report_of, write_html
from memexplore.cli.terminal import is_terminal
from memexplore.text import result_files
from memexplore.text.units import size_text

if TYPE_CHECKING:
    from memexplore.tape import Tape


def add(add_command: AddCommand) -> None:
    """Add the parser of the command."""
    opened = add_command(
        "open",
        "Show a PyTorch memory snapshot, a saved tape, a folder of a watched run, or a folder with a tape or snapshot "
        "of each rank.",
    )
    opened.add_argument("file", type=pathlib.Path)
    opened.add_argument("--json", action="store_true", help="print one JSON object")
    opened.add_argument(
        "--follow",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show a folder of a run until the run ends; default: on a terminal, if the run goes on",
    )
    opened.add_argument("--html", type=pathlib.Path, metavar="OUT", help="write a stand-alone HTML page per device")


def main(options: argparse.Namespace) -> int:
    """Show a file or a folder, and return the exit status."""
    from memexplore import snapshot
    from memexplore.out_of_memory.value import of_tape

    check_output("--html", options.html, result_files.PAGE)
    if options.file.is_dir():
        if options.html is not None:
            print("memexplore: --html writes a page of one tape: give a file of the folder", file=sys.stderr)
            return ERROR
        return _open_folder(options)
    with reading(options.file):
        tapes = snapshot.load(options.file)
        devices = [_device_summary(device, tape) for device, tape in tapes.items()]  # of tapes with addresses only
    if not tapes:
        print("memexplore: the file has no device: nothing was on the GPU when it was written", file=sys.stderr)
    if options.html is not None:
        pages = [options.html.with_stem(options.html.stem + (f"-{n}" if n else "")) for n in range(len(tapes))]
        for path in pages:
            check_output("--html", path, result_files.PAGE)
        for path, tape in zip(pages, tapes.values(), strict=True):
            write_output(path, functools.partial(write_html, tape, of_tape(tape)))
    if options.json:
        print(json.dumps({"devices": devices}, indent=2))
        return FITS
    for device, tape in zip(devices, tapes.values(), strict=True):
        print(
            f"Device {device['device']}: {device['events']} events, {device['segments']} segments, "
            f"{size_text(device['current_allocated'])} allocated of "
            f"{size_text(device['current_reserved'])} reserved at the end, {device['ooms']} out of memory"
        )
        print(report_of(tape), end="\n\n")
    return FITS


def _open_folder(options: argparse.Namespace) -> int:
    follow = False if options.json else options.follow
    with reading(options.file):
        if snapshot_folder.has_snapshots(options.file):
            print((snapshot_folder.as_json if options.json else snapshot_folder.text)(options.file))
            return FITS
        if follow is None:
            follow = is_terminal(sys.stdout) and folder.is_running(options.file)
        if follow:
            try:
                folder.follow(options.file)
            except KeyboardInterrupt:
                return INTERRUPTED
        text = folder.as_json(options.file) if options.json else folder.text(options.file)
    print(text)
    return FITS


def _device_summary(device: Any, tape: Tape) -> dict[str, Any]:
    """Return the object that `memexplore open --json` prints for one device."""
    import numpy as np

    from memexplore import snapshot
    from memexplore.analysis import curves
    from memexplore.out_of_memory.value import of_tape
    from memexplore.tape import Action

    post_mortem = of_tape(tape)

    def last(name: Any) -> int:
        return int(curves.curve(tape, name)[-1]) if len(tape) else 0

    return {
        "device": device,
        "events": snapshot.event_count(tape),
        "segments": snapshot.segment_count(tape),
        "current_allocated": last("allocated"),
        "current_reserved": last("reserved"),
        "peak_allocated": curves.peak(tape, "allocated")[0],
        "peak_reserved": curves.peak(tape, "reserved")[0],
        "ooms": int(np.count_nonzero(tape.action == Action.OOM)),
    } | ({"post_mortem": post_mortem.as_dict()} if post_mortem is not None else {})
