"""The Tape: memory events of one device as columns, one row an event, in time order."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas


class Action(enum.IntEnum):
    """What a row tells; the names are PyTorch's own, `PREEXISTING` and `MARK` are ours."""

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
    """A border of a step or a phase: `step` and `phase` are those that begin here."""


class Category(enum.IntEnum):
    """What kind of memory a row is, in the order in which figures stack them, bottom to top."""

    PARAMETER = 0
    BUFFER = 1
    OPTIMIZER_STATE = 2
    GRADIENT = 3
    ACTIVATION = 4
    INPUT = 5
    TEMPORARY = 6
    WORKSPACE = 7
    UNKNOWN = 8

    @property
    def text(self) -> str:
        """The category in words.

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
        """The phase in words."""
        return self.name.lower()


class Source(enum.StrEnum):
    """Where the numbers come from, said in every figure and sentence."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    IMPORTED = "imported"


class Frame(NamedTuple):
    """One line of a Python stack; a stack lists the innermost frame first."""

    filename: str
    line: int
    function: str


class Meta(NamedTuple):
    """What is true of the whole tape; sizes in bytes."""

    source: Source
    device: str
    """The device's name for a person, such as `Tesla T4`, `cuda:1` or `cpu`."""
    gpu: str | None = None
    """Key of the catalogue entry (`devices.find`), where there is one."""
    capacity: int | None = None
    """Bytes the allocator can reserve: total memory without what lies outside the allocator."""
    total: int | None = None
    """Bytes of the whole device."""
    settings: str = ""
    """Allocator settings as a `PYTORCH_CUDA_ALLOC_CONF` string."""
    versions: Mapping[str, str] = {}
    """For example `{"torch": "2.13.0", "memexplore": "0.1.0"}`; `torch` is the release whose rules apply."""
    notes: tuple[str, ...] = ()
    """Assumptions and limits a reader has to know, one sentence each."""


_COLUMNS: dict[str, Any] = {
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
}


@dataclasses.dataclass(frozen=True, eq=False)
class Tape:
    """Memory events of one device: numpy columns of equal length, interned tables and metadata.

    ``size`` is the **requested** size in bytes (the segment's size in segment rows). ``address`` is -1 where a row
    has no place (marks, out of memory). ``op``, ``module`` and ``stack`` are row numbers into ``ops``, ``modules``
    and ``stacks``, -1 for none. An ``alloc`` (or ``preexisting``) row and the next free row of the same address
    belong together: ``free_requested`` when the free is asked for, ``free_completed`` when it is done. ``time`` is in
    ns since the start, the row number where there is no clock.
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
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    stacks: tuple[tuple[Frame, ...], ...]
    meta: Meta

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Sequence[int] | NDArray[Any]],
        *,
        meta: Meta,
        ops: Sequence[str] = (),
        modules: Sequence[str] = (),
        stacks: Sequence[tuple[Frame, ...]] = (),
    ) -> Tape:
        """Build a Tape from any of its columns; those left out get their neutral value, `time` the row number.

        >>> tape = Tape.from_columns({"action": [Action.ALLOC], "address": [512], "size": [100]},
        ...                          meta=Meta(Source.MEASURED, "cpu"))
        >>> len(tape), int(tape.size[0]), int(tape.stack[0])
        (1, 100, -1)

        Raises ValueError where columns differ in length, a name is unknown, or a row points outside a table.
        """
        unknown = set(columns) - set(_COLUMNS)
        if unknown:
            raise ValueError(f"a Tape has no column {sorted(unknown)}; its columns are {list(_COLUMNS)}")
        lengths = {len(values) for values in columns.values()}
        if len(lengths) > 1:
            raise ValueError(f"the columns of a Tape have one length, these have {sorted(lengths)}")
        count = lengths.pop() if lengths else 0
        neutral = {"address": -1, "op": -1, "module": -1, "stack": -1, "size": 0, "stream": 0, "step": 0}
        neutral |= {"category": Category.UNKNOWN, "phase": Phase.OTHER, "action": Action.ALLOC}
        arrays = {}
        for name, dtype in _COLUMNS.items():
            if name in columns:
                array = np.asarray(columns[name], dtype=dtype)
            elif name == "time":
                array = np.arange(count, dtype=dtype)
            else:
                array = np.full(count, neutral[name], dtype=dtype)
            array.flags.writeable = False
            arrays[name] = array
        for name, table in (("op", ops), ("module", modules), ("stack", stacks)):
            column = arrays[name]
            if count and (column.max() >= len(table) or column.min() < -1):
                raise ValueError(f"column {name!r} points outside its table of {len(table)} entries")
        return cls(**arrays, ops=tuple(ops), modules=tuple(modules), stacks=tuple(stacks), meta=meta)

    def __len__(self) -> int:
        return len(self.time)

    def __getitem__(self, rows: slice) -> Tape:
        """The rows of a slice, with the same tables and metadata."""
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})

    def replace(self, **changes: Any) -> Tape:
        """The same tape with some columns, tables or metadata exchanged."""
        return dataclasses.replace(self, **changes)

    def equals(self, other: Tape) -> bool:
        """Whether both tapes tell the same events; clock time is not compared.

        >>> tape = Tape.from_columns({"size": [1]}, meta=Meta(Source.MEASURED, "cpu"))
        >>> tape.equals(tape[:]), tape.equals(tape[:0])
        (True, False)
        """
        same_tables = (self.ops, self.modules, self.stacks) == (other.ops, other.modules, other.stacks)
        columns = (name for name in _COLUMNS if name != "time")
        return same_tables and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in columns)

    def to_pandas(self) -> pandas.DataFrame:
        """One row an event, tables resolved to text; `stack` becomes the innermost line as ``file:line``."""
        import pandas

        frame = pandas.DataFrame({name: getattr(self, name) for name in _COLUMNS})
        for name, words in (
            ("action", [action.name.lower() for action in Action]),
            ("category", [category.text for category in Category]),
            ("phase", [phase.text for phase in Phase]),
        ):
            frame[name] = pandas.Categorical.from_codes(frame[name].to_numpy(np.int64), words)
        lines = [f"{stack[0].filename}:{stack[0].line}" if stack else "" for stack in self.stacks]
        for name, table in (("op", self.ops), ("module", self.modules), ("stack", lines)):
            words_and_none = np.array([*table, ""], dtype=object)
            frame[name] = words_and_none[getattr(self, name)]
        return frame

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tape as a Parquet file, tables and metadata in the file's own metadata."""
        import pyarrow
        import pyarrow.parquet

        # Files repeat in every stack, so frames are stored once and stacks point at them.
        frames: dict[Frame, int] = {}
        stacks = [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in self.stacks]
        tables = {"ops": self.ops, "modules": self.modules, "frames": list(frames), "stacks": stacks}
        meta = self.meta._asdict() | {"versions": dict(self.meta.versions)}
        table = pyarrow.table({name: getattr(self, name) for name in _COLUMNS})
        table = table.replace_schema_metadata(
            {"memexplore.tape": json.dumps(meta), "memexplore.tables": json.dumps(tables)}
        )
        pyarrow.parquet.write_table(table, os.fspath(path), compression="zstd")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tape:
        """Read a tape that `save` wrote.

        Raises ValueError where the file is no tape of ours or is damaged.
        """
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(os.fspath(path))
            metadata = table.schema.metadata or {}
            meta = json.loads(metadata[b"memexplore.tape"])
            tables = json.loads(metadata[b"memexplore.tables"])
            frames = [Frame(*frame) for frame in tables["frames"]]
            return cls.from_columns(
                {name: table.column(name).to_numpy() for name in _COLUMNS},
                meta=Meta(**meta | {"source": Source(meta["source"]), "notes": tuple(meta["notes"])}),
                ops=tables["ops"],
                modules=tables["modules"],
                stacks=[tuple(frames[number] for number in stack) for stack in tables["stacks"]],
            )
        except FileNotFoundError:
            raise
        except (pyarrow.ArrowException, KeyError, TypeError, ValueError, IndexError, OSError) as error:
            raise ValueError(f"{os.fspath(path)} is no tape that memexplore can read: {error}") from error
