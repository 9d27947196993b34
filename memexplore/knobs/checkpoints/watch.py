"""What becomes of modules while they run under a knob: whether each was called, and with gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memexplore.knobs.checkpoints.recompute import versions
from memexplore.knobs.report import Applied, LeftOut


class Watch:
    """Notes by name which modules ran so that the knob could work on them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.notes: dict[str, None] = {}
        """What a person has to know, in order."""
        self.apart: dict[str, None] = {}
        """Blocks that begin a segment of their own, in order."""
        self._looked: set[str] = set()
        self._worked: set[str] = set()
        self._without_gradients: set[str] = set()

    def computes(self, *names: str) -> bool:
        """Note a call; whether something is kept for backward at all."""
        (self._worked if torch.is_grad_enabled() else self._without_gradients).update(names)
        return torch.is_grad_enabled()

    @contextlib.contextmanager
    def buffers_of(self, name: str, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Note whether the module of a name writes to buffers in the block, the first time that it runs."""
        if name in self._looked:
            yield
            return
        self._looked.add(name)
        before = versions(modules)
        yield
        if before != versions(modules):
            self.notes[
                f"{name} changes buffers of its own when it runs, and does so again in backward: gradients may differ, "
                "as with plain torch.utils.checkpoint."
            ] = None

    def left_out(self) -> tuple[LeftOut, ...]:
        """Those that nothing was done with, and why."""
        return tuple(
            LeftOut(
                name,
                "it ran without gradients, so nothing is kept for backward"
                if name in self._without_gradients
                else "it was not called",
            )
            for name in self.names
            if name not in self._worked
        )

    def settle(self, text: str, applied: Applied) -> Applied:
        """What was said before the run put right: `text` has a place for the number of modules that it worked on."""
        left_out = self.left_out()
        before, now = (text.format(count) for count in (len(self.names), len(self.names) - len(left_out)))
        texts = tuple(now if given == before else given for given in applied.texts)
        if self.apart:
            names = ", ".join(list(self.apart)[:3]) + ", …" * (len(self.apart) > 3)
            self.notes[
                f"These begin a segment of their own, not called with the result of the block before: {names}."
            ] = None
        return applied._replace(texts=texts, left_out=applied.left_out + left_out, notes=(*applied.notes, *self.notes))


def replace_forward(undo: contextlib.ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module another `forward` until `undo` is closed."""
    before = module.__dict__.get("forward")

    def put_back() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before

    module.__dict__["forward"] = forward
    undo.callback(put_back)
