"""Rebuild the step that failed from the live process, for a run in another process.

The model and its optimizer are packed as shapes, with the last call of the model.
"""

from __future__ import annotations

import pickle
import sys
import traceback
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import torch

from memexplore.live import step_copy
from memexplore.live.code_loss import loss_in_code, returned_loss
from memexplore.live.code_step import CodeLoss, tensors_in
from memexplore.live.observed import ObservedCall, template, unknown_in
from memexplore.out_of_memory.attempts import is_readable, one_line
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.step import Step
from memexplore.run.search.process_settings import ProcessSettings, process_settings
from memexplore.virtual_gpu.frame_variables import variables

if TYPE_CHECKING:
    from memexplore.recorder.recorder import Recorder

NO_OPTIMIZER = "No optimizer of the model was found: SGD, which has no state, stands for it."
EVALUATION = (
    "The failed call is an evaluation, and advice is for training steps: evaluate smaller batches under "
    "torch.no_grad(), and move outputs that are kept to the CPU."
)
NO_KEYWORDS = "Keyword arguments of the model's call are not known: it is run without."
NO_CALL = (
    "The step cannot be rebuilt: no call of a model was seen. Search with "
    "mx.advise(mx.Step(model, batch, loss, optimizer))."
)
ONE_OF_SEVERAL = "Only the step of the model {} is run: other models are called too."
LOSS = (
    "If the model returns no loss, the mean squared error of its outputs stands for it, which keeps no tensor of its "
    "own for backward."
)


_STEP_MODULES = ("torch.autograd.graph", "torch.optim.")
"""Modules of torch whose functions are in the traceback of a backward pass or an update."""
Model = Callable[[], torch.nn.Module | None]


class SeenCall:
    """The last call of a model with weights, from outside of any module; holds no tensor but a criterion's."""

    def __init__(self) -> None:
        self.call: ObservedCall | None = None
        """The last call that computes gradients."""
        self.model: Model = lambda: None
        """The model of that call."""
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """All models with weights that were called."""
        self.arguments: list[weakref.ref[torch.Tensor]] = []
        """The tensors among the arguments of that call."""
        self.code: CodeLoss | None = None
        """The lines of the function of that call, where they return the loss."""
        self.evaluates: bool | None = None
        """Whether a model was called without gradients since; None where only training steps are seen."""

    def see(self, module: torch.nn.Module, args: Any, frame: FrameType | None) -> None:
        """Note a call from outside of any module; `frame` runs torch's `Module._call_impl`."""
        trains = any(weight.requires_grad for weight in module.parameters())
        if next(module.parameters(), None) is not None:
            self.models.add(module)
        if not torch.is_grad_enabled():
            self.evaluates = self.evaluates or next(module.parameters(), None) is not None
        elif trains:
            self.evaluates = False
            keywords = _keywords(module, frame)
            self.model, self.call = weakref.ref(module), _observed(args, keywords)
            arguments = tensors_in((args, keywords or {}))
            self.arguments = [weakref.ref(tensor) for tensor in arguments]
            self.code = returned_loss(frame, module, arguments)

    @property
    def outermost(self) -> list[torch.nn.Module]:
        """The models that were called and are no layers of another."""
        models = list(self.models)
        inner = {id(layer) for model in models for layer in model.modules() if layer is not model}
        return [model for model in models if id(model) not in inner]

    def follow(self, recorder: Recorder) -> None:
        """Note the calls that a recorder sees."""
        self.evaluates = False
        recorder.on_model_call = self.see


def _keywords(module: torch.nn.Module, frame: FrameType | None) -> dict[str, Any] | None:
    """Return the keyword arguments of a call, which hooks for all modules do not get; None if they are not known."""
    values = {} if frame is None else variables(frame)
    kwargs = values.get("kwargs")
    return kwargs if values.get("self") is module and isinstance(kwargs, dict) else None


class FailedStep(NamedTuple):
    """A step that can be run in another process; holds no tensor."""

    packed: bytes
    """The step or the cell, as it packs itself."""
    assumed: tuple[str, ...]
    """What is not known of the step, as sentences."""
    settings: ProcessSettings
    model: Model
    """Returns the live model, None if it exists no longer."""
    others: tuple[Model, ...] = ()
    """The other live models of a failed cell."""
    otherwise: FailedStep | None = None
    """What to search where this cannot be run."""
    part: str = ""
    """The class of the model whose call this is: the failed code may do more; empty for a whole cell."""
    calls_others: bool = False
    """Whether the failed code calls other models too."""


class _CannotRebuildError(Exception):
    """A sentence that says why a step cannot be rebuilt."""


class _Rebuilt:
    """Unpickled as the step with the inputs of a call, and with the loss of its code where that is known."""

    def __init__(self, packed: bytes, call: ObservedCall, code: CodeLoss | None = None) -> None:
        self._arguments = packed, call, code

    def __reduce__(self) -> tuple[Callable[..., Step], tuple[bytes, ObservedCall, CodeLoss | None]]:
        return _rebuilt, self._arguments


def _rebuilt(packed: bytes, call: ObservedCall, code: CodeLoss | None) -> Step:
    return step_copy.step_of(pickle.loads(packed), call, 1, Knobs(), code=code).step


def failed_step(error: BaseException, seen: SeenCall | None, names: list[Any]) -> FailedStep | str:
    """Return the step that an error has ended, or a sentence that says why it cannot be rebuilt.

    `seen` is the last call that was seen, `names` are values among which the optimizer is searched, besides the
    variables of the traceback.
    """
    try:
        model, call, arguments = _call(error, seen)
        kind = unknown_in((call.args, call.kwargs))
        if kind:
            raise _CannotRebuildError(f"The step cannot be rebuilt: the model was called with a {kind}.")
        optimizer, assumed = _optimizer(model, [*names, *_variables(error)])
        shapes = step_copy.pack(model, optimizer)
        packed = cloudpickle.dumps(_Rebuilt(shapes, call))
    except _CannotRebuildError as failure:
        return str(failure)
    except Exception as failure:
        return f"The step cannot be rebuilt: {one_line(failure)}"
    part, calls_others = type(model).__name__, seen is not None and len(seen.outermost) > 1
    if calls_others:
        assumed = (*assumed, ONE_OF_SEVERAL.format(part))
    if call.kwargs is None:
        assumed = (*assumed, NO_KEYWORDS)
    settings = hidden_settings()
    if call.method == step_copy.TRAINING_STEP:
        return FailedStep(packed, assumed, settings, weakref.ref(model), part=part, calls_others=calls_others)
    step = FailedStep(packed, (*assumed, LOSS), settings, weakref.ref(model), part=part, calls_others=calls_others)
    try:
        code = loss_in_code(error, model, arguments)
        if code is None and seen is not None and seen.model() is model:
            code = seen.code
        packed = b"" if code is None else cloudpickle.dumps(_Rebuilt(shapes, call, code))
    except Exception:
        # Such as names that cannot be sent to another process.
        return step
    return step._replace(packed=packed, assumed=assumed, otherwise=step) if packed else step


def hidden_settings() -> ProcessSettings:
    """Return the settings of a process that finds the modules of this one, and no real GPU."""
    settings = process_settings()
    # No memory of the real GPU is needed, and it may have none left for another process.
    hidden = ("CUDA_VISIBLE_DEVICES", "")
    # Modules beside a script are found in its folder only.
    return settings._replace(environment=(*settings.environment, hidden), path=tuple(sys.path))


def _variables(error: BaseException) -> list[Any]:
    """Return the variables of a traceback's frames, and the attributes of its instances, such as a trainer."""
    result: list[Any] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = list(frame.f_locals.values()) if frame.f_code.co_name != "<module>" else []
        result += values
        owner = frame.f_locals.get("self")
        if owner is not None and not isinstance(owner, torch.nn.Module | torch.Tensor):
            result += list(getattr(owner, "__dict__", {}).values())
    return result


def _call(error: BaseException, seen: SeenCall | None) -> tuple[torch.nn.Module, ObservedCall, list[torch.Tensor]]:
    """Return the outermost call of a model in a traceback, else the last that was seen, and its tensors."""
    seen = seen or SeenCall()
    in_step = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "")
        in_step = in_step or name.startswith(_STEP_MODULES)
        values = frame.f_locals if name == torch.nn.Module.__module__ else {}
        model, args, kwargs = values.get("self"), values.get("args"), values.get("kwargs")
        if not (isinstance(model, torch.nn.Module) and isinstance(args, tuple) and isinstance(kwargs, dict)):
            continue
        if any(weight.requires_grad for weight in model.parameters()):
            # Where it was not seen whether gradients are computed, the mode of the model says what the call is for.
            if seen.evaluates or (seen.evaluates is None and not model.training):
                raise _CannotRebuildError(EVALUATION)
            call = _observed(args, kwargs)
            if seen.call is not None and seen.model() is model:
                call = call._replace(autocast=seen.call.autocast)
            return model, call, tensors_in((args, kwargs))
    last = seen.model()
    if seen.evaluates and not in_step:
        raise _CannotRebuildError(EVALUATION)
    if seen.call is None or last is None:
        raise _CannotRebuildError(NO_CALL)
    # In place of an argument that is gone stands an object that no variable is.
    arguments: list[Any] = [ref() if ref() is not None else object() for ref in seen.arguments]
    return last, seen.call, arguments


def _observed(args: Any, kwargs: Any) -> ObservedCall:
    cast = ("cuda", torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else None
    return ObservedCall(template(args), None if kwargs is None else template(kwargs), "forward", cast, 1.0)


def _optimizer(model: torch.nn.Module, names: list[Any]) -> tuple[torch.optim.Optimizer, tuple[str, ...]]:
    weights = {id(weight) for weight in model.parameters()}
    for value in names:
        groups = value.param_groups if is_readable(value) and isinstance(value, torch.optim.Optimizer) else []
        if any(id(weight) in weights for group in groups for weight in group["params"]):
            return value, ()
    return torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1), (NO_OPTIMIZER,)
