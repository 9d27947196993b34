"""The lines of plain PyTorch that change a model as knobs do."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from memexplore.run.knobs.inplace_sites.sites import Sites
from memexplore.run.knobs.knob import ModelCode, Stage
from memexplore.run.knobs.knobs import Knobs, in_stages


def model_lines(model: nn.Module | None, knobs: Knobs, sites: Sites | None = None) -> Iterator[str]:
    """Yield the lines for the knobs of a model.

    >>> print(*model_lines(None, Knobs(frozen="encoder")), sep="\\n")
    for name in ['encoder']:
        model.get_submodule(name).requires_grad_(False)
    """
    code = ModelCode(knobs, model, sites)
    # What wraps the forward of the whole model comes after what wraps its parts.
    for knob, value in sorted(in_stages(knobs), key=lambda pair: pair[0].stage is Stage.SAVED_TENSORS):
        yield from knob.model_lines(value, code)
