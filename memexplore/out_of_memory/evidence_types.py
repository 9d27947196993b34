"""The values of an `Evidence`: what only the live process knows of a failure."""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping
from typing import NamedTuple

from memexplore.out_of_memory.message import Message
from memexplore.tape import Phase


class VariableUse(enum.StrEnum):
    """What a variable is to the failing call."""

    NOT_REACHED = "not used by the failing call"
    """Of a frame around the failing call, of a module, or of the notebook: whether it is read again is not known."""
    BESIDE = "beside the failing call"
    """Of the frame that calls an op of C++: whether the op uses it is not known either."""
    OUTPUT = "output of the notebook"
    """An entry of ``Out``, or ``_``, ``__`` and ``___``."""
    LAST_ERROR = "an earlier error"
    """Frames of the traceback of the exception before."""
    KEPT_ERROR = "an error that is kept"
    """Frames of the traceback of an exception that a variable keeps."""
    HANDLED_ERROR = "an error that is being handled"
    """Frames of the traceback of the exception in whose `except` block the call failed."""
    IN_USE = "in use"
    """Reached by the failing call."""
    NO_UPDATE = "for weights of no optimizer"
    """Kept for gradients that no optimizer reads."""
    LIBRARY = "of a library"
    """A global variable, or an attribute of a class, that the program does not name."""
    CYCLE = "in reference cycles"
    OWN_GRADIENT = "in the graph of its own gradient"
    """Of a leaf after `backward(create_graph=True)`: no variable has it any more."""
    ATTRIBUTE = "kept by layers"
    """An attribute of modules, none of their weights, which a call of each leaves until its next one."""
    NOT_TRAINED = "not trained"
    """Weights of a model that no optimizer updates."""


class State(enum.StrEnum):
    """Whether the program's optimizers keep tensors from step to step."""

    KEPT = "kept"
    NONE = "none"
    """Of no optimizer, too."""
    UNKNOWN = "unknown"


class Holder(NamedTuple):
    """A variable that keeps memory, and what the variable is to the failing call."""

    name: str
    """Such as ``losses``, ``trainer.history``, ``Out[3]`` or ``sys.last_exc``."""
    use: VariableUse
    addresses: frozenset[int]
    in_graph: frozenset[int]
    """Those of `addresses` that a graph keeps."""
    size: int
    tensors: int
    """Tensors that the variable holds itself."""
    is_container: bool
    classes: tuple[str, ...] = ()
    """The object with the attribute that holds most: its class and those that it is derived from (`cures`)."""
    is_model: bool = False
    """Whether `name` is that of one model."""
    attributes: Mapping[int, str] = types.MappingProxyType({})
    """Address of what the variable holds itself -> its attribute that leads there, such as ``trainer.history``."""


class Evidence(NamedTuple):
    """What the live process says of a failure."""

    message: Message
    holders: tuple[Holder, ...] = ()
    """Variables that keep memory which the failing call does not reach."""
    complete: bool = True
    """Whether the walk over references came to its end in time."""
    search_error: str = ""
    """The first error of a search that could not read an object, such as one of the user's class; else empty."""
    line: str = ""
    """``file:line`` of the user's innermost line in the traceback."""
    layer: str = ""
    """Qualified name of the innermost module in the traceback, or its class."""
    phase: Phase = Phase.OTHER
    """Part of the step that the traceback shows."""
    evaluating: str = ""
    """Class of the model that was called to evaluate, with weights that require gradients; else empty."""
    in_use: tuple[Holder, ...] = ()
    """Containers that the failing call reaches."""
    graph: frozenset[int] = frozenset()
    """Addresses that the failing call reaches through a graph only."""
    needed: frozenset[int] = frozenset()
    """All addresses that the failing call reaches."""
    state: State = State.UNKNOWN
    no_update: Holder | None = None
    """What graphs and gradients keep for weights that no optimizer updates, under the names of modules."""
    untrained: Holder | None = None
    """Weights of models that are not trained, under the names of the models."""
    state_to_come: int = 0
    """Bytes at least that the failing update has still to allocate for the optimizer's state."""
    may_train: bool = True
    """Whether the program has an optimizer, or asks for gradients of a tensor that is no weight; True if unknown."""
    trained: int | None = None
    """Bytes of the weights that optimizers update; None without an optimizer, or if unknown."""
    of_models: frozenset[int] = frozenset()
    """Addresses that a model or an optimizer has."""
    building: bool = False
    """Whether the failing call is in the constructor of a model."""
    of_libraries: tuple[Holder, ...] = ()
    """What the failing call reaches in objects for which `cures` has a row."""
    of_layers: tuple[Holder, ...] = ()
    """What modules have as attributes besides their weights, such as ``model.layers.*.attn``; `tensors` counts them."""
