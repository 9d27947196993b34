"""Which weights train: layers frozen, and linear layers with low-rank adapters beside them (LoRA).

Linear layers are `torch.nn.Linear` and the `Conv1D` of transformers, whose weight lies the other way around.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional

from memexplore.knobs.report import Applied, LeftOut
from memexplore.torch_internals.modules import BatchNorm, children_of


class Adapted(nn.Module):
    """A linear layer and a low-rank product added to its result: `base(x) + x @ down.T @ up.T`.

    `down` has shape (rank, inputs), `up` (outputs, rank). `up` starts as zeros, so the first result is the base's own
    (Hu et al. 2021, section 4.1, with alpha equal to the rank).

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
        """The base's result plus the adapter's; shape (..., outputs)."""
        return self.base(value) + functional.linear(functional.linear(value, self.down), self.up)

    @property
    def weight(self) -> torch.Tensor:
        """The base's weight, for code that looks at a layer's size or type."""
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.Tensor | None:
        """The base's bias."""
        return self.base.bias  # type: ignore[return-value]


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight matrix and adds a bias, and does nothing else.

    >>> is_linear(nn.Linear(1, 1)), is_linear(nn.Conv1d(1, 1, 1))
    (True, False)
    """
    return isinstance(module, nn.Linear) or _is_transposed(module)


def features(linear: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer.

    >>> features(nn.Linear(3, 5))
    (3, 5)
    """
    weight: torch.Tensor = linear.weight  # type: ignore[assignment]
    first, second = weight.shape
    return (first, second) if _is_transposed(linear) else (second, first)


def _is_transposed(module: nn.Module) -> bool:
    """Whether a module is the `Conv1D` of transformers, whose weight has shape (inputs, outputs)."""
    kind = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return kind is not None and isinstance(module, kind)


def check_names(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ValueError, with names that are close, where the model has no layer of one of these names.

    >>> check_names(nn.Sequential(nn.Linear(1, 1)), ["1"])
    Traceback (most recent call last):
    ValueError: Sequential has no layer '1'; it has: '0'
    """
    known = [name for name, _ in model.named_modules() if name]
    wrong = [name for name in names if name and name not in known]
    if not wrong:
        return
    near = {match: None for name in wrong for match in difflib.get_close_matches(name, known, n=3)}
    some = ", ".join(map(repr, near or known[:5]))
    hint = f"; {'close' if near else 'it has'}: {some}" if some else ""
    raise ValueError(f"{type(model).__name__} has no layer {', '.join(map(repr, wrong))}{hint}")


@contextlib.contextmanager
def frozen(model: nn.Module, names: tuple[str, ...]) -> Iterator[Applied]:
    """Have the weights of layers, and of all that hangs below them, get no gradient in the block.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    >>> with frozen(model, ("0",)):
    ...     [weight.requires_grad for weight in model.parameters()]
    [False, False, True, True]
    """
    check_names(model, names)
    layers = [model.get_submodule(name) for name in names]
    count = len({id(weight) for layer in layers for weight in layer.parameters()})
    if names and not count:
        raise ValueError(f"{', '.join(names)} has no weights that could be frozen")
    notes: tuple[str, ...] = ()
    if any(isinstance(module, BatchNorm) for layer in layers for module in layer.modules()):
        notes = ("Batch norm in frozen layers still updates its running statistics.",)
    with _without_gradient(weight for layer in layers for weight in layer.parameters()):
        yield Applied((f"{count} {'weight' if count == 1 else 'weights'} frozen",), (), notes)


@contextlib.contextmanager
def adapted(model: nn.Module, names: tuple[str, ...], rank: int) -> Iterator[Applied]:
    """Give linear layers low-rank adapters in the block, and freeze their own weights; named are they, or layers above.

    The adapters are gone after the block with what they learned. No random number is drawn.

    >>> model = nn.Sequential(nn.Linear(8, 4))
    >>> with adapted(model, ("0",), rank=2):
    ...     [(name, tuple(weight.shape)) for name, weight in model.named_parameters() if weight.requires_grad]
    [('0.down', (2, 8)), ('0.up', (4, 2))]
    """
    check_names(model, names)
    chosen, left_out = linear_layers(model, names)
    wrapped = {
        # The seed is read, not drawn from.
        base: Adapted(base, rank, torch.initial_seed() + number)
        for number, base in enumerate(chosen.values())
    }
    places = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in children_of(parent).items()
        if child in wrapped
    ]
    notes = (
        "The adapters are new weights and gone after the block: make the optimizer inside it, and save "
        "model.state_dict() before it ends.",
        *_tied(model, chosen),
    )
    with _without_gradient(weight for base in wrapped for weight in base.parameters()):
        try:
            for parent, name, base in places:
                children_of(parent)[name] = wrapped[base]  # type: ignore[index]
            many = "layer" if len(wrapped) == 1 else "layers"
            yield Applied((f"LoRA of rank {rank} on {len(wrapped)} linear {many}",), left_out, notes)
        finally:
            for parent, name, base in places:
                children_of(parent)[name] = base


def linear_layers(model: nn.Module, names: tuple[str, ...]) -> tuple[dict[str, nn.Module], tuple[LeftOut, ...]]:
    """The linear layers that adapters can be put beside, by name, and those that they cannot."""
    chosen: dict[str, nn.Module] = {}
    left_out: list[LeftOut] = []
    for name in names:
        below = {
            ".".join(part for part in (name, inner) if part): module
            for inner, module in model.get_submodule(name).named_modules()
            if is_linear(module)
        }
        if not below:
            raise ValueError(f"{name or 'the model'} is no linear layer and has none below it: LoRA needs one")
        for place, module in below.items():
            if not place:
                left_out.append(LeftOut(type(module).__name__, "it is the model itself"))
            elif isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
                left_out.append(LeftOut(place, "attention reads its weight and never calls it"))
            elif module.weight.is_floating_point():  # type: ignore[operator]
                chosen[place] = module
            else:
                left_out.append(LeftOut(place, f"its weights are {module.weight.dtype}"))
    return chosen, tuple(dict.fromkeys(left_out))


def _tied(model: nn.Module, chosen: dict[str, nn.Module]) -> Iterator[str]:
    owners: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(weight), []).append(name)
    for name, base in chosen.items():
        others = [owner for owner in owners[id(base.weight)] if owner != f"{name}.weight"]
        if others:
            yield f"{name} shares its weight with {', '.join(others)}: it is frozen there too."


@contextlib.contextmanager
def _without_gradient(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    before = [(weight, weight.requires_grad) for weight in {id(weight): weight for weight in weights}.values()]
    try:
        for weight, _ in before:
            weight.requires_grad_(False)
        yield
    finally:
        for weight, needed in before:
            weight.requires_grad_(needed)
