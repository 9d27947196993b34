"""What a run of a cell or a script as written shows: where its knobs act, and why one cannot."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.run.knobs.knob import Limits
from memexplore.run.knobs.knobs import unavailable_in
from memexplore.run.knobs.optimizer import optimizer_name
from memexplore.run.programs.cost import ProgramEnded
from memexplore.run.programs.hooks import (
    OutermostCalls,
    common_samples,
    gives_parameters,
    is_training_call,
    tensors_of,
    wrap_function,
    wrap_method,
)
from memexplore.run.programs.written import assigned_batch
from memexplore.torch_internals.state import OPTIMIZER_POST_HOOKS, OPTIMIZER_PRE_HOOKS
from memexplore.torch_internals.tensors import current_autograd_node

BATCH_FIELDS = ("batch", "accumulation")
"""Fields of `Knobs` that cut the batch."""


class BatchPlace(enum.Enum):
    """Where the batch of a program can be changed, the first that applies."""

    LOADER = "the constructor of its DataLoader"
    VARIABLE = "a variable of the cell, or an argument of the command line"
    INPUTS = "the tensors that become its model's inputs"


class Batch(NamedTuple):
    """The batch of a program as written."""

    place: BatchPlace
    size: int
    name: str = ""
    """The variable or argument."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a run has shown of a training loop."""

    loaders: int = 0
    """Number of DataLoaders that were made or iterated."""
    loaded: int | None = None
    """Batch size of the DataLoader whose batches were trained on first."""
    inputs: tuple[tuple[int, ...], ...] = ()
    """Shapes of the inputs of the first call that trains a model."""
    samples: int | None = None
    """Their common first dimension."""
    trained: int = 0
    """Samples in all calls that train."""
    optimizers: tuple[str, ...] = ()
    """Classes of the optimizers that were made."""
    updates: int = 0
    """Steps of all optimizers."""
    evaluates_again: bool = False
    """Whether one step of an optimizer ran several backward passes, as LBFGS does."""
    calls_zero_grad: bool = False
    arguments: tuple[tuple[str, int], ...] = ()
    """Whole numbers that the command line gave, or that are the defaults of its arguments."""

    def batch(self, variables: Mapping[str, Any]) -> Batch | None:
        """Return where the batch can be changed; `variables` are the variables that can have another value.

        >>> Seen(inputs=((8, 3),), samples=8).batch({"batch_size": 8, "test_batch": 100})
        Batch(place=<BatchPlace.VARIABLE: 'a variable of the cell, or an argument of the command line'>, size=8, \
name='batch_size')
        """
        if self.loaded is not None:
            return Batch(BatchPlace.LOADER, self.loaded)
        if self.samples is None:
            return None
        named = assigned_batch({name: value for name, value in variables.items() if value == self.samples})
        if named is not None:
            return Batch(BatchPlace.VARIABLE, self.samples, named[0])
        return Batch(BatchPlace.INPUTS, self.samples)

    def unavailable(self, program: str) -> dict[str, str]:
        """Return the knobs that cannot act on a program, which `program` names, each with the reason.

        >>> Seen().unavailable("this cell")["optimizer"]
        'this cell makes no optimizer'
        """
        has_batch = self.loaded is not None or self.samples is not None
        no_optimizer = f"{program} makes no optimizer"
        if self.updates:
            no_optimizer += " of its own: make it there, not before"
        limits = Limits(
            program,
            has_own_loop=True,
            no_batch="" if has_batch else self._no_batch(program),
            no_micro_batches=self._no_accumulation(program),
            no_optimizer="" if self.optimizers else no_optimizer,
            no_zero_grad="" if self.calls_zero_grad else f"{program} does not call zero_grad",
        )
        return unavailable_in(limits)

    def _no_batch(self, program: str) -> str:
        if not self.inputs:
            return f"{program} trains no model"
        loader = (
            f"{program} builds no DataLoader" if not self.loaders else f"the DataLoader of {program} has no batch size"
        )
        shapes = " and ".join(str(shape) for shape in self.inputs)
        return f"{loader}, and its model's inputs have no common first dimension: {shapes}"

    def _no_accumulation(self, program: str) -> str:
        if not self.updates:
            return f"{program} makes no step of an optimizer"
        if self.evaluates_again:
            return "a step of its optimizer calls the model several times"
        if self.loaded is None and self.updates == 1:
            return f"{program} makes one step, and each micro-batch needs a pass of its loop"
        return ""


class Watch:
    """Sees what a program makes and calls, until a log is restored."""

    def __init__(self, log: UndoLog, updates: int | None = None) -> None:
        """`updates` is the number after which the program is ended, None to let it run."""
        self.seen = Seen()
        self._most_updates = updates
        self._begun: int | None = None
        """Batch size of the DataLoader whose iteration began last."""
        self._passes: int | None = None
        """Backward passes in the step of an optimizer that runs, None while none runs."""
        wrap_function(log, (DataLoader,), "__init__", self._on_loader)
        wrap_method(log, DataLoader, "__iter__", self._on_iteration)
        wrap_method(log, Optimizer, "__init__", self._on_optimizer)
        wrap_method(log, Optimizer, "zero_grad", self._on_zero_grad)
        wrap_function(log, (nn.Module,), "zero_grad", self._on_zero_grad)
        wrap_function(log, (torch.autograd,), "backward", self._on_backward)
        wrap_method(log, argparse.ArgumentParser, "parse_known_args", self._on_arguments)
        log.set_item(OPTIMIZER_PRE_HOOKS, self, self._before_step)  # type: ignore[arg-type]
        log.set_item(OPTIMIZER_POST_HOOKS, self, self._after_step)  # type: ignore[arg-type]
        OutermostCalls(log, self._on_call)

    def _add(self, **changes: Any) -> None:
        self.seen = dataclasses.replace(self.seen, **changes)

    def _on_loader(self, method: Any, loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        method(loader, *args, **kwargs)
        self._add(loaders=self.seen.loaders + 1)

    def _on_iteration(self, method: Any, loader: DataLoader[Any]) -> Any:
        self._begun = batch_size_of(loader)
        self._add(loaders=max(self.seen.loaders, 1))
        return method(loader)

    def _on_optimizer(self, method: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        method(optimizer, *args, **kwargs)
        if gives_parameters(args, kwargs):
            self._add(optimizers=(*self.seen.optimizers, optimizer_name(optimizer)))

    def _on_zero_grad(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self._add(calls_zero_grad=True)
        return method(*args, **kwargs)

    def _on_backward(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if current_autograd_node() is None:  # not the backward pass of a checkpoint inside of another
            if self.seen.loaded is None:
                self._add(loaded=self._begun)
            if self._passes is not None:
                self._passes += 1
        return function(*args, **kwargs)

    def _on_arguments(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        options, rest = method(*args, **kwargs)
        numbers = {name: value for name, value in vars(options).items() if type(value) is int}
        self._add(arguments=tuple((dict(self.seen.arguments) | numbers).items()))
        return options, rest

    def _before_step(self, *_: Any) -> None:
        self._passes = 0

    def _after_step(self, *_: Any) -> None:
        several = (self._passes or 0) > 1
        self._passes = None
        self._add(updates=self.seen.updates + 1, evaluates_again=self.seen.evaluates_again or several)
        if self.seen.updates == self._most_updates:
            raise ProgramEnded

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_training_call(module):
            return
        samples = common_samples((args, kwargs))
        if not self.seen.inputs:
            shapes = tuple(tuple(value.shape) for value in tensors_of((args, kwargs)))
            self._add(inputs=shapes, samples=samples)
        self._add(trained=self.seen.trained + (samples or 0))


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Return the batch size of a DataLoader or of its batch sampler, None if it has none."""
    for owner in (loader, loader.batch_sampler):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


@contextlib.contextmanager
def watching(updates: int | None = None) -> Iterator[Watch]:
    """See what the program in the block makes and calls, and end it after some updates, with `ProgramEnded`.

    >>> with watching() as watch:
    ...     model = nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters())
    ...     for (x,) in DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), batch_size=4):
    ...         model(x).sum().backward()
    ...         optimizer.step()
    >>> watch.seen.loaded, watch.seen.optimizers, watch.seen.updates, watch.seen.trained
    (4, ('SGD',), 2, 8)
    """
    with undone_after(lambda log: Watch(log, updates)) as watch:
        yield watch
