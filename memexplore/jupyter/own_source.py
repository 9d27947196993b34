"""Find the source of a step's training loop, among the cells of this notebook and the script that runs."""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Iterator

from memexplore.analysis.places import file_text
from memexplore.run.code.own_code import OwnCode, names
from memexplore.run.code.own_loop import Unclear, find_loop, roles_of
from memexplore.run.programs.step import Step
from memexplore.text.ipython_shell import running_shell


def own_code_of(step: Step) -> OwnCode | None:
    """Return the latest cell with a training loop of the step's model; in a script, the script if it has one."""
    for own in _sources():
        try:
            used = names(ast.parse(own.source))
            if any(own.names.get(name) is step.model for name in used):
                find_loop(own.source, roles_of({name: own.names[name] for name in used if name in own.names}))
                return own
        except (Unclear, SyntaxError, ValueError):
            continue
    return None


def _sources() -> Iterator[OwnCode]:
    """Yield the cells of this notebook, the latest first, or the script that runs."""
    shell = running_shell()
    if shell is not None:
        cells = list(enumerate(shell.history_manager.input_hist_parsed))
        for number, source in reversed(cells[1:]):
            yield OwnCode(source, shell.user_ns, f"Cell In[{number}]")
        return
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is not None and pathlib.Path(path).suffix == ".py":
        try:
            yield OwnCode(pathlib.Path(path).read_text(encoding="utf-8"), vars(main), file_text(path))
        except (OSError, UnicodeDecodeError):
            return
