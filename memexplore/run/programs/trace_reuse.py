"""Derive the second step of a run from an earlier run whose first step made the same sequence of requests.

A run is two steps, and this saves tracing the second one. Two first steps are alike where their requests and frees are
equal row for row in everything except their sizes; the second step is then the earlier second step with the new sizes.
The requests of an update by an optimizer of torch depend on the parameters only: where those
before the first update are alike, the update is not traced either. A change of only the GPU or the allocator settings
changes no request, so nothing is traced where the same kernels run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator import Settings, assign_addresses
from memexplore.allocator.actions import SEGMENT_ACTIONS
from memexplore.recorder.events import Event
from memexplore.tape import Action, Category, Ending, Meta, Phase, Tape
from memexplore.text.tensor_text import interned
from memexplore.virtual_gpu.dispatch.work import Work

if TYPE_CHECKING:
    import pandas

_FIELD = {name: number for number, name in enumerate(Event._fields)}
_COMPARED = [_FIELD[name] for name in ("action", "phase", "step", "op", "module", "stack", "grad")]
ACTION, PHASE, MODULE, BLOCK, CODE = 0, 1, 4, -1, slice(3, 6)
"""Columns of `FirstStep.compared`; the code of a request is its op, layer and stack."""
_RELEASED = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


class FirstStep(NamedTuple):
    """The requests and frees of a first step as recorded, without segments; one row an event."""

    compared: NDArray[np.int64]
    """Action, phase, step, op, module, stack, gradients on or off, and the row that a free refers to."""
    size: NDArray[np.int64]
    in_optimizer: NDArray[np.bool_]
    tensor: NDArray[np.object_]
    """Shape and dtype of the tensor of each request (`tensor_text`), empty without one."""
    workspace: NDArray[np.object_]
    """Sizes of the workspace that may be requested behind each row (`Tape.workspaces`), None without one."""
    category: NDArray[np.int64]
    """Category of each request where the op says it, else UNKNOWN."""


def first_step(
    events: list[tuple[int, ...]], tensors: Mapping[int, str], workspaces: Mapping[int, tuple[int, ...]]
) -> FirstStep:
    """Return the first step from the events of a recorder so far, and their tensors and workspaces by row."""
    table = np.array(events, dtype=np.int64).reshape(len(events), len(_FIELD))
    kept = ~np.isin(table[:, _FIELD["action"]], SEGMENT_ACTIONS)
    row_of_event = np.cumsum(kept) - 1
    call = table[:, _FIELD["call"]].copy()
    is_free = (table[:, _FIELD["action"]] == Action.FREE_REQUESTED) & (call >= 0)
    call[is_free] = row_of_event[call[is_free]]
    table[:, _FIELD["stack"]] = _by_first_use(table[:, _FIELD["stack"]])
    compared = np.column_stack((table[:, _COMPARED], call))[kept]
    in_optimizer = table[kept, _FIELD["phase"]] == Phase.OPTIMIZER
    texts = np.array([tensors.get(row, "") for row in range(len(events))], dtype=object)
    workspace = np.full(len(events), None, dtype=object)
    for row, sizes in workspaces.items():
        workspace[row] = sizes
    category = table[kept, _FIELD["category"]]
    return FirstStep(compared, table[kept, _FIELD["size"]], in_optimizer, texts[kept], workspace[kept], category)


def _by_first_use(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number stacks in the order of their first use, as a recorder numbers the stacks of all its recordings."""
    _, first, number = np.unique(numbers, return_index=True, return_inverse=True)
    return np.where(numbers < 0, numbers, np.argsort(np.argsort(first))[number])


class FirstUpdate(NamedTuple):
    """The update in a first step, and all that follows it in the step: the same for every batch."""

    row: int
    """Its first row in the first step."""
    works: tuple[Work, ...]
    """The work of its kernels."""


@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """All requests of two steps, for other GPUs on which the same kernels run, and other allocator settings."""

    tape: Tape
    """Without segments; a free is two rows."""

    def on_allocator(self, meta: Meta, settings: Settings) -> Tape | None:
        """Return the tape for the capacity of `meta` and allocator settings; None if a request does not fit.

        Running out of memory unwinds the Python code, which frees in an order that only a run gives.
        """
        tape = self._placed(meta, settings)
        return None if _ends_out_of_memory(tape) else tape

    def until_failure(self, meta: Meta, settings: Settings) -> Tape | None:
        """Return the tape up to the request that does not fit, without the frees that follow it.

        None if all requests fit, or a kernel can do without the request that fails: then only a run shows the rest.
        """
        tape = self._placed(meta, settings)
        if not _ends_out_of_memory(tape) or tape.category[-1] == Category.WORKSPACE:
            return None
        failed = np.count_nonzero(~np.isin(tape.action[:-1], SEGMENT_ACTIONS))
        size, category = tape.size.copy(), tape.category.copy()
        size[-1], category[-1] = self.tape.size[failed], Category.UNKNOWN  # as a recorder has them, not a block
        return tape.replace(size=size, category=category, meta=meta._replace(ending=Ending.OUT_OF_MEMORY))

    def _placed(self, meta: Meta, settings: Settings) -> Tape:
        tape = assign_addresses(self.tape.replace(meta=meta), settings)
        segments = np.isin(tape.action, SEGMENT_ACTIONS)
        none = {name: np.where(segments, -1, getattr(tape, name)) for name in ("op", "module", "stack")}
        return tape.replace(category=np.where(segments, Category.UNKNOWN, tape.category).astype(np.uint8), **none)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace(Requests):
    """The requests of two steps, and for each of them the request of the first step that has the same size."""

    first: FirstStep
    size_source: NDArray[np.int64]
    """For each row of `tape` the row of `first` that it is, or whose size it has; -1 where it keeps its own size."""
    tensor_source: NDArray[np.int64]
    """For each row of `tape` the row of `first` whose tensor has the same shape and dtype, and which may have the same
    workspace behind it; -1 where the row keeps its own, and the number of rows of `first` where the new ones are
    unknown."""
    update: FirstUpdate | None = None
    """None where the update may depend on more than the parameters."""

    def continued(self, begun: FirstStep) -> Trace | None:
        """Return the trace of a run whose first step begins with `begun`, up to its update; None if it is not alike."""
        before, update = self.first, self.update
        if update is None or len(begun.size) != update.row:
            return None
        if not np.array_equal(begun.compared, before.compared[: update.row]):
            return None
        size = np.append(begun.size, before.size[update.row :])
        action, call = before.compared[:, 0], before.compared[:, -1]
        later_frees = np.flatnonzero((action == Action.FREE_REQUESTED) & (call >= 0))
        later_frees = later_frees[later_frees >= update.row]
        size[later_frees] = size[call[later_frees]]
        tensor = np.append(begun.tensor, before.tensor[update.row :])
        workspace = np.append(begun.workspace, before.workspace[update.row :])
        return self.resized(before._replace(size=size, tensor=tensor, workspace=workspace))

    def resized(self, first: FirstStep) -> Trace | None:
        """Return the trace of a run whose first step is `first`; None if that run has to be traced."""
        before = self.first
        if first.compared.shape != before.compared.shape or not np.array_equal(first.compared, before.compared):
            return None
        if not np.array_equal(first.size[first.in_optimizer], before.size[before.in_optimizer]):
            return None
        if not np.array_equal(first.tensor[first.in_optimizer], before.tensor[first.in_optimizer]):
            return None
        size = np.where(self.size_source >= 0, first.size[self.size_source], self.tape.size)
        tape = self.tape.replace(size=size)
        if not np.array_equal(first.tensor, before.tensor):
            tensor, texts = self._exchanged(tape.tensor, tape.tensor_texts, first.tensor)
            tape = tape.replace(tensor=tensor, tensor_texts=texts)
        if not np.array_equal(first.workspace, before.workspace):
            workspace, workspaces = self._exchanged(tape.workspace, tape.workspaces, first.workspace)
            tape = tape.replace(workspace=workspace, workspaces=workspaces)
        return dataclasses.replace(self, first=first, tape=tape)

    def _exchanged(
        self, column: NDArray[np.int32], table: Sequence[Any], of_first: NDArray[np.object_]
    ) -> tuple[NDArray[np.int32], tuple[Any, ...]]:
        """Return a column and its table with the values of another first step, -1 where these are unknown."""
        source, own = self.tensor_source, np.fromiter((*table, None), dtype=object)[column]
        new = np.append(of_first, np.full(1, None))[source]
        numbers, entries = interned(np.where(source >= 0, new, own).tolist())
        return np.array(numbers, dtype=np.int32), entries


def _ends_out_of_memory(tape: Tape) -> bool:
    return bool(len(tape) and tape.action[-1] == Action.OOM)


def requests_of(tape: Tape) -> Requests | None:
    """Return the requests of the tape of two traced steps; None where they depend on the capacity of the GPU."""
    if np.isin(tape.action, (*_RELEASED, Action.OOM, Action.PREEXISTING, Action.SNAPSHOT)).any():
        return None
    return Requests(tape[~np.isin(tape.action, SEGMENT_ACTIONS)])


def reusable_trace(first: FirstStep, requests: Requests, update: FirstUpdate | None = None) -> Trace | None:
    """Return the requests of two traced steps in the form that runs with other sizes can reuse; None without one.

    `first` is the first step of the same run, `update` its update where that depends on the parameters only. A request
    of the second step is matched with the request of the first step that has the same op, layer and line, in order
    where several have; where their sizes differ, nothing is reused. Requests of the optimizer, and those for gathered
    parameters, depend on the parameters only, and keep their sizes and shapes. Where only the shapes of
    a match differ, the shape is unknown in other runs.
    """
    kept = requests.tape
    # A free is one event and two rows.
    is_event = kept.action != Action.FREE_COMPLETED
    number = np.cumsum(is_event) - 1
    count = len(first.size)
    size_source = np.where(number < count, number, -1)
    later = np.flatnonzero((kept.action == Action.ALLOC) & (number >= count))
    matched = _matched(kept, number, count)
    tensor_source = _tensor_source(first, kept, later, number, matched)
    by_parameters = (kept.phase[later] == Phase.OPTIMIZER) | (kept.category[later] == Category.GATHERED_PARAMETER)
    tensor_source[later[by_parameters]] = -1
    matched[by_parameters] = -1
    if ((matched < 0) & ~by_parameters).any():
        return None
    has_match = matched >= 0
    if not np.array_equal(kept.size[later[has_match]], kept.size[matched[has_match]]):
        return None
    size_source[later[has_match]] = number[matched[has_match]]
    return Trace(kept, first, _with_frees(kept, size_source), tensor_source, update)


def _matched(tape: Tape, number: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return for each request of the second step the row of its match in the first step, -1 if it has none.

    `number` is the event of each row, `count` the events of the first step.
    """
    import pandas

    allocs = np.flatnonzero(tape.action == Action.ALLOC)
    table = pandas.DataFrame({name: getattr(tape, name)[allocs] for name in ("phase", "op", "module", "stack")})
    # cuBLAS takes its workspace at the first product of a thread, and only there.
    table["workspace"] = tape.category[allocs] == Category.WORKSPACE
    table["row"] = allocs
    keys = ["phase", "op", "module", "stack", "workspace"]
    early = table[number[allocs] < count].copy()
    late = table[number[allocs] >= count].copy()
    # From the last on: cuDNN takes its random state in front of a workspace, and only once.
    early["nth"], late["nth"] = (requests.groupby(keys).cumcount(ascending=False) for requests in (early, late))
    pairs = late.merge(early, on=[*keys, "nth"], how="left", suffixes=("", "_of"))
    matched = pairs["row_of"].fillna(-1).to_numpy(np.int64).copy()
    _match_across_phases(matched, early, late, tape)
    return matched


def _match_across_phases(
    matched: NDArray[np.int64], early: pandas.DataFrame, late: pandas.DataFrame, tape: Tape
) -> None:
    """Match a request without a match, whatever its phase, if one request of the first step is like it in all else.

    "All else" is op, layer, line, shape and dtype. Preparing a model for several GPUs computes with gradients, as a
    forward pass does, so the first batch is copied in another phase than the second.
    """
    keys = ["op", "module", "stack", "tensor"]
    unmatched = late[(matched < 0) & (tape.tensor[late["row"]] >= 0)]
    if unmatched.empty:
        return
    first = early.assign(tensor=tape.tensor[early["row"]]).drop_duplicates(keys, keep=False)
    pairs = unmatched.assign(tensor=tape.tensor[unmatched["row"]], place=unmatched.index).merge(
        first, on=keys, suffixes=("", "_of")
    )
    place = late.index.get_indexer(pairs["place"])
    matched[place] = pairs["row_of"]


def _tensor_source(
    first: FirstStep, tape: Tape, later: NDArray[np.int64], number: NDArray[np.int64], matched: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return `Trace.tensor_source` of a tape.

    `number` is the event of each row, `later` the requests of the second step, `matched` their rows in the first.
    """
    count = len(first.tensor)
    result = np.where((number < count) & (tape.tensor >= 0), number, -1)
    alike = (matched >= 0) & (tape.tensor[later] == tape.tensor[matched])
    alike &= tape.workspace[later] == tape.workspace[matched]
    result[later] = np.where(alike, number[matched], count)
    return result


def _with_frees(tape: Tape, size_source: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give the rows that free a block the size source of the block."""
    block: dict[int, int] = {}
    sources = size_source.tolist()
    for row, (action, address) in enumerate(zip(tape.action.tolist(), tape.address.tolist(), strict=True)):
        if action == Action.ALLOC:
            block[address] = sources[row]
        elif action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            sources[row] = block.get(address, -1)
    return np.array(sources, dtype=np.int64)
