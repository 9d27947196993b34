"""A training step as a value: a model, a batch, a loss and an optimizer, so that every knob has something to turn."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memexplore.torch_internals.dispatch import pytree
from memexplore.virtual_gpu import device
from memexplore.virtual_gpu.patches.device_names import is_virtual
from memexplore.virtual_gpu.tensors.tensor import fake_cpu_tensor

_SMALL = 1 << 20
"""Batches below 1 MiB keep their values: lengths and masks on the CPU may steer the model."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One training step: forward, loss, backward, optimizer.

    `model` is a module, or a function that builds one (then a model of any size costs nothing: it is built on the
    virtual GPU). `batch` is a tensor, a tuple ``(input, *targets)``, or a dict of keyword arguments of the model;
    samples lie along the first dimension. Only the shapes matter. `loss` is called as ``loss(output, *targets)``
    (``loss(output, batch)`` for a dict); where its first argument is called `model`, as ``loss(model, batch)``; where
    there is none, the output's own `loss` is taken. Where several losses go backward one after the other, as those of
    two adversaries, it yields them; the next is asked for when the one before has gone backward. `optimizer` is called
    with the parameters, and is AdamW unless given; an optimizer that exists already stands for another of its kind and
    settings.

    Where samples do not lie along the first dimension, as in a graph, `samples` is their number and
    ``resized(batch, samples)`` makes a batch of so many from one of another number; without it the number is fixed.

    >>> step = Step(torch.nn.Linear(8, 2), (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)),
    ...             loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.SGD)
    >>> step.batch_size, step.input_size
    (4, None)

    Bags of any length, and where each begins:

    >>> def bags(batch, samples):
    ...     return torch.zeros(3 * samples, dtype=torch.long), torch.arange(0, 3 * samples, 3)
    >>> step = Step(torch.nn.EmbeddingBag(9, 2), bags(None, 4), samples=4, resized=bags,
    ...             loss=lambda model, batch: model(*batch).sum())
    >>> [tuple(part.shape) for part in step.batch_of(6)]
    [(18,), (6,)]

    Raises TypeError or ValueError for what is none of these.
    """

    model: torch.nn.Module | Callable[[], torch.nn.Module]
    batch: Any
    loss: Callable[..., torch.Tensor | Iterator[torch.Tensor]] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | None = None
    samples: int | None = None
    resized: Callable[[Any, int], Any] | None = None

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise TypeError(f"model must be a torch.nn.Module or a function that builds one, not {type(self.model)}")
        if self.loss is not None and not callable(self.loss):
            raise TypeError(f"loss must be a function, not {type(self.loss).__name__}")
        if self.samples is not None and (type(self.samples) is not int or self.samples < 1):
            raise ValueError(f"samples={self.samples!r} must be a whole number from 1 on")
        if self.resized is not None and not callable(self.resized):
            raise TypeError(f"resized must be a function of a batch and a number, not {type(self.resized).__name__}")
        if isinstance(self.batch, Mapping) and not isinstance(self.batch, dict):
            object.__setattr__(self, "batch", dict(self.batch))
        if self._first() is None:
            raise ValueError(
                "the batch has no tensor with a dimension of samples: give a tensor, (input, target) or a dict"
            )

    def _first(self) -> torch.Tensor | None:
        leaves = pytree.tree_leaves(self.batch)
        return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), None)

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
    def sized(self) -> slice:
        """Which dimensions of the input are its size: the last two of images, the second of sequences, or none."""
        shape, is_float = self._input.shape, self._input.dtype.is_floating_point
        if len(shape) >= 4:
            return slice(len(shape) - 2, len(shape))
        if len(shape) == 3 or (len(shape) == 2 and not is_float):
            return slice(1, 2)
        return slice(0, 0)

    @property
    def input_size(self) -> int | None:
        """Height of the images or length of the sequences, None where the batch has neither."""
        extents = self._input.shape[self.sized]
        return extents[0] if extents else None

    def batch_of(self, size: int | None = None, input_size: int | None = None) -> Any:
        """The batch with another number of samples, and another resolution or length; None keeps what it is.

        Images keep their proportions. While a virtual GPU is on, large tensors of the answer have no values and take no
        memory.

        Raises ValueError where an input size is asked of a batch that has none, or another number of samples of one
        whose samples nobody can tell apart.
        """
        extents = self._input.shape[self.sized]
        if input_size is not None and not extents:
            raise ValueError("this batch has neither images nor sequences: it has no input size")
        wanted = tuple(extents)
        if input_size is not None:
            wanted = tuple(max(1, extent * input_size // extents[0]) for extent in extents)
        images = len(extents) == 2
        batch, samples = self._of_size(size)

        def resized(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dim():
                return value
            shape = list(value.shape)
            if samples is not None and shape[0] == self.batch_size:
                shape[0] = samples
            if images and value.dim() >= 3 and tuple(shape[-2:]) == tuple(extents):
                shape[-2:] = wanted
            elif extents and not images and value.dim() >= 2 and shape[1] == extents[0]:
                shape[1] = wanted[0]
            return _shaped(value, tuple(shape))

        return pytree.tree_map(resized, batch)

    def _of_size(self, size: int | None) -> tuple[Any, int | None]:
        """The batch, and how many samples its tensors are still to get along their first dimension."""
        if size is None or size == self.batch_size:
            return self.batch, None
        if self.resized is not None:
            return self.resized(self.batch, size), None
        leaves = pytree.tree_leaves(self.batch)
        if not any(isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == self.batch_size for leaf in leaves):
            raise ValueError(
                f"no tensor of the batch has its {_samples(self.batch_size)} along the first dimension: give "
                "Step(..., resized=function of batch and samples)"
            )
        return self.batch, size

    def micro_batches(self, batch: Any, count: int, size: int | None = None) -> Iterator[Any]:
        """A batch of `size` samples, or as many as the step's own, cut into `count` equal parts, in order.

        Where the step has `resized`, each part is what that makes of the batch.

        Raises ValueError where the samples cannot be dealt out equally.
        """
        samples = self.batch_size if size is None else size
        if samples % count:
            raise ValueError(f"accumulation={count} does not divide the batch of {samples}; write one of its divisors")
        share = samples // count
        if self.resized is not None and count > 1:
            for _ in range(count):
                yield self.resized(batch, share)
            return
        for number in range(count):
            part = slice(number * share, (number + 1) * share)
            yield pytree.tree_map(
                lambda value, part=part: (
                    value[part]
                    if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == samples
                    else value
                ),
                batch,
            )

    def loss_of(self, model: Callable[..., Any], batch: Any) -> Any:
        """The loss of a model on a batch, or an iterator of several.

        Raises TypeError where there is no `loss` and the model's output has none.
        """
        if self.loss is not None and takes_model(self.loss):
            return self.loss(model, batch)
        targets: tuple[Any, ...]
        if isinstance(batch, dict):
            output, targets = model(**batch), (batch,)
        elif isinstance(batch, tuple | list):
            output, targets = model(batch[0]), tuple(batch[1:])
        else:
            output, targets = model(batch), ()
        if self.loss is not None:
            return self.loss(output, *targets)
        own = getattr(output, "loss", output)
        if not isinstance(own, torch.Tensor) or own.dim():
            raise TypeError("the model's output has no loss: give Step(..., loss=function of output and target)")
        return own


def _samples(count: int) -> str:
    return f"{count} sample{'' if count == 1 else 's'}"


def takes_model(loss: Callable[..., Any]) -> bool:
    """Whether a loss is called as ``loss(model, batch)``, by the name of its first argument."""
    try:
        names = list(inspect.signature(loss).parameters)
    except (TypeError, ValueError):  # builtins have no signature
        return False
    return bool(names) and names[0] == "model"


def _shaped(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of another shape with the old values again and again, none where it is large and a virtual GPU is on."""
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
