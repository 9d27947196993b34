"""`LightningCallback`: a callback of Lightning's `Trainer` that watches its fits.

Lightning has two package names, `lightning.pytorch` and `pytorch_lightning`, with classes of their own. The callback is
one of every package that is imported, else of the one that is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from memexplore.integrations.fits import Fits, missing, share_of

if TYPE_CHECKING:
    from memexplore.live.live import Live

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _packages() -> list[ModuleType]:
    """Return the packages of Lightning that are imported, else the first one that can be."""
    if _imported():
        return _imported()
    for name in _NAMES:
        try:
            return [importlib.import_module(name)]
        except ImportError as error:
            reason = error
    raise missing("Lightning", "lightning") from reason


def _imported() -> list[ModuleType]:
    return [package for package in map(sys.modules.get, _NAMES) if package is not None]


class LightningCallback(Fits, *(package.Callback for package in _packages())):  # type: ignore[misc]
    """Watch the fits of a Lightning `Trainer`: ``Trainer(..., callbacks=[LightningCallback()])``.

    The options are those of `memexplore.watch`. The knobs of `live` work: precision (but for fp16) unless the trainer
    has one of its own, and accumulation with automatic optimization in one process. Steps are counted from the begin of
    `fit()`, resumed ones too. A second fit writes to ``FOLDER-2``.
    """

    methods = ("fit",)

    @staticmethod
    def trainers() -> tuple[type, ...]:
        """Return the classes of trainers of all packages that are imported by now."""
        return tuple(package.Trainer for package in _imported())

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        optimizers: list[torch.optim.Optimizer] = trainer.optimizers
        # Each of several may end a step, as in `trainer.global_step`.
        self.begin(pl_module, optimizers[0] if len(optimizers) == 1 else None)
        self._follow(trainer, pl_module)

    def _follow(self, trainer: Any, module: Any) -> None:
        """Let the trainer follow the knobs precision and accumulation."""
        live, strategy, plugin = self.live, trainer.strategy, trainer.precision_plugin
        if plugin.precision == "32-true":
            for name in ("train_step_context", "val_step_context"):
                self.replace(plugin, name, _with_autocast(getattr(plugin, name), live))
            live.follows("precision")
        if not module.automatic_optimization or trainer.world_size > 1 or len(trainer.optimizers) != 1:
            return
        train = strategy.training_step

        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            output: Any = None
            total: torch.Tensor | None = None
            for part in live.micro_batches(batch):
                if part is batch:
                    return train(batch, *args, **kwargs)
                loss = _loss(output)
                if loss is not None:
                    self._backward(trainer, module, loss, args[0] if args else 0, is_first=total is None)
                    total = loss.detach()
                output = loss = None
                output = _weighed(train(part, *args, **kwargs), share_of(part, batch), total)
            return output

        self.replace(strategy, "training_step", training_step)
        live.follows("accumulation")

    def _backward(self, trainer: Any, module: Any, loss: torch.Tensor, index: int, is_first: bool) -> None:
        """Run the backward pass of a part of a batch; Lightning itself runs that of the last part."""
        optimizer, batches = trainer.optimizers[0], trainer.accumulate_grad_batches
        if is_first and index % batches == 0:
            # Lightning would do it after the last part.
            module.optimizer_zero_grad(trainer.current_epoch, index, optimizer)
            self.replace(module, "optimizer_zero_grad", lambda *args, **kwargs: self.restore(module))
        trainer.strategy.backward(loss / batches, optimizer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End watching."""
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End watching by an exception."""
        self.end()


def _with_autocast(context: Callable[[], Any], live: Live) -> Callable[[], Any]:
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with context(), live.autocast():
            yield

    return both


def _loss(output: Any) -> torch.Tensor | None:
    """Return the loss of what `training_step` returns: a tensor, a mapping with `loss`, or None."""
    loss: torch.Tensor | None = output.get("loss") if isinstance(output, Mapping) else output
    return loss


def _weighed(output: Any, share: float, total: torch.Tensor | None) -> Any:
    """Return an output whose loss is weighed, with the value of the losses of the parts before it added."""
    loss = _loss(output)
    if loss is None:
        return output
    weighed = loss * share if total is None else loss * share + total
    return {**output, "loss": weighed} if isinstance(output, Mapping) else weighed
