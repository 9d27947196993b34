"""Lines of plain PyTorch that change a model as knobs do; `code` puts the loop's lines after them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from memexplore.whatif import adapters
from memexplore.whatif.checkpoints.blocks import Block, blocks
from memexplore.whatif.inplace.activations import Form
from memexplore.whatif.inplace.sites import Sites
from memexplore.whatif.knobs import Checkpoint, CheckpointKind, InPlace, Knobs, MemoryFormat, Mode, Precision

_ADAPTED = """\
class Adapted(torch.nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.up = torch.nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        torch.nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, value):
        linear = torch.nn.functional.linear
        return self.base(value) + linear(linear(value, self.down), self.up)
"""
_IN_PIECES = """\
def in_pieces(layers, pieces, value):
    for first, end, again in pieces:
        part = layers[first:end]
        value = checkpoint(part, value, {options}) if again else part(value)
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
"""What selective checkpointing keeps on a GPU; `matmuls.KEPT` has those of other devices too."""


def model_lines(model: nn.Module | None, knobs: Knobs, sites: Sites | None = None) -> Iterator[str]:
    """The lines for the knobs of a model, in the order in which `apply` puts them on.

    >>> print(*model_lines(None, Knobs(frozen="encoder")), sep="\\n")
    for name in ['encoder']:
        model.get_submodule(name).requires_grad_(False)
    """
    if knobs.frozen:
        yield _for_layers(knobs.frozen, "model.get_submodule(name).requires_grad_(False)")
    if knobs.lora:
        names = knobs.lora if model is None else tuple(adapters.linear_layers(model, knobs.lora)[0])
        yield _ADAPTED
        yield _for_layers(
            names, f"model.set_submodule(name, Adapted(model.get_submodule(name), rank={knobs.lora_rank}))"
        )
    if knobs.precision is Precision.ALL_BF16:
        yield "model.bfloat16()"
    if knobs.memory_format is MemoryFormat.CHANNELS_LAST:
        yield "model.to(memory_format=torch.channels_last)"
    if knobs.inplace is not InPlace.AS_WRITTEN:
        yield from _in_place(knobs.inplace, sites)
    yield from _checkpoint(model, knobs.checkpoint)
    if knobs.mode is Mode.INFERENCE:
        yield "model.eval()"


def _for_layers(names: tuple[str, ...], statement: str) -> str:
    return f"for name in {list(names)!r}:\n    {statement}"


def _in_place(choice: InPlace, sites: Sites | None) -> Iterator[str]:
    on = choice is InPlace.ON
    if sites is None:
        yield (
            "for module in model.modules():\n"
            '    if hasattr(module, "inplace"):\n'
            f"        module.inplace = {on}{'  # only where nothing reads its input afterwards' if on else ''}"
        )
        return
    form = Form.IN_PLACE if on else Form.OUT_OF_PLACE
    changed = [site.place for site in sites.sites if not site.reason and site.written is not form]
    modules = tuple(place.module for place in changed if not place.file)
    if modules:
        yield _for_layers(modules, f"model.get_submodule(name).inplace = {on}")
    for place in changed:
        if place.file:
            yield f"# {place}: call {place.function} in the form that {'overwrites' if on else 'keeps'} its input."


# --- checkpoints ----------------------------------------------------------------------------------------------------


def _checkpoint(model: nn.Module | None, checkpoint: Checkpoint) -> Iterator[str]:
    kind = checkpoint.kind
    if kind is CheckpointKind.AS_WRITTEN:
        return
    if kind is CheckpointKind.NONE:
        yield (
            "for module in model.modules():\n"
            '    if hasattr(module, "gradient_checkpointing"):\n'
            "        module.gradient_checkpointing = False  # and take checkpoint() out of the model's own code"
        )
        return
    if kind is CheckpointKind.NORMS:
        yield "# No few lines of plain PyTorch do this; memexplore.apply does:"
        yield '# with memexplore.apply(memexplore.Knobs(checkpoint="norms"), model): ...'
        return
    if getattr(getattr(model, "config", None), "use_cache", False):
        yield "model.config.use_cache = False"
    if model is not None and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        yield "# Batch norm's running statistics move twice a step in what is computed again."
    options = "use_reentrant=False"
    if kind is CheckpointKind.KEEP_MATMULS:
        yield "from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts"
        ops = ", ".join(f'"{name}"' for name in _KEPT)
        yield f"keep = [getattr(torch.ops.aten, name).default for name in ({ops})]"
        options += ", context_fn=functools.partial(create_selective_checkpoint_contexts, keep)"
    else:
        yield "from torch.utils.checkpoint import checkpoint"
    wrap = f"block.forward = functools.partial(checkpoint, block.forward, {options})"
    if kind is CheckpointKind.LAYERS:
        yield _for_names(checkpoint.layers, wrap)
    elif model is None:
        every = f"[::{checkpoint.every}]" if checkpoint.every > 1 else ""
        yield f"for block in list(model.layers){every}:  # model.layers: the repeated blocks of your model\n    {wrap}"
    else:
        yield from _found(model, checkpoint, wrap, options)


def _for_names(names: tuple[str, ...], wrap: str) -> str:
    return f"for name in {list(names)!r}:\n    block = model.get_submodule(name)\n    {wrap}"


def _found(model: nn.Module, checkpoint: Checkpoint, wrap: str, options: str) -> Iterator[str]:
    """The lines for blocks that are found."""
    found = blocks(model)
    segments: list[tuple[Block, ...]] = [(block,) for block in found]
    if checkpoint.kind is CheckpointKind.SQRT:
        count = max(1, round(math.sqrt(len(found))))
        segments = [
            tuple(block for number, block in enumerate(found) if number * count // len(found) == segment)
            for segment in range(count)
        ]
    chosen = segments[:: checkpoint.every]
    if all(len(segment) == 1 and len(segment[0].names) == 1 for segment in chosen):
        yield _for_names(tuple(block.name for block, *_ in chosen), wrap)
        return
    runs = [_run(model, segment) for segment in chosen]
    if None in runs:
        yield "# In the model's forward, run the layers of each line in one call of checkpoint(...):"
        for segment in chosen:
            names = [name for block in segment for name in block.names]
            yield f"# {names[0]} to {names[-1]}" if len(names) > 1 else f"# {names[0]}"
        return
    yield _IN_PIECES.format(options=options)
    for parent in dict.fromkeys(run[0] for run in runs if run is not None):
        layers = f"model.get_submodule({parent!r})" if parent else "model"
        pieces = _pieces(
            len(model.get_submodule(parent)._modules),
            [run[1:] for run in runs if run is not None and run[0] == parent],
        )
        yield f"layers = {layers}\nlayers.forward = functools.partial(in_pieces, layers, {pieces!r})"


def _run(model: nn.Module, segment: tuple[Block, ...]) -> tuple[str, int, int] | None:
    """The `nn.Sequential` that calls blocks one after another, and from where to where; None where no such one does."""
    names = [name for block in segment for name in block.names]
    parents = {name.rpartition(".")[0] for name in names}
    parent = parents.pop()
    owner = model.get_submodule(parent)
    if parents or not isinstance(owner, nn.Sequential):
        return None
    places = [list(owner._modules).index(name.rpartition(".")[2]) for name in names]
    if places != list(range(places[0], places[0] + len(places))):
        return None
    return parent, places[0], places[-1] + 1


def _pieces(count: int, again: list[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """All of `count` layers cut into those that are computed again and those between them.

    >>> _pieces(5, [(1, 3)])
    [(0, 1, False), (1, 3, True), (3, 5, False)]
    """
    cut: list[tuple[int, int, bool]] = []
    at = 0
    for first, end in again:
        if first > at:
            cut.append((at, first, False))
        cut.append((first, end, True))
        at = end
    if at < count:
        cut.append((at, count, False))
    return cut
