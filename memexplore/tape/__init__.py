"""The Tape: one frozen value with all memory events of a device.

- `tape`: the Tape, its columns and metadata. `words`: the words in its metadata. `methods`: what a Tape can show and
  compute, as a table.
- `file`: its file, `.tape`, read as untrusted input: a header with the `peaks`, then `blocks` in narrow `columns`;
  `fields` checks metadata and tables. `parquet`: Parquet files, where pyarrow is installed.
- `process_limit`: the limit on what a process may reserve, in the metadata.
"""

from memexplore.tape.tape import COLUMNS, Action, Category, Frame, Meta, Phase, Tape
from memexplore.tape.words import Communicator, Ending, Os, Source

__all__ = [
    "COLUMNS",
    "Action",
    "Category",
    "Communicator",
    "Ending",
    "Frame",
    "Meta",
    "Os",
    "Phase",
    "Source",
    "Tape",
]
