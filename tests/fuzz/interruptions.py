"""Reading a file, showing it, and applying knobs, interrupted at a random line: nothing may be left behind.

A number chooses the work and the line. After the interrupt the same work must end as it does without one, and the
collector of garbage, the model and its gradients must be as before.
"""

from __future__ import annotations

import functools
import gc
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memexplore as mx
from memexplore.cli.report_text import report_text
from tests import sample_tapes
from tests.fuzz import snapshots
from tests.fuzz.reading import file_of
from tests.interrupts import interrupted, lines_of

KNOBS = (mx.Knobs(inplace="on"), mx.Knobs(checkpoint="every 1"), mx.Knobs(precision="bf16"))


@functools.cache
def _tape() -> bytes:
    """Return the content of a saved tape."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tape.tape")
        sample_tapes.small_tape().save(path)
        return path.read_bytes()


def _load(data: bytes) -> object:
    with file_of(data) as path:
        return [len(tape) for tape in mx.load(path).values()]


def _open() -> object:
    with file_of(snapshots.files()[2]) as path:
        return [report_text(tape) for tape in mx.load(path).values()]


@functools.cache
def _model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))


def _apply(number: int) -> object:
    with mx.apply(KNOBS[number % len(KNOBS)], _model()):
        return _model()(torch.ones(2, 4)).shape


def check(number: int) -> str:
    """Interrupt the work of a number at a line of memexplore and return the kind of work."""
    rng = random.Random(number)
    knobs = rng.randrange(len(KNOBS))
    works: dict[str, Callable[[], object]] = {
        "load": lambda: _load(snapshots.files()[2]),
        "tape": lambda: _load(_tape()),
        "open": _open,
        "apply": lambda: _apply(knobs),
    }
    kind = rng.choice(list(works))
    work = works[kind]
    expected, before = work(), _state()

    def run() -> None:
        work()

    # Lines of the standard library and of pandas run in between; an interrupt in one of memexplore's own is the risk.
    line = interrupted(run, rng.randrange(_length(kind, run)), str(Path(mx.__file__).parent))
    assert _state() == before, f"{kind} interrupted at {line}"
    assert work() == expected, f"{kind} interrupted at {line}"
    return kind


_LENGTHS: dict[str, int] = {}


def _length(kind: str, run: Callable[[], None]) -> int:
    """Return the number of lines of memexplore that a work runs."""
    if kind not in _LENGTHS:
        package = str(Path(mx.__file__).parent)
        _LENGTHS[kind] = sum(line.filename.startswith(package) for line in lines_of(run))
    return max(_LENGTHS[kind], 1)


def _state() -> dict[str, Any]:
    """Return what an interrupt must leave unchanged."""
    model = _model()
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    return {
        "collector": gc.isenabled(),
        "forward": [module.__dict__.get("forward") for module in model.modules()],
        "hooks": hooks,
        "types": [type(module) for module in model.modules()],
        "inplace": [module.inplace for module in model.modules() if isinstance(module, nn.ReLU)],
        "dtypes": [parameter.dtype for parameter in model.parameters()],
        "autocast": torch.is_autocast_enabled("cpu"),
    }
