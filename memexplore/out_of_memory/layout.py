"""Make a tape of what the allocator holds now, for a failure that was not recorded; it ends with the failed request.

On a real GPU the tape has the allocator's history where somebody records it, else the layout alone. Categories and
layers come from the modules and optimizers that are alive.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

import numpy as np
import torch

from memexplore import snapshot
from memexplore.analysis.curves import lifetimes
from memexplore.out_of_memory.evidence_types import Evidence
from memexplore.out_of_memory.failure import with_failure
from memexplore.out_of_memory.objects import (
    children_of,
    name_of,
    of_kind,
    own_buffers,
    own_weights,
    parts_of,
    state_in,
    stored_gradient,
)
from memexplore.out_of_memory.reach import address_of
from memexplore.recorder import cuda, tape_builder
from memexplore.recorder.allocator_history import lasting, since
from memexplore.recorder.earlier_blocks import Untouched, classified, earlier
from memexplore.recorder.recorder import Recorder
from memexplore.recorder.recording import predicted, versions
from memexplore.snapshot.history import tape_of
from memexplore.tape import Action, Category, Tape
from memexplore.tape.allocator_settings import LARGE_SEGMENT
from memexplore.torch_internals.cuda import DUMP_SNAPSHOT
from memexplore.virtual_gpu.device import active
from memexplore.virtual_gpu.tensors.live_storages import live_storages


def present(evidence: Evidence) -> Tape | None:
    """Return what is allocated now on the GPU of an error, ending with its request; None without a GPU."""
    device = active()
    if device is not None:
        recorder = Recorder(live_storages)
        with device.watch(recorder):
            pass
        tape = tape_builder.build(recorder, predicted(device))
    elif torch.cuda.is_available():
        tape = _of_real_gpu(torch.device("cuda", evidence.message.device or 0))
    else:
        return None
    return _ended(_with_owners(tape), evidence)


def _ended(tape: Tape, evidence: Evidence) -> Tape:
    """Return a tape that ends with the request of an error: where its history has the request, else now."""
    failed = np.flatnonzero(tape.action == Action.OOM)
    message = evidence.message
    size = int(tape.size[failed[-1]]) if len(failed) else 0
    # The text has the bytes of the segment, rounded to three digits, and the history those of the request.
    requested = message.requested
    if not size or requested is None or abs(size - requested) > max(requested // 100, LARGE_SEGMENT):
        return with_failure(tape[tape.action != Action.OOM], evidence)
    last, before = int(failed[-1]), tape[: failed[-1]]
    exact = evidence._replace(message=message._replace(requested=size))
    ended = with_failure(before[before.action != Action.OOM], exact)
    stack = ended.stack.copy()
    if tape.stack[last] >= 0:
        stack[-1] = tape.stack[last]
    return ended.replace(stack=stack, meta=ended.meta._replace(notes=tape.meta.notes))


def _of_real_gpu(device: torch.device) -> Tape:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "present.pickle")
        DUMP_SNAPSHOT.value(path)
        devices = {recorded_device.device: recorded_device for recorded_device in snapshot.read(path)}
    meta = cuda.meta(device, versions(torch.__version__))
    recorded = devices.get(device.index or 0)
    if recorded is None:
        return Tape.from_columns({}, meta=meta)
    tape = tape_of(since(recorded, lasting.since_us) if lasting.is_on else recorded).replace(meta=meta)
    # What the history infers of older blocks is worse than what this process knows of them.
    older = np.flatnonzero(tape.action == Action.PREEXISTING)
    return classified(tape, older, earlier(device, Untouched.KEPT))


def _with_owners(tape: Tape) -> Tape:
    """Return a tape whose blocks have the categories that the modules and optimizers that are alive give them."""
    owners = dict(_owners())
    life = lifetimes(tape)
    rows = life.born[life.requested == len(tape)]
    category, module = tape.category.copy(), tape.module.copy()
    names = {name: number for number, name in enumerate(tape.modules)}
    for row in rows.tolist():
        kind, name = owners.get(int(tape.address[row]), (None, ""))
        if kind is not None:
            category[row] = kind
            if name:
                module[row] = names.setdefault(name, len(names))
    columns = {name: getattr(tape, name) for name in ("time", "action", "address", "size", "stream", "phase", "step")}
    columns |= {name: getattr(tape, name) for name in ("op", "stack", "tensor", "workspace")}
    classes = [*tape.classes, *("" for _ in range(len(names) - len(tape.modules)))] if tape.classes else []
    return tape.with_rows(columns | {"category": category, "module": module}, modules=list(names), classes=classes)


def _owners() -> Iterator[tuple[int, tuple[Category, str]]]:
    """Yield address, category and layer of weights, buffers, gradients and optimizer states."""
    # The list of all objects must not have itself among its elements.
    objects = [value for value in gc.get_objects() if issubclass(type(value), _OWNERS)]
    models = of_kind(objects, torch.nn.Module)
    inner = {id(child) for model in models for child in children_of(model).values()}
    for model in models:
        if id(model) not in inner:
            yield from _of_model(model)
    for optimizer in of_kind(objects, torch.optim.Optimizer):
        for state in state_in(optimizer).values():
            yield from ((address_of(value)[0], (Category.OPTIMIZER_STATE, "")) for value in state)


_OWNERS = (torch.nn.Module, torch.optim.Optimizer)


def _of_model(model: torch.nn.Module) -> Iterator[tuple[int, tuple[Category, str]]]:
    for name, module in parts_of(model):
        layer = name or name_of(type(model))
        for weight in own_weights(module).values():
            yield address_of(weight)[0], (Category.PARAMETER, layer)
            gradient = stored_gradient(weight)
            if gradient is not None:
                yield address_of(gradient)[0], (Category.GRADIENT, layer)
        for buffer in own_buffers(module).values():
            yield address_of(buffer)[0], (Category.BUFFER, layer)
