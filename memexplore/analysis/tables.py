"""Make tables of a Tape as DataFrames: layers along the module tree, tensors alive after a row; lines of user code."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sysconfig
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import Rows, block_bytes, by_category, curve, lifetimes, live_rows, peak
from memexplore.analysis.streams import has_streams
from memexplore.tape import Category, Frame, Phase, Tape
from memexplore.text.tensor_text import dtype_of, shape_of

if TYPE_CHECKING:
    import pandas

NO_LAYER = "(no layer)"
"""The row of `layers` for memory allocated outside any module."""

LAYER_CATEGORIES = (
    Category.ACTIVATION,
    Category.PARAMETER,
    Category.BUFFER,
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
)

# Tapes come from other machines too, so installed code is recognised by the form of its path.
_INSTALLED = re.compile(r"(^|/)(site-packages|dist-packages)/|/lib/python3\.\d+/|^<frozen ", re.IGNORECASE)
_IN_TORCH = re.compile(r"(?:^|/)torch/(?P<part>\w+)", re.IGNORECASE)
_NODE = re.compile(
    r"torch::autograd::(?:generated::|\(anonymous namespace\)::)?(?P<node>\w+?)(?:::apply\(|_apply_impl)"
)
# File names of C and C++ frames in a snapshot: a source file, or nothing.
_NATIVE = re.compile(r"^(\?\?)?$|\.(c|cc|cpp|cu|cuh|h|hpp|o|so[.\d]*)$")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a layer's name that is a number."""
_HERE = tuple(
    path.replace("\\", "/").rstrip("/") + "/"
    for path in (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sysconfig.get_paths()["stdlib"])
)


# Files and functions repeat in many frames.
@functools.lru_cache(maxsize=20_000)
def is_users(filename: str) -> bool:
    """Return whether a file is the user's code: neither installed nor C++."""
    path = filename.replace("\\", "/")
    installed = _INSTALLED.search(path) or path.startswith(_HERE) or _is_torchs(path)
    return not installed and not _NATIVE.search(path)


def _is_torchs(path: str) -> bool:
    """Return whether a path is that of a file of torch built from source; a user's folder may be named torch, too."""
    return any(match["part"].lower() in _parts_of_torch() for match in _IN_TORCH.finditer(path))


@functools.cache
def _parts_of_torch() -> frozenset[str]:
    """Return the names of torch's own folders and modules, such as ``nn`` and ``_tensor``."""
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations if spec else None) or []
    return frozenset(name.partition(".")[0].lower() for folder in folders for name in os.listdir(folder))


def is_native(filename: str) -> bool:
    """Return whether a file is C or C++ code, or none, as in frames of a snapshot."""
    return _NATIVE.search(filename.replace("\\", "/")) is not None


@functools.lru_cache(maxsize=20_000)
def _node(function: str) -> str:
    """Return the autograd node that a function of C++ belongs to, empty for another function."""
    match = _NODE.search(function)
    return match["node"] if match is not None else ""


def user_line(stack: tuple[Frame, ...]) -> str:
    """Return the innermost line of the user's code as ``file:line``, or the innermost line if all code is installed.

    Installed code is torch, everything in site-packages or dist-packages, the standard library and memexplore. For a
    stack of C++ frames only, as the autograd engine has, the result is the node, such as `MulBackward0 (autograd)`.

    >>> user_line((Frame("/env/site-packages/torch/nn/functional.py", 10, "relu"), Frame("train.py", 7, "forward")))
    'train.py:7'
    """
    for frame in stack:
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.line}"
    for frame in stack:
        node = _node(frame.function)
        if node:
            return f"{node} (autograd)"
    if any(frame.function.startswith("torch::autograd::Engine") for frame in stack):
        return "autograd engine"
    return f"{stack[0].filename}:{stack[0].line}" if stack else ""


def module_parents(names: tuple[str, ...]) -> dict[str, str]:
    """Return the parent of each module, "" for a root; ancestors without a row are added, parents precede children.

    The parent of `layer3.5.conv2` is `layer3.5`; the parent of a top-level name is the first root. A root has the name
    of its class, which begins with a capital letter.

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
        # Numbered modules are sorted by number; the tape may list them in another order.
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
    """Return the step with the highest peak allocated, and the slice of its rows."""
    _, row = peak(tape)
    if row < 0:
        return 0, slice(0, 0)
    step = int(tape.step[row])
    rows = np.flatnonzero(tape.step == step)
    return step, slice(int(rows[0]), int(rows[-1]) + 1)


def _alive(tape: Tape, row: int) -> Rows:
    """Return the alloc rows of the blocks not yet reusable after a row, as the requested curve counts them."""
    life = lifetimes(tape)
    return life.born[(life.born <= row) & (life.completed > row)]


def layers(tape: Tape) -> pandas.DataFrame:
    """Return the bytes of each module in the step with the highest peak allocated, one row per module in tree order.

    Index `layer` (qualified name); columns `depth`, `parent`; then in requested bytes `activation`, `parameter`,
    `buffer`, `gradient`, `optimizer_state` of the module itself, and the same with `_total` including its submodules.
    Each category is counted after the row of that step at which its sum over all modules is highest: for activations
    the end of a forward pass (of the largest micro-batch, or of a checkpoint's recomputation), so the column is what
    the module keeps for the backward pass. `peak` is the highest allocated bytes of the whole device over the rows of
    the module in that step, 0 for a module without rows; `peak_total` includes its submodules. The row `(no layer)`
    holds memory allocated outside any module, so each column sums to its category.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [40], "category": [Category.PARAMETER], "module": [0]},
    ...                          modules=["Linear"], meta=Meta(Source.MEASURED, "cpu"))
    >>> int(layers(tape).loc["Linear", "parameter"])
    40

    Raises ValueError for a tape that is not placed.
    """
    import pandas

    tree = module_parents(tape.modules)
    names = [*tree, NO_LAYER]
    number = {name: position for position, name in enumerate(names)}
    position = np.array([*(number[name] if name else len(tree) for name in tape.modules), len(tree)], dtype=np.int64)
    _, rows = peak_step(tape)
    requested = by_category(tape, "requested", rows)
    columns: dict[str, Rows] = {}
    for category in LAYER_CATEGORIES:
        own = np.zeros(len(names), dtype=np.int64)
        if requested.shape[1]:
            alive = _alive(tape, rows.start + int(np.argmax(requested[category])))
            alive = alive[tape.category[alive] == category]
            np.add.at(own, position[tape.module[alive]], tape.size[alive])
        columns[category.name.lower()] = own
    highest = np.zeros(len(names), dtype=np.int64)
    here = np.zeros(len(tape), dtype=bool)
    here[rows] = tape.step[rows] == (tape.step[rows.start] if rows.stop else 0)
    np.maximum.at(highest, position[tape.module[here]], curve(tape)[here])

    frame = pandas.DataFrame(index=pandas.Index(names, name="layer"))
    depth = np.zeros(len(names), dtype=np.int64)
    for name, parent in tree.items():
        depth[number[name]] = depth[number[parent]] + 1 if parent else 0
    frame["depth"] = depth
    frame["parent"] = [*tree.values(), ""]
    # Parents precede children, so one pass from the end sums every subtree.
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
    """Return the `count` largest tensors alive after a row (default: the peak allocated), largest first, none empty.

    Index `row` (the alloc row of each tensor); columns `size` (requested bytes), `allocated` (bytes of its block),
    `dtype` ("" if unknown), `shape` (a tuple, None if unknown), `category`, `layer`, `op`, `phase`, `step`, `line`
    (`user_line`) and `stack` (innermost frame first), and `stream` where blocks of several streams are on the tape.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> tensors(tape, count=1)["size"].tolist()
    [20]

    Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
    """
    import pandas

    alive = live_rows(tape, row)
    alive = alive[tape.size[alive] > 0]
    alive = alive[np.argsort(-tape.size[alive], kind="stable")][:count]
    lines = [user_line(stack) for stack in tape.stacks]

    def names_of(column: NDArray[Any], table: list[str]) -> list[str]:
        return [table[number] if number >= 0 else "" for number in column[alive].tolist()]

    texts = names_of(tape.tensor, list(tape.tensor_texts))
    streams = {"stream": tape.stream[alive]} if has_streams(tape) else {}
    return pandas.DataFrame(
        {
            "size": tape.size[alive],
            "allocated": block_bytes(tape)[alive],
            "dtype": list(map(dtype_of, texts)),
            "shape": pandas.Series(list(map(shape_of, texts)), index=alive, dtype=object),
            "category": names_of(tape.category, [category.text for category in Category]),
            "layer": names_of(tape.module, list(tape.modules)),
            "op": names_of(tape.op, list(tape.ops)),
            "phase": names_of(tape.phase, [phase.text for phase in Phase]),
            "step": tape.step[alive],
            "line": names_of(tape.stack, lines),
            "stack": [tape.stacks[number] if number >= 0 else () for number in tape.stack[alive].tolist()],
            **streams,
        },
        index=pandas.Index(alive, name="row"),
    )


def tensor_groups(tape: Tape, row: int | None = None, count: int | None = None) -> pandas.DataFrame:
    """Return the tensors alive after a row (default: the peak allocated) in groups of equal ones, largest group first.

    Tensors are equal if they have the same size, dtype, shape, category, op, line and stream, and layers that differ
    only in numbers. Columns: `size` (requested bytes of each), `count`, `total` (their product), `dtype` ("" if
    unknown), `shape` (a tuple, None if unknown), `category`, `layer` (`h.0–11.mlp` for numbers without gaps, `h.*.mlp`
    with gaps), `op`, `line`, `stream`. At most `count` groups.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512, 1024], "size": [10, 10, 25], "module": [0, 1, -1]},
    ...                          modules=["h.0", "h.1"], meta=Meta(Source.MEASURED, "cpu"))
    >>> tensor_groups(tape)[["size", "count", "total", "layer"]].to_numpy().tolist()
    [[25, 1, 25, ''], [10, 2, 20, 'h.0–1']]

    Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
    """
    import pandas

    alive = live_rows(tape, row)
    alive = alive[tape.size[alive] > 0]
    lines = np.full(len(tape.stacks) + 1, "", dtype=object)
    for number in np.unique(tape.stack[alive]).tolist():
        lines[number] = user_line(tape.stacks[number]) if number >= 0 else ""
    forms = np.array([*(_NUMBER.sub("#", name) for name in tape.modules), ""], dtype=object)
    modules, ops, texts = (
        np.array([*names, ""], dtype=object) for names in (tape.modules, tape.ops, tape.tensor_texts)
    )
    kinds = np.array([category.text for category in Category], dtype=object)
    table = pandas.DataFrame(
        {
            "size": tape.size[alive],
            "tensor": texts[tape.tensor[alive]],
            "category": kinds[tape.category[alive]],
            "form": forms[tape.module[alive]],
            "op": ops[tape.op[alive]],
            "line": lines[tape.stack[alive]],
            "layer": modules[tape.module[alive]],
            "stream": tape.stream[alive],
        }
    )
    keys = ["size", "tensor", "category", "form", "op", "line", "stream"]
    groups = table.groupby(keys, sort=False)["layer"].agg(count="size", layers="unique").reset_index()
    groups["total"] = groups["size"] * groups["count"]
    groups = groups.sort_values("total", ascending=False, kind="stable", ignore_index=True).head(count)
    groups["layer"] = [_layers_text(list(layers)) for layers in groups["layers"]]
    groups["dtype"] = [dtype_of(text) for text in groups["tensor"]]
    groups["shape"] = pandas.Series([shape_of(text) for text in groups["tensor"]], dtype=object)
    return groups[["size", "count", "total", "dtype", "shape", "category", "layer", "op", "line", "stream"]]


def _layers_text(names: list[str]) -> str:
    """Return layers that differ only in numbers as one name.

    >>> _layers_text(["h.0.mlp", "h.1.mlp"]), _layers_text(["h.0", "h.2"]), _layers_text(["h.1"])
    ('h.0–1.mlp', 'h.*', 'h.1')
    """
    if len(names) == 1:
        return names[0]
    parts = []
    for column in zip(*(name.split(".") for name in names), strict=True):
        numbers = {int(part) for part in column if part.isdecimal()}
        low, high = min(numbers, default=0), max(numbers, default=0)
        is_range = len(numbers) > 1 and high - low + 1 == len(numbers)
        parts.append(f"{low}–{high}" if is_range else "*" if len(numbers) > 1 else column[0])
    return ".".join(parts)
