"""`python -m tests.run_cells FILE` runs the cells of a JSON file, pairs of a line and code, in one IPython shell."""

import json
import sys
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell


def run(cells: list[tuple[int, str]]) -> None:
    """Run cells until one fails, which ends the process with an error that names its line."""
    shell = InteractiveShell.instance()
    for line, code in cells:
        result = shell.run_cell(code, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            sys.exit(f"line {line}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
