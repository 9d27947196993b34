"""The knob `lora`: linear layers with low-rank adapters, which train instead of the weights.

Linear layers are `torch.nn.Linear` and the `Conv1D` of transformers, whose weight is transposed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from memexplore.run.knobs.applying.layer_names import check_names, for_layers
from memexplore.run.knobs.applying.report import ApplyReport, Change, Skipped, counted
from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.run.knobs.checkpoints.blocks import repeated
from memexplore.run.knobs.control import Control, Explored, layer_names
from memexplore.run.knobs.frozen import stop_gradients
from memexplore.run.knobs.knob import Application, Estimate, Group, Knob, Limits, ModelCode, Stage
from memexplore.run.knobs.values import LayerNames
from memexplore.torch_internals.modules import children_of

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.run.knobs.knobs import Knobs

_NO_LINEAR = (
    "This layer contains no linear layer, which LoRA needs. Select a linear layer, or a layer that contains one."
)
_TEMPORARY = (
    "The adapters are new weights and removed after the block: make the optimizer inside it, and save "
    "model.state_dict() before it ends."
)
_ADAPTED = """\
class Adapted(torch.nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        outputs, inputs = {shape}
        self.down = torch.nn.Parameter(base.weight.new_empty(rank, inputs))
        self.up = torch.nn.Parameter(base.weight.new_zeros(outputs, rank))
        torch.nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, value):
        linear = torch.nn.functional.linear
        return self.base(value) + linear(linear(value, self.down), self.up)
"""


class LoraKnob(Knob):
    """Linear layers with low-rank adapters (LoRA), which train instead of the weights; the empty name is the model."""

    name, word = "lora", "LoRA"
    costs = "another training, faster"
    values = LayerNames("; the rank is lora_rank=")
    place = 140
    group = Group.LAYERS
    locked = "Adapters are new weights, which need an optimizer of their own: add them and start again."
    stage = Stage.WEIGHTS

    def phrase(self, value: Any) -> str:
        """Return the number of layers."""
        return f"LoRA on {counted(len(value), 'layer')}"

    def layers(self, value: Any) -> tuple[str, ...]:
        """Return the layers."""
        names: tuple[str, ...] = value
        return names

    def apply(self, value: Any, application: Application) -> ApplyReport:
        """Add adapters to the linear layers, and freeze the weights of these."""
        return add_adapters(application.log, application.model, value, application.knobs.lora_rank)

    def controls(self, explored: Explored) -> list[Control]:
        """Return a text with the names of the layers."""
        return [layer_names(self)]

    def hidden(self, explored: Explored) -> str:
        """Return that there is nothing to adapt."""
        modules = () if explored.model is None else explored.model.modules()
        has_linear = explored.model is None or any(map(is_linear, modules))
        return "" if has_linear else "the model has no linear layer"

    def why_not_layer(self, module: nn.Module) -> str:
        """Return that a layer cannot be adapted."""
        return "" if is_linear(module) else _NO_LINEAR

    def unavailable(self, limits: Limits) -> str:
        """Return why no optimizer can be made with the adapters."""
        return limits.no_optimizer

    def model_lines(self, value: Any, code: ModelCode) -> Iterator[str]:
        """Yield a class of adapters, and a loop that puts them into the model."""
        layers = value if code.model is None else tuple(linear_layers(code.model, value)[0])
        yield _ADAPTED.format(shape=_shape(code.model, layers))
        yield for_layers(
            layers, f"model.set_submodule(name, Adapted(model.get_submodule(name), rank={code.knobs.lora_rank}))"
        )

    def alters_training(self, value: Any, model: nn.Module | None, knobs: Knobs) -> bool:
        """Return True."""
        return True

    def training_text(self, value: Any, knobs: Knobs) -> str:
        """Return what it means for the training."""
        where = value[0] if len(value) == 1 else f"{len(value)} layers"
        return f"In {where} only adapters of rank {knobs.lora_rank} train, not the weights themselves."

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return the parents of the repeated blocks: the head is trained for the task and needs no adapters."""
        if explored.model is None:
            return ()
        parents = dict.fromkeys(name.rpartition(".")[0] or name for name in repeated(explored.model))
        return (tuple(parents),) if parents else ()

    def estimate(self, value: Any, estimate: Estimate) -> None:
        """Leave out gradients and optimizer state."""
        estimate.constant = estimate.fixed = estimate.weights
        estimate.gradients = estimate.states = 0


class Adapted(nn.Module):
    """A linear layer plus a low-rank product: `base(x) + x @ down.T @ up.T`.

    `down` has shape (rank, inputs), `up` (outputs, rank). `up` starts as zeros, so the first result is the
    base's (Hu et al. 2021, section 4.1, with alpha equal to the rank).

    >>> linear = nn.Linear(8, 4)
    >>> x = torch.ones(2, 8)
    >>> torch.equal(Adapted(linear, rank=2, seed=0)(x), linear(x))
    True
    """

    def __init__(self, base: nn.Module, rank: int, seed: int) -> None:
        super().__init__()
        weight: torch.Tensor = base.weight  # type: ignore[assignment]
        self.in_features, self.out_features = features(base)
        generator = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(self.in_features)
        down = torch.empty(rank, self.in_features).uniform_(-bound, bound, generator=generator)
        self.base = base
        self.down = nn.Parameter(down.to(weight.device, weight.dtype))
        self.up = nn.Parameter(torch.zeros(self.out_features, rank, device=weight.device, dtype=weight.dtype))
        self.train(base.training)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of the base's and the adapter's result, of shape (..., outputs)."""
        return self.base(value) + functional.linear(functional.linear(value, self.down), self.up)

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the base, for code that reads a layer's size or dtype."""
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the base."""
        return self.base.bias  # type: ignore[return-value]


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by a weight matrix, adds a bias, and does nothing else.

    >>> is_linear(nn.Linear(1, 1)), is_linear(nn.Conv1d(1, 1, 1))
    (True, False)
    """
    return isinstance(module, nn.Linear) or _is_transposed(module)


def features(linear: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer.

    >>> features(nn.Linear(3, 5))
    (3, 5)
    """
    weight: torch.Tensor = linear.weight  # type: ignore[assignment]
    first, second = weight.shape
    return (first, second) if _is_transposed(linear) else (second, first)


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a module is the `Conv1D` of transformers, whose weight has shape (inputs, outputs)."""
    kind = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return kind is not None and isinstance(module, kind)


def add_adapters(log: UndoLog, model: nn.Module, names: tuple[str, ...], rank: int) -> ApplyReport:
    """Give low-rank adapters to linear layers, named or below a named layer, and freeze the weights of their bases.

    Restoring the log removes the adapters with their trained weights. No random number is drawn.

    >>> log, model = UndoLog(), nn.Sequential(nn.Linear(8, 4))
    >>> add_adapters(log, model, ("0",), rank=2).texts
    ('LoRA of rank 2 on 1 linear layer',)
    >>> [(name, tuple(weight.shape)) for name, weight in model.named_parameters() if weight.requires_grad]
    [('0.down', (2, 8)), ('0.up', (4, 2))]
    >>> log.restore()

    Raises ValueError for a name without a layer, or without a linear layer below it.
    """
    check_names(model, names)
    chosen, skipped = linear_layers(model, names)
    adapters = {
        # `initial_seed` reads the seed and draws nothing.
        base: Adapted(base, rank, torch.initial_seed() + number)
        for number, base in enumerate(chosen.values())
    }
    entries = [
        (children_of(parent), name, child)
        for parent in list(model.modules())
        for name, child in children_of(parent).items()
        if child in adapters
    ]
    notes = (_TEMPORARY, *_shared_weights(model, chosen))
    stop_gradients(log, (weight for base in adapters for weight in base.parameters()))
    for table, name, base in entries:
        log.set_item(table, name, adapters[base])  # type: ignore[index]
    change = Change("lora", f"LoRA of rank {rank} on {counted(len(adapters), 'linear layer')}")
    return ApplyReport((change,), skipped, notes)


def linear_layers(model: nn.Module, names: tuple[str, ...]) -> tuple[dict[str, nn.Module], tuple[Skipped, ...]]:
    """Return the linear layers that can get adapters, by name, and the layers that cannot."""
    chosen: dict[str, nn.Module] = {}
    skipped: list[Skipped] = []
    for name in names:
        below = {
            ".".join(part for part in (name, inner) if part): module
            for inner, module in model.get_submodule(name).named_modules()
            if is_linear(module)
        }
        if not below:
            raise ValueError(
                f"LoRA was not added: {name or 'the model'} contains no linear layer. "
                "Name a linear layer, or a layer that contains one."
            )
        for layer, module in below.items():
            if not layer:
                skipped.append(Skipped(type(module).__name__, "it is the model itself"))
            elif isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
                skipped.append(Skipped(layer, "attention reads its weight and never calls it"))
            elif module.weight.is_floating_point():  # type: ignore[operator]
                chosen[layer] = module
            else:
                skipped.append(Skipped(layer, f"its weights are {module.weight.dtype}"))
    return chosen, tuple(dict.fromkeys(skipped))


def _shared_weights(model: nn.Module, chosen: dict[str, nn.Module]) -> list[str]:
    """Return a note for each chosen layer whose weight the model has under other names too."""
    names_of: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(weight), []).append(name)
    notes = []
    for layer, base in chosen.items():
        others = [name for name in names_of[id(base.weight)] if name != f"{layer}.weight"]
        if others:
            notes.append(f"{layer} shares its weight with {', '.join(others)}: that weight is frozen there too.")
    return notes


def _shape(model: nn.Module | None, names: tuple[str, ...]) -> str:
    """Return the expression for outputs and inputs of linear layers; transformers' `Conv1D` transposes its weight."""
    kinds = {isinstance(model.get_submodule(name), nn.Linear) for name in names} if model is not None else {True}
    if kinds == {True}:
        return "base.weight.shape"
    if kinds == {False}:
        return "reversed(base.weight.shape)"
    return "base.weight.shape if isinstance(base, torch.nn.Linear) else reversed(base.weight.shape)"
