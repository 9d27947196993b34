"""The repeated blocks of a model, found without being told: what activation checkpointing takes as one piece.

How they are found. Modules that the same module calls (`ModuleList` and `ModuleDict` are looked through, nobody calls
them) and that are of one class repeat, where they have children and weights. A repeated module is a *stage*, and the
blocks are those inside it, where nearly all of its layers with weights are in blocks of its own that are numbered:
fewer are outside than in the smallest block, and each block has two at least. So a stage of a ResNet is opened and its
bottlenecks are not (a convolution with its norm is no block); a decoder layer is opened neither for its experts (its
attention is outside) nor for its two attentions (they have names). All modules of the classes so found are blocks.
`nn.Sequential` counts as one class where what it calls is the same.

A model without such classes whose layers stand in flat `nn.Sequential`s has runs of them as blocks: a layer with
weights and what follows it. The kind that covers more layers with weights counts.

The order is that in which modules were registered, which is that of the forward pass in nearly every model.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from torch import nn

from memexplore.torch_internals.modules import children_of, parameters_of

_LISTS = (nn.ModuleList, nn.ModuleDict)
_DIGITS = re.compile(r"\d+")


class Block(NamedTuple):
    """One block: the qualified names of modules that are called one after another, nearly always one."""

    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first module's name, which stands for the block."""
        return self.names[0]


def repeated(model: nn.Module) -> tuple[str, ...]:
    """Qualified names of a model's repeated blocks, outermost, in the order in which they were registered.

    >>> layer = lambda: nn.TransformerEncoderLayer(8, 2, 16)
    >>> repeated(nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False))
    ('layers.0', 'layers.1', 'layers.2')

    A flat `nn.Sequential` has a block from each layer with weights on, named after it:

    >>> repeated(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()))
    ('0', '2')

    Empty where nothing repeats.
    """
    return tuple(block.name for block in blocks(model))


def blocks(model: nn.Module) -> tuple[Block, ...]:
    """The repeated blocks of a model with all modules that they are made of.

    >>> blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    (Block(names=('0', '1')), Block(names=('2',)))
    """
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        names.setdefault(module, name)
    looked = _Look()
    whole = looked.repeating(model)
    runs = list(_runs("", model, looked))
    in_runs = sum(looked.layers(model.get_submodule(name)) for run in runs for name in run)
    if in_runs > sum(map(looked.layers, whole)):
        return tuple(map(Block, runs))
    return tuple(Block((names[module],)) for module in whole)


def covered_share(model: nn.Module, names: tuple[str, ...]) -> float:
    """Share of a model's layers with weights that are in modules of some names, from 0 to 1.

    >>> covered_share(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ("0",))
    0.5

    Raises AttributeError for a name that is no module.
    """
    looked = _Look()
    inside = {id(layer) for name in names for layer in model.get_submodule(name).modules() if has_weights(layer)}
    return len(inside) / looked.layers(model) if looked.layers(model) else 0.0


def has_weights(module: nn.Module) -> bool:
    """Whether a module has a weight matrix of its own, or one that is yet to be shaped."""
    return any(
        isinstance(weight, nn.parameter.UninitializedParameter) or weight.dim() >= 2
        for weight in parameters_of(module).values()
        if weight is not None
    )


class _Look:
    """What was found out about modules of one model, so that no tree is walked twice."""

    def __init__(self) -> None:
        self._layers: dict[nn.Module, int] = {}
        self._kinds: dict[nn.Module, Hashable] = {}

    def layers(self, module: nn.Module) -> int:
        """How many layers with weights a module has, itself included."""
        if module not in self._layers:
            self._layers[module] = sum(map(has_weights, module.modules()))
        return self._layers[module]

    def kind(self, module: nn.Module) -> Any:
        """What two modules share that are of one class."""
        if type(module) is not nn.Sequential:
            return type(module)
        if module not in self._kinds:
            inner = [kind for kind, _ in itertools.groupby(map(self.kind, module.children()))]
            self._kinds[module] = (nn.Sequential, *inner)
        return self._kinds[module]

    def repeating(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a model, each one module."""
        kinds = {self.kind(block) for block in self._inside(model)}
        most = Counter[Hashable]()
        for module in model.modules():
            if self.kind(module) in kinds:
                most[self.kind(module)] = max(most[self.kind(module)], self.layers(module))
        # Single convolutions beside real blocks: the feature extractor of wav2vec, the transitions of DenseNet.
        if any(layers >= 2 for layers in most.values()):
            kinds = {kind for kind in kinds if most[kind] >= 2}
        return list(self._of(model, kinds))

    def _inside(self, module: nn.Module) -> dict[nn.Module, bool]:
        """Blocks below a module, and whether each is one of a numbered row of them."""
        called = {child: name for name, child in _called(module)}
        count = Counter(self.kind(child) for child in called if self._may(child))
        rows = Counter((self.kind(child), _DIGITS.sub("#", name)) for child, name in called.items())
        found: dict[nn.Module, bool] = {}
        for child, name in called.items():
            inner, kind = self._inside(child), self.kind(child)
            if not self._may(child) or count[kind] < 2 or self._is_stage(child, inner):
                found |= inner
            else:
                found[child] = rows[kind, _DIGITS.sub("#", name)] >= 2
        return found

    def _may(self, module: nn.Module) -> bool:
        return bool(self.layers(module)) and next(module.children(), None) is not None

    def _is_stage(self, module: nn.Module, inner: dict[nn.Module, bool]) -> bool:
        layers = [self.layers(block) for block, numbered in inner.items() if numbered]
        return bool(layers) and min(layers) >= 2 and self.layers(module) - sum(layers) < min(layers)

    def _of(self, module: nn.Module, kinds: set[Hashable]) -> Iterator[nn.Module]:
        """The outermost modules of some classes; one that holds others of them is a stage with a single block."""
        seen: set[int] = set()
        for _, child in _called(module):
            if id(child) in seen:
                continue
            seen.add(id(child))
            kind = self.kind(child)
            holds = any(self.kind(other) in kinds - {kind} for other in child.modules())
            if kind in kinds and self._may(child) and not holds:
                yield child
            else:
                yield from self._of(child, kinds)


def _called(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What a module may call itself, by name."""
    for name, child in module.named_children():
        if isinstance(child, _LISTS) and type(child).forward is nn.Module.forward:
            yield from ((f"{name}.{inner}", module) for inner, module in _called(child))
        else:
            yield name, child


def _runs(name: str, module: nn.Module, looked: _Look) -> Iterator[tuple[str, ...]]:
    """Runs of children of flat `nn.Sequential`s, by name: each begins with one that has weights."""
    children = {
        f"{name}.{child}" if name else child: inner for child, inner in children_of(module).items() if inner is not None
    }
    flat = is_sequential(module) and not any(map(is_sequential, children.values()))
    if not flat or sum(looked.layers(child) > 0 for child in children.values()) < 2:
        for child, inner in children.items():
            yield from _runs(child, inner, looked)
        return
    run: list[str] = []
    for child, inner in children.items():
        if looked.layers(inner) and run:
            yield tuple(run)
            run = []
        if looked.layers(inner) or run:
            run.append(child)
    yield tuple(run)


def is_sequential(module: nn.Module) -> bool:
    """Whether a module calls its children one after another and does nothing else."""
    return type(module).forward is nn.Sequential.forward
