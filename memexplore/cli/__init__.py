"""The command line ``memexplore``.

- `commands`: the parser, and one function per command; `run`: the command `run`
- `rank_runs`: `run --world N`, ranks in processes beside each other; `equal_ranks`: which of them run to the end, by
  the requests of `first_steps`
- `live_run`: `run --live`; `folder`: `open FOLDER`. Both show a `live_status.Status` by `live_text`, in place in a
  terminal (`live_display`, `terminal`) or as plain lines. `snapshot_folder`: `open FOLDER` of snapshot files
- `options`: exit statuses and checks of options
- `report_text`: tables and the report of a tape as text

To add a command, add a parser in `commands._parser`, a function, and a case in `commands.main`.
"""

from memexplore.cli.commands import main

__all__ = ["main"]
