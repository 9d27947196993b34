"""`python -m tests.out_of_memory [NAME ...]` says of each program of the corpus whether its answer is right."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.out_of_memory.corpus import ANSWERS, post_mortem, wrong


def main() -> int:
    """Run the chosen programs, or all, print a line for each; 0 if all answers are right."""
    names = sys.argv[1:] or list(ANSWERS)
    right = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found = post_mortem(name, Path(folder))
            faults = wrong(name, found)
            right += not faults
            print(f"{name:32} {'; '.join(faults) or 'right'}", flush=True)
    print(f"{right} of {len(names)} are right")
    return 0 if right == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
