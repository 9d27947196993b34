"""Tables of a Tape: its layers along the module tree, and the largest tensors at a moment, with the user's line."""

from __future__ import annotations

import os
import re
import sysconfig
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import Rows, block_bytes, by_category, curve, lifetimes, live_rows, peak
from memexplore.tape import Category, Frame, Phase, Tape

if TYPE_CHECKING:
    import pandas

NO_LAYER = "(no layer)"
"""The row of `layers` for memory that no module made."""

LAYER_CATEGORIES = (
    Category.ACTIVATION,
    Category.PARAMETER,
    Category.BUFFER,
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
)

# Tapes come from other machines too, so installed code is told by the shape of its path, not only by this machine's.
_INSTALLED = re.compile(r"(^|/)(site-packages|dist-packages)/|/lib/python3\.\d+/|(^|/)torch/|^<frozen ", re.IGNORECASE)
_NODE = re.compile(
    r"torch::autograd::(?:generated::|\(anonymous namespace\)::)?(?P<node>\w+?)(?:::apply\(|_apply_impl)"
)
# What a snapshot tells of C and C++: a source file, or nothing.
_NATIVE = re.compile(r"^(\?\?)?$|\.(c|cc|cpp|cu|cuh|h|hpp|so[.\d]*)$")
_HERE = tuple(
    path.replace("\\", "/").rstrip("/") + "/"
    for path in (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sysconfig.get_paths()["stdlib"])
)


def user_line(stack: tuple[Frame, ...]) -> str:
    """Innermost line of the user's own code as ``file:line``; the innermost of all where every line is installed code.

    A stack of C++ frames only, as the autograd engine has, is called by its node, such as `MulBackward0 (autograd)`.

    Installed code is torch, anything in site-packages or dist-packages, the standard library and memexplore.

    >>> user_line((Frame("/env/site-packages/torch/nn/functional.py", 10, "relu"), Frame("train.py", 7, "forward")))
    'train.py:7'
    """
    for frame in stack:
        path = frame.filename.replace("\\", "/")
        if not _NATIVE.search(path) and not _INSTALLED.search(path) and not path.startswith(_HERE):
            return f"{frame.filename}:{frame.line}"
    for frame in stack:
        node = _NODE.search(frame.function)
        if node is not None:
            return f"{node['node']} (autograd)"
    if any(frame.function.startswith("torch::autograd::Engine") for frame in stack):
        return "autograd engine"
    return f"{stack[0].filename}:{stack[0].line}" if stack else ""


def module_parents(names: tuple[str, ...]) -> dict[str, str]:
    """Parent of each module, "" for a root: missing ancestors are added, children stand behind their parent.

    A name such as `layer3.5.conv2` hangs below `layer3.5`; a top-level name hangs below the first root, which is
    called by its class and so begins with a capital letter.

    >>> module_parents(("UNet", "down.0", "CrossEntropyLoss"))
    {'UNet': '', 'down': 'UNet', 'down.0': 'down', 'CrossEntropyLoss': ''}
    """
    root = next((name for name in names if "." not in name and name[:1].isupper()), "")
    children: dict[str, list[str]] = {"": []}
    parent_of: dict[str, str] = {}
    for name in names:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            ancestor = ".".join(parts[:depth])
            if not ancestor or ancestor in parent_of:
                continue
            is_root = depth == 1 and (not root or ancestor[:1].isupper())
            parent = "" if is_root else root if depth == 1 else ".".join(parts[: depth - 1])
            parent_of[ancestor] = parent
            children.setdefault(parent, []).append(ancestor)
    for siblings in children.values():
        # Numbered modules run in the order of their numbers, whichever of them the tape met first.
        numbered = iter(sorted((name for name in siblings if _number(name) >= 0), key=_number))
        siblings[:] = [next(numbered) if _number(name) >= 0 else name for name in siblings]
    ordered: dict[str, str] = {}
    waiting = children[""][::-1]
    while waiting:
        name = waiting.pop()
        ordered[name] = parent_of[name]
        waiting.extend(children.get(name, [])[::-1])
    return ordered


def _number(name: str) -> int:
    last = name.rpartition(".")[2]
    return int(last) if last.isdecimal() else -1


def peak_step(tape: Tape) -> tuple[int, slice]:
    """The step with the highest peak allocated, and the rows from its first to its last."""
    _, row = peak(tape)
    if row < 0:
        return 0, slice(0, 0)
    step = int(tape.step[row])
    rows = np.flatnonzero(tape.step == step)
    return step, slice(int(rows[0]), int(rows[-1]) + 1)


def _alive(tape: Tape, row: int) -> Rows:
    """Rows of the blocks that are not yet back after a row; as `curves.live`, by requested bytes."""
    life = lifetimes(tape)
    return life.born[(life.born <= row) & (life.completed > row)]


def layers(tape: Tape) -> pandas.DataFrame:
    """One row a module, in the order of the module tree: what it holds in the step with the highest peak allocated.

    Index `layer` (qualified name); `depth`, `parent`; then, in requested bytes and each twice, for the module itself
    and (`_total`) for all that hangs below it too: `activation`, `parameter`, `buffer`, `gradient`,
    `optimizer_state`. Each category is counted at the moment of that step when it is at its highest over all modules:
    for activations that is the end of a forward (of the largest micro-batch, or of a checkpoint's recomputation), so
    the column is what the module keeps for backward. `peak` and `peak_total` are the highest allocated bytes of the
    whole device while rows of the module (and of those below it) run in that step, 0 if it has none. The row
    `(no layer)` holds what no module made, so that each column adds up to its category.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [40], "category": [Category.PARAMETER], "module": [0]},
    ...                          modules=["Linear"], meta=Meta(Source.MEASURED, "cpu"))
    >>> int(layers(tape).loc["Linear", "parameter"])
    40

    Raises ValueError where the tape is not placed.
    """
    import pandas

    tree = module_parents(tape.modules)
    names = [*tree, NO_LAYER]
    number = {name: position for position, name in enumerate(names)}
    place = np.array([*(number[name] if name else len(tree) for name in tape.modules), len(tree)], dtype=np.int64)
    _, rows = peak_step(tape)
    requested = by_category(tape, "requested", rows)
    columns: dict[str, Rows] = {}
    for category in LAYER_CATEGORIES:
        own = np.zeros(len(names), dtype=np.int64)
        if requested.shape[1]:
            alive = _alive(tape, rows.start + int(np.argmax(requested[category])))
            alive = alive[tape.category[alive] == category]
            np.add.at(own, place[tape.module[alive]], tape.size[alive])
        columns[category.name.lower()] = own
    highest = np.zeros(len(names), dtype=np.int64)
    here = np.zeros(len(tape), dtype=bool)
    here[rows] = tape.step[rows] == (tape.step[rows.start] if rows.stop else 0)
    np.maximum.at(highest, place[tape.module[here]], curve(tape)[here])

    frame = pandas.DataFrame(index=pandas.Index(names, name="layer"))
    depth = np.zeros(len(names), dtype=np.int64)
    for name, parent in tree.items():
        depth[number[name]] = depth[number[parent]] + 1 if parent else 0
    frame["depth"] = depth
    frame["parent"] = [*tree.values(), ""]
    # Children stand behind their parents, so one pass from the end adds up every subtree.
    upwards = [(number[name], number[parent]) for name, parent in tree.items() if parent][::-1]
    for label, own in columns.items():
        total = own.copy()
        for below, above in upwards:
            total[above] += total[below]
        frame[label], frame[f"{label}_total"] = own, total
    total = highest.copy()
    for below, above in upwards:
        total[above] = max(total[above], total[below])
    frame["peak"], frame["peak_total"] = highest, total
    return frame


def tensors(tape: Tape, row: int | None = None, count: int | None = None) -> pandas.DataFrame:
    """The largest tensors alive after a row (the peak allocated by default), largest first; empty ones are left out.

    Index `row` (of the tape, where each was made); `size` (requested bytes), `allocated` (bytes of its block),
    `category`, `layer`, `op`, `phase`, `step`, `line` (`user_line`) and `stack` (innermost frame first).

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> tensors(tape, count=1)["size"].tolist()
    [20]

    Raises IndexError for a row that is not on the tape, ValueError where the tape is not placed.
    """
    import pandas

    moment = peak(tape)[1] if row is None else row
    alive = live_rows(tape, moment) if row is not None or moment >= 0 else np.zeros(0, dtype=np.int64)
    alive = alive[tape.size[alive] > 0]
    alive = alive[np.argsort(-tape.size[alive], kind="stable")][:count]
    lines = [user_line(stack) for stack in tape.stacks]

    def words(column: NDArray[Any], table: list[str]) -> list[str]:
        return [table[number] if number >= 0 else "" for number in column[alive].tolist()]

    return pandas.DataFrame(
        {
            "size": tape.size[alive],
            "allocated": block_bytes(tape)[alive],
            "category": words(tape.category, [category.text for category in Category]),
            "layer": words(tape.module, list(tape.modules)),
            "op": words(tape.op, list(tape.ops)),
            "phase": words(tape.phase, [phase.text for phase in Phase]),
            "step": tape.step[alive],
            "line": words(tape.stack, lines),
            "stack": [tape.stacks[number] if number >= 0 else () for number in tape.stack[alive].tolist()],
        },
        index=pandas.Index(alive, name="row"),
    )
