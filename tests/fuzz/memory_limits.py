"""Steps of training that run out of memory at a random place: what they leave behind, and how the next one runs.

An input is a model, a way of training, an optimizer and allocator settings, a number of steps that fit, and then one
step on a GPU whose memory is a random value below what the step needs. After it, the step's memory is free again, no
hook and no mode is left, and the next step, on the memory that there was before, makes the requests of a step before
which nothing failed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memexplore as mx
from memexplore.tape import Action, Tape
from memexplore.virtual_gpu import device as virtual_device
from tests.virtual_gpu import torch_state

FAILURES = 4
"""Inputs in a row that differ in nothing but the memory of the step."""
_PACKAGE = os.path.dirname(mx.__file__) + os.sep


class _Block(nn.Module):
    """A block as in a transformer, recomputed in the backward pass or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.reentrant = reentrant

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x) if self.reentrant is None else checkpoint(self._run, x, use_reentrant=self.reentrant)


def _blocks(reentrant: bool | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), *(_Block(reentrant) for _ in range(3)), nn.Linear(64, 1))


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        return (x + self.second(x)).relu().mean((2, 3))


class _Product(torch.autograd.Function):
    # Without these two the backward pass, which runs outside of autocast, would multiply tensors of two dtypes.
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        x, weight = context.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class _OwnFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(128, 128)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + _Product.apply(x, weight).relu()
        return x


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(500, 64), nn.LSTM(64, 96, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table(x))[0]


class _Model(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]


MODELS = {
    "blocks": _Model(_blocks, lambda: torch.zeros(64, 32, 64, device="cuda")),
    "checkpoints": _Model(lambda: _blocks(False), lambda: torch.zeros(64, 32, 64, device="cuda")),
    "reentrant": _Model(lambda: _blocks(True), lambda: torch.zeros(64, 32, 64, device="cuda")),
    "residual": _Model(_Residual, lambda: torch.zeros(8, 3, 64, 64, device="cuda")),
    "functions": _Model(_OwnFunctions, lambda: torch.zeros(1024, 128, device="cuda")),
    "recurrent": _Model(_Recurrent, lambda: torch.zeros(32, 24, dtype=torch.long, device="cuda")),
    "encoder": _Model(lambda: nn.TransformerEncoderLayer(64, 4, 256), lambda: torch.zeros(48, 16, 64, device="cuda")),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "one by one": functools.partial(torch.optim.AdamW, foreach=False),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "adagrad": torch.optim.Adagrad,
}
PRECISIONS = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
PASSES = ("once", "once", "once", "accumulated", "retained", "penalty", "in a thread")
SETTINGS = ("", "", "expandable_segments:True", "max_split_size_mb:32")


class Setting(NamedTuple):
    """Everything of an input but the memory of its step."""

    model: str
    optimizer: str
    precision: str
    passes: str
    settings: str
    steps: int
    """Steps before the one that fails; without any, that one makes the optimizer's state."""
    recorded: bool
    """Whether the step that fails is recorded, as in `%%memprofile`."""


class Reference(NamedTuple):
    """A step before which nothing failed."""

    held: int
    """Bytes reserved when the step begins."""
    peak: int
    rows: list[tuple[Any, ...]]
    """Everything that the step did with memory, with the addresses and segments."""
    requests: list[tuple[Any, ...]]
    """The requests and frees alone: after another step they have other addresses."""


def setting_of(number: int) -> Setting:
    """Return the setting of an input."""
    rng = random.Random(number // FAILURES)
    return Setting(
        rng.choice(list(MODELS)),
        rng.choice(list(OPTIMIZERS)),
        rng.choice(list(PRECISIONS)),
        rng.choice(PASSES),
        rng.choice(SETTINGS),
        rng.randrange(3),
        rng.random() < 0.5,
    )


def check(number: int) -> str:
    """Run the input of a number; return `out of memory` or `fits`, or raise AssertionError with the input."""
    setting = setting_of(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = _reference(setting)
        before = torch_state.global_state()
        memory = random.Random(number).randrange(reference.held, max(reference.peak, reference.held + 1))
        try:
            ended = _run_out_of_memory(setting, memory, reference)
        except Exception as error:
            error.add_note(f"{setting}, {memory} bytes")
            raise
        if ended == "out of memory":
            again = _tape_of_step(setting)
            assert again.rows == reference.rows, f"a later run of {setting} differs after {memory} bytes"
    assert torch_state.global_state() == before, f"state is left of {setting}, {memory} bytes"
    return ended


@functools.lru_cache(maxsize=1)
def _reference(setting: Setting) -> Reference:
    return _tape_of_step(setting)


def _tape_of_step(setting: Setting) -> Reference:
    """Return the step after those that fit, on a new virtual GPU."""
    with mx.virtual("80GiB", settings=setting.settings):
        training = _Training(setting)
        return training.recorded()


def _run_out_of_memory(setting: Setting, memory: int, reference: Reference) -> str:
    """Run the step on a GPU with some bytes; check what it left, and the next step with the memory of before."""
    with mx.virtual("80GiB", settings=setting.settings) as gpu:
        training = _Training(setting)
        _release_caches()
        allocated, state = torch.cuda.memory_allocated(), _state()
        gpu.allocator.limit_to(memory)
        frames: list[str] = []
        try:
            with mx.record() if setting.recorded else contextlib.nullcontext():
                training.step()
            return "fits"
        except torch.OutOfMemoryError as error:
            frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        finally:
            gpu.allocator.limit_to(None)
        assert [name for name in frames if name.startswith(_PACKAGE) and "capture" not in name] == []
        training.forget_failed_step()
        _release_caches()
        assert torch.cuda.memory_allocated() == allocated, f"{torch.cuda.memory_allocated() - allocated} bytes are left"
        assert _state() == state
        assert training.hooks() == 0
        assert training.recorded().requests == reference.requests
    return "out of memory"


def _release_caches() -> None:
    """Free the cuBLAS workspaces, which a process keeps, and the allocator's cache."""
    on = virtual_device.active()
    assert on is not None
    on.runner.free_workspaces()
    torch.cuda.empty_cache()


def _state() -> dict[str, Any]:
    """Return the global state of torch without the random numbers that the step has drawn."""
    state = torch_state.global_state()
    del state["random"]
    return state


class _Training:
    """A model, its optimizer and its batch on the virtual GPU that is on, after the steps that fit."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        family = MODELS[setting.model]
        self.model = family.make().cuda()
        self.optimizer = OPTIMIZERS[setting.optimizer](self.model.parameters())
        self.batch = family.batch()
        for _ in range(setting.steps):
            self.step()
        self._states = {weight: set(state) for weight, state in self.optimizer.state.items()}

    def step(self) -> None:
        """Run one step, in a thread if the setting says so; gradients are empty before and after it."""
        if self.setting.passes != "in a thread":
            self._step()
            return
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self._step()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors.pop()

    def _step(self) -> None:
        dtype = PRECISIONS[self.setting.precision]
        scaler = torch.amp.GradScaler(enabled=dtype is torch.float16)
        for _ in range(2 if self.setting.passes == "accumulated" else 1):
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                loss = self.model(self.batch).float().square().mean()
            self._backward(scaler.scale(loss))
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()

    def _backward(self, loss: torch.Tensor) -> None:
        # Neither attention nor cuDNN's LSTM have a second derivative, nor a reentrant checkpoint a gradient of inputs.
        if self.setting.passes == "penalty" and self.setting.model in ("blocks", "checkpoints", "functions"):
            gradients = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True)
            loss = loss + sum(gradient.square().sum() for gradient in gradients)
        loss.backward(retain_graph=self.setting.passes == "retained")

    def forget_failed_step(self) -> None:
        """Drop what the program's own objects have of a step that failed."""
        self.optimizer.zero_grad()
        for weight, state in list(self.optimizer.state.items()):
            if weight not in self._states:
                del self.optimizer.state[weight]
                continue
            for name in set(state) - self._states[weight]:
                del state[name]

    def hooks(self) -> int:
        """Return the number of hooks on the modules."""
        tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return sum(len(getattr(module, name)) for module in self.model.modules() for name in tables)

    def recorded(self) -> Reference:
        """Run a step and return what it requested."""
        _release_caches()
        held = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        with mx.record() as recording:
            self.step()
        rows = _rows(recording.tape)
        requests = [(row[0], *row[2:]) for row in rows if row[0] in (Action.ALLOC, Action.FREE_REQUESTED)]
        return Reference(held, torch.cuda.max_memory_reserved(), rows, requests)


def _rows(tape: Tape) -> list[tuple[Any, ...]]:
    """Return action, address, size, category, phase, step, op and layer of each row; stacks name the fuzzer as well."""
    ops, modules = np.array([*tape.ops, ""], object), np.array([*tape.modules, ""], object)
    columns = (tape.action, tape.address, tape.size, tape.category, tape.phase, tape.step, ops[tape.op])
    return list(zip(*(column.tolist() for column in (*columns, modules[tape.module])), strict=True))
