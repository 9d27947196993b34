"""Compare a measured tape with a predicted one, request by request, and find what makes their peaks differ."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.replay import assign_addresses
from memexplore.analysis.curves import Rows, lifetimes, peak
from memexplore.hardware.outside_allocator import Library
from memexplore.tape import Action, Category, Phase, Tape
from memexplore.tape.allocator_settings import Settings
from memexplore.tape.methods import method
from memexplore.text.units import difference_text, size_text

CURVES = ("allocated", "reserved")
_AGREEING = 5
"""Requests that have to agree behind a difference, so that both tapes are at the same point again."""
_FARTHEST = 400
"""Requests of both tapes that are searched for such a point."""
_OF_ONE_OP = 6
"""Rows before and after scratch memory in which the other requests of its op stand."""
_MOST_PAIRS = 250_000
_NAMED = 2
"""Layers that are named of several."""
_MOST_TRIED = 12
"""Groups of differing requests whose effect on the peaks is replayed, those with most bytes first."""

_LIBRARIES = {
    "cuDNN": ("convolution", "cudnn", "_ctc", "miopen"),
    "cuBLAS": ("::mm", "addmm", "bmm", "baddbmm", "::mv", "addmv", "linear", "matmul", "addbmm"),
    "cuFFT": ("fft",),
    "NCCL": ("c10d::", "_c10d", "all_reduce", "all_gather", "reduce_scatter"),
}
"""Parts of names of ops whose scratch memory is a library's."""


class Change(enum.StrEnum):
    """How a request differs."""

    SIZE = "another size"
    MEASURED = "only measured"
    PREDICTED = "only predicted"
    FREED = "freed at another time"
    STREAM = "on another stream"


class Peaks(NamedTuple):
    """Bytes of one curve at its highest."""

    measured: int
    predicted: int

    @property
    def text(self) -> str:
        """The difference of the prediction.

        >>> Peaks(1000, 1000).text, Peaks(1000, 988).text, Peaks(9000, 9001).text
        ('equal to the byte', '−1.2 %', '+1 B')
        """
        if self.measured == self.predicted:
            return "equal to the byte"
        change = self.predicted - self.measured
        share = f"{abs(change) / self.measured * 100:.1f}" if self.measured else ""
        size = f"{abs(change):,} B" if share in ("", "0.0") else f"{share} %"
        return f"{'−' if change < 0 else '+'}{size}"


@dataclasses.dataclass(frozen=True)
class Differing:
    """Requests of one op that differ in the same way; sizes in bytes."""

    change: Change
    op: str
    """Name of the op, "" where neither tape knows it."""
    category: str
    """Kind of the memory, as the prediction has it; of what is only measured, as measured."""
    library: str
    """Library whose scratch memory it is, "" for tensors."""
    modules: tuple[str, ...]
    """The layers, in the order of the run, each once."""
    phase: str
    tensors: tuple[str, ...]
    """Shape and dtype of each tensor or, of scratch memory, of what its op made and of the weights of its layer."""
    sizes: tuple[tuple[int | None, int | None], ...]
    """Measured and predicted size of each request, in the order of the run; None on the side that lacks it."""
    rows: tuple[int | None, int | None]
    """The first of them as a row of the measured and of the predicted tape."""
    effect: tuple[int, int] | None = None
    """Change of the predicted peaks (`CURVES`) with these requests as they were measured; None if not tried."""

    @property
    def bytes(self) -> int:
        """Predicted less measured bytes of all of them."""
        return sum((predicted or 0) - (measured or 0) for measured, predicted in self.sizes)

    @property
    def name(self) -> str:
        """What the requests are.

        >>> Differing(Change.SIZE, "aten::convolution", "workspace", "cuDNN", ("stem", "head"), "forward", (),
        ...           ((10, 20), (10, 20)), (0, 0)).name
        "cuDNN's workspace in aten::convolution (stem, head)"
        """
        what = f"{self.library}'s workspace" if self.library else self.category
        layers = [module for module in self.modules if module]
        more = [f"{len(layers) - _NAMED} more layers"] if len(layers) > _NAMED else []
        where = f" ({', '.join([*layers[:_NAMED], *more])})" if layers else ""
        return what + (f" in {self.op}" if self.op else "") + where

    @property
    def text(self) -> str:
        """The requests and how they differ, in one line."""
        count = f"{len(self.sizes)} × " if len(self.sizes) > 1 else ""
        measured, predicted = self.sizes[0]
        if self.change is Change.SIZE:
            texts = size_text(measured or 0), size_text(predicted or 0)
            if texts[0] == texts[1]:
                texts = f"{measured:,} B", f"{predicted:,} B"
            first = f"{texts[0]} measured, {texts[1]} predicted"
            return f"{count}{self.name}: {first}" + (" (the first)" if count else "")
        size = size_text((predicted if measured is None else measured) or 0)
        return f"{count}{self.name}: {self.change}, {size}"

    @property
    def full_text(self) -> str:
        """`text`, with the effect on the peaks."""
        changes = [
            f"{name} {difference_text(0, change)}"
            for name, change in zip(CURVES, self.effect or (0, 0), strict=True)
            if change
        ]
        return f"{self.text}; as measured the prediction would change by {', '.join(changes)}" if changes else self.text


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """A measured run beside the prediction of the same program. Make one with `compare_tapes`."""

    measured: Tape
    predicted: Tape
    requests: tuple[int, int]
    """Number of requests, measured and predicted."""
    equal: int
    """Number of requests that are equal in order, size and life."""
    differing: tuple[Differing, ...]
    """The requests that differ, in the order of the first of each group."""
    peaks: dict[str, Peaks]
    """Peaks by curve (`CURVES`)."""
    outside: Peaks | None = None
    """Memory outside the allocator; None where it was not measured."""
    outside_range: tuple[int, int] = (0, 0)
    """Lowest and highest prediction of it."""

    @property
    def is_equal(self) -> bool:
        """Whether all requests and both peaks are equal."""
        return not self.differing and all(each.measured == each.predicted for each in self.peaks.values())

    @property
    def cause(self) -> Differing | None:
        """The group that moves the peaks of the prediction most towards the measured ones; None without an effect."""
        for number in reversed(range(len(CURVES))):
            each = self.peaks[CURVES[number]]
            sign = np.sign(each.measured - each.predicted)
            moving = [group for group in self.differing if group.effect and sign * group.effect[number] > 0]
            if sign and moving:
                return max(moving, key=lambda group: abs(group.effect[number]) if group.effect else 0)
        return None

    @property
    def text(self) -> str:
        """The answer, in one sentence."""
        ends = [bool(np.any(tape.action[-1:] == Action.OOM)) for tape in (self.measured, self.predicted)]
        if ends[0] != ends[1]:
            measured, predicted = (("ran out of memory" if end else "ended") for end in ends)
            return f"The measured run {measured}, the predicted one {predicted}{self._first()}."
        answer = ", ".join(f"{name} {each.text}" for name, each in self.peaks.items())
        if all(each.measured == each.predicted for each in self.peaks.values()):
            answer = f"{' and '.join(CURVES)} memory equal to the byte"
        if self.is_equal:
            return f"{answer[0].upper()}{answer[1:]}; all {self.equal:,} requests are equal in order and size."
        return f"{answer[0].upper()}{answer[1:]}{self._why()}."

    def _why(self) -> str:
        cause = self.cause
        if cause is not None:
            return f": {cause.name} ({cause.change})"
        if any(each.measured != each.predicted for each in self.peaks.values()):
            return (
                f": {self._placed()}" if not self.differing else f"; no one kind of requests explains it{self._first()}"
            )
        return f"; requests that differ have no effect on the peaks{self._first()}"

    def _placed(self) -> str:
        settings = self.measured.meta.settings, self.predicted.meta.settings
        if settings[0] != settings[1]:
            shown = [text or "the defaults" for text in settings]
            return f"no request differs, but the allocator's settings do ({shown[0]} measured, {shown[1]} predicted)"
        segments = [
            int(np.count_nonzero(tape.action == Action.SEGMENT_FREE)) for tape in (self.measured, self.predicted)
        ]
        if segments[0] != segments[1]:
            return f"no request differs; {segments[0]} segments were given back instead of {segments[1]}"
        return "no request differs; the driver placed segments elsewhere"

    def _first(self) -> str:
        return f": first {self.differing[0].text}" if self.differing else ""

    def table(self) -> list[tuple[str, str, str, str]]:
        """Return the rows of a table: what, measured, predicted, difference."""
        outside = {} if self.outside is None else {"outside the allocator": self.outside}
        rows = [
            (
                f"peak {name}" if name in CURVES else name,
                size_text(each.measured),
                size_text(each.predicted),
                "0" if each.measured == each.predicted else difference_text(each.measured, each.predicted),
            )
            for name, each in {**self.peaks, **outside}.items()
        ]
        measured, predicted = self.requests
        return [*rows, ("requests", f"{measured:,}", f"{predicted:,}", f"{self.equal:,} equal")]

    def __str__(self) -> str:
        rows = [("", "measured", "predicted", "difference"), *self.table()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
        lines = [self.text, "", *("  ".join(row).rstrip() for row in cells)]
        if self.differing:
            lines += ["", "Requests that differ:", *(f"  {group.full_text}" for group in self.differing)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return str(method("comparison_html")(self))


def compare_tapes(measured: Tape, predicted: Tape) -> Comparison:
    """Return how a prediction differs from what was measured.

    Requests are matched in order: at a difference, up to the next point from which both tapes ask for the same.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"address": [1, 2, 3], "size": [512, 1024, 2048]}
    >>> one = Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cuda:0"))
    >>> other = Tape.from_columns(rows | {"size": [512, 4096, 2048]}, meta=Meta(Source.PREDICTED, "T4"))
    >>> compare_tapes(one, one[:]).text
    'Allocated and reserved memory equal to the byte; all 3 requests are equal in order and size.'
    >>> compare_tapes(one, other).differing[0].sizes
    ((1024, 4096),)

    Raises ValueError for a tape that is not placed.
    """
    sides = _Requests.of(measured), _Requests.of(predicted)
    pairs = _Pairs(*sides)
    differing = pairs.groups()
    order = sorted(differing, key=lambda group: -abs(group.bytes))[:_MOST_TRIED]
    before = pairs.peaks(()) if differing else (0, 0)
    for group in order:
        after = pairs.peaks(group.numbers)
        group.effect = after[0] - before[0], after[1] - before[1]
    count = sum(len(group.numbers) for group in differing)
    both = int(np.count_nonzero(pairs.partner >= 0))
    alone = sum(len(group.numbers) for group in differing if group.change in (Change.MEASURED, Change.PREDICTED))
    return Comparison(
        measured,
        predicted,
        (len(sides[0].size), len(sides[1].size)),
        both - (count - alone),
        tuple(group.shown() for group in differing),
        {name: Peaks(peak(measured, name)[0], peak(predicted, name)[0]) for name in CURVES},  # type: ignore[arg-type]
    )


def libraries(tape: Tape) -> frozenset[Library]:
    """Return the libraries whose kernels a program has called, of those that take much memory outside the allocator.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"op": [0]}, ops=["aten::mm"], meta=Meta(Source.MEASURED, "cuda:0"))
    >>> [library.value for library in libraries(tape)]
    ['cuBLAS']
    """
    found = {_library(op) for op in tape.ops}
    return frozenset(library for library in Library if library.value in found)


# --- requests ---------------------------------------------------------------------------------------------------------


class _Requests(NamedTuple):
    """The requests of a tape in their order."""

    tape: Tape
    row: Rows
    size: Rows
    stream: Rows
    """Number of the stream in the order of first use."""
    end: Rows
    """Number of requests before the block can be used again."""
    op: NDArray[Any]
    tensor: NDArray[Any]
    """Shape and dtype of the tensor, "" for scratch memory; None for all requests of a tape that has no tensors."""
    layer: NDArray[Any]
    """Name of the layer; None where it is not known."""

    @classmethod
    def of(cls, tape: Tape) -> _Requests:
        life = lifetimes(tape)
        _, first, stream = np.unique(tape.stream[life.born], return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))
        names = np.array([*tape.ops, ""], dtype=object)
        end = np.searchsorted(life.born, life.completed)
        texts = np.array([*tape.tensor_texts, "" if tape.tensor_texts else None], dtype=object)
        layers = np.array([*tape.modules, None], dtype=object)
        columns = names[tape.op[life.born]], texts[tape.tensor[life.born]], layers[tape.module[life.born]]
        return cls(tape, life.born, tape.size[life.born], order[stream], end, *columns)

    def __len__(self) -> int:
        return len(self.row)


@dataclasses.dataclass
class _Group:
    """`Differing` while it is being found; numbers are those of `_Pairs`."""

    change: Change
    pairs: _Pairs
    numbers: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Numbers of the request on both sides, -1 on the side that lacks it."""
    effect: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        return sum((predicted or 0) - (measured or 0) for measured, predicted in self._sizes())

    def _sizes(self) -> list[tuple[int | None, int | None]]:
        one, other = self.pairs.measured, self.pairs.predicted
        return [(int(one.size[i]) if i >= 0 else None, int(other.size[j]) if j >= 0 else None) for i, j in self.numbers]

    def shown(self) -> Differing:
        one, other = self.pairs.measured, self.pairs.predicted
        known = [(other, j) if j >= 0 else (one, i) for i, j in self.numbers]
        rows = [(side.tape, int(side.row[number])) for side, number in known]
        tape, row = rows[0]
        category = Category(int(tape.category[row]))
        op = str(known[0][0].op[known[0][1]])
        is_scratch = category in (Category.WORKSPACE, Category.TEMPORARY, Category.UNKNOWN)
        i, j = self.numbers[0]
        return Differing(
            self.change,
            op,
            category.text,
            _library(op) if is_scratch else "",
            tuple(dict.fromkeys(_name(tape.modules, tape.module[row]) for tape, row in rows)),
            Phase(int(tape.phase[row])).text,
            tuple(dict.fromkeys(filter(None, (_operands(tape, row) for tape, row in rows)))),
            tuple(self._sizes()),
            (int(one.row[i]) if i >= 0 else None, int(other.row[j]) if j >= 0 else None),
            self.effect,
        )


def _name(table: tuple[str, ...], number: int) -> str:
    return table[number] if number >= 0 else ""


def _operands(tape: Tape, row: int) -> str:
    """Return the tensor of a request or, for scratch memory, the tensors of its op and the parameters of its layer."""
    if tape.tensor[row] >= 0:
        return tape.tensor_texts[tape.tensor[row]]
    near = slice(max(row - _OF_ONE_OP, 0), row + _OF_ONE_OP + 1)
    of_op = (
        (tape.op[near] == tape.op[row]) & (tape.module[near] == tape.module[row]) & (tape.step[near] == tape.step[row])
    )
    of_layer = (tape.category == Category.PARAMETER) & (tape.module == tape.module[row])
    numbers = [*tape.tensor[near][of_op].tolist(), *tape.tensor[of_layer & (tape.module >= 0)].tolist()]
    return ", ".join(dict.fromkeys(tape.tensor_texts[number] for number in numbers if number >= 0))


def _library(op: str) -> str:
    return next((name for name, parts in _LIBRARIES.items() if any(part in op for part in parts)), "")


class _Pairs:
    """Which requests of two tapes are the same."""

    def __init__(self, measured: _Requests, predicted: _Requests) -> None:
        self.measured, self.predicted = measured, predicted
        self.partner = _partners(measured, predicted)
        """Of each measured request the predicted one, -1 without one."""

    @functools.cached_property
    def _boundary(self) -> Rows:
        """For a number of measured requests the number of predicted ones that have gone before the same point."""
        return np.maximum.accumulate(np.append(0, self.partner + 1))

    def groups(self) -> list[_Group]:
        """Return the requests that differ, by how they differ, op, category and phase."""
        one, other = self.measured, self.predicted
        i = np.flatnonzero(self.partner >= 0)
        j = self.partner[i]
        is_paired = np.zeros(len(other), dtype=bool)
        is_paired[j] = True
        before = [np.append(0, np.cumsum(flags)) for flags in (self.partner >= 0, is_paired)]
        is_size = one.size[i] != other.size[j]
        is_stream = ~is_size & (one.stream[i] != other.stream[j])
        is_freed = ~is_size & ~is_stream & (before[0][one.end[i]] != before[1][other.end[j]])
        found: list[tuple[Change, int, int]] = []
        for change, flags in ((Change.SIZE, is_size), (Change.STREAM, is_stream), (Change.FREED, is_freed)):
            found += [(change, int(a), int(b)) for a, b in zip(i[flags], j[flags], strict=True)]
        found += [(Change.MEASURED, int(a), -1) for a in np.flatnonzero(self.partner < 0)]
        found += [(Change.PREDICTED, -1, int(b)) for b in np.flatnonzero(~is_paired)]
        groups: dict[tuple[Any, ...], _Group] = {}
        for change, a, b in sorted(found, key=lambda each: self._boundary[each[1]] if each[2] < 0 else each[2]):
            side, number = (other, b) if b >= 0 else (one, a)
            row = side.row[number]
            key = change, side.op[number], int(side.tape.category[row]), int(side.tape.phase[row])
            groups.setdefault(key, _Group(change, self)).numbers.append((a, b))
        return list(groups.values())

    def peaks(self, as_measured: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Return the peaks (`CURVES`) of the prediction with some requests as they were measured."""
        one, other = self.measured, self.predicted
        size, stream, end = other.size.copy(), other.stream.copy(), other.end.copy()
        is_left_out = np.zeros(len(other), dtype=bool)
        added: list[int] = []
        for i, j in as_measured:
            if j < 0:
                added.append(i)
            elif i < 0:
                is_left_out[j] = True
            else:
                is_freed = self._boundary[one.end[i]] if one.end[i] < len(one) else len(other)
                size[j], stream[j], end[j] = one.size[i], one.stream[i], max(int(is_freed), j + 1)
        kept = np.flatnonzero(~is_left_out)
        events = [
            *((float(j) + 0.9, number, True) for number, j in enumerate(kept.tolist())),
            *((float(end[j]), number, False) for number, j in enumerate(kept.tolist()) if end[j] < len(other)),
        ]
        sizes, streams = [size[kept]], [stream[kept]]
        for number, i in enumerate(added, len(kept)):
            born, gone = int(self._boundary[i]), int(self._boundary[one.end[i]])
            events.append((born + 0.4, number, True))
            if one.end[i] < len(one):
                events.append((gone + (0.5 if gone == born else 0.0), number, False))
            sizes.append(one.size[i : i + 1])
            streams.append(one.stream[i : i + 1])
        events.sort()
        return _peaks_of(events, np.concatenate(sizes), np.concatenate(streams), other.tape)


def _peaks_of(events: list[tuple[float, int, bool]], size: Rows, stream: Rows, like: Tape) -> tuple[int, int]:
    """Return the peaks of requests and frees, placed by the allocator under the settings of a tape."""
    number = np.array([number for _, number, _ in events], dtype=np.int64)
    is_birth = np.array([birth for _, _, birth in events], dtype=bool)
    repeats = np.where(is_birth, 1, 2)
    rows = np.repeat(np.arange(len(events)), repeats)
    actions = np.where(is_birth[rows], Action.ALLOC, Action.FREE_REQUESTED)
    actions[np.cumsum(repeats)[~is_birth] - 1] = Action.FREE_COMPLETED
    columns = {
        "action": actions,
        "address": number[rows] + 1,
        "size": size[number[rows]],
        "stream": stream[number[rows]],
    }
    meta = like.meta._replace(capacity=None, capacity_without_limit=None, limit=None)
    tape = assign_addresses(Tape.from_columns(columns, meta=meta), Settings.parse(like.meta.settings))
    return peak(tape, "allocated")[0], peak(tape, "reserved")[0]


# --- matching ---------------------------------------------------------------------------------------------------------


def _partners(one: _Requests, other: _Requests) -> Rows:
    """Return for each request of `one` the number of the same request in `other`, -1 without one."""
    partner = np.full(len(one), -1, dtype=np.int64)
    i = j = 0
    while i < len(one) and j < len(other):
        count = min(len(one) - i, len(other) - j)
        differs = one.size[i : i + count] != other.size[j : j + count]
        for name in ("tensor", "layer"):
            known, known_of_other = getattr(one, name)[i : i + count], getattr(other, name)[j : j + count]
            differs |= (known != known_of_other) & (known != None) & (known_of_other != None)  # noqa: E711
        equal = int(np.argmax(differs)) if differs.any() else count
        partner[i : i + equal] = np.arange(j, j + equal)
        i, j = i + equal, j + equal
        if equal < count:
            ahead, ahead_of_other = _next_agreement(one, other, i, j)
            partner[i : i + ahead] = _closest(one, other, (i, i + ahead), (j, j + ahead_of_other))
            i, j = i + ahead, j + ahead_of_other
    return partner


def _next_agreement(one: _Requests, other: _Requests, i: int, j: int) -> tuple[int, int]:
    """Return after how many requests of both tapes they ask for the same again, the fewest in total; else all."""
    ends = min(len(one) - i, _FARTHEST), min(len(other) - j, _FARTHEST)
    for total in range(1, sum(ends) + 1):
        for ahead in range(max(total - ends[1], 0), min(total, ends[0]) + 1):
            if _agree(one, other, i + ahead, j + total - ahead):
                return ahead, total - ahead
    return len(one) - i, len(other) - j


def _agree(one: _Requests, other: _Requests, i: int, j: int) -> bool:
    """Return whether the requests from two places on agree: the first in its size, the next ones in size or op.

    A tensor and scratch memory do not agree, nor do tensors of other shapes or of other layers.
    """
    if i == len(one) or j == len(other):
        return i == len(one) and j == len(other)
    if not _is_equal(one, i, other, j):
        return False
    for a, b in zip(range(i + 1, min(i + _AGREEING, len(one))), range(j + 1, len(other))):  # noqa: B905
        is_similar = _is_same_op(one.op[a], other.op[b]) and _is_same_kind(one, a, other, b)
        if not is_similar and not _is_equal(one, a, other, b):
            return False
    return True


def _is_equal(one: _Requests, a: int, other: _Requests, b: int) -> bool:
    """Return whether two requests have the same size, and the same tensor and layer as far as these are known."""
    is_same_tensor = one.tensor[a] is None or other.tensor[b] is None or one.tensor[a] == other.tensor[b]
    return bool(one.size[a] == other.size[b]) and is_same_tensor and _is_same_kind(one, a, other, b)


def _is_same_kind(one: _Requests, a: int, other: _Requests, b: int) -> bool:
    """Return whether both requests are for tensors or both for scratch memory, of one layer, as far as is known."""
    tensor, other_tensor, layer, other_layer = one.tensor[a], other.tensor[b], one.layer[a], other.layer[b]
    is_same = tensor is None or other_tensor is None or bool(tensor) == bool(other_tensor)
    return is_same and (layer is None or other_layer is None or layer == other_layer)


def _is_same_op(one: str, other: str) -> bool:
    return bool(one) and one == other


def _closest(one: _Requests, other: _Requests, here: tuple[int, int], there: tuple[int, int]) -> list[int]:
    """Return the partners of requests between two places: as many as possible of the same op, in order."""
    (i, last), (j, last_of_other) = here, there
    rows, columns = last - i, last_of_other - j
    if rows * columns > _MOST_PAIRS or not rows * columns:
        return [-1] * rows

    def cost(a: int, b: int) -> float:
        if not _is_same_kind(one, a, other, b):
            return 3.0
        if one.size[a] == other.size[b]:
            return 0.0
        if _is_same_op(one.op[a], other.op[b]):
            return 1.0
        return 3.0 if one.op[a] and other.op[b] else 1.5

    least = [[float(b) for b in range(columns + 1)]]
    for a in range(rows):
        line = [a + 1.0]
        for b in range(columns):
            line.append(min(least[a][b] + cost(i + a, j + b), least[a][b + 1] + 1, line[b] + 1))
        least.append(line)
    partners = [-1] * rows
    a, b = rows, columns
    while a and b:
        if least[a][b] == least[a - 1][b - 1] + cost(i + a - 1, j + b - 1):
            a, b = a - 1, b - 1
            partners[a] = j + b
        elif least[a][b] == least[a - 1][b] + 1:
            a -= 1
        else:
            b -= 1
    return partners
