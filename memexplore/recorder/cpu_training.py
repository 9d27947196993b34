"""Tell whether a recorded GPU waits while a model trains on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from memexplore.tape import Action, Phase, Tape
from memexplore.torch_internals.modules import weights_of


class CpuTraining:
    """The models and optimizers of a recording whose parameters are on the CPU."""

    def __init__(self) -> None:
        self._seen = WeakIdKeyDictionary()
        self._models: dict[str, None] = {}
        self._stepped: set[bool] = set()
        """Whether parameters were on the CPU, of each optimizer that stepped."""

    def called(self, model: torch.nn.Module) -> None:
        """Note a model that code outside of models calls."""
        if model not in self._seen:
            self._seen[model] = True
            if _on_cpu(weights_of(model)):
                self._models.setdefault(type(model).__name__)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that steps."""
        if len(self._stepped) < 2:
            self._stepped.add(_on_cpu([weight for group in optimizer.param_groups for weight in group["params"]]))

    def models(self, tape: Tape) -> tuple[str, ...]:
        """Return the models that trained on the CPU if nothing trained on the recorded GPU, else nothing.

        Parameters that wait on the CPU between the steps, as with offloading, allocate on the GPU in forward.
        """
        in_model = (tape.phase == Phase.FORWARD) | (tape.phase == Phase.BACKWARD)
        if self._stepped != {True} or np.any(in_model & (tape.action == Action.ALLOC)):
            return ()
        return tuple(self._models)


def _on_cpu(parameters: list[torch.nn.Parameter]) -> bool:
    return bool(parameters) and all(parameter.device.type == "cpu" for parameter in parameters)
