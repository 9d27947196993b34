"""`memexplore gpus`: the GPU catalogue, or one GPU with the source of each number."""

from __future__ import annotations

import argparse
import importlib.metadata
import json

from memexplore.cli.options import FITS, AddCommand, check_release, find_gpu
from memexplore.cli.report_text import text_table
from memexplore.hardware import catalogue
from memexplore.text.units import size_text


def add(add_command: AddCommand) -> None:
    """Add the parser of the command."""
    gpus = add_command("gpus", "List the GPU catalogue, or one GPU with the source of each number.")
    gpus.add_argument("gpu", nargs="?", help="a name or a size")
    gpus.add_argument("--release", metavar="RELEASE", help="a torch release, such as 2.11; default: the installed one")
    gpus.add_argument("--json", action="store_true", help="print one JSON object")


def main(options: argparse.Namespace) -> int:
    """Print the catalogue or one GPU, and return the exit status."""
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
    table = catalogue.gpus(release)
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
