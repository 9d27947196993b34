"""The lines of plain PyTorch that change a model as knobs do.

In: a model (or None), `Knobs` and in-place sites. Out: pieces of text, which `lines` puts before those of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from memexplore.codegen.checkpoints import checkpoint_lines
from memexplore.knobs import adapters
from memexplore.knobs.choices import InPlace, MemoryFormat, Mode, Offload, Precision
from memexplore.knobs.inplace.activations import Form
from memexplore.knobs.inplace.sites import Sites
from memexplore.knobs.knobs import Knobs

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
_ON_CPU = """\
def on_cpu(forward, *args, **kwargs):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return forward(*args, **kwargs)

model.forward = functools.partial(on_cpu, model.forward)
"""


def model_lines(model: nn.Module | None, knobs: Knobs, sites: Sites | None = None) -> Iterator[str]:
    """Yield the lines for the knobs of a model, in another order than `apply.MODEL_FIELDS`.

    >>> print(*model_lines(None, Knobs(frozen="encoder")), sep="\\n")
    for name in ['encoder']:
        model.get_submodule(name).requires_grad_(False)
    """
    if knobs.frozen:
        yield _for_layers(knobs.frozen, "model.get_submodule(name).requires_grad_(False)")
    if knobs.lora:
        names = knobs.lora if model is None else tuple(adapters.linear_layers(model, knobs.lora)[0])
        yield _ADAPTED.format(shape=_shape(model, names))
        yield _for_layers(
            names, f"model.set_submodule(name, Adapted(model.get_submodule(name), rank={knobs.lora_rank}))"
        )
    if knobs.precision is Precision.ALL_BF16:
        yield "model.bfloat16()"
    if knobs.memory_format is MemoryFormat.CHANNELS_LAST:
        yield "model.to(memory_format=torch.channels_last)"
    if knobs.inplace is not InPlace.AS_WRITTEN:
        yield from _in_place(knobs.inplace, sites)
    yield from checkpoint_lines(model, knobs.checkpoint)
    if knobs.offload is Offload.SAVED_TENSORS:
        yield _ON_CPU
    if knobs.mode is Mode.INFERENCE:
        yield "model.eval()"


def _shape(model: nn.Module | None, names: tuple[str, ...]) -> str:
    """Return the expression for outputs and inputs of linear layers; transformers' `Conv1D` transposes its weight."""
    kinds = {isinstance(model.get_submodule(name), nn.Linear) for name in names} if model is not None else {True}
    if kinds == {True}:
        return "base.weight.shape"
    if kinds == {False}:
        return "reversed(base.weight.shape)"
    return "base.weight.shape if isinstance(base, torch.nn.Linear) else reversed(base.weight.shape)"


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
    changed = [site.call for site in sites.sites if not site.reason and site.written is not form]
    modules = tuple(call.module for call in changed if not call.file)
    if modules:
        yield _for_layers(modules, f"model.get_submodule(name).inplace = {on}")
    for call in changed:
        if call.file:
            yield f"# {call}: use the form of {call.function} that {'overwrites' if on else 'keeps'} its input."
