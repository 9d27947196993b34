"""Saving and loading tapes: bytes and processor time, beside those of another checkout.

`python -m tests.bench.bench_tape_file [CHECKOUT]` saves the same tapes with this code and with that of the checkout, in
turns and in processes of their own, and prints ratios: this code / the other one, so below 1 is better. A checkout from
before `.tape` files writes Parquet. Times are the shortest; the first save of a tape also computes the sizes
of its blocks for the peaks in the header, which everything that shows the same tape then need not do again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
REPEATS = 2

MEASURE = """
import json, sys, time
from pathlib import Path
from memexplore.tape import Tape
from tests import sample_tapes

MAKE = {
    "training, 3 steps": lambda: sample_tapes.training_tape(3),
    "training, 100 steps": lambda: sample_tapes.training_tape(100),
    "random, 100 000 rows": lambda: sample_tapes.big_tape(100_000),
    "random, 1 000 000 rows": lambda: sample_tapes.big_tape(1_000_000),
}
tape, path = MAKE[sys.argv[1]](), Path(sys.argv[2])
tape[:2].save(path)  # what is imported at the first use
Tape.load(path)


def seconds(function):
    began = time.process_time()
    function()
    return time.process_time() - began


first = seconds(lambda: tape.save(path))
again = min(seconds(lambda: tape.save(path)) for _ in range(2))
load = min(seconds(lambda: Tape.load(path)) for _ in range(3))
print(json.dumps({"rows": len(tape), "bytes": path.stat().st_size, "first": first, "again": again, "load": load}))
"""
TAPES = ("training, 3 steps", "training, 100 steps", "random, 100 000 rows", "random, 1 000 000 rows")


def measured(checkout: Path, name: str, path: Path) -> dict[str, Any]:
    """Return what saving and loading a tape takes with the code of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", MEASURE, name, str(path)]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def best(checkout: Path, name: str, path: Path, before: dict[str, Any] | None) -> dict[str, Any]:
    """Return the shorter time of a measurement and of those before."""
    result = measured(checkout, name, path)
    return result if before is None else {key: min(value, before[key]) for key, value in result.items()}


def main() -> None:
    checkouts = [REPOSITORY, *map(Path, sys.argv[1:2])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tape")
        for name in TAPES:
            results: list[dict[str, Any] | None] = [None] * len(checkouts)
            for _ in range(REPEATS):
                results = [best(one, name, path, before) for one, before in zip(checkouts, results, strict=True)]
            new, *others = (result or {} for result in results)
            print(f"{name}: {new['rows']:,} rows, {new['bytes']:,} bytes")
            for key in ("first", "again", "load"):
                print(
                    f"  {key:6} {new[key] * 1e3:8.1f} ms"
                    + "".join(f"  × {new[key] / other[key]:.2f}" for other in others)
                )
            for other in others:
                print(f"  bytes  × {new['bytes'] / other['bytes']:.2f} of {other['bytes']:,}")


if __name__ == "__main__":
    main()
