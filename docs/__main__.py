"""`python -m docs [FOLDER]`: build the documentation site with the executed course; a warning is an error.

`python -m docs --stored [FOLDER]` leaves the notebooks without outputs, which takes a tenth of the time.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys

from sphinx.cmd.build import build_main

from docs import executed

SOURCE = pathlib.Path(__file__).parent


def main() -> int:
    """Build the site that the command line names. Return the exit status of Sphinx."""
    parser = argparse.ArgumentParser(prog="python -m docs", description="Build the documentation site.")
    parser.add_argument("--stored", action="store_true", help="do not execute the notebooks")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=SOURCE / "_site")
    options = parser.parse_args()
    notebooks = sorted((executed.REPOSITORY / "notebooks").glob("*.ipynb"))
    course, pages = SOURCE / "course", SOURCE / "_pages"
    for folder in (course, pages):
        shutil.rmtree(folder, ignore_errors=True)
    pages.mkdir()
    if options.stored:
        executed.copy(notebooks, course)
    else:
        executed.execute(notebooks, course, pages / "views")
    words = ["-W", "--keep-going", "-E", "-q", "-d", str(SOURCE / "_doctrees"), str(SOURCE), str(options.folder)]
    return build_main(words)


if __name__ == "__main__":
    sys.exit(main())
