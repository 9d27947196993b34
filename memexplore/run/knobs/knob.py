"""What a knob is: one setting of a training step, with everything that the project has to know about it."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn

from memexplore.run.knobs.applying.loop import Loop, RunningLoop
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.control import Control, Explored, choice
from memexplore.run.knobs.values import OneOf, Values

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.run.knobs.applying.scope import Feature, Reach
    from memexplore.run.knobs.applying.undo import UndoLog
    from memexplore.run.knobs.inplace_sites.sites import Sites
    from memexplore.run.knobs.knobs import Knobs
    from memexplore.run.machine import Machine


class Group(enum.Enum):
    """Where an explorer shows a knob; the groups are in its order."""

    VARIABLES = "Variables"
    BATCH = "Batch"
    MODEL = "Model"
    OPTIMIZER = "Optimizer"
    LAYERS = "Layers"
    GPU = "GPU and allocator"
    SEVERAL_GPUS = "Several GPUs"


class Stage(enum.IntEnum):
    """When a knob acts. What a later one wraps around a model's forward is outside of what an earlier one does."""

    GPU = enum.auto()
    PROCESS = enum.auto()
    WEIGHTS = enum.auto()
    """Which weights train: adapters come before everything that wraps the forward of modules."""
    LAYOUT = enum.auto()
    ACTIVATIONS = enum.auto()
    SAVED_TENSORS = enum.auto()
    """Hooks of saved tensors are inside the hooks of `checkpoint="norms"`, and get the tensors first."""
    RECOMPUTATION = enum.auto()
    BATCH = enum.auto()
    PRECISION = enum.auto()
    MODE = enum.auto()
    UPDATE = enum.auto()


class Application(NamedTuple):
    """A model to which knobs are applied."""

    log: UndoLog
    """Restores the model: a knob adds the action that does so before each change."""
    model: nn.Module
    knobs: Knobs
    sites: Sites | None
    """Activations that may overwrite their input; None to find them at the model's first call."""
    reach: Reach
    device: torch.device
    """Device on which the model runs."""
    in_place_failed: Callable[[Exception], object] | None = None
    """Gets the error of a model that cannot run on fake tensors; None to raise it from the model's call."""


class Limits(NamedTuple):
    """What a program lets knobs change: why something cannot be changed, as a clause, empty where it can."""

    program: str = "the step"
    has_own_loop: bool = False
    """Whether the program itself makes its inputs and calls `backward`, as a cell does."""
    no_batch: str = ""
    no_micro_batches: str = ""
    no_optimizer: str = ""
    no_zero_grad: str = ""


class Untouched(enum.Enum):
    """What a knob cannot lessen of the bytes that a step needs."""

    NOTHING = "nothing"
    ALL_BUT_ACTIVATIONS = "weights, gradients, optimizer state, and temporaries of the update"
    ALL_BUT_UPDATE = "all but temporaries of the update"
    EVERYTHING = "all that is allocated"


@dataclasses.dataclass
class Estimate:
    """About what a step needs with another value of one knob; at first what it needs as written. Sizes in bytes."""

    weights: int
    gradients: int
    states: int
    """Optimizer state."""
    activations: float
    constant: int
    """Weights, gradients and optimizer state."""
    fixed: int
    """Bytes that saving activations leaves."""
    input_size: int | None = None
    time: float = 1.0
    """Over that as written."""


class ModelCode(NamedTuple):
    """A model in code: `model` is its name."""

    knobs: Knobs
    model: nn.Module | None = None
    """The model itself, None where it is not known."""
    sites: Sites | None = None
    """Activations that may overwrite their input, None where they are not known."""


class Knob:
    """One setting of a training step. The first sentence of a subclass's docstring says in the docs what it does.

    A knob changes the model (it has `apply`), the training loop (`change_loop`) or the machine (`on_machine`).
    """

    name: ClassVar[str]
    """The name of its file, and its keyword in `Knobs`."""
    word: ClassVar[str] = ""
    """Its name in texts where that is not the name with spaces, such as "LoRA"."""
    costs: ClassVar[str] = ""
    """What it costs, as a clause: whether results stay equal, and time. Empty for what is no change of a training."""
    values: ClassVar[Values]
    place: ClassVar[int]
    """Where a setting names it, in ascending order."""
    group: ClassVar[Group]
    is_primary: ClassVar[bool] = False
    """Whether an explorer shows it above the others."""
    needs_step: ClassVar[str] = ""
    """Why no program that has a loop of its own can have it, after its name ``{}``; empty if some can."""
    locked: ClassVar[str] = ""
    """Why no loop that runs can switch it, as a sentence."""
    stage: ClassVar[Stage] = Stage.ACTIVATIONS
    adds_only_recomputation: ClassVar[bool] = False
    """Whether all FLOPs that it adds to a step are recomputed ones."""
    leaves: ClassVar[Untouched] = Untouched.NOTHING
    """What no value can lessen."""
    saves_little: ClassVar[bool] = False
    """Whether it costs and saves little, so that it is tried first where few bytes are missing."""
    part_of: ClassVar[str] = ""
    """The knob without which this one changes nothing."""

    def __repr__(self) -> str:
        return f"<knob {self.name}>"

    @property
    def summary(self) -> str:
        """What it does, in one sentence."""
        return inspect.cleandoc(type(self).__doc__ or "").partition("\n")[0]

    # -- texts

    @property
    def noun(self) -> str:
        """Its name in a text."""
        return self.word or self.name.replace("_", " ")

    @property
    def label(self) -> str:
        """Its name on a control."""
        return self.noun[0].upper() + self.noun[1:]

    def text(self, value: Any) -> str:
        """Return a value with its name, as in ``checkpoint every 2``."""
        return f"{self.name.replace('_', ' ')} {self.values.text(value)}"

    def phrase(self, value: Any) -> str:
        """Return what a value does, as in "2 GPUs"; by default the value with its name."""
        return f"{self.noun} {self.values.text(value)}"

    # -- in an explorer

    def written(self, explored: Explored) -> str:
        """Return what the program says, empty where that is not known."""
        return ""

    def option(self, value: Any) -> str:
        """Return the text of a value in a list of choices."""
        return self.values.text(value)

    def controls(self, explored: Explored) -> list[Control]:
        """Return the controls; by default a list of the values of `OneOf`, none for other values."""
        if not isinstance(self.values, OneOf):
            return []
        texts = {value: self.option(value) for value in self.values.choices}
        return [choice(self, texts, self.written(explored), is_primary=self.is_primary)]

    def unavailable(self, limits: Limits) -> str:
        """Return why a program cannot have the knob, as a clause, empty if it can."""
        return self.needs_step.format(limits.program) if limits.has_own_loop else ""

    def hidden(self, explored: Explored) -> str:
        """Return why the knob would change nothing, so that an explorer does not show it."""
        return ""

    def not_now(self, knobs: Knobs) -> str:
        """Return which other knob has to be changed first, as a sentence."""
        return ""

    def why_not_layer(self, module: nn.Module) -> str:
        """Return why a layer, apart from those below it, cannot be named in a value, as a sentence."""
        return ""

    # -- in a loop that runs

    def asks_loop_for(self, value: Any) -> tuple[str, ...]:
        """Return what a loop that runs has to leave to memexplore for a value; see `live.loop`."""
        return ()

    def locked_in(self, value: Any, loop: RunningLoop) -> str:
        """Return why a loop that runs cannot switch to a value, as a sentence, empty if it can."""
        if self.locked or not self.changes_model:
            return self.locked or f"{self.label} belongs to the loop: change it there and start again."
        return loop.no_model

    def cannot_raise_peak(self, value: Any) -> bool:
        """Return whether no step needs more memory with a value than with the knob as written, whatever the model.

        Few values are so sure: a checkpoint keeps inputs and leaves workspaces, and tensors that come back from the CPU
        are copies beside their weights.
        """
        return False

    # -- what it does

    def apply(self, value: Any, application: Application) -> ApplyReport:
        """Change a model, and add to the log what restores it.

        An interrupt may come at any line: the log comes before the change, and undoing twice must do no harm.
        """
        raise NotImplementedError

    @property
    def changes_model(self) -> bool:
        """Whether it changes a model."""
        return type(self).apply is not Knob.apply

    def of_model(self, value: Any) -> Any:
        """Return the value that is applied to the model in a loop that is changed by `change_loop` as well."""
        return value

    def off(self, value: Any) -> tuple[Feature, ...]:
        """Return what the model does no longer, which is off in the loop around it too, such as in a loss function."""
        return ()

    def change_loop(self, value: Any, loop: Loop) -> None:
        """Change parts of a training loop."""

    def phrase_in_loop(self, value: Any, loop: Loop) -> str:
        """Return what `change_loop` has done, empty if nothing. The loop has been changed by all knobs."""
        is_followed = self.stage is Stage.BATCH or (self.stage is Stage.UPDATE and loop.trains)
        return self.phrase(value) if is_followed else ""

    def notes(self, value: Any, model: nn.Module, knobs: Knobs) -> tuple[str, ...]:
        """Return sentences on what a value means for a model, beside the sentences of `apply`."""
        return ()

    def on_machine(self, value: Any, machine: Machine) -> Machine:
        """Return the machine that a program runs on."""
        return machine

    def conflicts(self, value: Any, knobs: Knobs, explored: Explored) -> Iterator[str]:
        """Yield sentences for contradictions with other knobs and the program, which say what to write instead."""
        yield from ()

    # -- in a search

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return values that may save memory; in a cell the model is not known."""
        return ()

    def estimate(self, value: Any, estimate: Estimate) -> None:
        """Change an estimate of what a step needs; it orders a search and is never shown as a result."""

    def untouched(self, value: Any) -> Untouched:
        """Return what a value cannot lessen."""
        return self.leaves

    # -- what it means

    def model_lines(self, value: Any, code: ModelCode) -> Iterator[str]:
        """Yield lines of plain PyTorch that change the model in the same way, as pieces of one or more lines."""
        yield from ()

    def alters_training(self, value: Any, model: nn.Module | None, knobs: Knobs) -> bool:
        """Return whether a value changes what is trained; `model` is None where it is not known."""
        return False

    def training_text(self, value: Any, knobs: Knobs) -> str:
        """Return how a value that `alters_training` trains differently, as a sentence."""
        return ""

    def layers(self, value: Any) -> tuple[str, ...]:
        """Return the names of layers in a value."""
        return ()

    @property
    def names_layers(self) -> bool:
        """Whether values name layers."""
        return type(self).layers is not Knob.layers
