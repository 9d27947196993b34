"""The command line ``memexplore``.

- `run`, `open`, `export`, `verify`, `gpus`, `lab`, `doctor`: one file a command. `commands`: which of them runs.
- `rank_runs`: `run --world N`, ranks in processes beside each other; `equal_ranks`: which of them run to the end, by
  the requests of `first_steps`
- `live_run`: `run --live`; `folder`: `open FOLDER`. Both show a `live_status.Status` by `live_text`, in place in a
  terminal (`live_display`, `terminal`) or as plain lines. `snapshot_folder`: `open FOLDER` of snapshot files
- `options`: exit statuses and checks of options
- `report_text`: tables and the report of a tape as text

To add a command, write a file with `add`, which adds its parser, and `main`, and enter it in `commands`.
"""

from memexplore.cli.commands import main

__all__ = ["main"]
