"""The command line ``memexplore``.

- `run`, `open`, `export`, `verify`, `gpus`, `lab`, `doctor`: one file a command. `commands`: which of them runs.
- `run_options`: what `run` is asked for, a `RunOptions`. `recorded_run` records a script and `live_run` watches one
  (`run --live`); `run` prints and writes what they return
- `rank_runs`: `run --world N`, ranks in processes beside each other; `equal_ranks`: which of them run to the end, by
  the requests of `first_steps`; `among_ranks`: the process of a rank that needs others
- `folder`: `open FOLDER`. It and `live_run` show a `live_status.Status` by `live_text`, in place in a
  terminal (`live_display`, `terminal`) or as plain lines. `snapshot_folder`: `open FOLDER` of snapshot files
- `options`: exit statuses and checks of options
- `report_text`: tables and the report of a tape as text

To add a command, write a file with `add`, which adds its parser, and `main`, and enter it in `commands`.
"""

from memexplore.cli.commands import main

__all__ = ["main"]
