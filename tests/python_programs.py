"""Python programs in processes of their own that start without the seconds that importing torch takes."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.forked import PARENT

IS_SUPPORTED = hasattr(os, "pidfd_open")
"""Whether programs are forked: on Linux."""
_PROGRAM = str(Path(__file__).with_name("forked.py"))
_PACKAGES = ("torch", "torch._dynamo.config", "pandas")
"""Not memexplore itself, so that each program imports it in its own order."""


KERNEL = "ipykernel.kernelapp", "ipywidgets", "pandas", "plotly.express", "nbformat", "torch._dynamo"
"""What a kernel has imported when it starts, without having a name of it.

Fake tensors need `torch._dynamo`; plotly's first figure needs `nbformat`, whose `jsonschema` builds 39 grammars."""


def command(module: str, *arguments: Any) -> list[str]:
    """Return a command that does what ``python -m MODULE ARGUMENTS`` does."""
    if not IS_SUPPORTED:
        return [sys.executable, "-m", module, *map(str, arguments)]
    return client(_server(_PACKAGES), module, *map(str, arguments))


def specify_kernel(kernels: Path, socket: str = "") -> None:
    """Specify a kernel named python3 which the process at a socket forks; default: one that ends with this one."""
    # The default of this option was read from the environment when ipykernel was imported.
    parent = f"--IPKernelApp.parent_handle={PARENT}"
    command = client(socket or _server(KERNEL), "ipykernel_launcher", parent, "-f", "{connection_file}")
    (kernels / "python3").mkdir(parents=True)
    specification = {"argv": command, "display_name": "python3", "language": "python"}
    (kernels / "python3" / "kernel.json").write_text(json.dumps(specification))


def serve(path: str, packages: tuple[str, ...], **options: Any) -> subprocess.Popen[bytes]:
    """Start the process that forks programs for requests at a socket; it has imported the packages.

    It ends with this process, however that ends: its input ends then.
    """
    environment = {**(options.pop("env", None) or os.environ)}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, _PROGRAM, "serve", path, *packages]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, **options)


def client(path: str, module: str, *arguments: str) -> list[str]:
    """Return the command of a program that the process at a socket forks."""
    # Without `site` and PYTHONPATH: the client needs the standard library only.
    return [sys.executable, "-I", "-S", _PROGRAM, "start", path, module, *arguments]


@functools.cache
def _server(packages: tuple[str, ...]) -> str:
    """Return the socket of a process that ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="memexplore-programs-")
    path = str(Path(folder.name, "socket"))
    process = serve(path, packages)
    atexit.register(folder.cleanup)
    atexit.register(process.kill)
    ends = time.monotonic() + 120
    while not os.path.exists(path):
        assert process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.05)
    return path
