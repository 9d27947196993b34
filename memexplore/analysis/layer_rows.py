"""Arrange the layers of a Tape as a tree of rows, with the bytes of each by category after a row of the tape.

Numbered layers of the same structure, such as the blocks of a transformer, share a row: `h.0–11` are `h.0` to `h.11`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from memexplore.analysis.curves import Rows, block_bytes, cached_by_tape, lifetimes, live_rows
from memexplore.analysis.tables import NO_LAYER, module_parents
from memexplore.tape import Category, Tape

_RANGE = re.compile(r"(\d+)–(\d+)")
ITSELF = "(itself)"
"""Label of the row with the bytes of a layer outside its sublayers."""


class LayerRow(NamedTuple):
    """One row: the bytes of a layer and its sublayers, or of several layers of the same structure together."""

    name: str
    """Qualified name; a range such as `0–11` in the place of a number if the row stands for several layers."""
    label: str
    """Name below the parent row."""
    kind: str
    """Name of the class, "" if unknown."""
    layers: int
    """Number of layers in the row."""
    sizes: tuple[int, ...]
    """Bytes by `Category`."""
    smallest: int
    """Bytes of the smallest of the layers in the row."""
    largest: int
    children: tuple[LayerRow, ...] = ()
    members: tuple[LayerRow, ...] = ()
    """The layers of the row one by one; empty for a single layer, and below a row of several layers."""

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.sizes)


class _Place(NamedTuple):
    """A row of the tree without bytes, the same for every row of the tape."""

    name: str
    label: str
    kind: str
    members: tuple[Rows, ...]
    """For each layer in the row: the modules (indices of `tape.modules`, -1 for none) whose bytes it counts."""
    children: tuple[_Place, ...]
    singles: tuple[_Place, ...]


def held_layers(tape: Tape, row: int) -> tuple[LayerRow, ...]:
    """Return the layers with what they hold after a row, in allocated bytes; they sum to the allocated curve.

    The last row holds what belongs to no layer. Layers without bytes have no row. Row -1 is that of an empty tape.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512, 1024], "size": [10, 20, 5], "module": [1, 2, -1]},
    ...                          modules=["Net", "h.0", "h.1"], meta=Meta(Source.MEASURED, "cpu"))
    >>> [(row.name, row.layers, row.total) for row in held_layers(tape, 2)]
    [('Net', 1, 30), ('(no layer)', 1, 5)]
    >>> [(row.label, row.layers, row.smallest, row.largest) for row in held_layers(tape, 2)[0].children]
    [('h', 2, 10, 20)]

    Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
    """
    own = np.zeros((len(tape.modules) + 1, len(Category)), dtype=np.int64)
    if row >= 0:
        alive = live_rows(tape, row)
        np.add.at(own, (tape.module[alive], tape.category[alive]), block_bytes(tape)[alive])
    return _rows(tape, lambda modules: own[modules].sum(axis=0))


def highest_layers(tape: Tape) -> tuple[LayerRow, ...]:
    """Return the layers with the most that each of them held at any time, in allocated bytes.

    The maxima of two layers may be at different times, so they do not sum to the peak.

    >>> from memexplore.tape import Action, Meta, Source
    >>> columns = {"action": [Action.ALLOC, Action.FREE_REQUESTED], "address": [0, 0], "size": [9, 9], "module": [0, 0]}
    >>> tape = Tape.from_columns(columns, modules=["Net"], meta=Meta(Source.MEASURED, "cpu"))
    >>> [(row.name, row.total) for row in highest_layers(tape)], held_layers(tape, 1)
    ([('Net', 9)], ())

    Raises ValueError for a tape that is not placed.
    """
    life = lifetimes(tape)
    bytes_of, count = block_bytes(tape)[life.born], len(tape.modules) + 1
    module = tape.module[life.born] % count
    order = np.argsort(module, kind="stable")
    starts = np.searchsorted(module[order], np.arange(count + 1))

    def highest(modules: Rows) -> Rows:
        blocks = np.concatenate([order[starts[m] : starts[m + 1]] for m in (modules % count).tolist()] or [order[:0]])
        when = np.concatenate([life.requested[blocks], life.born[blocks]])
        change = np.concatenate([-bytes_of[blocks], bytes_of[blocks]])
        # What a row frees is gone before another row allocates, so rows decide; a tie cannot occur.
        total = np.cumsum(change[np.argsort(when, kind="stable")])
        if not len(total):
            return np.zeros(len(Category), dtype=np.int64)
        row = np.sort(when)[int(np.argmax(total))]
        held = blocks[(life.born[blocks] <= row) & (life.requested[blocks] > row)]
        sizes = np.zeros(len(Category), dtype=np.int64)
        np.add.at(sizes, tape.category[life.born[held]], bytes_of[held])
        return sizes

    return _rows(tape, highest)


def has_layer(tape: Tape, row_name: str) -> bool:
    """Return whether a tape has a layer that the row with a name stands for."""
    return row_name == NO_LAYER or bool(layers_in(module_parents(tape.modules), row_name))


def layers_in(names: Iterable[str], row_name: str) -> list[str]:
    """Return those of some layers that the row with a name stands for.

    >>> layers_in(["h.0", "h.1", "h.1.mlp", "h.2"], "h.0–1"), layers_in(["h.0", "h.1"], "h.1")
    (['h.0', 'h.1'], ['h.1'])
    """
    parts = [_RANGE.fullmatch(part) for part in row_name.split(".")]
    ranges = [range(int(part[1]), int(part[2]) + 1) for part in parts if part is not None]
    if not ranges:
        return [name for name in names if name == row_name]
    form = r"\.".join(
        r"(\d+)" if part is not None else re.escape(text) for part, text in zip(parts, row_name.split("."), strict=True)
    )
    matches = ((name, re.fullmatch(form, name)) for name in names)
    return [
        name
        for name, match in matches
        if match is not None and all(int(text) in span for text, span in zip(match.groups(), ranges, strict=True))
    ]


def _rows(tape: Tape, measure: Callable[[Rows], Rows]) -> tuple[LayerRow, ...]:
    return tuple(row for place in _tree(tape) if (row := _row(place, measure)) is not None)


def _row(place: _Place, measure: Callable[[Rows], Rows]) -> LayerRow | None:
    sizes = measure(np.concatenate(place.members))
    if not sizes.any():
        return None
    count, total = len(place.members), int(sizes.sum())
    of_members = [int(measure(modules).sum()) for modules in place.members] if count > 1 else [total]
    children, members = (
        tuple(row for inner in inners if (row := _row(inner, measure)) is not None)
        for inners in (place.children, place.singles)
    )
    # A layer whose bytes are all its own needs no row below it.
    if len(children) == 1 and children[0].label == ITSELF:
        children = ()
    by_category = tuple(sizes.tolist())
    return LayerRow(
        place.name, place.label, place.kind, count, by_category, min(of_members), max(of_members), children, members
    )


# -- the tree


@cached_by_tape
def _tree(tape: Tape) -> tuple[_Place, ...]:
    tree = _Tree(tape)
    roots = [name for name, parent in tree.parents.items() if not parent and name in tree.used]
    # An empty module name is no layer, as -1 is.
    none = [index for index, name in enumerate(tape.modules) if not name]
    nothing = _Place(NO_LAYER, NO_LAYER, "", (np.array([*none, -1]),), (), ())
    return (*(tree.place([root], root, root) for root in roots), nothing)


class _Tree:
    """Modules of a tape, and their structure: two layers have the same one if all their parts correspond."""

    def __init__(self, tape: Tape) -> None:
        self.parents = module_parents(tape.modules)
        self.children: dict[str, list[str]] = {name: [] for name in self.parents}
        for name, parent in self.parents.items():
            if parent:
                self.children[parent].append(name)
        self.kinds = dict(zip(tape.modules, tape.classes, strict=True)) if tape.classes else {}
        born = lifetimes(tape).born
        born = born[tape.module[born] >= 0]
        self.own = {tape.modules[number]: number for number in np.unique(tape.module[born]).tolist()}
        """Layers that allocate outside their sublayers, with their index in `tape.modules`."""
        self.modules: dict[str, list[int]] = {}
        """Indices in `tape.modules` of a layer and all its sublayers; the layers without any are not used."""
        for name in reversed(self.parents):
            inner = [number for child in self.children[name] for number in self.modules[child]]
            self.modules[name] = [self.own[name], *inner] if name in self.own else inner
        self.used = {name for name, numbers in self.modules.items() if numbers}
        self.structures = self._structures(tape, born)

    def _structures(self, tape: Tape, born: Rows) -> dict[str, int]:
        """Return for each layer the number of its structure: class, bytes of weights, and structures of its parts."""
        weights: dict[int, int] = {}
        is_weight = np.isin(tape.category[born], (Category.PARAMETER, Category.BUFFER))
        for module, size in zip(
            tape.module[born[is_weight]].tolist(), tape.size[born[is_weight]].tolist(), strict=True
        ):
            weights[module] = weights.get(module, 0) + size
        ops: dict[int, set[int]] = {}
        for module, op in set(zip(tape.module[born].tolist(), tape.op[born].tolist(), strict=True)):
            ops.setdefault(module, set()).add(op)
        numbers: dict[object, int] = {}
        structures: dict[str, int] = {}
        for name in reversed(self.parents):
            number, kind = self.own.get(name, -1), self.kinds.get(name, "")
            parts = tuple((_tail(child), structures[child]) for child in self.children[name])
            # Without a class, layers without parts are alike if they run the same ops.
            alike = kind or (frozenset(ops.get(number, ())) if not parts else "")
            key = (alike, weights.get(number, 0), parts)
            structures[name] = numbers.setdefault(key, len(numbers))
        return structures

    def place(self, names: list[str], row_name: str, label: str, *, one_by_one: bool = False) -> _Place:
        """Return the place of some layers of the same structure, with those below; `one_by_one` adds each of them."""
        has_own = any(name in self.own for name in names)
        # The layers have the same sublayers, of which some may allocate in one of them only.
        parts = ((child, _tail(child)) for child in self.children[names[0]])
        runs = self._runs(
            [child for child, tail in parts if any(self._child(name, tail) in self.used for name in names)]
        )
        is_root = not self.parents[names[0]]
        children = []
        for tails in runs:
            inner = [self._child(name, tail) for name in names for tail in tails]
            part = tails[0] if len(tails) == 1 else f"{tails[0]}–{tails[-1]}"
            inner_name = part if inner[0] == tails[0] else f"{row_name}.{part}"
            alone = len(runs) == 1 and not has_own and not is_root
            # A layer that only holds others has no row: `h ×12` for the blocks in `h`, `mlp.act` for `act` in `mlp`.
            inner_label = part if not alone else label if len(tails) > 1 else f"{label}.{part}"
            split = len(tails) > 1 and len(names) == 1
            child = self.place(inner, inner_name, inner_label, one_by_one=split)
            if alone:
                return child
            children.append(child)
        if has_own and children:
            own = tuple(np.array([self.own[name]] if name in self.own else [], dtype=np.int64) for name in names)
            children.append(_Place(row_name, ITSELF, "", own, (), ()))
        members = tuple(np.array(self.modules[name], dtype=np.int64) for name in names)
        singles = (
            tuple(self.place([name], name, _tail(name)) for name in names if name in self.used) if one_by_one else ()
        )
        return _Place(row_name, label, self.kinds.get(names[0], ""), members, tuple(children), singles)

    def _child(self, name: str, tail: str) -> str:
        """Return the name of a sublayer; those of the first root have no prefix."""
        return qualified if (qualified := f"{name}.{tail}") in self.parents else tail

    def _runs(self, children: list[str]) -> list[list[str]]:
        """Return the tails of sublayers; numbered neighbours of the same structure are in one list."""
        runs: list[list[str]] = []
        before = ""
        for child in children:
            tail = _tail(child)
            follows = tail.isdecimal() and runs and runs[-1][-1].isdecimal() and int(tail) == int(runs[-1][-1]) + 1
            if follows and self.structures[child] == self.structures[before]:
                runs[-1].append(tail)
            else:
                runs.append([tail])
            before = child
        return runs


def _tail(name: str) -> str:
    return name.rpartition(".")[2]
