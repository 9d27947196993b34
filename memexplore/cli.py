"""The command `memexplore`: run, open, verify, gpus, lab, doctor."""

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
from memexplore.doctor import INSTALL_LAB
from memexplore.units import size_text

if TYPE_CHECKING:
    from memexplore.tape import Tape

FITS, ERROR, USAGE, OOM, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit statuses; 130 is the shell's own for Ctrl-C."""

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_FIRST_NOTEBOOK = "01_where_does_memory_go.ipynb"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 fine or fits, 1 error, 2 usage, 3 out of memory."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, script_arguments = words, []
    if words[:1] == ["run"] and "--" in words:
        own, script_arguments = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = _parser()
    options, rest = parser.parse_known_args(own)
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
        # The reader of our output has gone (`| head`); the interpreter must not trip over it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR


class _UsageError(Exception):
    """The command line asks for something that cannot be had; the message says what to write instead."""


def _hint(command: str) -> str:
    return " (the script's own arguments stand behind --)" if command == "run" else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="memexplore", description=memexplore.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"memexplore {memexplore.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help_text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)

    run = command("run", "Run a training script and say where the memory goes; exit status 0 fits, 3 out of memory.")
    run.add_argument("script", type=pathlib.Path, help="a Python file; its own arguments stand behind --")
    run.add_argument(
        "--gpu",
        help="a catalogue name, a size such as 24GiB, cuda or cpu; default: the real GPU if usable, else a virtual T4",
    )
    run.add_argument("--release", metavar="RELEASE", help="follow another torch release's rules, such as 2.11")
    run.add_argument("--html", type=pathlib.Path, metavar="FILE", help="write a stand-alone page")
    run.add_argument("--json", action="store_true", help="print one JSON object; the script's output goes to stderr")
    run.add_argument("-o", "--output", type=pathlib.Path, metavar="TAPE.parquet", help="save the tape")

    opened = command("open", "Show a PyTorch memory snapshot or a saved tape.")
    opened.add_argument("file", type=pathlib.Path)
    opened.add_argument("--json", action="store_true", help="print one JSON object")
    opened.add_argument("--html", type=pathlib.Path, metavar="OUT", help="write a stand-alone page per device")

    verify = command("verify", "Replay a recorded snapshot through the allocator model and compare.")
    verify.add_argument("file", type=pathlib.Path)
    verify.add_argument("--json", action="store_true", help="print one JSON object")

    gpus = command("gpus", "List the GPU catalogue, or one GPU with the source of each number.")
    gpus.add_argument("gpu", nargs="?", help="a name or a size")
    gpus.add_argument(
        "--release", metavar="RELEASE", help="under another torch release than the installed, such as 2.11"
    )
    gpus.add_argument("--json", action="store_true", help="print one JSON object")

    command("lab", "Open JupyterLab on the first notebook; further arguments are JupyterLab's.")
    command("doctor", "Say what this machine has and what is missing.")
    return parser


# --- run -----------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    if not options.script.is_file():
        raise _UsageError(f"there is no script {str(options.script)!r}")
    _check_release(options.release)
    if options.gpu is not None and options.gpu not in ("cuda", "cpu"):
        _gpu(options.gpu)
    for path in (options.html, options.output):
        if path is not None and not path.absolute().parent.is_dir():
            raise _UsageError(f"there is no folder {str(path.absolute().parent)!r} to write {path.name} into")
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
    told = summary.summary(tape)
    print(json.dumps(told, indent=2) if options.json else _report(tape, told), file=output, flush=True)
    return status or (OOM if told["outcome"] == "oom" else FITS)


def _gpu(text: str) -> gpu_catalogue.Gpu:
    try:
        return gpu_catalogue.find(text)
    except ValueError as error:
        raise _UsageError(str(error)) from None


def _check_release(text: str | None) -> None:
    if text is not None and not re.fullmatch(r"\d+\.\d+(\.\d+)?", text):
        raise _UsageError(f"{text!r} is no torch release: write one such as 2.11")


def _private_stdout() -> Any:
    """A stream to where stdout went; from now on everything written to stdout goes to stderr.

    For good: what the script's threads and exit handlers print later would spoil the one JSON object as well.
    """
    sys.stdout.flush()
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return private


def _record(function: Callable[[], None], gpu: str | None, release: str | None) -> Tape:
    """Return the tape of a function. Default: the real GPU if usable, else a virtual T4."""
    import torch

    from memexplore import capture, targets

    place = gpu or targets.default_target()
    if not targets.is_real(place):
        return capture.simulate(function, gpu=place, release=release)
    if release is not None:
        raise _UsageError("--release changes the rules of a virtual GPU: name one with --gpu")
    try:
        device = targets.real_device(place)
    except ValueError as error:
        raise _UsageError(str(error)) from None
    with contextlib.suppress(torch.OutOfMemoryError), capture.record(device) as recording:
        function()
    return recording.tape


# --- text ----------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Lines of a table; one letter a column, `l` or `r`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        ).rstrip()
        for row in rows
    ]


def _report(tape: Tape, told: dict[str, Any]) -> str:
    """Sentence, categories at the peak, and the largest tensors then."""
    from memexplore.analysis import groups, summary

    lines = [summary.sentence(tape)]
    if died := groups.oom_text(tape):
        lines += ["", died]
    if peak := told["peak_allocated"]:
        shares = [(kind, size) for kind, size in told["at_peak"]["by_category"].items() if size]
        rows = [(kind, size_text(size), f"{size / peak * 100:.0f} %") for kind, size in shares]
        lines += ["", "At the peak:", *_table(rows, "lrr")]
        lines += ["", "The largest tensors then:", *_largest(tape)]
        lines += _where_from(tape)
    lines += [f"Note: {note}" for note in tape.meta.notes]
    return "\n".join(lines)


def _largest(tape: Tape) -> list[str]:
    """A table of the largest tensors at the peak, without the columns that the tape has no values for."""
    from memexplore.analysis import tables

    table = tables.tensors(tape, count=10)[["size", "category", "op", "layer", "line"]]
    table["size"] = table["size"].map(size_text)
    table["line"] = table["line"].map(_nearby)
    table = table.loc[:, (table != "").any()]
    rows = [list(table.columns), *table.to_numpy().tolist()]
    return _table(rows, "r" + "l" * (len(rows[0]) - 1))


def _where_from(tape: Tape) -> list[str]:
    """Who was alive at the peak by line, how the segments are filled, and what grew; each only where it is known."""
    from memexplore.analysis import addresses, curves, groups

    lines = []
    if any(tape.stacks):
        held = groups.by_line(tape).head(10)
        rows = [
            (size_text(size), f"{count:,}", category, _nearby(line))
            for size, count, category, line in zip(*(held[name].tolist() for name in held.columns), strict=True)
        ]
        lines += ["", "By line of code:", *_table([("size", "blocks", "mostly", "line"), *rows], "rrll")]
    if addresses.has_segments(tape):
        lines += ["", addresses.fragmentation_text(tape, curves.peak(tape)[1])]
    if grew := groups.growth_text(tape):
        table = groups.growth(tape).head(10)
        rows = [
            (f"+{size_text(size)}", category, layer, _nearby(line))
            for size, category, layer, line in zip(
                *(table[name].tolist() for name in ("grew", "category", "layer", "line")), strict=True
            )
        ]
        lines += ["", grew, *_table([("grew", "category", "layer", "line"), *rows], "rlll")]
    return lines


def _nearby(line: str) -> str:
    """`file:line` relative to the current folder where the file lies below it."""
    here = os.getcwd() + os.sep
    return line.removeprefix(here)


def _write_html(tape: Tape, path: pathlib.Path) -> None:
    from memexplore import report

    path.write_text(report.html(tape), encoding="utf-8")


# --- open, verify --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Turn what a bad file raises into one sentence and the exit status of an error."""
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
    told = [_device(device, tape) for device, tape in tapes.items()]
    if options.json:
        print(json.dumps({"devices": told}, indent=2))
        return FITS
    from memexplore.analysis import summary

    for of_device, tape in zip(told, tapes.values(), strict=True):
        print(
            f"Device {of_device['device']}: {of_device['events']} events, {of_device['segments']} segments, "
            f"{size_text(of_device['current_allocated'])} allocated of "
            f"{size_text(of_device['current_reserved'])} reserved at the end, {of_device['ooms']} out of memory"
        )
        print(_report(tape, summary.summary(tape)), end="\n\n")
    return FITS


def _device(device: Any, tape: Tape) -> dict[str, Any]:
    """What `memexplore open --json` says of one device."""
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
        told = snapshot.verify(options.file)
    if options.json:
        print(json.dumps(told, indent=2))
    else:
        rows = [("device", "", "as recorded", "of")] + [
            (str(of_device["device"]), name.replace("_", " "), *map(str, value))
            for of_device in told["devices"]
            for name, value in of_device.items()
            if isinstance(value, (list, tuple))
        ]
        print("\n".join(_table(rows, "llrr")))
    return FITS


# --- gpus, lab, doctor ---------------------------------------------------------------------------------------------


def _gpus(options: argparse.Namespace) -> int:
    _check_release(options.release)
    # Read off the package: importing torch takes a second.
    release = options.release or importlib.metadata.version("torch")
    if options.gpu is not None:
        gpu = _gpu(options.gpu).under(release)
        if options.json:
            import dataclasses

            print(json.dumps(dataclasses.asdict(gpu) | {"capacity": gpu.capacity}, indent=2))
            return FITS
        print(f"{gpu.key}: {gpu.name}, compute capability {'.'.join(map(str, gpu.compute_capability))}")
        low, high = map(size_text, gpu.outside_range)
        between = f"{low} to {high} by what a process runs; " if gpu.outside else ""
        print(f"  total: {size_text(gpu.total)} ({gpu.sources.total})")
        print(f"  outside the allocator: {size_text(gpu.outside)} ({between}{gpu.sources.outside})")
        print(f"  capacity: {size_text(gpu.capacity)}\n  speed: {gpu.sources.performance}")
        if gpu.note:
            print(f"  {gpu.note}")
        return FITS
    table = gpu_catalogue.gpus(release)
    if options.json:
        print(json.dumps({"gpus": json.loads(table.reset_index().to_json(orient="records"))}, indent=2))
        return FITS

    def tera(rate: float) -> str:
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
            *(tera(getattr(row, f"flops_{kind}")) for kind in ("fp32", "tf32", "fp16", "bf16")),
        )
        for row in table.itertuples()
    ]
    print("\n".join(_table(rows, "l" + "r" * 10)))
    print("Rates in dense TFLOP/s. ~ is estimated. `memexplore gpus NAME` gives the source of each number.")
    return FITS


def _notebook() -> pathlib.Path | None:
    """The first notebook: beside the package in a checkout, inside it, or below the current folder."""
    homes = (pathlib.Path(_PACKAGE).parent, pathlib.Path(_PACKAGE), pathlib.Path.cwd())
    paths = (home / "notebooks" / _FIRST_NOTEBOOK for home in homes)
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
    # JupyterLab refuses to start as root unless told so; in a container root is all there is.
    as_root = hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in arguments
    command = [sys.executable, "-m", "jupyterlab", str(notebook), *(["--allow-root"] if as_root else []), *arguments]
    with contextlib.suppress(KeyboardInterrupt):
        return subprocess.call(command)
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
