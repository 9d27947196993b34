"""`memexplore export`: the steps and tapes of a folder of ranks as files for other programs."""

from __future__ import annotations

import argparse
import pathlib

from memexplore.cli import folder
from memexplore.cli.options import FITS, AddCommand, reading


def add(add_command: AddCommand) -> None:
    """Add the parser of the command."""
    export = add_command("export", "Write the steps and tapes of a folder of ranks as files for other programs.")
    export.add_argument("folder", type=pathlib.Path)
    export.add_argument(
        "--parquet", action="store_true", required=True, help="as Parquet files for DuckDB, Dask, Spark or pandas"
    )
    export.add_argument(
        "-o", "--output", type=pathlib.Path, metavar="OUT", help="the folder that is written; default: FOLDER/parquet"
    )


def main(options: argparse.Namespace) -> int:
    """Write the files, and return the exit status."""
    with reading(options.folder):
        print(folder.export(options.folder, options.output or options.folder / "parquet"))
    return FITS
