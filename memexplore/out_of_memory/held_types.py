"""The values of `held`: memory that nothing needs any more, and why it is alive."""

from __future__ import annotations

import enum
from typing import NamedTuple

from memexplore.tape import Category


class WhyHeld(enum.StrEnum):
    """Why a group of blocks is alive."""

    GROWS = "grows"
    """A list, a sum or another container gets more with each step."""
    SUMMED_GRAPHS = "summed graphs"
    """Losses of several calls are kept with their graphs."""
    LONG_GRAPH = "long graph"
    """The graph of the failing step reaches back over earlier steps."""
    EARLIER_GRAPH = "earlier graph"
    """The graph of a loss of an earlier forward pass."""
    STALE_GRADIENTS = "stale gradients"
    """Gradients of an earlier step during a forward pass."""
    CAST_WEIGHTS = "cast weights"
    """Copies of weights in autocast's cache."""
    NO_BACKWARD = "no backward"
    """Activations of a model that only evaluates."""
    NO_OPTIMIZER = "no optimizer"
    """Activations of several passes in a program that has no optimizer and has run no backward pass."""
    NO_UPDATE = "no update"
    """Kept for the gradients of weights that no optimizer updates."""
    OLD_VALUE = "old value"
    """A variable has a result of an earlier call, which the program makes again."""
    OUTPUT = "output"
    """An output of the notebook."""
    LAST_ERROR = "last error"
    KEPT_ERROR = "kept error"
    """The frames of an exception that a variable keeps."""
    HANDLED_ERROR = "handled error"
    """The frames of the exception in whose `except` block the call failed."""
    BEFORE = "from before"
    """A variable has a model, an optimizer or a graph that was there before the program or cell began."""
    NOT_REACHED = "not reached"
    """A variable has what the failing call does not use; whether it is read again is not known."""
    COLLECTED = "collected"
    """A container has what several calls outside of models have made, and the next call may add to it."""
    LEFT_BY_LAYERS = "left by layers"
    """An attribute of layers has what their last calls made; whether it is read before the next ones is not known."""
    CYCLE = "reference cycle"
    """Only objects that refer to each other have it."""
    OWN_GRADIENT = "own gradient"
    """Leaves whose gradients have a graph, which leads to the leaves."""
    LIBRARY = "library"
    """A global variable of a module that the running code does not name."""


GROWING = (WhyHeld.GROWS, WhyHeld.SUMMED_GRAPHS, WhyHeld.LONG_GRAPH)
"""What gets more with each period."""
MAYBE_READ = (WhyHeld.NOT_REACHED, WhyHeld.COLLECTED, WhyHeld.LEFT_BY_LAYERS)
"""What is named, and is no cause."""
WITHOUT_BACKWARD = (WhyHeld.NO_BACKWARD, WhyHeld.NO_OPTIMIZER)
"""Graphs that no backward pass needs."""
OF_MODEL = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE, Category.GRADIENT)
"""Weights and what belongs to them."""


class HeldGroup(NamedTuple):
    """Blocks that one change of the code gives back."""

    what: WhyHeld
    holder: str
    """Variable, such as ``losses``, or several that hold the same; empty where no variable holds the blocks."""
    rows: tuple[int, ...]
    size: int
    """Allocated bytes."""
    blocks: int
    """Blocks of the most frequent place: about as many calls are kept."""
    each: int
    """Allocated bytes that one call or step adds, for `WhyHeld.GROWS`."""
    layer: str
    line: str
    """Layer and ``file:line`` that allocated the largest block."""
    is_container: bool = False
    """Whether the variable is a list or another container."""
