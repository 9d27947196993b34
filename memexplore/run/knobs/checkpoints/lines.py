"""Write the lines of plain PyTorch that recompute the same activations in backward as the checkpoint knob.

Where one call of
`torch.utils.checkpoint.checkpoint` can wrap a forward, or layers that an `nn.Sequential` calls, the lines do that.
Blocks that the model calls one after another, and normalisations whose results other layers save, need several
functions: their lines contain the class `Region` of `region`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from memexplore.run.code.variables import names_in
from memexplore.run.knobs.checkpoints import norms
from memexplore.run.knobs.checkpoints.block_names import blocks_expression
from memexplore.run.knobs.checkpoints.blocks import has_weights
from memexplore.run.knobs.checkpoints.pieces import Piece, follows, pieces_of, segments_of
from memexplore.run.knobs.checkpoints.region_lines import NORMS, REGION, REGION_IMPORTS, SEGMENTS
from memexplore.run.knobs.checkpoints.setting import Checkpoint, CheckpointKind
from memexplore.torch_internals.modules import BatchNorm, children_of

_IN_PIECES = """\
def in_pieces(layers, pieces, value):
    for first, end, recomputed in pieces:
        part = layers[first:end]
        value = {name}(part, value, {options}) if recomputed else part(value)
    return value
"""
_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Ops whose results selective checkpointing keeps on a GPU; `selective` has the ops of other devices as well."""

_KEEP = """\
kept = [
{ops}]

def keep(context, op, *args, **kwargs):
    given = dict(zip((argument.name for argument in op._schema.arguments), args)) | kwargs
    # Attention with dropout draws random numbers. Without a second run, later ops would draw other numbers.
    return op._schema.name.removeprefix("aten::") in kept and not given.get("dropout_p")
"""
_FLAGS = """\
for module in model.modules():
    if hasattr(module, "gradient_checkpointing"):
        module.gradient_checkpointing = False"""
_NOT_CHECKPOINTED = """\
def without_checkpoint(function, *args, use_reentrant=None, preserve_rng_state=True, context_fn=None,
                       determinism_check=None, debug=False, early_stop=True, **kwargs):
    return function(*args, **kwargs)
"""
_UNCACHED = """\
def uncached(forward, *args, **kwargs):
    if torch.is_grad_enabled():  # a forward that runs twice must not fill a cache twice
        args = [None if isinstance(value, Cache) else value for value in args]
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
    return forward(*args, **kwargs)
"""
_STATISTICS = "# Recomputed batch norm updates its running statistics twice in each step."


def checkpoint_lines(model: nn.Module | None, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the lines for a checkpoint setting; without a model, as if its repeated blocks were `model.layers`.

    >>> print(*checkpoint_lines(None, Checkpoint.parse("every 2")), sep="\\n")
    from torch.utils.checkpoint import checkpoint
    for block in list(model.layers)[::2]:  # model.layers: the repeated blocks of your model
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    """
    kind = checkpoint.kind
    if kind is CheckpointKind.AS_WRITTEN:
        return
    own = tuple(_own_off(model)) if model is not None else ()
    if kind is CheckpointKind.NONE and not own:
        yield _FLAGS if model is not None else f"{_FLAGS}  # and take checkpoint() out of the model's own code"
    yield from own
    if kind is CheckpointKind.NONE:
        return
    # The model's own code may look up the name `checkpoint` where these lines run.
    call = _Call("recompute" if _NOT_CHECKPOINTED in own else "checkpoint", "use_reentrant=False", _keeps_cache(model))
    if model is not None and any(isinstance(module, BatchNorm) for module in model.modules()):
        yield _STATISTICS
    if kind is CheckpointKind.NORMS:
        yield from _norms(model)
        return
    if call.cached:
        yield "from transformers import Cache"
        yield _UNCACHED
    if kind is CheckpointKind.SQRT:
        yield from _sqrt(model, call)
        return
    yield call.imported
    if kind is CheckpointKind.KEEP_MATMULS:
        yield from _keep_matmuls(model)
        call = call.keeping_matmuls()
    if kind is CheckpointKind.LAYERS:
        yield _for_names(model, checkpoint.layers, call)
    else:
        yield from _every(model, checkpoint.every, call)


def _every(model: nn.Module | None, every: int, call: _Call) -> Iterator[str]:
    """Yield the lines that checkpoint every n-th of the repeated blocks."""
    if model is None:
        chosen = f"[::{every}]" if every > 1 else ""
        yield (
            f"for block in list(model.layers){chosen}:  # model.layers: the repeated blocks of your model\n"
            f"    {call.around_block}"
        )
        return
    pieces = pieces_of(model)[::every]
    single = tuple(piece.name for piece in pieces if len(piece.modules) == 1)
    if single:
        yield _for_names(model, single, call)
    yield from _in_sequentials([piece for piece in pieces if len(piece.modules) > 1], call)


def _keep_matmuls(model: nn.Module | None) -> Iterator[str]:
    """Yield the lines that define which results selective checkpointing keeps."""
    yield "from torch.utils.checkpoint import create_selective_checkpoint_contexts"
    yield _KEEP.format(ops="".join(f'    "{op}",\n' for op in _KEPT))
    overwriting = [] if model is None else list(_overwriting(model))
    if overwriting:
        yield (
            f"for name in {overwriting!r}:\n"
            "    model.get_submodule(name).inplace = False  # a kept result must not be overwritten"
        )


def _overwriting(model: nn.Module) -> Iterator[str]:
    """Yield the names of in-place layers that an `nn.Sequential` calls with the result of a matrix product."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            for (_, before), (own, layer) in itertools.pairwise(module.named_children()):
                if has_weights(before) and getattr(layer, "inplace", False):
                    yield f"{name}.{own}" if name else own


class _Call(NamedTuple):
    """A call of `torch.utils.checkpoint.checkpoint` in the lines."""

    name: str
    options: str
    cached: bool
    """Whether the model may pass a key-value cache to its blocks."""

    @property
    def imported(self) -> str:
        """The import statement."""
        alias = "" if self.name == "checkpoint" else f" as {self.name}"
        return f"from torch.utils.checkpoint import checkpoint{alias}"

    @property
    def around_block(self) -> str:
        """The statement that checkpoints a block."""
        return self.set_forward(f"functools.partial({self.name}, block.forward, {self.options})")

    def keeping_matmuls(self) -> _Call:
        """Return the call that keeps the results named by `_keep_matmuls`."""
        keeping = "context_fn=functools.partial(create_selective_checkpoint_contexts, keep)"
        return self._replace(options=f"{self.options}, {keeping}")

    def set_forward(self, forward: str) -> str:
        """Return the statement that sets the forward of a block."""
        return f"block.forward = {f'functools.partial(uncached, {forward})' if self.cached else forward}"


def _keeps_cache(model: nn.Module | None) -> bool:
    return bool(getattr(getattr(model, "config", None), "use_cache", False))


def _for_names(model: nn.Module | None, names: tuple[str, ...], call: _Call) -> str:
    if blocks := blocks_expression(model, names):
        return f"for block in {blocks}:\n    {call.around_block}"
    return f"for name in {list(names)!r}:\n    block = model.get_submodule(name)\n    {call.around_block}"


# --- layers that an `nn.Sequential` calls ---------------------------------------------------------------------------


def _in_sequentials(runs: list[Piece], call: _Call) -> Iterator[str]:
    """Yield the lines for runs of consecutive children of `nn.Sequential`s."""
    if runs:
        yield _IN_PIECES.format(name=call.name, options=call.options)
    owners: dict[str, list[Piece]] = {}
    for run in runs:
        owners.setdefault(run.name.rpartition(".")[0], []).append(run)
    for name, own in owners.items():
        parent = own[0].parent
        assert parent is not None
        layers = f"model.get_submodule({name!r})" if name else "model"
        pieces = _cut(len(children_of(parent)), [(run.start, run.start + len(run.modules)) for run in own])
        yield f"layers = {layers}\nlayers.forward = functools.partial(in_pieces, layers, {pieces!r})"


def _cut(count: int, recomputed: list[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """Return `count` layers as consecutive ranges (first, end, whether the range is recomputed).

    >>> _cut(5, [(1, 3)])
    [(0, 1, False), (1, 3, True), (3, 5, False)]
    """
    ranges: list[tuple[int, int, bool]] = []
    position = 0
    for first, end in recomputed:
        if first > position:
            ranges.append((position, first, False))
        ranges.append((first, end, True))
        position = end
    if position < count:
        ranges.append((position, count, False))
    return ranges


# --- segments of blocks ---------------------------------------------------------------------------------------------


def _sqrt(model: nn.Module | None, call: _Call) -> Iterator[str]:
    """Yield the lines for √N segments."""
    joined = call.set_forward("functools.partial(in_segment, segment, position, block.forward)")
    if model is None:
        yield REGION_IMPORTS
        yield REGION
        yield SEGMENTS
        yield (
            "blocks = list(model.layers)  # model.layers: the repeated blocks of your model\n"
            "for position, block in enumerate(blocks):\n"
            "    segment = position * max(1, round(len(blocks) ** 0.5)) // len(blocks)\n"
            f"    {joined}"
        )
        return
    pieces = pieces_of(model)
    segments = segments_of(len(pieces)) if pieces else []
    runs: list[Piece] = []
    segment_of_run: list[int] = []
    called: dict[int, list[str]] = {}
    for segment, piece in zip(segments, pieces, strict=True):
        if piece.parent is None:
            called.setdefault(segment, []).append(piece.name)
        elif runs and segment_of_run[-1] == segment and follows(piece, runs[-1]):
            runs[-1] = runs[-1]._replace(modules=(*runs[-1].modules, *piece.modules))
        else:
            runs.append(piece)
            segment_of_run.append(segment)
    single = tuple(names[0] for names in called.values() if len(names) == 1)
    several = [names for names in called.values() if len(names) > 1]
    if several:
        yield REGION_IMPORTS
    if single or runs:
        yield call.imported
    if single:
        yield _for_names(model, single, call)
    yield from _in_sequentials(runs, call)
    if several:
        yield REGION
        yield SEGMENTS
        rows = "".join(f"    {names!r},\n" for names in several)
        yield (
            f"segments = [\n{rows}]\n"
            "for segment, names in enumerate(segments):\n"
            "    for position, name in enumerate(names):\n"
            "        block = model.get_submodule(name)\n"
            f"        {joined}"
        )


# --- normalisations and activation functions ------------------------------------------------------------------------


def _norms(model: nn.Module | None) -> Iterator[str]:
    """Yield the lines for normalisations and activation functions."""
    yield REGION_IMPORTS
    yield REGION
    yield NORMS
    if model is None:
        yield (
            "for module in list(model.modules()):\n"
            '    if not list(module.children()) and "norm" in type(module).__name__.lower():\n'
            '        module.forward = functools.partial(recomputed, "norm", module, module.forward)\n'
            '    elif type(module).__module__ == "torch.nn.modules.activation" and not list(module.children()):\n'
            '        module.forward = functools.partial(recomputed, "activation", module, module.forward)'
        )
        return
    kinds: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if norms.is_norm(module):
            kinds.setdefault("norm", []).append(name)
        elif norms.is_activation(module):
            kinds.setdefault("saves its result" if norms.saves_result(module) else "activation", []).append(name)
    for kind, names in kinds.items():
        yield (
            f"for name in {names!r}:\n"
            "    module = model.get_submodule(name)\n"
            f'    module.forward = functools.partial(recomputed, "{kind}", module, module.forward)'
        )


# --- the model's own checkpoints ------------------------------------------------------------------------------------


def _own_off(model: nn.Module) -> Iterator[str]:
    """Yield the lines that switch off the checkpoints in a model's own code."""
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        yield _FLAGS
    wrapped = [name for name, module in model.named_modules() if _is_wrapped(module)]
    if wrapped:
        yield (
            f"for name in {wrapped!r}:\n"
            "    block = model.get_submodule(name)\n"
            "    block.forward = block.forward.args[0]  # the forward that checkpoint() wraps"
        )
    variables = list(dict.fromkeys(pair for module in model.modules() for pair in _checkpoint_names(type(module))))
    if variables:
        yield _NOT_CHECKPOINTED
        for python_module, name in variables:
            yield f'sys.modules["{python_module}"].{name} = without_checkpoint'


def _is_wrapped(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, functools.partial) and forward.func is torch_checkpoint.checkpoint


def _checkpoint_names(kind: type) -> Iterator[tuple[str, str]]:
    """Yield Python module and variable through which the code of a class reaches `checkpoint`."""
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] in ("torch", "transformers"):
            continue  # transformers has flags
        for function in vars(owner).values():
            if not inspect.isfunction(function):
                continue
            names, variables = set(names_in(function.__code__)), function.__globals__
            names_of_checkpoint = (name for name in names if variables.get(name) is torch_checkpoint.checkpoint)
            yield from ((variables["__name__"], name) for name in names_of_checkpoint)
            packages = (torch, torch.utils, torch_checkpoint)
            if "checkpoint" in names and any(variables.get(name) is package for name in names for package in packages):
                yield torch_checkpoint.__name__, "checkpoint"
