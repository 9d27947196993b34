"""The long run: `python -m tests.fuzz --kind KIND --inputs COUNT [--begin NUMBER] [--output FOLDER]`.

Prints the inputs, outcomes and findings so far after every child process, writes the inputs that failed into the
folder, and ends with status 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.fuzz.kinds import KINDS
from tests.fuzz.runner import run_inputs, write_out


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, allow_abbrev=False)
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all kinds, one after the other")
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs of each kind")
    parser.add_argument("--begin", type=int, default=0, help="the number of the first input")
    parser.add_argument("--output", type=Path, default=Path("fuzz-findings"), help="folder for inputs that failed")
    options = parser.parse_args()
    failed = 0
    for kind in options.kind or KINDS:
        make, outcomes, seconds = KINDS[kind](), Counter[str](), 0.0
        for result in run_inputs(make, range(options.begin, options.begin + options.inputs)):
            outcomes += result.outcomes
            seconds += result.seconds
            for finding in result.findings:
                failed += 1
                print(f"{finding.kind}: {write_out(make, finding, options.output / kind)}", flush=True)
            counts = ", ".join(f"{count:,} {name}" for name, count in sorted(outcomes.items()))
            total = outcomes.total()
            print(f"{kind}: {total:,} inputs ({counts}) in {seconds:.0f} s, {total / seconds:.0f} a second", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
