"""The knobs of a cell or a script while it runs: each acts where the program comes to it, and all is restored."""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from memexplore.run.knobs.applying.apply import (
    apply_to_step,
    changes_of_loop,
    loop_of,
    notes_on,
    of_model,
    training_loop_scope,
)
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.run.knobs.knobs import Knobs, conflicts
from memexplore.run.knobs.precision import CASTS
from memexplore.run.knobs.update import Update
from memexplore.run.knobs.zero_grad import ZeroGrad
from memexplore.run.programs.hooks import (
    OutermostCalls,
    common_samples,
    has_weights,
    is_training_call,
    wrap_function,
    wrap_method,
)
from memexplore.run.programs.made_optimizers import MadeOptimizers
from memexplore.run.programs.micro_batches import MicroBatches
from memexplore.run.programs.resized_inputs import Resizing, Sites
from memexplore.run.programs.seen import Batch, BatchPlace


class CannotActError(ValueError):
    """A sentence that says why a knob cannot act on a program."""


_OF_WEIGHTS = ("frozen", "lora")
"""Fields of `Knobs` that decide which weights an optimizer gets."""
_LOSS_OUTSIDE = (
    "Autocast is around the model's calls only. With the loss in autocast too, as PyTorch advises, the loss is "
    "computed in fp32, which can need more memory."
)


class Plan(NamedTuple):
    """How knobs act on a program."""

    knobs: Knobs
    program: str = "this program"
    """What messages call it."""
    batch: Batch | None = None
    """The batch as written; None where no knob changes it."""
    sites: Sites = frozenset()
    """Where the program makes its batch, for `BatchPlace.INPUTS`."""

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return self.knobs.accumulation or 1

    @property
    def variables(self) -> dict[str, Any]:
        """Values of variables of a cell."""
        by_batch = self.batch is not None and self.batch.place is BatchPlace.VARIABLE
        return dict(self.knobs.variables) | ({self.batch.name: self.size} if self.batch and by_batch else {})

    @property
    def size(self) -> int:
        """Samples that the program is to compute with at once."""
        assert self.batch is not None
        return (self.knobs.batch or self.batch.size) // self.micro_batches

    def checked(self) -> Plan:
        """Return the plan; raise `CannotActError` for knobs that contradict each other or the program."""
        if self.knobs.update is Update.IN_BACKWARD:
            raise CannotActError(
                f"update='in backward' replaces the optimizer's step, and {self.program} calls it itself; write "
                "update= one of 'foreach', 'fused', 'per tensor'"
            )
        if wrong := conflicts(self.knobs):
            raise CannotActError("; ".join(wrong))
        if self.batch is not None and (self.knobs.batch or self.batch.size) % self.micro_batches:
            raise CannotActError(
                f"accumulation={self.micro_batches} does not divide the batch of {self.batch.size}; write one of its "
                "divisors"
            )
        return self


class Acting:
    """The knobs of a plan on a program, until a log is restored. `names` are the variables with which it begins."""

    def __init__(self, log: UndoLog, plan: Plan, names: Mapping[str, Any]) -> None:
        self._plan, self._knobs = plan, plan.knobs
        self.trained = 0
        """Samples in all calls that have trained."""
        self._models = contextlib.ExitStack()
        log.add(self._models.close)
        self._reports: list[ApplyReport] = []
        self._changed_models = WeakIdKeyDictionary()
        self._has_changed_weights = False
        self._loaders = 0
        """DataLoaders with the other batch size."""
        self._made = self._micro_batches = None
        self._calls = OutermostCalls(log, self._before_call)
        changed = self._knobs.changed().keys()
        if changed & {"optimizer", "update", *_OF_WEIGHTS}:
            self._made = MadeOptimizers(log, self._knobs, self._change_weights)
        if "zero_grad" in changed:
            wrap_method(log, Optimizer, "zero_grad", self._zero_grad)
            wrap_function(log, (nn.Module,), "zero_grad", self._zero_grad)
        if plan.batch is not None and plan.batch.place is BatchPlace.LOADER:
            self._resize_loaders(log, names)
        if plan.batch is not None and plan.batch.place is BatchPlace.VARIABLE:
            wrap_method(log, argparse.ArgumentParser, "parse_known_args", self._parse)
        if plan.micro_batches > 1:
            self._micro_batches = MicroBatches(log, plan.micro_batches, names)

    @contextlib.contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Run the program in the block, on a device.

        Raises ValueError after a complete run in which a knob could not act, and where the program cannot run with the
        tensors of the other batch.
        """
        batch = self._plan.batch
        with training_loop_scope(self._knobs, device):
            if batch is None or batch.place is not BatchPlace.INPUTS:
                yield
            else:
                with self._reporting_errors(), Resizing(self._plan.sites, batch.size, self._plan.size, self._calls):
                    yield
        self._check_acted()

    def report(self, *, is_complete: bool) -> ApplyReport:
        """Return what was changed, and what a complete run has shown of it."""
        samples = 0 if self._plan.batch is None else self._plan.batch.size
        changes = changes_of_loop(self._knobs, loop_of(self._knobs, samples))
        in_loop = ApplyReport(tuple(change for change in changes if change.field != "precision"))
        reports = [report.completed() for report in self._reports] if is_complete else self._reports
        notes = [_LOSS_OUTSIDE] if self._knobs.precision in CASTS else []
        notes += self._single_step() if is_complete else ()
        return sum([*reports, ApplyReport(notes=tuple(notes))], in_loop).without_pending()

    def _single_step(self) -> tuple[str, ...]:
        """Return a note where accumulation leaves a single step, which begins without the optimizer's state."""
        if self._micro_batches is None or self._micro_batches.has_second_step:
            return ()
        return (
            f"With accumulation={self._plan.micro_batches} {self._plan.program} ends after one step, and later ones "
            "may need more memory: they begin with the optimizer's state. Let the loop make more passes.",
        )

    # -- models

    def _before_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not has_weights(model):
            return
        if model not in self._changed_models:
            self._changed_models[model] = None
            left_out = _OF_WEIGHTS if self._has_changed_weights else ()
            self._change(model, of_model(self._knobs).replace(**{name: getattr(Knobs(), name) for name in left_out}))
            self._reports.append(ApplyReport((), (), notes_on(self._knobs, model)))
        if is_training_call(model):
            samples = common_samples((args, kwargs))
            if not self.trained:
                self._check_inputs(samples)
            self.trained += samples or 0

    def _change(self, model: nn.Module, knobs: Knobs) -> None:
        try:
            self._reports.append(self._models.enter_context(apply_to_step(knobs, model)))
        except ValueError as error:  # no error of the program, which is where it is raised
            raise CannotActError(str(error)) from error

    def _change_weights(self, model: nn.Module) -> None:
        """Freeze layers and add adapters where the optimizer is made; the model's first call then has the rest."""
        self._has_changed_weights = True
        self._change(model, Knobs(lora=self._knobs.lora, lora_rank=self._knobs.lora_rank, frozen=self._knobs.frozen))

    # -- the loop

    def _zero_grad(self, zero_grad: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        zero_grad(owner, set_to_none=self._knobs.zero_grad is ZeroGrad.TO_NONE)

    def _resize_loaders(self, log: UndoLog, names: Mapping[str, Any]) -> None:
        wrap_function(log, (DataLoader, BatchSampler), "__init__", self._make_loader)
        for loader in names.values():
            for owner in (loader, loader.batch_sampler) if isinstance(loader, DataLoader) else ():
                if getattr(owner, "batch_size", None) == self._written:
                    log.set_item(vars(owner), "batch_size", self._plan.size)
                    self._loaders += 1

    def _make_loader(self, init: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        """Make a DataLoader, or a sampler of batches, with the other batch size where it has the one as written."""
        bound = inspect.signature(init).bind(loader, *args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["batch_size"] == self._written and bound.arguments.get("batch_sampler") is None:
            bound.arguments["batch_size"] = self._plan.size
            self._loaders += 1
        init(*bound.args, **bound.kwargs)

    @property
    def _written(self) -> int | None:
        return None if self._plan.batch is None else self._plan.batch.size

    def _parse(self, parse: Any, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line, and change the argument that holds the batch."""
        options, rest = parse(*args, **kwargs)
        batch = self._plan.batch
        if batch is not None and batch.name in vars(options):
            setattr(options, batch.name, self._plan.size)
        return options, rest

    # -- what could not act

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Raise ValueError where the program cannot run with the other number of samples in its tensors."""
        try:
            yield
        except (RuntimeError, IndexError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError | CannotActError):
                raise
            raise CannotActError(
                f"{self._fields()} cannot be changed: with inputs of {self._plan.size} samples {self._plan.program} "
                f"raises {type(error).__name__}: {error}"
            ) from error

    def _fields(self) -> str:
        return " and ".join(field for field in ("batch", "accumulation") if field in self._knobs.changed())

    def _check_inputs(self, samples: int | None) -> None:
        """Raise ValueError where the first call that trains has not the number of samples that it is to have."""
        batch = self._plan.batch
        if batch is None or batch.place is BatchPlace.LOADER or samples == self._plan.size:
            return
        tried = f"{batch.name} = {self._plan.size}" if batch.name else "changed tensors"
        raise CannotActError(
            f"{self._fields()} cannot be changed: with {tried} the model of {self._plan.program} still gets inputs of "
            f"{samples} samples"
        )

    def _check_acted(self) -> None:
        program, batch = self._plan.program, self._plan.batch
        if (
            batch is not None
            and batch.place is BatchPlace.LOADER
            and not self._loaders
            and self._plan.size != batch.size
        ):
            raise CannotActError(
                f"{self._fields()} cannot be changed: {program} has made no DataLoader of {batch.size} now"
            )
        if self._made is not None and not self._made.number:
            fields = " and ".join(set(self._knobs.changed()) & {"optimizer", "update", *_OF_WEIGHTS})
            raise CannotActError(f"{fields} cannot be changed: {program} has made no optimizer now")
        if self._micro_batches is not None and not self._micro_batches.steps:
            raise CannotActError(
                f"accumulation={self._plan.micro_batches} needs as many passes of the loop for a step, and {program} "
                f"ended after {self._micro_batches.passes}"
            )


@contextlib.contextmanager
def acting(plan: Plan, names: Mapping[str, Any]) -> Iterator[Acting]:
    """Let knobs act on a program in the block, and restore everything afterwards.

    >>> data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    >>> with acting(Plan(Knobs(batch=2), batch=Batch(BatchPlace.LOADER, 4)), {}):
    ...     loader = DataLoader(data, batch_size=4)
    >>> loader.batch_size, DataLoader(data, batch_size=4).batch_size
    (2, 4)
    """
    with undone_after(lambda log: Acting(log, plan, names)) as knobs:
        yield knobs
