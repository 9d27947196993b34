"""The knob `accumulation`: gradients accumulated over several micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from memexplore.run.knobs.applying.loop import Loop, RunningLoop
from memexplore.run.knobs.applying.report import counted
from memexplore.run.knobs.control import Control, Explored, Option, counter, numbers
from memexplore.run.knobs.knob import Estimate, Group, Knob, Limits, Stage, Untouched
from memexplore.run.knobs.mode import Mode
from memexplore.run.knobs.values import Number
from memexplore.torch_internals.modules import BatchNorm

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.run.knobs.knobs import Knobs

_NO_MICRO_BATCHES = (
    "The loop does not use live.micro_batches(batch) and live.backward(loss): write them in the loop, see "
    "help(live.micro_batches)."
)
_BATCH_NORM = "Batch norm sees one micro-batch at a time: losses and gradients differ from those of the whole batch."


class AccumulationKnob(Knob):
    """Equal micro-batches of a step, whose gradients are accumulated before the update."""

    name = "accumulation"
    costs = "equal results but for batch norm, a little slower"
    values = Number()
    place = 50
    group = Group.BATCH
    leaves = Untouched.ALL_BUT_ACTIVATIONS
    is_primary = True
    stage = Stage.BATCH

    def phrase(self, value: Any) -> str:
        """Return the number of micro-batches."""
        return f"accumulation over {counted(value, 'micro-batch')}"

    def change_loop(self, value: Any, loop: Loop) -> None:
        """Run forward and backward for each micro-batch."""
        loop.micro_batches = value

    def phrase_in_loop(self, value: Any, loop: Loop) -> str:
        """Return the number of micro-batches and their size."""
        return f"{self.phrase(value)} of {loop.samples // value}" if value > 1 else ""

    def notes(self, value: Any, model: nn.Module, knobs: Knobs) -> tuple[str, ...]:
        """Say where batch norm makes it another training."""
        has_batch_norm = any(isinstance(module, BatchNorm) for module in model.modules())
        return (_BATCH_NORM,) if value > 1 and knobs.mode is Mode.AS_WRITTEN and has_batch_norm else ()

    def conflicts(self, value: Any, knobs: Knobs, explored: Explored) -> Iterator[str]:
        """Yield a sentence where the batch cannot be divided."""
        if knobs.batch is not None and knobs.batch % value:
            yield f"accumulation={value} does not divide batch={knobs.batch}; write one of its divisors"

    def written(self, explored: Explored) -> str:
        """Return one micro-batch."""
        return "1"

    def controls(self, explored: Explored) -> list[Control]:
        """Return a slider over the divisors of the batch; powers of two where it is not known."""

        def options(knobs: Knobs) -> list[Option]:
            batch = knobs.batch or explored.batch
            if batch is None:
                return numbers(2**power for power in range(6))
            return numbers(number for number in range(1, batch + 1) if batch % number == 0)

        return [counter(self, 1, options, unit="micro-batches", unit_of_one="micro-batch", is_primary=True)]

    def unavailable(self, limits: Limits) -> str:
        """Return why the loop has no micro-batches."""
        return limits.no_batch or limits.no_micro_batches

    def asks_loop_for(self, value: Any) -> tuple[str, ...]:
        """Return the micro-batches."""
        return (self.name,)

    def locked_in(self, value: Any, loop: RunningLoop) -> str:
        """Return how a loop gets micro-batches."""
        return "" if self.name in loop.follows else _NO_MICRO_BATCHES

    def alters_training(self, value: Any, model: nn.Module | None, knobs: Knobs) -> bool:
        """Return whether the model has batch norm."""
        return model is not None and bool(self.notes(value, model, knobs))

    def training_text(self, value: Any, knobs: Knobs) -> str:
        """Return what it means for the training."""
        return "Batch norm takes its statistics from each micro-batch."

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return divisors of the batch; of a cell, whose runs take longer, the first three."""
        counts = () if explored.batch is None else micro_batch_counts(explored.batch)
        return counts if explored.model is not None else counts[:3]

    def estimate(self, value: Any, estimate: Estimate) -> None:
        """Divide the activations; each micro-batch has launches of its own."""
        estimate.time = 1 + value / 1000
        estimate.activations /= value


_MAX_MICRO_BATCHES = 64
"""Each micro-batch is traced: more of them would take too long."""


def micro_batch_counts(batch: int) -> tuple[int, ...]:
    """Return numbers of micro-batches to try: divisors of the batch from 2 to 64, each at least twice the last one.

    >>> micro_batch_counts(48), micro_batch_counts(7), micro_batch_counts(1)
    ((2, 4, 8, 16, 48), (7,), ())
    """
    counts: list[int] = []
    for count in range(2, min(batch, _MAX_MICRO_BATCHES) + 1):
        if batch % count == 0 and (not counts or count >= 2 * counts[-1]):
            counts.append(count)
    return tuple(counts)
