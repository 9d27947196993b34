"""Repeated blocks of a model, found from its module tree: the units that activation checkpointing recomputes.

Modules of the same class below the same parent repeat if they have children and weights. (`ModuleList` and `ModuleDict`
are transparent, since they are never called.) A repeated module is a *stage*, and the blocks are those inside it, if
nearly all of its layers with weights are in numbered blocks of its own: fewer layers are outside than in the smallest
block, and each block has at least two. So a stage of a ResNet is opened and its bottlenecks are not (a convolution with
its norm is not a block); a decoder layer is opened neither for its experts (its attention is outside) nor for its two
attentions (they have names, not numbers). All modules of the classes found in this way are blocks. Two `nn.Sequential`
are of the same class if their children are.

A model without such classes whose layers are in flat `nn.Sequential`s has runs of children as blocks: a layer with
weights and all that follows it. The kind that covers more layers with weights is used.

Blocks are in order of registration, which in nearly every model is the order of the forward pass.
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
    """One block: the qualified names of its modules, called one after another; nearly always one module."""

    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the first module, which names the block."""
        return self.names[0]


def repeated(model: nn.Module) -> tuple[str, ...]:
    """Return the qualified names of a model's outermost repeated blocks, in order of registration.

    >>> layer = lambda: nn.TransformerEncoderLayer(8, 2, 16)
    >>> repeated(nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False))
    ('layers.0', 'layers.1', 'layers.2')

    In a flat `nn.Sequential` each layer with weights begins a block, which has its name:

    >>> repeated(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()))
    ('0', '2')

    Empty if no module repeats.
    """
    return tuple(block.name for block in blocks(model))


def blocks(model: nn.Module) -> tuple[Block, ...]:
    """Return the repeated blocks of a model with all of their modules.

    >>> blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    (Block(names=('0', '1')), Block(names=('2',)))
    """
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        names.setdefault(module, name)
    tree = _ModuleTree()
    single_blocks = tree.repeating(model)
    runs = list(_runs("", model, tree))
    in_runs = sum(tree.layers(model.get_submodule(name)) for run in runs for name in run)
    if in_runs > sum(map(tree.layers, single_blocks)):
        return tuple(map(Block, runs))
    return tuple(Block((names[module],)) for module in single_blocks)


def covered_share(model: nn.Module, names: tuple[str, ...]) -> float:
    """Return the share of a model's layers with weights that are in named modules, from 0 to 1.

    >>> covered_share(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ("0",))
    0.5

    Raises AttributeError for a name without a module.
    """
    tree = _ModuleTree()
    inside = {id(layer) for name in names for layer in model.get_submodule(name).modules() if has_weights(layer)}
    return len(inside) / tree.layers(model) if tree.layers(model) else 0.0


def has_weights(module: nn.Module) -> bool:
    """Return whether a module has a weight matrix of its own, also if its shape is not set yet."""
    return any(
        isinstance(weight, nn.parameter.UninitializedParameter) or weight.dim() >= 2
        for weight in parameters_of(module).values()
        if weight is not None
    )


class _ModuleTree:
    """Properties of the modules of one model, each computed once."""

    def __init__(self) -> None:
        self._layers: dict[nn.Module, int] = {}
        self._kinds: dict[nn.Module, Hashable] = {}

    def layers(self, module: nn.Module) -> int:
        """Return the number of layers with weights in a module, itself included."""
        if module not in self._layers:
            self._layers[module] = sum(map(has_weights, module.modules()))
        return self._layers[module]

    def kind(self, module: nn.Module) -> Any:
        """Return a value that is equal for modules of the same class."""
        if type(module) is not nn.Sequential:
            return type(module)
        if module not in self._kinds:
            inner = [kind for kind, _ in itertools.groupby(map(self.kind, module.children()))]
            self._kinds[module] = (nn.Sequential, *inner)
        return self._kinds[module]

    def repeating(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of a model that are single modules."""
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
        """Return the blocks below a module, and for each whether it is one of several with numbered names."""
        called = {child: name for name, child in _called(module)}
        count = Counter(self.kind(child) for child in called if self._is_candidate(child))
        rows = Counter((self.kind(child), _DIGITS.sub("#", name)) for child, name in called.items())
        below: dict[nn.Module, bool] = {}
        for child, name in called.items():
            inner, kind = self._inside(child), self.kind(child)
            if not self._is_candidate(child) or count[kind] < 2 or self._is_stage(child, inner):
                below |= inner
            else:
                below[child] = rows[kind, _DIGITS.sub("#", name)] >= 2
        return below

    def _is_candidate(self, module: nn.Module) -> bool:
        return bool(self.layers(module)) and next(module.children(), None) is not None

    def _is_stage(self, module: nn.Module, inner: dict[nn.Module, bool]) -> bool:
        layers = [self.layers(block) for block, numbered in inner.items() if numbered]
        return bool(layers) and min(layers) >= 2 and self.layers(module) - sum(layers) < min(layers)

    def _of(self, module: nn.Module, kinds: set[Hashable]) -> Iterator[nn.Module]:
        """Yield the outermost modules of some classes; a module that contains another is a stage with one block."""
        seen: set[int] = set()
        for _, child in _called(module):
            if id(child) in seen:
                continue
            seen.add(id(child))
            kind = self.kind(child)
            contains = any(self.kind(other) in kinds - {kind} for other in child.modules())
            if kind in kinds and self._is_candidate(child) and not contains:
                yield child
            else:
                yield from self._of(child, kinds)


def _called(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a module calls directly, by name."""
    for name, child in module.named_children():
        if isinstance(child, _LISTS) and type(child).forward is nn.Module.forward:
            yield from ((f"{name}.{inner}", module) for inner, module in _called(child))
        else:
            yield name, child


def _runs(name: str, module: nn.Module, tree: _ModuleTree) -> Iterator[tuple[str, ...]]:
    """Yield runs of children of flat `nn.Sequential`s, by name: each begins with a child that has weights."""
    children = {
        f"{name}.{child}" if name else child: inner for child, inner in children_of(module).items() if inner is not None
    }
    flat = is_sequential(module) and not any(map(is_sequential, children.values()))
    if not flat or sum(tree.layers(child) > 0 for child in children.values()) < 2:
        for child, inner in children.items():
            yield from _runs(child, inner, tree)
        return
    run: list[str] = []
    for child, inner in children.items():
        if tree.layers(inner) and run:
            yield tuple(run)
            run = []
        if tree.layers(inner) or run:
            run.append(child)
    yield tuple(run)


def is_sequential(module: nn.Module) -> bool:
    """Return whether a module calls its children one after another and does nothing else."""
    return type(module).forward is nn.Sequential.forward
