"""Activation checkpointing put onto a model: the real `torch.utils.checkpoint`, around modules found or named."""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from memexplore.knobs.checkpoints import blocks, norms, selective
from memexplore.knobs.checkpoints.recompute import (
    Carried,
    Guard,
    again,
    call_twice,
    counting,
    statistics_kept,
    without_cache,
)
from memexplore.knobs.checkpoints.regions import Region
from memexplore.knobs.checkpoints.watch import Watch, replace_forward
from memexplore.knobs.knobs import Checkpoint, CheckpointKind
from memexplore.knobs.report import Applied, LeftOut
from memexplore.torch_internals.modules import CHECKPOINT_GENERATOR, children_of

_STATISTICS = (
    "Batch norm's running statistics move once a step, as without checkpoints; "
    "plain torch.utils.checkpoint moves them twice."
)
_CACHE = "Blocks that are computed again get no key-value cache, as transformers does it too."


@contextlib.contextmanager
def checkpointed(model: nn.Module, checkpoint: Checkpoint) -> Iterator[Applied]:
    """Have a model throw activations away and compute them again in the backward passes of the block.

    The model's own checkpoints are switched off, but for `as written`, so that what runs is what was asked for. Losses,
    gradients, random numbers and running statistics are those of the plain run, on a CPU, a GPU or a virtual one.
    Forward and backward belong in the block; everything is undone at its end, after an exception too.
    `Applied.settled()` tells afterwards what was left out.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(3)))
    >>> with checkpointed(model, Checkpoint.parse("every 2")) as applied:
    ...     model(torch.ones(1, 4)).sum().backward()
    >>> applied.texts
    ('Checkpointing 2 of 3 blocks',)

    Raises ValueError for a layer that the model does not have; while the model runs, RuntimeError for a block that
    overwrites its input.
    """
    if checkpoint.kind is CheckpointKind.AS_WRITTEN:
        yield Applied()
        return
    with contextlib.ExitStack() as undo:
        undo.enter_context(_own_off(model))
        yield _PUT_ON[checkpoint.kind](undo, model, checkpoint)


class Piece(NamedTuple):
    """What is computed again as one: modules that are called one after another, nearly always one."""

    name: str
    modules: tuple[nn.Module, ...]
    parent: nn.Module | None = None
    """The `nn.Sequential` that calls them, where blocks are runs of its children."""
    start: int = 0
    """Which of its children is the first."""
    others: tuple[str, ...] = ()
    """Names of the blocks that are computed again with it."""


def pieces_of(model: nn.Module) -> list[Piece]:
    """The repeated blocks of a model as pieces, in order."""
    found = []
    for block in blocks.blocks(model):
        modules = tuple(model.get_submodule(name) for name in block.names)
        parent_name, _, own = block.name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if len(modules) > 1 or (blocks.is_sequential(parent) and next(modules[0].children(), None) is None):
            found.append(Piece(block.name, modules, parent, list(children_of(parent)).index(own)))
        else:
            found.append(Piece(block.name, modules))
    return found


# --- the kinds ------------------------------------------------------------------------------------------------------


def _none(undo: contextlib.ExitStack, model: nn.Module, checkpoint: Checkpoint) -> Applied:
    return Applied(("No checkpointing",))


def _every(undo: contextlib.ExitStack, model: nn.Module, checkpoint: Checkpoint) -> Applied:
    pieces = pieces_of(model)
    return _checkpoint(undo, model, pieces[:: checkpoint.every], len(pieces), "blocks")


def _keep_matmuls(undo: contextlib.ExitStack, model: nn.Module, checkpoint: Checkpoint) -> Applied:
    pieces = pieces_of(model)
    return _checkpoint(
        undo, model, pieces, len(pieces), "blocks, keeping the results of matrix products", selective.contexts
    )


def _layers(undo: contextlib.ExitStack, model: nn.Module, checkpoint: Checkpoint) -> Applied:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in checkpoint.layers:
        if not name or name not in modules:
            near = difflib.get_close_matches(name, modules, 3) or blocks.repeated(model)[:3] or list(modules)[1:4]
            raise ValueError(f"the model has no layer {name!r}; there are {', '.join(near)} and others")
    names = tuple(dict.fromkeys(checkpoint.layers))
    pieces, left_out = [], []
    for name in names:
        above = next((other for other in names if name.startswith(f"{other}.")), None)
        if above is not None:
            left_out.append(LeftOut(name, f"it is part of {above}, which is computed again as a whole"))
        elif isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            left_out.append(LeftOut(name, "it is a list, which nobody calls: name the layers in it"))
        else:
            pieces.append(Piece(name, (modules[name],)))
    word = "named layer" if len(names) == 1 else "named layers"
    return Applied((), tuple(left_out)) + _checkpoint(undo, model, pieces, len(names), word)


def _checkpoint(
    undo: contextlib.ExitStack,
    model: nn.Module,
    pieces: list[Piece],
    count: int,
    words: str,
    contexts: Callable[[], Any] = torch_checkpoint.noop_context_fn,
) -> Applied:
    """Put `torch.utils.checkpoint.checkpoint` around pieces."""
    if not pieces:
        return _nothing(model) if not count else Applied((f"Checkpointing 0 of {count} {words}",))
    watch, guard = Watch(tuple(piece.name for piece in pieces)), Guard()
    for piece in pieces:
        if piece.parent is None:
            site = _site(piece, watch, guard, contexts)
            replace_forward(undo, piece.modules[0], _checkpointing(site, piece.modules[0].forward))
    for parent, runs in _by_parent(pieces).items():
        replace_forward(undo, parent, _sequence(parent, [_site(run, watch, guard, contexts) for run in runs]))
    undo.enter_context(guard.watching(_all(pieces)))
    return _applied(watch, f"Checkpointing {{}} of {count} {words}", pieces)


def _by_parent(pieces: list[Piece]) -> dict[nn.Module, list[Piece]]:
    found: dict[nn.Module, list[Piece]] = {}
    for piece in pieces:
        if piece.parent is not None:
            found.setdefault(piece.parent, []).append(piece)
    return found


class _Site(NamedTuple):
    """A piece with all that runs it."""

    piece: Piece
    inner: list[nn.Module]
    """Its modules and those below them."""
    statistics: list[nn.Module]
    watch: Watch
    guard: Guard
    contexts: Callable[[], Any]

    def computes(self) -> bool:
        """Whether something is kept for backward."""
        return self.watch.computes(self.piece.name, *self.piece.others)

    def run(self, first: Callable[..., Any], later: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `first` now and `later` in backward."""
        return call_twice(_Twice(self, first, later), self.contexts, args, kwargs)


def _site(piece: Piece, watch: Watch, guard: Guard, contexts: Callable[[], Any]) -> _Site:
    inner = _all([piece])
    return _Site(piece, inner, counting(inner), watch, guard, contexts)


class _Twice:
    """A function for `checkpoint`: `first` the first time, `later` from the second on, with all kept as it was."""

    def __init__(self, site: _Site, first: Callable[..., Any], later: Callable[..., Any]) -> None:
        self._site, self._later = site, later
        self._first: Callable[..., Any] | None = first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        site, run, self._first = self._site, self._first, None
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        with site.guard.keeping(site.piece.name, tensors):
            if run is None:
                with statistics_kept(site.statistics):
                    return self._later(*args, **kwargs)
            with site.watch.buffers_of(site.piece.name, site.inner):
                return run(*args, **kwargs)


def _checkpointing(site: _Site, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a piece's only module, computed again in backward."""

    def later(*args: Any, **kwargs: Any) -> Any:
        return again(site.piece.modules[0], forward, args, kwargs)

    def checkpointing(*args: Any, **kwargs: Any) -> Any:
        if not site.computes():
            return forward(*args, **kwargs)
        given = without_cache(args, kwargs)
        if given.cache:
            site.watch.notes[_CACHE] = None
        return site.run(forward, later, *given.args, **given.kwargs)

    return checkpointing


def _sequence(parent: nn.Module, sites: list[_Site]) -> Callable[[Any], Any]:
    """The `forward` of an `nn.Sequential` whose runs of children are computed again in backward."""
    children = list(children_of(parent).values())
    starts = {site.piece.start: site for site in sites}

    def sequence(value: Any) -> Any:
        place = 0
        while place < len(children):
            site = starts.get(place)
            if site is None or not site.computes():
                value = children[place](value)  # type: ignore[misc]
                place += 1
            else:
                value = site.run(_in_turn(site.piece), _in_turn_again(site.piece), value)
                place += len(site.piece.modules)
        return value

    return sequence


def _in_turn(piece: Piece) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for module in piece.modules:
            value = module(value)
        return value

    return run


def _in_turn_again(piece: Piece) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for module in piece.modules:
            value = again(module, module.forward, (value,), {})
        return value

    return run


def _sqrt(undo: contextlib.ExitStack, model: nn.Module, checkpoint: Checkpoint) -> Applied:
    """√N segments of consecutive blocks (Chen et al. 2016, Training deep nets with sublinear memory cost)."""
    pieces = pieces_of(model)
    if not pieces:
        return _nothing(model)
    segments = segments_of(len(pieces))
    watch, guard = Watch(tuple(piece.name for piece in pieces)), Guard()
    segment_of: dict[int, _Segment] = {}
    joined: dict[int, list[list[Piece]]] = {}
    for position, (segment, piece) in enumerate(zip(segments, pieces, strict=True)):
        if piece.parent is None:
            place = segment_of.setdefault(segment, _Segment(position))
            site = _site(piece, watch, guard, torch_checkpoint.noop_context_fn)
            replace_forward(undo, piece.modules[0], _in_region(site, place, position))
        else:
            runs = joined.setdefault(segment, [])
            if runs and goes_on(runs[-1][-1], piece):
                runs[-1].append(piece)
            else:
                runs.append([piece])
    for parent, parts in _by_parent([_one(run) for runs in joined.values() for run in runs]).items():
        sites = [_site(part, watch, guard, torch_checkpoint.noop_context_fn) for part in parts]
        replace_forward(undo, parent, _sequence(parent, sites))
    undo.enter_context(guard.watching(_all(pieces)))
    count = segments[-1] + 1
    words = f"Checkpointing {{}} of {len(pieces)} blocks in {count} segment{'s' if count > 1 else ''}"
    return _applied(watch, words, pieces)


def segments_of(count: int) -> list[int]:
    """Which of √N segments each of N blocks is in.

    >>> segments_of(5)
    [0, 0, 0, 1, 1]
    """
    segments = max(1, round(math.sqrt(count)))
    return [position * segments // count for position in range(count)]


def goes_on(before: Piece, piece: Piece) -> bool:
    """Whether an `nn.Sequential` calls a piece right after another."""
    return before.parent is piece.parent and before.start + len(before.modules) == piece.start


def _one(run: list[Piece]) -> Piece:
    """Runs of the same `nn.Sequential` that follow each other as one."""
    modules = tuple(module for piece in run for module in piece.modules)
    return run[0]._replace(modules=modules, others=tuple(piece.name for piece in run[1:]))


class _Segment:
    """Consecutive blocks, the first of which begins a region that the others join."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.region: weakref.ref[Region] | None = None

    def open_for(self, name: str, position: int, tensors: list[torch.Tensor], watch: Watch) -> Region:
        """The region that a block belongs to: the one before it where it goes on with its result, or a new one."""
        region = self.region() if self.region is not None else None
        if region is None or region.last >= position or not region.takes(tensors):
            if position != self.first:
                watch.apart[name] = None
            region = Region(name)
            self.region = weakref.ref(region)
        region.last = position
        return region


def _in_region(site: _Site, segment: _Segment, position: int) -> Callable[..., Any]:
    """The `forward` of one block of a segment."""
    name, (module,), watch, guard = site.piece.name, site.piece.modules, site.watch, site.guard
    forward = module.forward

    def first(args: Any, kwargs: Any, kept: list[torch.Tensor]) -> Any:
        with guard.keeping(name, kept), watch.buffers_of(name, site.inner):
            return forward(*args, **kwargs)

    def later(args: Any, kwargs: Any, kept: list[torch.Tensor]) -> Any:
        with guard.keeping(name, kept), statistics_kept(site.statistics):
            return again(module, forward, args, kwargs)

    def joining(*args: Any, **kwargs: Any) -> Any:
        if not site.computes():
            return forward(*args, **kwargs)
        given = without_cache(args, kwargs)
        if given.cache:
            watch.notes[_CACHE] = None
        region = segment.open_for(name, position, given.tensors, watch)
        return region.call(first, later, given.args, given.kwargs)

    return joining


def _norms(undo: contextlib.ExitStack, model: nn.Module, checkpoint: Checkpoint) -> Applied:
    return norms.recomputed(undo, model, _STATISTICS)


_PUT_ON: dict[CheckpointKind, Callable[[contextlib.ExitStack, nn.Module, Checkpoint], Applied]] = {
    CheckpointKind.NONE: _none,
    CheckpointKind.EVERY: _every,
    CheckpointKind.SQRT: _sqrt,
    CheckpointKind.LAYERS: _layers,
    CheckpointKind.KEEP_MATMULS: _keep_matmuls,
    CheckpointKind.NORMS: _norms,
}


def _all(pieces: list[Piece]) -> list[nn.Module]:
    found = (inner for piece in pieces for module in piece.modules for inner in module.modules())
    return list(dict.fromkeys(found))


def _applied(watch: Watch, text: str, pieces: list[Piece]) -> Applied:
    keeps_count = any(norm.track_running_stats for norm in counting(_all(pieces)))
    notes = (_STATISTICS,) if keeps_count else ()
    return Applied((text.format(len(pieces)),), (), notes, (functools.partial(watch.settle, text),))


def _nothing(model: nn.Module) -> Applied:
    reason = "no block of it repeats: name the layers to compute again"
    return Applied(("Checkpointing 0 of 0 blocks",), (LeftOut(type(model).__name__, reason),))


# --- the model's own checkpoints ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_off(model: nn.Module) -> Iterator[None]:
    """Have the model run plainly where it has checkpoints of its own.

    `torch.utils.checkpoint.checkpoint` looks the generator up when it is called, however code imported it.
    """
    generator = CHECKPOINT_GENERATOR.value

    def plain(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if isinstance(function, Carried):
            yield from generator(function, *args, **kwargs)
        else:
            yield

    flags = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    before = [(module, module.__dict__.get("gradient_checkpointing")) for module in flags]
    reentrant = torch_checkpoint.CheckpointFunction
    try:
        for module in flags:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        setattr(*CHECKPOINT_GENERATOR, plain)
        torch_checkpoint.CheckpointFunction = _Plain  # type: ignore[misc,assignment]
        yield
    finally:
        setattr(*CHECKPOINT_GENERATOR, generator)
        torch_checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]
        for module, value in before:
            if value is None:
                del module.__dict__["gradient_checkpointing"]
            else:
                module.__dict__["gradient_checkpointing"] = value


class _Plain:
    """`CheckpointFunction` that keeps everything."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)
