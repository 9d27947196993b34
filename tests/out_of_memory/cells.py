"""Cells that run out of memory: a source and a GPU go in, its post-mortem comes out."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

import torch

from memexplore.hardware import catalogue
from memexplore.hardware.catalogue import Gpu
from memexplore.out_of_memory.evidence import Shell, collect
from memexplore.out_of_memory.evidence_types import Evidence
from memexplore.out_of_memory.value import PostMortem, of_tape
from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Tape

_numbers = itertools.count()


def run(source: str, gpu: str | Gpu, names: dict[str, Any] | None = None) -> tuple[Tape, Evidence | None]:
    """Run the source of a cell on a virtual GPU; return its tape, and the evidence if it ran out of memory."""
    filename = f"<cell {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {"__name__": "__main__", "torch": torch, "nn": torch.nn, "F": torch.nn.functional, **(names or {})}
    evidence = None
    device = gpu if isinstance(gpu, Gpu) else catalogue.find(gpu)
    with virtual(device), record() as recording:
        try:
            exec(compile(source, filename, "exec"), namespace)
        except torch.OutOfMemoryError as error:
            recording.ended_by(error)
            evidence = collect(error, Shell(namespace, namespace.get("Out", {})), seconds=30)
    return recording.tape, evidence


def post_mortem(source: str, gpu: str | Gpu) -> PostMortem:
    """Return the post-mortem of a cell that runs out of memory."""
    tape, evidence = run(source, gpu)
    assert evidence is not None, f"the cell fits: its peak is {tape.peak('reserved')[0]}"
    found = of_tape(tape, evidence)
    assert found is not None
    return found
