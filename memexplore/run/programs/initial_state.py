"""The models, optimizers and tensors that a notebook cell begins with: its names go in, runs begin with them again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from memexplore.run.knobs.applying.model_state import (
    Gradients,
    preserve_model_state,
    preserve_random_states,
    preserve_values,
    refill,
)
from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.run.machine import bytes_on
from memexplore.virtual_gpu.patches.device_names import is_virtual


class InitialState:
    """Models, optimizers, schedulers and gradient scalers of a namespace before the first run of a cell.

    Lists, tuples and dicts of the namespace are searched one level deep. The value holds no tensor of its own: for the
    gradients and the optimizer states it keeps only which were missing.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        held: list[Any] = []
        for value in namespace.values():
            inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
            held += [one for one in inside if isinstance(one, _KINDS)]
        modules = {module: None for one in held if isinstance(one, torch.nn.Module) for module in one.modules()}
        self._modules = list(modules)
        self._optimizers = list({id(one): one for one in held if isinstance(one, torch.optim.Optimizer)}.values())
        self._schedulers_and_scalers = [one for one in held if isinstance(one, LRScheduler | torch.amp.GradScaler)]
        self._without_gradients = [
            module for module in self._modules if all(weight.grad is None for weight in module.parameters(False))
        ]
        self._without_state = [optimizer for optimizer in self._optimizers if not optimizer.state]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Remove gradients and optimizer states that were missing; after the block, undo that and what the block did.

        Preserved are the models, the optimizers with their states, and the random states.
        """
        with (
            preserve_model_state(self._modules, Gradients.AS_THEY_ARE),
            preserve_random_states(),
            undone_after(self._record_optimizers),
        ):
            for module in self._without_gradients:
                for weight in module.parameters(recurse=False):
                    weight.grad = None
            for optimizer in self._without_state:
                optimizer.state.clear()
            yield

    def _record_optimizers(self, log: UndoLog) -> None:
        for optimizer in self._optimizers:
            states = {weight: _copied(state) for weight, state in optimizer.state.items()}
            log.add(refill, optimizer.state, states)
            for group in optimizer.param_groups:
                log.add(refill, group, dict(group))
        for one in self._schedulers_and_scalers:
            log.add(refill, vars(one), dict(vars(one)))

    def tensors(self, names: dict[str, Any]) -> list[torch.Tensor]:
        """Return the models' weights, buffers and gradients, the optimizers' states, and the tensors among names."""
        weights = [weight for module in self._modules for weight in module.parameters(recurse=False)]
        found: list[Any] = [*weights, *(weight.grad for weight in weights), *names.values()]
        found += [buffer for module in self._modules for buffer in module.buffers(recurse=False)]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        found += [value for state in states for value in state.values()]
        return [each for each in found if isinstance(each, torch.Tensor)]

    def bytes_on_real_gpus(self, names: dict[str, Any]) -> int:
        """Return the bytes of `tensors` that are on real GPUs."""
        found = [each for each in self.tensors(names) if _is_on_real_gpu(each)]
        return sum(bytes_on(device, found) for device in {each.device for each in found})

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

    def preserve_values(self) -> contextlib.AbstractContextManager[None]:
        """Preserve the values of all weights, buffers, gradients and optimizer states; copies wait on the CPU."""
        weights = [weight for module in self._modules for weight in module.parameters(recurse=False)]
        tensors: list[Any] = [*weights, *(weight.grad for weight in weights)]
        tensors += [buffer for module in self._modules for buffer in module.buffers(recurse=False)]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        tensors += [value for table in (*states, *map(vars, self._schedulers_and_scalers)) for value in table.values()]
        return preserve_values(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))


_KINDS = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)


def _is_on_real_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda and not is_virtual(value)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    # Step counters are counted up in place.
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value
        for name, value in state.items()
    }
