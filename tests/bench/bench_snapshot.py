"""`python -m tests.bench.bench_snapshot`: time and memory of opening a snapshot of a million events.

Each stage runs in a process of its own, beside `torch.cuda._memory_viz.trace_plot` with the same file. The file is
that of `tests.sample_tapes.big_tape`, replayed by the allocator model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from memexplore.tape import Action, Category, Tape

MIB = 1024**2


def write(path: pathlib.Path, rows: int) -> None:
    """Write the snapshot file of a tape with about `rows` rows."""
    from memexplore.allocator import replay
    from memexplore.snapshot import save_snapshot
    from tests.sample_tapes import big_tape

    tape = big_tape(rows * 2 // 3)
    # On a GPU a free has two rows, requested and completed.
    source = np.repeat(np.arange(len(tape)), np.where(tape.action == Action.FREE_REQUESTED, 2, 1))
    columns = {name: getattr(tape, name)[source] for name in ("address", "size", "stack")}
    # A line of code has its op, its layer and its category; the recordings have 16 to 313 stacks each.
    for name, table in (("op", tape.ops), ("module", tape.modules), ("category", tuple(Category))):
        columns[name] = columns["stack"] % len(table)
    action = tape.action[source]
    action[1:][source[1:] == source[:-1]] = Action.FREE_COMPLETED
    meta = tape.meta._replace(device="cuda:0")
    freed = Tape.from_columns(
        {**columns, "action": action}, meta=meta, ops=tape.ops, modules=tape.modules, stacks=tape.stacks
    )
    save_snapshot(replay(freed), path)


def resident() -> int:
    """Return the resident bytes of this process."""
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_resident() -> int:
    """Return the highest resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ours(path: pathlib.Path) -> dict[str, Any]:
    """Open a file with memexplore and draw the first figure."""
    import memexplore as mx
    from memexplore.analysis.verdict_content import verdict_content
    from memexplore.figures.timeline import timeline

    gc.collect()
    before, begin = resident(), time.perf_counter()
    (tape,) = mx.load(path).values()
    loaded = time.perf_counter()
    peak = peak_resident()
    gc.collect()
    after_load = resident()
    verdict = verdict_content(tape)
    figure = timeline(tape)
    data = figure.to_json()
    drawn = time.perf_counter()
    window = timeline(tape, (len(tape) // 2, len(tape) // 2 + 10_000)).to_json()
    return {
        "load_s": loaded - begin,
        "first_figure_s": drawn - begin,
        "zoom_s": time.perf_counter() - drawn,
        "highest": peak - before,
        "loaded": after_load - before,
        "highest_with_figure": peak_resident() - before,
        "figure_bytes": len(data),
        "window_bytes": len(window),
        "points": max(len(trace.x) for trace in figure.data),
        "verdict": verdict.headline,
    }


def viewer(path: pathlib.Path) -> dict[str, Any]:
    """Open a file with PyTorch's own viewer, which writes one HTML page."""
    from torch.cuda import _memory_viz

    gc.collect()
    before, begin = resident(), time.perf_counter()
    with open(path, "rb") as file:
        data = pickle.load(file)
    loaded = time.perf_counter()
    page = _memory_viz.trace_plot(data)
    return {
        "load_s": loaded - begin,
        "first_figure_s": time.perf_counter() - begin,
        "highest": peak_resident() - before,
        "figure_bytes": len(page),
    }


def main() -> None:
    """Print the results of memexplore and of PyTorch's viewer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--file", type=pathlib.Path, help="an existing snapshot, plain or gzip")
    parser.add_argument("--only", choices=["ours", "viewer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps({"ours": ours, "viewer": viewer}[options.only](options.file)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or pathlib.Path(folder) / "snapshot.pickle"
        if options.file is None:
            write(path, options.rows)
        size = path.stat().st_size
        print(f"file: {size / MIB:.0f} MiB, {options.rows:,} rows")
        for name in ("ours", "viewer"):
            command = [sys.executable, "-m", "tests.bench.bench_snapshot", "--only", name, "--file", str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{name}: failed: {done.stderr[-300:]}")
                continue
            print(f"{name}:")
            for key, value in json.loads(done.stdout).items():
                if key.endswith("_s"):
                    print(f"  {key:20} {value:8.2f} s")
                elif key in ("highest", "loaded", "highest_with_figure", "figure_bytes", "window_bytes"):
                    print(f"  {key:20} {value / MIB:8.1f} MiB = {value / size:.1f} x the file")
                else:
                    print(f"  {key:20} {value}")


if __name__ == "__main__":
    main()
