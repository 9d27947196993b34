"""`memexplore lab`: JupyterLab on the first notebook of the course.

In a checkout the notebooks lie beside the package. A wheel has them inside of the package, where nobody should write:
they are copied into a folder below the working directory, and a notebook that is there already is left as it is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

from memexplore.cli.options import ERROR, INTERRUPTED
from memexplore.text.package import FOLDER, install_command

FIRST_NOTEBOOK = "01_where_does_memory_go.ipynb"
COPIES = "memexplore-notebooks"
"""Folder for the notebooks of a wheel."""


def first_notebook() -> pathlib.Path | None:
    """Return the first notebook, of a checkout or copied from the wheel; None without one."""
    beside, below = (folder / "notebooks" for folder in (FOLDER.parent, pathlib.Path.cwd()))
    for folder in (beside, below):
        if (folder / FIRST_NOTEBOOK).is_file():
            return folder / FIRST_NOTEBOOK
    packed = FOLDER / "notebooks"
    return copy_missing(packed, pathlib.Path.cwd() / COPIES) / FIRST_NOTEBOOK if packed.is_dir() else None


def copy_missing(packed: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Copy the notebooks and their images into a folder and return it; files that are there already stay."""
    for source in sorted(packed.rglob("*")):
        target = folder / source.relative_to(packed)
        if source.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return folder


def lab(arguments: list[str]) -> int:
    """Open JupyterLab, `arguments` are its own; return an exit status where JupyterLab cannot replace this process."""
    missing = [name for name in ("jupyterlab", "ipykernel") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"memexplore lab needs {' and '.join(missing)}: {install_command('lab')}", file=sys.stderr)
        return ERROR
    try:
        notebook = first_notebook()
    except OSError as error:
        print(f"memexplore lab cannot copy its notebooks to this folder ({error}): run it in another", file=sys.stderr)
        return ERROR
    if notebook is None:
        print(
            f"memexplore lab found no notebooks/{FIRST_NOTEBOOK}: run it in a checkout of memexplore, "
            f"installed with {install_command('lab')}",
            file=sys.stderr,
        )
        return ERROR
    # JupyterLab refuses to run as root without --allow-root, and in a container root is often the only user.
    as_root = hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in arguments
    # The address that is printed without a browser leads to the notebook too.
    address = f"--LabApp.default_url=/lab/tree/{notebook.name}"
    options = [address, *(["--allow-root"] if as_root else []), *arguments]
    command = [sys.executable, "-m", "jupyterlab", str(notebook), *options]
    if os.name == "posix":
        # No process between JupyterLab and the signals: it asks after Ctrl-C, and ends its kernels at SIGTERM.
        os.execv(command[0], command)
    with contextlib.suppress(KeyboardInterrupt):
        return subprocess.call(command)
    return INTERRUPTED
