"""Checkpoint knob on a model: `torch.utils.checkpoint` wrapped around repeated blocks or named layers."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from memexplore.run.knobs.applying.forward import Wrapper, device_of, wrap_forward, wrap_innermost_forward
from memexplore.run.knobs.applying.report import ApplyReport, Change, Skipped, counted
from memexplore.run.knobs.applying.scope import CHECKPOINTS, Reach, switch_off
from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.run.knobs.checkpoints import blocks, norms, segments, selective
from memexplore.run.knobs.checkpoints.pieces import Piece, by_parent, modules_in, pieces_of
from memexplore.run.knobs.checkpoints.recompute import again, without_cache
from memexplore.run.knobs.checkpoints.setting import Checkpoint, CheckpointKind
from memexplore.run.knobs.checkpoints.site import Site, sequential_forward
from memexplore.run.knobs.checkpoints.watch import NO_KEY_VALUE_CACHE, Watch


def checkpointed(model: nn.Module, checkpoint: Checkpoint) -> contextlib.AbstractContextManager[ApplyReport]:
    """Recompute activations in the backward passes of the block; see `set_checkpoints`.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(3)))
    >>> import torch
    >>> with checkpointed(model, Checkpoint.parse("every 2")) as report:
    ...     model(torch.ones(1, 4)).sum().backward()
    >>> report.texts
    ('Checkpointing 2 of 3 blocks',)
    """
    return undone_after(lambda log: set_checkpoints(log, model, checkpoint))


def set_checkpoints(
    log: UndoLog, model: nn.Module, checkpoint: Checkpoint, reach: Reach = Reach.FORWARD
) -> ApplyReport:
    """Make a model free activations after forward and recompute them in backward.

    The model's own checkpoints are switched off in its forward, except for `as written`: only the setting counts.
    Losses, gradients, random numbers and running statistics are as in the plain run, on a CPU, a GPU or a virtual
    one. Forward and backward must both run before the log is restored. `ApplyReport.completed()` says afterwards which
    blocks were skipped.

    Raises ValueError for a layer that the model does not have; while the model runs, RuntimeError for a block that
    overwrites its input.
    """
    if checkpoint.kind is CheckpointKind.AS_WRITTEN:
        return ApplyReport()
    if checkpoint.kind is CheckpointKind.NORMS:
        report = norms.recompute_norms(log, model, reach)
    else:
        report = _KINDS[checkpoint.kind](log, model, checkpoint)
    _switch_off_own(log, model)
    return report


def _switch_off_own(log: UndoLog, model: nn.Module) -> None:
    """Switch off the checkpoints that the model's own forward makes, and its flags `gradient_checkpointing`.

    The flags, which transformers reads, are off until the log is restored, also where another model shares the module.
    """
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            log.set_item(module.__dict__, "gradient_checkpointing", False)
    switch_off(log, model, device_of(model).type, CHECKPOINTS)


# --- the kinds ------------------------------------------------------------------------------------------------------


def _none(log: UndoLog, model: nn.Module, checkpoint: Checkpoint) -> ApplyReport:
    return ApplyReport((Change("checkpoint", "No checkpointing"),))


def _every(log: UndoLog, model: nn.Module, checkpoint: Checkpoint) -> ApplyReport:
    pieces = pieces_of(model)
    phrase = f"Checkpointing {{}} of {len(pieces)} blocks"
    return _wrap(log, phrase, pieces[:: checkpoint.every]) if pieces else segments.no_blocks(model)


def _keep_matmuls(log: UndoLog, model: nn.Module, checkpoint: Checkpoint) -> ApplyReport:
    pieces = pieces_of(model)
    phrase = f"Checkpointing {{}} of {len(pieces)} blocks, keeping the results of matrix products"
    return _wrap(log, phrase, pieces, selective.contexts) if pieces else segments.no_blocks(model)


def _layers(log: UndoLog, model: nn.Module, checkpoint: Checkpoint) -> ApplyReport:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in checkpoint.layers:
        if not name or name not in modules:
            similar = difflib.get_close_matches(name, modules, 3) or blocks.repeated(model)[:3] or list(modules)[1:4]
            raise ValueError(f"the model has no layer {name!r}; there are {', '.join(similar)} and others")
    names = tuple(dict.fromkeys(checkpoint.layers))
    pieces, skipped = [], []
    for name in names:
        parent = next((other for other in names if name.startswith(f"{other}.")), None)
        if parent is not None:
            skipped.append(Skipped(name, f"it is part of {parent}, which is recomputed as a whole"))
        elif isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            skipped.append(Skipped(name, "it is a list, which is never called; name the layers in it"))
        else:
            pieces.append(Piece(name, (modules[name],)))
    phrase = f"Checkpointing {{}} of {counted(len(names), 'named layer')}"
    return ApplyReport((), tuple(skipped)) + _wrap(log, phrase, pieces)


def _wrap(
    log: UndoLog,
    phrase: str,
    pieces: list[Piece],
    contexts: Callable[[], Any] = torch_checkpoint.noop_context_fn,
) -> ApplyReport:
    """Wrap `torch.utils.checkpoint.checkpoint` around pieces, whose number `phrase` gets."""
    if not pieces:
        return ApplyReport((Change("checkpoint", phrase.format(0)),))
    watch = Watch(phrase.format, tuple(piece.name for piece in pieces))
    for piece in pieces:
        if piece.parent is None:
            site = Site(piece, watch, contexts)
            wrap_forward(log, piece.modules[0], _checkpointing(site))
    for parent, runs in by_parent(pieces).items():
        wrap_innermost_forward(log, parent, sequential_forward(parent, [Site(run, watch, contexts) for run in runs]))
    watch.guard.protect(log, modules_in(pieces))
    return watch.report(modules_in(pieces))


def _checkpointing(site: Site) -> Wrapper:
    """Return the forward of a piece of one module, recomputed in backward."""

    def checkpointing(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def later(*args: Any, **kwargs: Any) -> Any:
            return again(site.piece.modules[0], forward, args, kwargs)

        if not site.computes_gradients():
            return forward(*args, **kwargs)
        inputs = without_cache(args, kwargs)
        if inputs.had_cache:
            site.watch.add_note(NO_KEY_VALUE_CACHE)
        return site.run(forward, later, *inputs.args, **inputs.kwargs)

    return checkpointing


_KINDS: dict[CheckpointKind, Callable[[UndoLog, nn.Module, Checkpoint], ApplyReport]] = {
    CheckpointKind.NONE: _none,
    CheckpointKind.EVERY: _every,
    CheckpointKind.SQRT: segments.checkpoint_segments,
    CheckpointKind.LAYERS: _layers,
    CheckpointKind.KEEP_MATMULS: _keep_matmuls,
}
