"""The knob `dropout`: dropout as it is in evaluation mode."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import functional

from memexplore.run.knobs.applying.report import ApplyReport, Change
from memexplore.run.knobs.applying.scope import Feature, SharedPatch, is_off, switch_off
from memexplore.run.knobs.knob import Application, Group, Knob, ModelCode, Stage
from memexplore.run.knobs.values import OneOf

if TYPE_CHECKING:
    from memexplore.run.knobs.knobs import Knobs


class Dropout(enum.Enum):
    """Whether elements are dropped."""

    AS_WRITTEN = "as written"
    OFF = "off"


_LINES = """\
for module in model.modules():  # and take functions of dropout out of the model's own code
    if "Dropout" in type(module).__name__ and hasattr(module, "p"):
        module.p = 0.0
    elif isinstance(getattr(module, "dropout", None), float):
        module.dropout = 0.0"""


class DropoutKnob(Knob):
    """Dropout does nothing, as in evaluation mode: by modules, by functions, in attention and in recurrent layers."""

    name = "dropout"
    costs = "another training"
    values = OneOf(Dropout)
    place = 125
    group = Group.MODEL
    stage = Stage.ACTIVATIONS

    def apply(self, value: Any, application: Application) -> ApplyReport:
        """Switch off the functions that drop elements, and the dropout between recurrent layers."""
        log, model = application.log, application.model
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                log.add(setattr, module, "dropout", module.dropout)
                module.dropout = 0.0
        switch_off(log, model, application.device.type, *self.off(value))
        return ApplyReport((Change(self.name, self.phrase(value)),))

    def model_lines(self, value: Any, code: ModelCode) -> Iterator[str]:
        """Yield a loop over the modules; functions are called in the model's own code."""
        yield _LINES

    def alters_training(self, value: Any, model: nn.Module | None, knobs: Knobs) -> bool:
        """Return True."""
        return True

    def training_text(self, value: Any, knobs: Knobs) -> str:
        """Return what it means for the training."""
        return "No element is dropped, so that the model may fit its training data too closely."

    def off(self, value: Any) -> tuple[Feature, ...]:
        """Return dropout by functions, which a loss function may call too."""
        return (_DROPOUT,)


def _without_training(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of dropout that drops nothing where a scope says so."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        if is_off(_DROPOUT):
            by_name = dict(zip(names, args, strict=False)) | kwargs
            return function(**{**by_name, "training": False})
        return function(*args, **kwargs)

    return scoped


def _without_probability(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return `scaled_dot_product_attention` that drops nothing where a scope says so."""

    @functools.wraps(attention)
    def scoped(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0 if is_off(_DROPOUT) else dropout_p, *args, **kwargs)

    return scoped


_FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_DROPOUT = Feature(
    *(SharedPatch(functional, name, _without_training) for name in _FUNCTIONS),
    SharedPatch(functional, "scaled_dot_product_attention", _without_probability),
    off=lambda device_type: contextlib.nullcontext(),
)
