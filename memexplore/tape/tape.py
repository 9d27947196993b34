"""The Tape: memory events of one device as columns of equal length, one row per event, in time order.

Recorders, the virtual GPU and snapshot files produce a Tape; analysis, figures and the notebook read one.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.tape.methods import method
from memexplore.tape.words import Communicator, Ending, Os, Source

if TYPE_CHECKING:
    import pandas


class Action(enum.IntEnum):
    """The kind of event in a row; the names are PyTorch's, except `PREEXISTING` and `MARK`."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8
    PREEXISTING = 9
    """A block that was already allocated when the tape began."""
    MARK = 10
    """The start of a step or phase; the row's `step` and `phase` columns name it."""


class Category(enum.IntEnum):
    """Kind of memory, in the order in which figures stack the kinds, bottom to top."""

    PARAMETER = 0
    BUFFER = 1
    OPTIMIZER_STATE = 2
    GRADIENT = 3
    ACTIVATION = 4
    INPUT = 5
    TEMPORARY = 6
    WORKSPACE = 7
    UNKNOWN = 8
    # Of several ranks (`recorder.communication`). Files have the numbers, so new ones stand at the end.
    GATHERED_PARAMETER = 9
    GRADIENT_BUCKET = 10
    COMMUNICATION_BUFFER = 11

    @property
    def text(self) -> str:
        """Name of the category as text.

        >>> Category.OPTIMIZER_STATE.text
        'optimizer state'
        """
        return self.name.lower().replace("_", " ")


class Phase(enum.IntEnum):
    """The part of a training step in which a row happened."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    OTHER = 3

    @property
    def text(self) -> str:
        """Name of the phase as text."""
        return self.name.lower()


class Frame(NamedTuple):
    """One line of a Python stack; a stack lists the innermost frame first."""

    filename: str
    line: int
    function: str


class Meta(NamedTuple):
    """Metadata of a whole tape; sizes in bytes."""

    source: Source
    device: str
    """Display name of the device, such as `Tesla T4`, `cuda:1` or `cpu`."""
    gpu: str | None = None
    """Key of the entry in the GPU catalogue (`catalogue.find`), None without an entry."""
    capacity: int | None = None
    """Bytes that the allocator can reserve: total memory minus memory outside the allocator, or the limit of
    `torch.cuda.set_per_process_memory_fraction` if it is less."""
    total: int | None = None
    """Bytes of the whole device."""
    settings: str = ""
    """Allocator settings as a `PYTORCH_CUDA_ALLOC_CONF` string."""
    versions: Mapping[str, str] = {}
    """Releases by package, such as `{"torch": "2.13.0", "memexplore": "0.1.0"}`; the rules of this torch apply."""
    notes: tuple[str, ...] = ()
    """Assumptions and limits of the numbers, one sentence each."""
    ending: Ending = Ending.UNKNOWN
    error: str = ""
    """The error that ended the program, with its line, such as ``ValueError: too small (train.py:12)``."""
    trained_on_cpu: tuple[str, ...] = ()
    """Models of a recorded GPU that trained on the CPU while nothing trained on the GPU."""
    advice: str = ""
    """Sentence on how to run the program on the GPU, for a program that did not use it."""
    unmeasured: str = ""
    """Sentence on child processes whose memory is not on the tape; "" if there are none."""
    os: Os = Os.LINUX
    """Operating system whose driver places the segments of a replay (`allocator.placement`)."""
    rank: int | None = None
    """Rank of the process among the `world` processes of its default group, None without one."""
    world: int | None = None
    communicators: tuple[Communicator, ...] = ()
    """NCCL groups that have communicated, whose memory is outside the allocator (`outside_allocator.nccl_bytes`)."""
    late_reserved: int | None = None
    """Peak of the reserved bytes of a simulated run where frees that wait for other streams end as late as they can;
    None if none waits."""
    early_allocated: int | None = None
    """Peak of the allocated bytes of a simulated run where each collective that the program does not wait for ends
    before the next one begins, which frees what only the collective held; None if that frees nothing earlier."""
    early_reserved: int | None = None
    """Peak of the reserved bytes of that run."""
    limit: int | None = None
    """Bytes that the process may reserve (`torch.cuda.set_per_process_memory_fraction`), None without a limit."""
    capacity_without_limit: int | None = None
    """`capacity` as it would be without `limit`; None where no limit lowers it."""


COLUMNS: dict[str, Any] = {
    "time": np.int64,
    "action": np.uint8,
    "address": np.int64,
    "size": np.int64,
    "stream": np.int64,
    "category": np.uint8,
    "phase": np.uint8,
    "step": np.int32,
    "op": np.int32,
    "module": np.int32,
    "stack": np.int32,
    "tensor": np.int32,
    "workspace": np.int32,
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tape:
    """Memory events of one device: numpy columns of equal length, interned tables and metadata.

    ``size`` is the **requested** size in bytes (in segment rows the size of the segment). ``address`` is -1 in rows
    without an address (marks, out of memory). ``op``, ``module`` and ``stack`` are indices into ``ops``, ``modules``
    and ``stacks``, -1 for none; ``tensor`` is one into ``tensor_texts`` in the rows of requests for a tensor, and
    ``workspace`` one into ``workspaces`` in the rows of requests behind which a library requests a workspace whose size
    is an estimate. An ``alloc`` (or ``preexisting``) row pairs with the next free rows of the same address:
    ``free_requested`` when the program frees the block, ``free_completed`` when the allocator can reuse it. ``time`` is
    in ns since the start, or the row number for a tape without a clock.

    The methods `peak`, `layers`, `tensors`, `by_line` and `by_category` are shorthand for functions of
    `memexplore.analysis`. A tape is *placed* when its alloc rows have addresses; analysis of a tape that is not
    raises ValueError, and `memexplore.replay` places it.
    """

    time: NDArray[np.int64]
    action: NDArray[np.uint8]
    address: NDArray[np.int64]
    size: NDArray[np.int64]
    stream: NDArray[np.int64]
    category: NDArray[np.uint8]
    phase: NDArray[np.uint8]
    step: NDArray[np.int32]
    op: NDArray[np.int32]
    module: NDArray[np.int32]
    stack: NDArray[np.int32]
    tensor: NDArray[np.int32]
    workspace: NDArray[np.int32]
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    stacks: tuple[tuple[Frame, ...], ...]
    meta: Meta
    classes: tuple[str, ...] = ()
    """Class name of each entry of `modules`, "" where unknown; empty if no class is known."""
    tensor_texts: tuple[str, ...] = ()
    """Shapes and dtypes, such as `float32[8, 1024]`, of the tensor that a block was allocated for, not of its views."""
    workspaces: tuple[tuple[int, ...], ...] = ()
    """Bytes that the workspace behind a request may have, each under an assumption, the tape's own first; 0 is none."""
    whole: Tape | None = None
    """The whole run as if there were room, of a run that ended out of memory (`analysis.picture`); None if unknown.

    Files have no whole run.
    """

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Sequence[int] | NDArray[Any]],
        *,
        meta: Meta,
        ops: Sequence[str] = (),
        modules: Sequence[str] = (),
        stacks: Sequence[tuple[Frame, ...]] = (),
        classes: Sequence[str] = (),
        tensor_texts: Sequence[str] = (),
        workspaces: Sequence[tuple[int, ...]] = (),
    ) -> Tape:
        """Build a Tape from some of its columns; missing columns get a neutral value, `time` the row number.

        >>> tape = Tape.from_columns({"action": [Action.ALLOC], "address": [512], "size": [100]},
        ...                          meta=Meta(Source.MEASURED, "cpu"))
        >>> len(tape), int(tape.size[0]), int(tape.stack[0])
        (1, 100, -1)

        Raises ValueError for columns of different lengths, an unknown column, or an index outside its table.
        """
        unknown = set(columns) - set(COLUMNS)
        if unknown:
            raise ValueError(f"a Tape has no columns {sorted(unknown)}; use some of {list(COLUMNS)}")
        lengths = {len(values) for values in columns.values()}
        if len(lengths) > 1:
            raise ValueError(f"the columns have different lengths {sorted(lengths)}; give columns of one length")
        count = lengths.pop() if lengths else 0
        neutral: dict[str, int] = dict.fromkeys(("address", "op", "module", "stack", "tensor", "workspace"), -1)
        neutral |= {"size": 0, "stream": 0, "step": 0}
        neutral |= {"category": Category.UNKNOWN, "phase": Phase.OTHER, "action": Action.ALLOC}
        arrays: dict[str, Any] = {}
        for name, dtype in COLUMNS.items():
            if name in columns:
                array = np.asarray(columns[name], dtype=dtype)
            elif name == "time":
                array = np.arange(count, dtype=dtype)
            else:
                array = np.full(count, neutral[name], dtype=dtype)
            array.flags.writeable = False
            arrays[name] = array
        tables: dict[str, Sequence[Any]] = {"op": ops, "module": modules, "stack": stacks}
        tables |= {"tensor": tensor_texts, "workspace": workspaces}
        for name, table in tables.items():
            column = arrays[name]
            if count and (column.max() >= len(table) or column.min() < -1):
                raise ValueError(
                    f"column {name!r} has an index outside its table of {len(table)} entries; use -1 for none"
                )
        if classes and len(classes) != len(modules):
            raise ValueError(f"a Tape of {len(modules)} modules has {len(classes)} classes; give one for each module")
        return cls(
            **arrays,
            ops=tuple(ops),
            modules=tuple(modules),
            stacks=tuple(stacks),
            meta=meta,
            classes=tuple(classes),
            tensor_texts=tuple(tensor_texts),
            workspaces=tuple(workspaces),
        )

    def __len__(self) -> int:
        return len(self.time)

    def __repr__(self) -> str:
        return str(method("text")(self))

    def _repr_html_(self) -> str:
        return str(method("html")(self))

    def __getitem__(self, rows: slice | NDArray[Any]) -> Tape:
        """Return the rows of a slice, of an array of row numbers or of a mask, with the same tables and metadata."""
        return self.with_rows({name: getattr(self, name)[rows] for name in COLUMNS})

    def with_rows(self, columns: Mapping[str, Any], **changes: Any) -> Tape:
        """Return a tape of other rows with the same tables and metadata, which `changes` may replace (`from_columns`).

        >>> tape = Tape.from_columns({"size": [1], "op": [0]}, ops=["mm"], meta=Meta(Source.MEASURED, "cpu"))
        >>> tape.with_rows({"size": [2, 3]}).ops
        ('mm',)
        """
        names = ("ops", "modules", "stacks", "classes", "tensor_texts", "workspaces", "meta")
        return Tape.from_columns(columns, **{name: getattr(self, name) for name in names} | changes)

    def replace(self, **changes: Any) -> Tape:
        """Return a copy with some columns, tables or metadata replaced."""
        return dataclasses.replace(self, **changes)

    def without_workspaces(self) -> Tape:
        """Return the tape without its `workspaces`, which are wrong where the tape gets other sizes.

        >>> columns = {"size": [1], "workspace": [0]}
        >>> tape = Tape.from_columns(columns, workspaces=[(0, 512)], meta=Meta(Source.PREDICTED, "T4"))
        >>> tape.without_workspaces().workspace.tolist()
        [-1]
        """
        return self.replace(workspace=np.full_like(self.workspace, -1), workspaces=())

    def equals(self, other: Tape) -> bool:
        """Return whether both tapes have the same events; the `time` column is not compared.

        >>> tape = Tape.from_columns({"size": [1]}, meta=Meta(Source.MEASURED, "cpu"))
        >>> tape.equals(tape[:]), tape.equals(tape[:0])
        (True, False)
        """
        tables = ("ops", "modules", "stacks", "tensor_texts", "workspaces")
        same_tables = all(getattr(self, name) == getattr(other, name) for name in tables)
        columns = (name for name in COLUMNS if name != "time")
        return same_tables and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in columns)

    def peak(self, curve: Literal["requested", "allocated", "active", "reserved"] = "allocated") -> tuple[int, int]:
        """Return the highest value of a curve in bytes, and the first row that reaches it (`curves.peak`).

        >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20]}, meta=Meta(Source.MEASURED, "cpu"))
        >>> tape.peak()
        (30, 1)

        Raises ValueError for a tape that is not placed or an unknown curve.
        """
        return method("peak")(self, curve)

    def layers(self) -> pandas.DataFrame:
        """Return the bytes of each layer in the step with the highest peak, one row per module (`tables.layers`).

        >>> tape = Tape.from_columns({"address": [0], "size": [40], "category": [Category.PARAMETER], "module": [0]},
        ...                          modules=["Linear"], meta=Meta(Source.MEASURED, "cpu"))
        >>> int(tape.layers().loc["Linear", "parameter"])
        40

        Raises ValueError for a tape that is not placed.
        """
        return method("layers")(self)

    def tensors(self, row: int | None = None, count: int | None = None) -> pandas.DataFrame:
        """Return the `count` largest tensors alive after a row, by default at the peak allocated (`tables.tensors`).

        >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20]}, meta=Meta(Source.MEASURED, "cpu"))
        >>> tape.tensors(count=1)["size"].tolist()
        [20]

        Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
        """
        return method("tensors")(self, row, count)

    def by_line(self, row: int | None = None) -> pandas.DataFrame:
        """Return allocated bytes by line of the user's code after a row, by default at the peak (`groups.by_line`).

        >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20], "stack": [0, 0]},
        ...                          stacks=[(Frame("train.py", 7, "step"),)], meta=Meta(Source.MEASURED, "cpu"))
        >>> tape.by_line()[["size", "line"]].to_numpy().tolist()
        [[30, 'train.py:7']]

        Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
        """
        return method("by_line")(self, row)

    def by_category(self) -> pandas.DataFrame:
        """Return allocated bytes of each category after each row: one row per event, one column per category.

        >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20], "category": [Category.INPUT] * 2},
        ...                          meta=Meta(Source.MEASURED, "cpu"))
        >>> tape.by_category()["input"].tolist()
        [10, 30]

        Raises ValueError for a tape that is not placed.
        """
        import pandas

        return pandas.DataFrame(method("by_category")(self).T, columns=[kind.text for kind in Category])

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per event and indices as text; `stack` is the innermost ``file:line``."""
        import pandas

        frame = pandas.DataFrame({name: getattr(self, name) for name in COLUMNS})
        for name, words in (
            ("action", [action.name.lower() for action in Action]),
            ("category", [category.text for category in Category]),
            ("phase", [phase.text for phase in Phase]),
        ):
            frame[name] = pandas.Categorical.from_codes(frame[name].to_numpy(np.int64), words)
        lines = [f"{stack[0].filename}:{stack[0].line}" if stack else "" for stack in self.stacks]
        sizes = [", ".join(map(str, workspace)) for workspace in self.workspaces]
        tables = (("op", self.ops), ("module", self.modules), ("stack", lines), ("tensor", self.tensor_texts))
        for name, table in (*tables, ("workspace", sizes)):
            words_and_none = np.array([*table, ""], dtype=object)
            frame[name] = words_and_none[getattr(self, name)]
        return frame

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tape to a file, which `load` reads; a path that ends in `.parquet` is for `to_parquet`.

        Raises ImportError for a Parquet file where pyarrow is not installed.
        """
        method("save")(self, os.fspath(path))

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the tape to a Parquet file for DuckDB, Dask or Spark; tables and metadata go into its metadata.

        Raises ImportError where pyarrow is not installed.
        """
        method("to_parquet")(self, os.fspath(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tape:
        """Return the tape in a file that `save` or `to_parquet` wrote.

        Raises ValueError for a damaged file or a file that they did not write.
        """
        return method("load")(os.fspath(path))
