"""Inputs run in child processes, many in each, every input with a limit of CPU time and memory.

The kernel ends a child whose input exceeds its CPU time, also inside C code; the next child goes on behind that input.
A finding is an input that ended its child (a crash, a hang) or raised an error that nothing documents.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import mmap
import os
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

MIB = 1024**2
BATCH = 5000
"""Inputs of one child."""


class Input(NamedTuple):
    """One input: what is written out if it fails, its size for the limit of time, and what runs it."""

    data: bytes
    length: int
    """Bytes that the limits count: of a packed file those of its content."""
    run: Callable[[], str]
    """Returns the outcome as one word."""


Make = Callable[[int], Input]
"""From the number of an input to the input."""


class Finding(NamedTuple):
    """An input that failed: its number, `crash`, `hang` or `error`, and what is known of it."""

    number: int
    kind: str
    text: str


class Result(NamedTuple):
    """What many inputs ended in."""

    outcomes: Counter[str]
    findings: list[Finding]
    seconds: float


def seconds_allowed(length: int) -> float:
    """Return the CPU time of an input: a second, and a second for each further megabyte."""
    return max(1.0, length / 1e6)


def run_inputs(make: Make, numbers: range, *, memory: int = 1024 * MIB, batch: int = BATCH) -> Iterator[Result]:
    """Run the inputs of some numbers and yield the result of each child process.

    `memory` is what a child may use beyond what the parent uses; an input that needs more raises MemoryError.
    """
    begin = numbers.start
    while begin < numbers.stop:
        stop = min(begin + batch, numbers.stop)
        result, begin = _run_child(make, begin, stop, memory)
        yield result


def _run_child(make: Make, begin: int, stop: int, memory: int) -> tuple[Result, int]:
    """Run inputs in a child and return their result and the number of the next input."""
    start = time.monotonic()
    shared = mmap.mmap(-1, 16)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        gc.freeze()  # what lives in the parent is not traversed, which would copy its memory
        status = 1
        try:
            faulthandler.disable()  # pytest enables it; a crash is a finding, not a traceback between the results
            _limit_memory(memory)
            with os.fdopen(writer, "w") as report:
                for number in range(begin, stop):
                    shared[:8] = number.to_bytes(8, "little")
                    ended = _run_one(make, number)
                    report.write(json.dumps(ended) + "\n")
                    if ended[1] == "error":
                        report.flush()
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as report:
        lines = report.read().splitlines()
    _, status = os.waitpid(child, 0)
    outcomes: Counter[str] = Counter()
    findings = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a child that was killed may be cut
            number, outcome, text = json.loads(line)
            outcomes[outcome] += 1
            if outcome == "error":
                findings.append(Finding(number, outcome, text))
    following = stop
    if status:
        last = int.from_bytes(shared[:8], "little")
        following = last + 1
        hang = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        kind = "hang" if hang else "crash"
        outcomes = Counter({**outcomes, kind: 1})
        lost = last - begin - sum(outcomes.values()) + 1
        outcomes["unknown"] += max(lost, 0)  # outcomes that the child had not written yet
        findings.append(Finding(last, kind, f"wait status {status}"))
    return Result(outcomes, findings, time.monotonic() - start), following


def _limit_memory(memory: int) -> None:
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run_one(make: Make, number: int) -> tuple[int, str, str]:
    """Run one input in the child and return its number, its outcome and the text of its error."""
    try:
        made = make(number)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds_allowed(made.length))
        try:
            return number, made.run(), ""
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except BaseException as error:
        return number, "error", "".join(traceback.format_exception(error, limit=-6))[-3000:]


def write_out(make: Make, finding: Finding, folder: Path) -> Path:
    """Write the input of a finding and what is known of it into a folder; return the path of the input."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{finding.kind}-{finding.number}"
    path.write_bytes(make(finding.number).data)
    path.with_suffix(".txt").write_text(finding.text, errors="backslashreplace")
    return path
