"""The names that a notebook cell begins with: the notebook's own, restored after a run, or a packed copy of them."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from memexplore.recorder.recording import Recording
from memexplore.run.knobs.applying.model_state import (
    Gradients,
    preserve_model_state,
    preserve_random_states,
    preserve_values,
    refill,
)
from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.run.machine import Machine, bytes_on
from memexplore.run.programs import real_run
from memexplore.run.programs.limit import FailureLimit
from memexplore.run.programs.packing import pack_names
from memexplore.text.units import size_text
from memexplore.virtual_gpu.tensors.tensor import is_virtual

VARIABLES_ALONE = "The notebook's variables alone"
"""Beginning of the note of a tape on whose GPU the notebook's variables do not fit."""


class NotebookNames:
    """The names of a notebook as they are before the first run of a cell: what they hold is restored after each run.

    Lists, tuples and dicts among the names are searched one level deep for models, optimizers, schedulers and gradient
    scalers. No other tensors are held: of the gradients and the optimizer states only which were missing.
    """

    may_be_endless: ClassVar[bool] = True

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace, self._values = namespace, dict(namespace)
        held: list[Any] = []
        for value in self._values.values():
            inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
            held += [item for item in inside if isinstance(item, _KINDS)]
        modules = {module: None for item in held if isinstance(item, torch.nn.Module) for module in item.modules()}
        self._modules = list(modules)
        self._optimizers = list({id(item): item for item in held if isinstance(item, torch.optim.Optimizer)}.values())
        self._schedulers_and_scalers = [item for item in held if isinstance(item, LRScheduler | torch.amp.GradScaler)]
        self._without_gradients = [
            module for module in self._modules if all(weight.grad is None for weight in module.parameters(False))
        ]
        self._without_state = [optimizer for optimizer in self._optimizers if not optimizer.state]

    @contextlib.contextmanager
    def restored(self, machine: Machine) -> Iterator[None]:
        """Remove gradients and optimizer states that were missing; after the block, undo that and what the block did.

        Preserved are the models, the optimizers with their states, and the random states; on a real device also the
        values of all weights, buffers and states, of which copies wait on the CPU.
        """
        is_real = not machine.is_virtual
        with (
            real_run.preserve_device(machine.device) if is_real else contextlib.nullcontext(),
            preserve_model_state(self._modules, Gradients.AS_THEY_ARE),
            preserve_random_states(),
            undone_after(self._record_optimizers),
        ):
            for module in self._without_gradients:
                for weight in module.parameters(recurse=False):
                    weight.grad = None
            for optimizer in self._without_state:
                optimizer.state.clear()
            with self._preserve_values() if is_real else contextlib.nullcontext():
                yield

    def _record_optimizers(self, log: UndoLog) -> None:
        for optimizer in self._optimizers:
            states = {weight: _copied(state) for weight, state in optimizer.state.items()}
            log.add(refill, optimizer.state, states)
            for group in optimizer.param_groups:
                log.add(refill, group, dict(group))
        for stateful in self._schedulers_and_scalers:
            log.add(refill, vars(stateful), dict(vars(stateful)))

    def limited(self, recording: Recording) -> contextlib.AbstractContextManager[None]:
        """Return the block of a run, which takes as long as the cell does."""
        return contextlib.nullcontext()

    def begin(self) -> dict[str, Any]:
        """Return the names for a run."""
        return dict(self._values)

    def put_on_virtual_gpu(self, names: dict[str, Any]) -> None:
        """Give the virtual GPU that is on what is on a real one: models, optimizer states and tensors among names.

        When the GPU is turned off, the models have their tensors again; `restored` restores the states.
        """
        for module in self._modules:
            if any(_is_on_real_gpu(own) for own in (*module.parameters(False), *module.buffers(False))):
                module.to("cuda")
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if _is_on_real_gpu(value):
                        state[name] = value.to("cuda")
        for name, value in names.items():
            if _is_on_real_gpu(value):
                names[name] = value.detach().to("cuda").requires_grad_(value.requires_grad)

    def notes_without_room(self) -> tuple[str, ...]:
        """Return the notes of a tape on whose GPU the names do not fit."""
        tensors = [tensor for tensor in self._tensors() if _is_on_real_gpu(tensor)]
        size = size_text(sum(bytes_on(device, tensors) for device in {tensor.device for tensor in tensors}))
        return (f"{VARIABLES_ALONE} need {size}, and do not fit: the cell did not run.",)

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes of models, gradients, optimizer states and tensors on a real GPU."""
        return bytes_on(device, self._tensors())

    def packed(self, source: str) -> PackedNames:
        """Return a copy of the names that a cell reads. Raises `UnsendableCellError`."""
        return PackedNames(pack_names(source, self._namespace))

    def _preserve_values(self) -> contextlib.AbstractContextManager[None]:
        tables = map(vars, self._schedulers_and_scalers)
        values = [value for table in tables for value in table.values() if isinstance(value, torch.Tensor)]
        return preserve_values([*self._held_tensors(), *values])

    def _tensors(self) -> list[torch.Tensor]:
        tensors = [value for value in self._values.values() if isinstance(value, torch.Tensor)]
        return [*self._held_tensors(), *tensors]

    def _held_tensors(self) -> list[torch.Tensor]:
        """Return the weights, buffers and gradients of the models, and the tensors of the optimizers' states."""
        weights = [weight for module in self._modules for weight in module.parameters(recurse=False)]
        values: list[Any] = [*weights, *(weight.grad for weight in weights)]
        values += [buffer for module in self._modules for buffer in module.buffers(recurse=False)]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        values += [value for state in states for value in state.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]


@dataclasses.dataclass(eq=False)
class PackedNames:
    """A copy of names as bytes, for a cell in another process: each run on a virtual GPU unpickles its own.

    Runs are limited: nobody watches them.
    """

    pickled: bytes
    """Unpickled while the virtual GPU is on, they give the names (`packing.pack_names`)."""
    may_be_endless: ClassVar[bool] = False
    limit: FailureLimit = dataclasses.field(default_factory=FailureLimit, repr=False)

    @contextlib.contextmanager
    def restored(self, machine: Machine) -> Iterator[None]:
        """Return the block of a run: its names are its own. Raises ValueError for a real device."""
        if not machine.is_virtual:
            raise ValueError("a packed cell has no values of tensors on a GPU: run it on a virtual GPU")
        yield

    def limited(self, recording: Recording) -> contextlib.AbstractContextManager[None]:
        """Return the block of a run, which ends some steps after the failed one and raises TimeoutError if late."""
        return self.limit.limited(recording)

    def begin(self) -> dict[str, Any]:
        """Return the names for a run; their tensors are on the virtual GPU that is on."""
        # Not copied: functions of the notebook have this dictionary as their globals.
        names: dict[str, Any] = pickle.loads(self.pickled)
        return names

    def put_on_virtual_gpu(self, names: dict[str, Any]) -> None:
        """Leave the names as they are: `begin` has put them there."""

    def notes_without_room(self) -> tuple[str, ...]:
        """Return no notes: the search says what does not fit."""
        return ()

    def bytes_on(self, device: torch.device) -> int:
        """Return 0: nothing is on a real GPU."""
        return 0

    def packed(self, source: str) -> PackedNames:
        """Return the names themselves."""
        return self


_KINDS = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)


def _is_on_real_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda and not is_virtual(value)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    # Step counters are counted up in place.
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value
        for name, value in state.items()
    }
