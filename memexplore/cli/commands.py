"""The commands `run`, `open`, `verify`, `gpus`, `lab` and `doctor`: text or JSON to stdout, an exit status."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import pathlib
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import memexplore
from memexplore import doctor, gpu_catalogue, result_files
from memexplore.cli import examples, folder, lab, run, snapshot_folder
from memexplore.cli.options import (
    ERROR,
    FITS,
    INTERRUPTED,
    USAGE,
    UsageError,
    check_output,
    check_release,
    find_gpu,
    write_output,
)
from memexplore.cli.report_text import report_of, text_table
from memexplore.cli.terminal import is_terminal
from memexplore.tape import Os
from memexplore.units import size_text
from memexplore.virtual_gpu.value_setting import Values

if TYPE_CHECKING:
    from memexplore.tape import Tape


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 success or fits, 1 error, 2 usage error, 3 out of memory, 4 nothing ran on the GPU or child processes were not
    measured, 130 interrupted.
    """
    arguments, script_arguments = run.split_arguments(list(sys.argv[1:] if argv is None else argv))
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "lab":
        parser.error(f"unrecognized arguments: {' '.join(rest)}" + _hint(options.command))
    try:
        match options.command:
            case "run":
                return run.run(options, script_arguments)
            case "open":
                return _open(options)
            case "verify":
                return _verify(options)
            case "gpus":
                return _gpus(options)
            case "lab":
                return lab.lab(rest)
            case _:
                return FITS if doctor.report() else ERROR
    except UsageError as error:
        print(f"memexplore {options.command}: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader closed the pipe (`| head`): without a new stdout the interpreter would fail to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR


def _hint(command: str) -> str:
    return " (give the arguments of the script after --)" if command == "run" else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memexplore",
        description=(memexplore.__doc__ or "").partition("\n")[0],
        epilog=examples.text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"memexplore {memexplore.__version__}")
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

    running = command(
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
        "--live",
        type=pathlib.Path,
        nargs="?",
        const=pathlib.Path(),
        metavar="FOLDER",
        help="watch the training steps instead of recording everything, show them while they run, and write them to a "
        "folder that `memexplore open FOLDER` follows; a name that ends with .py is the script",
    )
    running.add_argument(
        "--advise",
        action="store_true",
        help="after an out-of-memory error, search settings with which the step that failed would have fitted",
    )
    running.add_argument(
        "--html",
        type=pathlib.Path,
        metavar="FILE",
        help="write a stand-alone HTML page; of several ranks that of the worst, or a folder with one each",
    )
    running.add_argument("--json", action="store_true", help="print one JSON object; the script prints to stderr")
    running.add_argument(
        "-o",
        "--output",
        type=pathlib.Path,
        metavar="TAPE.parquet",
        help="save the tape; of several ranks a folder of tapes for `memexplore open`",
    )

    opened = command(
        "open",
        "Show a PyTorch memory snapshot, a saved tape, a folder of a watched run, or a folder with a snapshot of each "
        "rank.",
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

    verify = command("verify", "Replay a recorded snapshot through the allocator model and compare.")
    verify.add_argument("file", type=pathlib.Path)
    verify.add_argument("--json", action="store_true", help="print one JSON object")

    gpus = command("gpus", "List the GPU catalogue, or one GPU with the source of each number.")
    gpus.add_argument("gpu", nargs="?", help="a name or a size")
    gpus.add_argument("--release", metavar="RELEASE", help="a torch release, such as 2.11; default: the installed one")
    gpus.add_argument("--json", action="store_true", help="print one JSON object")

    command("lab", "Open JupyterLab on the first notebook; further arguments go to JupyterLab.")
    command("doctor", "Report what this machine has and what is missing.")
    return parser


# --- open, verify --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Print the error of an unreadable file as one sentence, and exit with the status of an error."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        print(f"memexplore: {reason if str(path) in reason else f'{path}: {reason}'}", file=sys.stderr)
        raise SystemExit(ERROR) from None


def _open(options: argparse.Namespace) -> int:
    from memexplore import snapshot
    from memexplore.postmortem.value import of_tape

    check_output("--html", options.html, result_files.PAGE)
    if options.file.is_dir():
        if options.html is not None:
            print("memexplore: --html writes a page of one tape: give a file of the folder", file=sys.stderr)
            return ERROR
        return _open_folder(options)
    with _reading(options.file):
        tapes = snapshot.load(options.file)
        devices = [_device_summary(device, tape) for device, tape in tapes.items()]  # of tapes with addresses only
    if options.html is not None:
        pages = [options.html.with_stem(options.html.stem + (f"-{n}" if n else "")) for n in range(len(tapes))]
        for path in pages:
            check_output("--html", path, result_files.PAGE)
        for path, tape in zip(pages, tapes.values(), strict=True):
            write_output(path, functools.partial(run.write_html, tape, of_tape(tape)))
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
    with _reading(options.file):
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
    from memexplore.postmortem.value import of_tape
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


def _verify(options: argparse.Namespace) -> int:
    from memexplore import snapshot

    with _reading(options.file):
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


# --- gpus, lab, doctor ---------------------------------------------------------------------------------------------


def _gpus(options: argparse.Namespace) -> int:
    check_release(options.release)
    # From the package metadata: importing torch takes a second.
    release = options.release or importlib.metadata.version("torch")
    if options.gpu is not None:
        gpu = find_gpu(options.gpu).for_release(release)
        if options.json:
            import dataclasses

            print(json.dumps(dataclasses.asdict(gpu) | {"capacity": gpu.capacity}, indent=2))
            return FITS
        print(f"{gpu.key}: {gpu.name}, compute capability {'.'.join(map(str, gpu.compute_capability))}")
        low, high = map(size_text, gpu.outside_range)
        span = f"{low} to {high}, depending on the program; " if gpu.outside else ""
        print(f"  total: {size_text(gpu.total)} ({gpu.sources.total})")
        print(f"  outside the allocator: {size_text(gpu.outside)} ({span}{gpu.sources.outside})")
        print(f"  capacity: {size_text(gpu.capacity)}\n  speed: {gpu.sources.performance}")
        if gpu.note:
            print(f"  {gpu.note}")
        return FITS
    table = gpu_catalogue.gpus(release)
    if options.json:
        print(json.dumps({"gpus": json.loads(table.reset_index().to_json(orient="records"))}, indent=2))
        return FITS

    def teraflops(rate: float) -> str:
        return "-" if rate != rate else f"{rate / 1e12:.0f}"

    rows = [("GPU", "capacity", "total", "outside", "cc", "SMs", "GB/s", "fp32", "tf32", "fp16", "bf16")] + [
        (
            str(row.Index),
            size_text(row.capacity),
            ("~" if "total" in row.estimated else "") + size_text(row.total),
            ("~" if "outside" in row.estimated else "") + size_text(row.outside),
            row.compute_capability,
            str(row.multiprocessors),
            f"{row.bandwidth / 1e9:.0f}",
            *(teraflops(getattr(row, f"flops_{kind}")) for kind in ("fp32", "tf32", "fp16", "bf16")),
        )
        for row in table.itertuples()
    ]
    print("\n".join(text_table(rows, "l" + "r" * 10)))
    print("Rates in dense TFLOP/s. ~ is estimated. `memexplore gpus NAME` gives the source of each number.")
    return FITS
