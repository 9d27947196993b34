"""A training step as a value: model, batch, loss and optimizer, with everything that a knob changes."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from memexplore.run.knobs.knob import Limits
from memexplore.run.knobs.knobs import Knobs, unavailable_in
from memexplore.run.machine import Machine
from memexplore.run.programs import batches, optimizers, step_run
from memexplore.run.programs.execution import Execution
from memexplore.run.programs.packing import StepPickler, pack_step
from memexplore.virtual_gpu import device
from memexplore.virtual_gpu.tensors.tensor import fake_cpu_tensor, is_virtual

_SMALL = 1 << 20
"""Batches below 1 MiB keep their values: lengths and masks on the CPU may decide what the model does."""
Loss = Callable[..., torch.Tensor | Iterator[torch.Tensor]]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One training step: forward, loss, backward, optimizer.

    Args:
        model: A module, or a function that builds one. A model that is built takes no memory: it is built on the
            virtual GPU.
        batch: A tensor, a tuple such as ``(input, target)``, ``(input, mask, target)``, ``((input, mask), target)`` or
            ``(dict, target)``, or a dict, NamedTuple or dataclass with the names of the model's arguments. The
            signatures of model and loss decide which of them gets a part (`batches.call_of`). Samples lie along the
            first dimension. Only the shapes matter.
        loss: A criterion such as ``torch.nn.functional.cross_entropy``, called as ``loss(output, *targets)``. Where
            the batch is a dict, it gets the parts that it names, else the dict. Default: the loss that the model
            returns.
        optimizer: The name of an optimizer of torch, such as ``"adamw"``, a function of the parameters, or an
            optimizer, from which a new one of the same class and settings is made. Default: AdamW.
        compute_loss: Instead of `loss`, a function that calls the model itself: ``compute_loss(model, batch)``.
        samples: The number of samples where they do not lie along the first dimension, as in a graph.
        resize: A function ``resize(batch, samples)`` that makes a batch with another number of samples of one whose
            samples do not lie along the first dimension. Without it their number is fixed.

    `loss` and `compute_loss` may yield several losses that go backward one after the other, as the losses of two
    adversaries; each is requested after the backward pass of the loss before.

    >>> step = Step(torch.nn.Linear(8, 2), (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)),
    ...             loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.SGD)
    >>> step.batch_size, step.input_size
    (4, None)

    Bags of any length, and the index at which each begins:

    >>> def bags(batch, samples):
    ...     return torch.zeros(3 * samples, dtype=torch.long), torch.arange(0, 3 * samples, 3)
    >>> step = Step(torch.nn.EmbeddingBag(9, 2), bags(None, 4), samples=4, resize=bags,
    ...             compute_loss=lambda model, batch: model(*batch).sum())
    >>> [tuple(part.shape) for part in step.batch_of(6)]
    [(18,), (6,)]

    Raises TypeError or ValueError for an argument that is none of these, and where both `loss` and `compute_loss` are
    given.
    """

    model: torch.nn.Module | Callable[[], torch.nn.Module]
    batch: Any
    loss: Loss | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | str | None = None
    compute_loss: Loss | None = None
    samples: int | None = None
    resize: Callable[[Any, int], Any] | None = None

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise TypeError(f"model must be a torch.nn.Module or a function that builds one, not {type(self.model)}")
        _check_loss(self.loss, self.compute_loss)
        if self.samples is not None and (type(self.samples) is not int or self.samples < 1):
            raise ValueError(f"samples={self.samples!r} must be a whole number from 1 on")
        if self.resize is not None and not callable(self.resize):
            raise TypeError(f"resize must be a function of a batch and a number, not {type(self.resize).__name__}")
        if isinstance(self.batch, Mapping) and type(self.batch) is not dict:
            object.__setattr__(self, "batch", dict(self.batch))
        object.__setattr__(self, "optimizer", optimizers.written(self.optimizer))
        if self._first() is None:
            raise ValueError(
                f"the batch is {batches.kind(self.batch)}, without a tensor that has a dimension of samples: give a "
                "tensor, (input, target), ((input, mask), target) or a dict"
            )

    def _first(self) -> torch.Tensor | None:
        return next((tensor for tensor in batches.tensors(self.batch) if tensor.dim()), None)

    @property
    def _input(self) -> torch.Tensor:
        first = self._first()
        assert first is not None
        return first

    @property
    def batch_size(self) -> int:
        """Samples in the batch."""
        return self._input.shape[0] if self.samples is None else self.samples

    @property
    def size_dimensions(self) -> slice:
        """Dimensions of the input that are its size: the last two of images, the second of sequences, else none."""
        shape, is_float = self._input.shape, self._input.dtype.is_floating_point
        if len(shape) >= 4:
            return slice(len(shape) - 2, len(shape))
        if len(shape) == 3 or (len(shape) == 2 and not is_float):
            return slice(1, 2)
        return slice(0, 0)

    @property
    def input_size(self) -> int | None:
        """Height of the images or length of the sequences, None if the batch has neither."""
        extents = self._input.shape[self.size_dimensions]
        return extents[0] if extents else None

    may_be_endless: ClassVar[bool] = False

    def execute(self, knobs: Knobs, machine: Machine) -> Execution:
        """Execute two steps with some knobs, and restore the model; see `step_run.execute`."""
        return step_run.execute(self, knobs, machine)

    def packed(self, pickler: type[StepPickler] = StepPickler) -> bytes:
        """Return the step as bytes for another process; weights and large batches are packed as shapes.

        Raises `UnsendableStepError` for a step that cannot be pickled.
        """
        return pack_step(self, pickler)

    def unavailable_knobs(self) -> dict[str, str]:
        """Return the knobs that the step cannot have, each with the reason."""
        if self.resize is not None or self._has_samples():
            return {}
        text = "the samples do not lie along the first dimension: give Step(..., resize=function of batch and samples)"
        return unavailable_in(Limits(no_batch=text))

    def batch_of(self, size: int | None = None, input_size: int | None = None) -> Any:
        """Return the batch with another number of samples, and another resolution or length; None keeps its own.

        Images keep their proportions. While a virtual GPU is on, large tensors of the result have no values and take no
        memory.

        Raises ValueError for an input size where the batch has none, and for another number of samples where the
        samples do not lie along the first dimension and the step has no `resize`.
        """
        extents = self._input.shape[self.size_dimensions]
        if input_size is not None and not extents:
            raise ValueError("this batch has neither images nor sequences: it has no input size")
        wanted = tuple(extents)
        if input_size is not None:
            wanted = tuple(max(1, extent * input_size // extents[0]) for extent in extents)
        images = len(extents) == 2
        batch, samples = self._of_size(size)

        def reshaped(value: torch.Tensor) -> torch.Tensor:
            if not value.dim():
                return value
            shape = list(value.shape)
            if samples is not None and shape[0] == self.batch_size:
                shape[0] = samples
            if images and value.dim() >= 3 and tuple(shape[-2:]) == tuple(extents):
                shape[-2:] = wanted
            elif extents and not images and value.dim() >= 2 and shape[1] == extents[0]:
                shape[1] = wanted[0]
            return _shaped(value, tuple(shape))

        return batches.mapped(reshaped, batch)

    def _of_size(self, size: int | None) -> tuple[Any, int | None]:
        """Return the batch, and the number of samples that its tensors do not have yet along their first dimension."""
        if size is None or size == self.batch_size:
            return self.batch, None
        if self.resize is not None:
            return self.resize(self.batch, size), None
        if not self._has_samples():
            raise ValueError(
                f"no tensor of the batch has its {_samples(self.batch_size)} along the first dimension: give "
                "Step(..., resize=function of batch and samples)"
            )
        written = self.batch_size
        return batches.with_samples(self.batch, written, lambda parts: (list(parts) * -(-size // written))[:size]), size

    def _has_samples(self) -> bool:
        """Return whether the batch has tensors along whose first dimension the samples lie, or lists of samples."""
        along_first = any(tensor.dim() and len(tensor) == self.batch_size for tensor in batches.tensors(self.batch))
        return along_first or batches.has_list_of_samples(self.batch, self.batch_size)

    def micro_batches(self, batch: Any, count: int, size: int | None = None) -> Iterator[Any]:
        """Yield a batch of `size` samples, by default the step's own number, in `count` equal parts, in order.

        Where the step has `resize`, each part is what `resize` makes of the batch.

        Raises ValueError where `count` does not divide the samples.
        """
        samples = self.batch_size if size is None else size
        if samples % count:
            raise ValueError(f"accumulation={count} does not divide the batch of {samples}; write one of its divisors")
        share = samples // count
        if self.resize is not None and count > 1:
            for _ in range(count):
                yield self.resize(batch, share)
            return
        for number in range(count):
            part = slice(number * share, (number + 1) * share)
            chosen = batches.with_samples(batch, samples, operator.itemgetter(part))
            yield batches.mapped(partial(_part, samples=samples, part=part), chosen)

    def loss_of(self, model: Callable[..., Any], batch: Any) -> Any:
        """Return the loss of a model on a batch, or an iterator of several losses.

        Raises TypeError if the loss does not take its arguments, and if the step has neither `loss` nor
        `compute_loss` and the model's output has no loss.
        """
        if self.compute_loss is not None:
            try:
                return self.compute_loss(model, batch)
            except TypeError as error:
                if batches.rejects(self.compute_loss, (model, batch), {}, error):
                    raise TypeError(
                        f"compute_loss was called as compute_loss(model, batch), and does not take that ({error}). "
                        "Write a function of these two, or pass a criterion as loss="
                    ) from error
                raise
        call = batches.call_of(model, self.loss, batch)
        try:
            output = model(*call.args, **call.kwargs)
        except TypeError as error:
            if batches.rejects(model, call.args, call.kwargs, error):
                raise TypeError(_model_rejected(call, batch, error)) from error
            raise
        if self.loss is None:
            own = batches.own_loss(output)
            if own is None:
                raise TypeError(
                    f"the model's output has no loss, it is {batches.kind(output)}: give Step(..., loss=function of "
                    "output and target) or Step(..., compute_loss=function of model and batch)"
                )
            return own
        if batches.is_criterion(self.loss):
            output = batches.criterion_input(output)
            if not isinstance(output, torch.Tensor):
                reason = TypeError(
                    f"a criterion of torch takes a tensor, and the model returned {type(output).__name__}"
                )
                raise TypeError(_rejected(output, call.targets, isinstance(batch, dict), reason))
        try:
            return self.loss(output, *call.targets)
        except TypeError as error:
            if batches.rejects(self.loss, (output, *call.targets), {}, error):
                raise TypeError(_rejected(output, call.targets, isinstance(batch, dict), error)) from error
            raise


def _part(value: torch.Tensor, samples: int, part: slice) -> torch.Tensor:
    return value[part] if value.dim() and value.shape[0] == samples else value


def _samples(count: int) -> str:
    return f"{count} sample{'' if count == 1 else 's'}"


def _check_loss(loss: Any, compute_loss: Any) -> None:
    """Raise TypeError if the value is not a loss, or if `loss` is a function of model and batch."""
    for name, function in (("loss", loss), ("compute_loss", compute_loss)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, not {type(function).__name__}")
    if loss is not None and compute_loss is not None:
        raise TypeError("a step has one loss: give loss=function of output and target, or compute_loss=, not both")
    signature = batches.signature(loss) if loss is not None else None
    if signature is not None and next(iter(signature.parameters), None) == "model":
        raise TypeError(
            "loss= is called as loss(output, *targets), and the first argument of this function is called model. "
            "Pass it as compute_loss=, which is called as compute_loss(model, batch)"
        )


def _model_rejected(call: batches.Call, batch: Any, error: TypeError) -> str:
    """Return the message for a model that does not take the inputs of a batch."""
    kinds = [*map(batches.kind, call.args), *(f"{name}={batches.kind(part)}" for name, part in call.kwargs.items())]
    return (
        f"the model was called as model({', '.join(kinds)}), and does not take that ({error}). The batch is "
        f"{batches.kind(batch)}: write ((input, input), target), a dict with the names of the model's arguments, or "
        "Step(..., compute_loss=function of model and batch)"
    )


def _rejected(output: Any, targets: tuple[Any, ...], is_dict: bool, error: TypeError) -> str:
    """Return the message for a loss that does not take its arguments."""
    if is_dict:
        names = ["batch"]
    else:
        names = ["target"] if len(targets) == 1 else [f"target_{number}" for number in range(1, len(targets) + 1)]
    kinds = ", ".join(map(batches.kind, (output, *targets)))
    return (
        f"loss was called as loss({', '.join(['output', *names])}) with {kinds}, and does not take that ({error}). "
        "Change what it takes or what the batch holds, or write Step(..., compute_loss=function of model and batch)"
    )


def _shaped(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of another shape that repeats the values; without values where large and a virtual GPU is on."""
    count = 1
    for extent in shape:
        count *= extent
    large = count * value.element_size() >= _SMALL or value.device.type != "cpu"
    if is_virtual(value) or (large and device.active() is not None):
        return fake_cpu_tensor(shape, value.dtype)
    for dimension, extent in enumerate(shape):
        if extent != value.shape[dimension]:
            value = value.index_select(dimension, torch.arange(extent, device=value.device) % value.shape[dimension])
    return value
