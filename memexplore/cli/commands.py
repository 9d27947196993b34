"""The commands `run`, `open`, `verify`, `gpus`, `lab` and `doctor`: text or JSON to stdout, an exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import memexplore
from memexplore import doctor, gpu_catalogue, script
from memexplore.cli.report_text import report_text, text_table
from memexplore.doctor import INSTALL_LAB
from memexplore.units import size_text

if TYPE_CHECKING:
    from memexplore.tape import Tape

FITS, ERROR, USAGE, OOM, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit statuses; 130 is the shell's status for Ctrl-C."""

_PACKAGE = pathlib.Path(memexplore.__file__).parent
_FIRST_NOTEBOOK = "01_where_does_memory_go.ipynb"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success or fits, 1 error, 2 usage error, 3 out of memory."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    script_arguments: list[str] = []
    if arguments[:1] == ["run"] and "--" in arguments:
        split = arguments.index("--")
        arguments, script_arguments = arguments[:split], arguments[split + 1 :]
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "lab":
        parser.error(f"unrecognized arguments: {' '.join(rest)}" + _hint(options.command))
    try:
        match options.command:
            case "run":
                return _run(options, script_arguments)
            case "open":
                return _open(options)
            case "verify":
                return _verify(options)
            case "gpus":
                return _gpus(options)
            case "lab":
                return _lab(rest)
            case _:
                return FITS if doctor.report() else ERROR
    except _UsageError as error:
        print(f"memexplore {options.command}: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader closed the pipe (`| head`): without a new stdout the interpreter would fail to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR


class _UsageError(Exception):
    """Invalid command line; the message says what to write instead."""


def _hint(command: str) -> str:
    return " (give the arguments of the script after --)" if command == "run" else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="memexplore", description=memexplore.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"memexplore {memexplore.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help_text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)

    run = command("run", "Run a training script and report its memory; exit status 0 fits, 3 out of memory.")
    run.add_argument("script", type=pathlib.Path, help="a Python file; give its own arguments after --")
    run.add_argument(
        "--gpu",
        help="a catalogue name, a size such as 24GiB, cuda or cpu; default: the real GPU if usable, else a virtual T4",
    )
    run.add_argument("--release", metavar="RELEASE", help="follow the rules of this torch release, such as 2.11")
    run.add_argument("--html", type=pathlib.Path, metavar="FILE", help="write a stand-alone HTML page")
    run.add_argument("--json", action="store_true", help="print one JSON object; the script's output goes to stderr")
    run.add_argument("-o", "--output", type=pathlib.Path, metavar="TAPE.parquet", help="save the tape")

    opened = command("open", "Show a PyTorch memory snapshot or a saved tape.")
    opened.add_argument("file", type=pathlib.Path)
    opened.add_argument("--json", action="store_true", help="print one JSON object")
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


# --- run -----------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    if not options.script.is_file():
        raise _UsageError(f"no script {str(options.script)!r}; give the path of a Python file")
    _check_release(options.release)
    if options.gpu is not None and options.gpu not in ("cuda", "cpu"):
        _gpu(options.gpu)
    for path in (options.html, options.output):
        if path is not None and not path.absolute().parent.is_dir():
            raise _UsageError(f"no folder {str(path.absolute().parent)!r} for {path.name}; create it first")
    output = _private_stdout() if options.json else sys.stdout
    status = 0

    def function() -> None:
        nonlocal status
        status = script.execute(options.script, arguments)

    try:
        tape = _record(function, options.gpu, options.release)
    except _UsageError:
        raise
    except BaseException as error:
        sys.stdout.flush()
        script.print_traceback(error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else ERROR
    sys.stdout.flush()

    from memexplore.analysis import summary

    if options.output is not None:
        tape.save(options.output)
    if options.html is not None:
        _write_html(tape, options.html)
    result = summary.summary(tape)
    print(json.dumps(result, indent=2) if options.json else report_text(tape), file=output, flush=True)
    return status or (OOM if result["outcome"] == "oom" else FITS)


def _gpu(text: str) -> gpu_catalogue.Gpu:
    try:
        return gpu_catalogue.find(text)
    except ValueError as error:
        raise _UsageError(str(error)) from None


def _check_release(text: str | None) -> None:
    if text is not None and not re.fullmatch(r"\d+\.\d+(\.\d+)?", text):
        raise _UsageError(f"{text!r} is not a torch release; write one such as 2.11")


def _private_stdout() -> Any:
    """Return a stream to the present stdout, and redirect stdout to stderr.

    The redirection stays, because threads and exit handlers of the script may print after the JSON object.
    """
    sys.stdout.flush()
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return private


def _record(function: Callable[[], None], gpu: str | None, release: str | None) -> Tape:
    """Return the tape of a function. Default: the real GPU if usable, else a virtual T4."""
    import torch

    from memexplore import capture, targets

    target = gpu or targets.default_target()
    if not targets.is_real(target):
        return capture.simulate(function, gpu=target, release=release)
    if release is not None:
        raise _UsageError("--release needs a virtual GPU; name one with --gpu")
    try:
        device = targets.real_device(target)
    except ValueError as error:
        raise _UsageError(str(error)) from None
    with contextlib.suppress(torch.OutOfMemoryError), capture.record(device) as recording:
        function()
    return recording.tape


# --- files -----------------------------------------------------------------------------------------------------------


def _write_html(tape: Tape, path: pathlib.Path) -> None:
    from memexplore import report

    path.write_text(report.html(tape), encoding="utf-8")


# --- open, verify --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Print the error of an unreadable file as one sentence, and exit with the status of an error."""
    try:
        yield
    except (OSError, ValueError) as error:
        print(f"memexplore: {path}: {error}", file=sys.stderr)
        raise SystemExit(ERROR) from None


def _open(options: argparse.Namespace) -> int:
    from memexplore import snapshot

    with _reading(options.file):
        tapes = snapshot.load(options.file)
    if options.html is not None:
        for number, tape in enumerate(tapes.values()):
            suffix = f"-{number}" if number else ""
            _write_html(tape, options.html.with_stem(options.html.stem + suffix))
    devices = [_device_summary(device, tape) for device, tape in tapes.items()]
    if options.json:
        print(json.dumps({"devices": devices}, indent=2))
        return FITS
    for device, tape in zip(devices, tapes.values(), strict=True):
        print(
            f"Device {device['device']}: {device['events']} events, {device['segments']} segments, "
            f"{size_text(device['current_allocated'])} allocated of "
            f"{size_text(device['current_reserved'])} reserved at the end, {device['ooms']} out of memory"
        )
        print(report_text(tape), end="\n\n")
    return FITS


def _device_summary(device: Any, tape: Tape) -> dict[str, Any]:
    """Return the object that `memexplore open --json` prints for one device."""
    import numpy as np

    from memexplore import snapshot
    from memexplore.analysis import curves
    from memexplore.tape import Action

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
    }


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
    _check_release(options.release)
    # From the package metadata: importing torch takes a second.
    release = options.release or importlib.metadata.version("torch")
    if options.gpu is not None:
        gpu = _gpu(options.gpu).for_release(release)
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


def _notebook() -> pathlib.Path | None:
    """Return the first notebook: beside the package in a checkout, inside it, or below the working directory."""
    folders = (_PACKAGE.parent, _PACKAGE, pathlib.Path.cwd())
    paths = (folder / "notebooks" / _FIRST_NOTEBOOK for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def _lab(arguments: list[str]) -> int:
    missing = [name for name in ("jupyterlab", "ipykernel") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"memexplore lab needs {' and '.join(missing)}: {INSTALL_LAB}", file=sys.stderr)
        return ERROR
    notebook = _notebook()
    if notebook is None:
        print(
            f"memexplore lab found no notebooks/{_FIRST_NOTEBOOK}: run it in a checkout of memexplore, "
            f"installed with {INSTALL_LAB}",
            file=sys.stderr,
        )
        return ERROR
    # JupyterLab refuses to run as root without --allow-root, and in a container root is often the only user.
    as_root = hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in arguments
    command = [sys.executable, "-m", "jupyterlab", str(notebook), *(["--allow-root"] if as_root else []), *arguments]
    with contextlib.suppress(KeyboardInterrupt):
        return subprocess.call(command)
    return INTERRUPTED
