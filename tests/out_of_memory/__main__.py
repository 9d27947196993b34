"""`python -m tests.out_of_memory [NAME ...]` says of each program whether its answer is right, and its cure cures."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.out_of_memory.corpus import ANSWERS, APPLIED, outcome_applied, post_mortem, wrong


def main() -> int:
    """Run the chosen programs, or all, print a line for each; 0 if all answers are right."""
    names = sys.argv[1:] or list(ANSWERS)
    right = cured = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found = post_mortem(name, Path(folder))
            faults = wrong(name, found)
            right += not faults
            applied = outcome_applied(name, Path(folder)) if name in APPLIED else "cannot be applied"
            cured += applied == "fits"
            print(f"{name:32} {'; '.join(faults) or 'right'}, first suggestion applied: {applied}", flush=True)
    print(f"{right} of {len(names)} are right; with the first suggestion applied {cured} run to their ends")
    return 0 if right == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
