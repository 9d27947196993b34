"""Keep the state of a recording that belongs to one thread: its open module calls and its phase.

Rows of every thread have the module, line and phase of that thread. Steps are counted, and the beginnings of phases
marked, in one thread at a time, the leading one (`Threads.leads`).
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from memexplore.recorder.stacks import Outer
from memexplore.tape import Phase
from memexplore.torch_internals.modules import weights_of
from memexplore.torch_internals.tensors import forward_gradients_enabled

_NESTED = 4
"""Nodes that are looked at, the asked one included."""
_is_grad_enabled = torch.is_grad_enabled  # bound once, because each recorded block asks


class ThreadState:
    """Open module calls, phase and stack of one thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, Outer, int, int]] = []
        """Open calls: module, number, stack, id, and the call outside of the autograd function that runs it."""
        self.enabled = True
        """Whether gradients were enabled when code outside the forward of an autograd function last ran."""
        self.phase = int(Phase.OTHER)
        self.in_backward = False
        """Whether a hook of the backward pass called the optimizer that is stepping."""
        self.stack = -2
        self.op_number = -1
        """Number of the running op, where ops have numbers (`op_numbers`)."""
        self.sequence = -1
        """Number of the autograd node that the thread makes next, as the last op saw it."""
        self.forwards: dict[int, tuple[int, int, Any]] = {}
        """Number of a node -> module, stack and op of the forward that made it."""
        self.step_from = -1
        """Number of the first node that the step after the last update of an optimizer may have made."""
        self.optimizer: Outer | None = None
        """The stack outside of the optimizer that steps; also after a step that raised."""
        self.stepping: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer that steps; also after a step that raised."""

    def forget_forwards(self) -> None:
        """Remove what made the nodes of steps before the last update of an optimizer."""
        # A list first: the thread may add to it meanwhile.
        entries = list(self.forwards.items())
        self.forwards = {number: entry for number, entry in entries if number >= self.step_from}

    def made_by(self, node: Any, number: int) -> tuple[int, int, Any] | None:
        """Return module, stack and op of the forward that made a node, None if they are not known.

        The code of a tensor around others, such as DTensor's, may make nodes before it runs the first op on the tensors
        inside: then that op has noted them, and not the node of torch's own outside. After an op in place on a view a
        node is made that runs the op's backward on the part of the gradient.
        """
        entry = self.forwards.get(number)
        if entry is None:
            name = node.name()
            numbers = range(0)
            if name.endswith("CopySlices"):
                numbers = range(number - 1, number - _NESTED, -1)
            elif name[-1].isdigit():  # `NllLossBackward0`; of a function of Python `ScaleBackward`
                numbers = range(number + 1, number + _NESTED)
            return next((near for nearby in numbers if (near := self.forwards.get(nearby)) is not None), None)
        return entry

    def gradients(self, node: Any) -> bool:
        """Return whether gradients are enabled; in the forward of an autograd function, whether they were at its call.

        Such a forward, that of a re-entrant checkpoint included, runs without gradients and, unlike `no_grad`, without
        forward-mode gradients (torch/csrc/autograd/python_function.cpp). So does inference mode.
        """
        if _is_grad_enabled():
            self.enabled = True
            return True
        return self.without_gradients(node)

    def without_gradients(self, node: Any) -> bool:
        """Return what `gradients` does where gradients are not enabled now."""
        if forward_gradients_enabled() or torch.is_inference_mode_enabled():
            self.enabled = False
            return False
        # In backward a forward runs only as a recomputation, which calls modules.
        return self.enabled and (node is None or bool(self.calls))


class _Here(threading.local):
    def __init__(self, states: list[ThreadState]) -> None:
        self.state = ThreadState()
        states.append(self.state)


class Threads:
    """The states of the threads of one recording; the thread that makes it leads first."""

    def __init__(self) -> None:
        self.states: list[ThreadState] = []
        self.local = _Here(self.states)
        """Has the `state` of the calling thread."""
        self._leader = self.local.state
        self.lender: ThreadState | None = None
        """The thread that led until the autograd engine's thread, which runs its backward pass, took over."""

    @property
    def here(self) -> ThreadState:
        """The state of the calling thread."""
        return self.local.state

    def leads(self, here: ThreadState, trains: bool) -> bool:
        """Return whether the calling thread leads; a thread that trains takes over while the leader is in no module."""
        if here is not self._leader and trains and not self._leader.calls:
            self._leader, self.lender = here, None
        return here is self._leader

    def leads_backward(self, here: ThreadState) -> bool:
        """Return whether the calling thread, which runs a backward pass, leads; it takes over as in training."""
        leader = self._leader
        if self.leads(here, trains=True) and here is not leader:
            self.lender = leader
        return here is self._leader

    def return_to(self, here: ThreadState) -> None:
        """Let a thread lead again whose backward pass another thread has run."""
        self.lender = None
        if not self._leader.calls:
            self._leader = here
            here.phase = int(Phase.BACKWARD)

    def leads_call(self, here: ThreadState, module: torch.nn.Module) -> bool:
        """Return whether the calling thread leads when it calls a module outside of any other."""
        if here is self._leader:
            return True
        trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights_of(module))
        return self.leads(here, trained)

    def close_calls(self) -> list[int]:
        """Close the calls that are open in any thread, and return their numbers."""
        numbers = [call for state in self.states for _, call, *_ in state.calls]
        for state in self.states:
            state.calls.clear()
        return numbers
