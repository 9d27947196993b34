"""Checkpoint setting `sqrt`: consecutive blocks joined into √N segments, each recomputed as one region."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memexplore.run.knobs.applying.forward import Wrapper, wrap_forward, wrap_innermost_forward
from memexplore.run.knobs.applying.report import ApplyReport, Change, Skipped, counted
from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.run.knobs.checkpoints.pieces import (
    Piece,
    by_parent,
    follows,
    joined,
    modules_in,
    pieces_of,
    segments_of,
)
from memexplore.run.knobs.checkpoints.recompute import again, frozen_statistics, without_cache
from memexplore.run.knobs.checkpoints.regions import Region
from memexplore.run.knobs.checkpoints.setting import Checkpoint
from memexplore.run.knobs.checkpoints.site import Site, sequential_forward
from memexplore.run.knobs.checkpoints.watch import NO_KEY_VALUE_CACHE, Watch


def checkpoint_segments(log: UndoLog, model: nn.Module, checkpoint: Checkpoint) -> ApplyReport:
    """Recompute the blocks of a model in √N segments (see `segments_of`)."""
    pieces = pieces_of(model)
    segments = segments_of(len(pieces)) if pieces else []
    if not pieces:
        return no_blocks(model)
    total, in_segments = len(pieces), counted(segments[-1] + 1, "segment")
    watch = Watch(
        lambda number: f"Checkpointing {number} of {total} blocks in {in_segments}",
        tuple(piece.name for piece in pieces),
    )
    segment_of: dict[int, _Segment] = {}
    runs_of: dict[int, list[list[Piece]]] = {}
    for position, (number, piece) in enumerate(zip(segments, pieces, strict=True)):
        if piece.parent is None:
            segment = segment_of.setdefault(number, _Segment(position))
            wrap_forward(log, piece.modules[0], _in_region(Site(piece, watch), segment, position))
        else:
            runs = runs_of.setdefault(number, [])
            if runs and follows(piece, runs[-1][-1]):
                runs[-1].append(piece)
            else:
                runs.append([piece])
    for parent, parts in by_parent(joined(run) for runs in runs_of.values() for run in runs).items():
        wrap_innermost_forward(log, parent, sequential_forward(parent, [Site(part, watch) for part in parts]))
    watch.guard.protect(log, modules_in(pieces))
    return watch.report(modules_in(pieces))


def no_blocks(model: nn.Module) -> ApplyReport:
    """Return the report for a model without repeated blocks."""
    reason = "no block of it repeats; name the layers to recompute"
    change = Change("checkpoint", "Checkpointing 0 of 0 blocks")
    return ApplyReport((change,), (Skipped(type(model).__name__, reason),))


class _Segment:
    """Consecutive blocks: the first opens a region, the others join it."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.region: weakref.ref[Region] | None = None

    def region_for(self, name: str, position: int, tensors: list[torch.Tensor], watch: Watch) -> Region:
        """Return the region of a block: the last block's region if the block takes its result, else a new one."""
        region = self.region() if self.region is not None else None
        if region is None or region.last >= position or not region.continues(tensors):
            if position != self.first:
                watch.starts_segment(name)
            region = Region(name)
            self.region = weakref.ref(region)
        region.last = position
        return region


def _in_region(site: Site, segment: _Segment, position: int) -> Wrapper:
    """Return the forward of one block of a segment."""
    name, (module,), watch = site.piece.name, site.piece.modules, site.watch

    def joining(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def first(args: Any, kwargs: Any, kept: list[torch.Tensor]) -> Any:
            with watch.guard.keeping(name, kept), watch.buffers_of(name, site.modules):
                return forward(*args, **kwargs)

        def later(args: Any, kwargs: Any, kept: list[torch.Tensor]) -> Any:
            with watch.guard.keeping(name, kept), frozen_statistics(site.norms):
                return again(module, forward, args, kwargs)

        if not site.computes_gradients():
            return forward(*args, **kwargs)
        inputs = without_cache(args, kwargs)
        if inputs.had_cache:
            watch.add_note(NO_KEY_VALUE_CACHE)
        region = segment.region_for(name, position, inputs.tensors, watch)
        return region.call(first, later, inputs.args, inputs.kwargs)

    return joining
