"""Knobs for the weights that train: frozen layers, and linear layers with low-rank adapters (LoRA).

Linear layers are `torch.nn.Linear` and the `Conv1D` of transformers, whose weight is transposed.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from memexplore.knobs.facts import Change, Count, Note, NoteKind, Skipped, Unit
from memexplore.knobs.report import ApplyReport
from memexplore.knobs.undo import UndoLog
from memexplore.torch_internals.modules import BatchNorm, children_of


class Adapted(nn.Module):
    """A linear layer plus a low-rank product: `base(x) + x @ down.T @ up.T`.

    `down` has shape (rank, inputs), `up` (outputs, rank). `up` starts as zeros, so the first result equals that of the
    base (Hu et al. 2021, section 4.1, with alpha equal to the rank).

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
        """Return the result of the base plus that of the adapter, of shape (..., outputs)."""
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


def check_names(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ValueError, with similar names, if the model has no layer of one of these names.

    >>> check_names(nn.Sequential(nn.Linear(1, 1)), ["1"])
    Traceback (most recent call last):
    ValueError: Sequential has no layer '1'; it has: '0'
    """
    layers = [name for name, _ in model.named_modules() if name]
    wrong = [name for name in names if name and name not in layers]
    if not wrong:
        return
    similar = {match: None for name in wrong for match in difflib.get_close_matches(name, layers, n=3)}
    listed = ", ".join(map(repr, similar or layers[:5]))
    hint = f"; {'close' if similar else 'it has'}: {listed}" if listed else ""
    raise ValueError(f"{type(model).__name__} has no layer {', '.join(map(repr, wrong))}{hint}")


def freeze(log: UndoLog, model: nn.Module, names: tuple[str, ...]) -> ApplyReport:
    """Disable the gradients of the weights of named layers and of all layers below them.

    >>> log, model = UndoLog(), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    >>> freeze(log, model, ("0",)).texts
    ('2 weights frozen',)
    >>> [weight.requires_grad for weight in model.parameters()]
    [False, False, True, True]
    >>> log.restore()

    Raises ValueError for a name without a layer, or for layers without weights.
    """
    check_names(model, names)
    layers = [model.get_submodule(name) for name in names]
    count = _stop_gradients(log, (weight for layer in layers for weight in layer.parameters()))
    if names and not count:
        raise ValueError(f"{', '.join(names)} has no weights that could be frozen; name a layer with weights")
    notes: tuple[Note, ...] = ()
    if any(isinstance(module, BatchNorm) for layer in layers for module in layer.modules()):
        notes = (Note(NoteKind.FROZEN_BATCH_NORM),)
    return ApplyReport((Change("frozen", names, (Count(Unit.WEIGHT, count),)),), (), notes)


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
    notes = (Note(NoteKind.ADAPTERS_ARE_TEMPORARY), *_shared_weights(model, chosen))
    _stop_gradients(log, (weight for base in adapters for weight in base.parameters()))
    for table, name, base in entries:
        log.set_item(table, name, adapters[base])  # type: ignore[index]
    counts = Count(Unit.LINEAR_LAYER, len(adapters)), Count(Unit.RANK, rank)
    return ApplyReport((Change("lora", names, counts),), skipped, notes)


def linear_layers(model: nn.Module, names: tuple[str, ...]) -> tuple[dict[str, nn.Module], tuple[Skipped, ...]]:
    """Return the linear layers that can get adapters, by name, and those that cannot."""
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


def _shared_weights(model: nn.Module, chosen: dict[str, nn.Module]) -> list[Note]:
    """Return a note for each chosen layer whose weight the model has under other names too."""
    names_of: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(weight), []).append(name)
    notes = []
    for layer, base in chosen.items():
        others = [name for name in names_of[id(base.weight)] if name != f"{layer}.weight"]
        if others:
            notes.append(Note(NoteKind.SHARED_WEIGHT, (layer, *others)))
    return notes


def _stop_gradients(log: UndoLog, weights: Iterable[torch.Tensor]) -> int:
    """Set `requires_grad` of weights to False; return the number of distinct weights."""
    different = {id(weight): weight for weight in weights}.values()
    for weight in different:
        log.add(weight.requires_grad_, weight.requires_grad)
        weight.requires_grad_(False)
    return len(different)
