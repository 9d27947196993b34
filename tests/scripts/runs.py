"""One run of a script in its own process and an empty folder: plain Python on the CPU, or `memexplore run`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests import python_programs
from tests.scripts.script_list import ENVIRONMENT, Script

_PROJECT = Path(__file__).parents[2]


class Run(NamedTuple):
    """What a run gave. `outcome`: fits, oom, error, timeout or (on the CPU) ok."""

    outcome: str
    output: str
    """What was printed; on a virtual GPU also what went to stderr."""
    seconds: float
    summary: dict[str, Any]
    """The object that `memexplore run --json` prints."""

    @property
    def error(self) -> str:
        """The last line that was printed, of a run that ended in an error; what was not measured of others."""
        if self.summary.get("outcome") == "partly measured":
            return str(self.summary["notes"][0])
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1].strip() if lines and self.outcome in ("error", "timeout") else ""


def on_cpu(script: Script, timeout: float = 300) -> Run:
    """Run a script with plain Python, without a GPU."""
    code, stdout, stderr, seconds = _run([sys.executable, str(script.path)], script, timeout)
    if code == 0:
        return Run("ok", stdout, seconds, {})
    return Run("timeout" if code is None else "error", stdout + stderr, seconds, {})


def on_virtual_gpu(script: Script, gpu: str = "T4", values: str | None = None, timeout: float = 300) -> Run:
    """Run a script with `memexplore run`. `values` as in `--values`."""
    command = python_programs.command("memexplore.cli", "run", script.path, "--gpu", gpu, "--json")
    command += [] if values is None else ["--values", values]
    code, stdout, stderr, seconds = _run(command, script, timeout)
    try:
        summary = json.loads(stdout)
    except ValueError:
        summary = {}
    outcome = "timeout" if code is None else {0: "fits", 3: "oom"}.get(code, "error")
    return Run(outcome, stderr, seconds, summary)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _run(command: list[str], script: Script, timeout: float) -> tuple[int | None, str, str, float]:
    paths = [str(_PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Without a network, and without progress bars, which would mix with the printed lines.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
    # One thread: the same order of sums in every run, and no more threads than cores under a test runner.
    environment |= {"OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "YOLO_OFFLINE": "true", "MPLBACKEND": "agg"}
    if script.name in ENVIRONMENT:
        environment |= ENVIRONMENT[script.name] | {"MASTER_PORT": str(_free_port())}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {"HOME": folder, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # Its own session: workers of data loaders end with it.
            os.killpg(process.pid, 9)
            stdout, stderr = process.communicate()
            stderr += f"\nno end after {timeout:.0f} s"
            return None, stdout, stderr, time.perf_counter() - start
    # The folder has another name in every run.
    stdout, stderr = (text.replace(folder, ".") for text in (stdout, stderr))
    return process.returncode, stdout, stderr, time.perf_counter() - start
