"""Watch the fits of a trainer for its callback, and end each watch whatever ends the fit.

A trainer may end a fit without calling its callbacks, as where an exception or an interrupt ends it. So while a
callback exists, the methods of the trainers' classes that fit models are replaced by ones that end the fit in any case.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from memexplore.run.programs import batches

if TYPE_CHECKING:
    from memexplore.live.live import Live
    from memexplore.run.programs.step import Step

Method = Callable[..., Any]
_open: Fits | None = None
"""The callback whose fit is being watched."""
_fitting: Any = None
_callbacks: weakref.WeakSet[Fits] = weakref.WeakSet()
_replaced: list[tuple[type, str, Method, Method]] = []
"""Class, name, original and replacement of each method, the class derived last in front."""


class Fits:
    """Base class of the callbacks: one after the other, their fits are watched."""

    methods: tuple[str, ...] = ()
    """Names of the methods of trainers that fit a model."""

    @staticmethod
    def trainers() -> tuple[type, ...]:
        """Return the classes of trainers."""
        return ()

    def __init__(
        self,
        *,
        device: str | torch.device | None = None,
        first: int = 3,
        every: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        step: Step | None = None,
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = {
            "device": device,
            "first": first,
            "every": every,
            "folder": folder,
            "step": step,
        }
        self._fits = 0
        self._live: Live | None = None
        self._watching: AbstractContextManager[Live] | None = None
        self._handled: BaseException | None = None
        """The exception that was being handled when the fit began."""
        self._undo: list[functools.partial[None]] = []
        """Restore attributes of the trainer."""
        _callbacks.add(self)
        weakref.finalize(self, _restore_methods).atexit = False
        _replace_methods(self.trainers(), self.methods)

    @property
    def live(self) -> Live:
        """The watched fit, also after its end; of several fits the last.

        Raises RuntimeError before the first one.
        """
        if self._live is None:
            raise RuntimeError("no fit has begun yet: read `live` while the trainer trains, or afterwards")
        return self._live

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process watches fits of its own.
        return _made, (type(self), self._options)

    def __deepcopy__(self, memo: Any) -> Any:
        return _made(type(self), self._options)

    def begin(self, models: Any, optimizer: Any) -> None:
        """Begin to watch a fit; an earlier one that has not ended ends first."""
        from memexplore.jupyter.watching import watch

        global _open
        self.end()
        self._fits += 1
        self._handled = _handled()
        options = dict(self._options)
        if options["folder"] is not None and self._fits > 1:
            options["folder"] = f"{os.fspath(options['folder'])}-{self._fits}"
        # Noted first, so that an interrupt while it begins leaves something to end.
        self._watching, _open = watch(models, optimizer, **options), self
        self._live = self._watching.__enter__()

    def end(self) -> None:
        """End the fit, by the exception that is being handled if there is one. It may be called twice."""
        global _open
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        watching = self._watching
        if watching is not None:
            error = _handled()
            if error is None or error is self._handled:
                watching.__exit__(None, None, None)
            else:
                watching.__exit__(type(error), error, error.__traceback__)
        self._watching = self._handled = None
        if _open is self:
            _open = None

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Give an instance another method until the fit ends."""
        self._undo.append(functools.partial(_restore, owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def restore(self, owner: Any) -> None:
        """Give an instance back what `replace` replaced last."""
        for undo in reversed(self._undo):
            if undo.args[0] is owner:
                undo()
                self._undo.remove(undo)
                return


_MISSING = object()


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is not _MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def share_of(part: Any, batch: Any) -> float:
    """Return the share of the samples of a batch that are in a part of it."""
    counts = [next((len(tensor) for tensor in batches.tensors(value) if tensor.dim()), 0) for value in (part, batch)]
    return counts[0] / counts[1] if counts[1] else 1.0


def _handled() -> BaseException | None:
    """Return the exception that is being handled, not the one that closes a generator meanwhile."""
    error = sys.exc_info()[1]
    while isinstance(error, GeneratorExit):
        error = error.__context__
    return error


def _made(kind: type[Fits], options: dict[str, Any]) -> Fits:
    return kind(**options)


# -- methods of the trainers


class _Ending(io.IOBase):
    """Block at whose end a fit ends that began in it.

    Its `__exit__` is written in C, as that of `memexplore.live.watch.Watching`, so an interrupt leaves no fit open.
    """

    def __init__(self, trainer: Any) -> None:
        self._block = _ending(trainer)
        self.close = self._block.close  # type: ignore[method-assign]
        next(self._block)


def _ending(trainer: Any) -> Generator[None, None, None]:
    global _fitting
    before = _fitting, _open
    try:
        try:
            _fitting = trainer
            yield
        finally:
            _leave(*before)
    finally:
        _leave(*before)


def _leave(trainer: Any, fits: Fits | None) -> None:
    global _fitting
    _fitting = trainer
    if _open is not None and _open is not fits:
        _open.end()


def fitting() -> Any:
    """Return the trainer whose method runs, None without one."""
    return _fitting


def _that_ends(method: Method) -> Method:
    @functools.wraps(method)
    def fit(*args: Any, **kwargs: Any) -> Any:
        with _Ending(args[0] if args else None):
            return method(*args, **kwargs)

    return fit


def _replace_methods(trainers: tuple[type, ...], names: tuple[str, ...]) -> None:
    """Replace methods of trainers and of classes derived from them, where they are not replaced yet."""
    known = {(owner, name) for owner, name, _, _ in _replaced}
    for owner in (derived for trainer in trainers for derived in _derived(trainer)):
        for name in names:
            method = vars(owner).get(name)
            if inspect.isfunction(method) and (owner, name) not in known:
                replacement = _that_ends(method)
                _replaced.insert(0, (owner, name, method, replacement))
                setattr(owner, name, replacement)


def _derived(kind: Any) -> Iterator[type]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _derived(derived)


def _restore_methods() -> None:
    """Restore the methods when no callback is left."""
    while _replaced and not list(_callbacks):
        owner, name, method, replacement = _replaced.pop(0)
        # What another library has put in its place calls ours, which does nothing without a callback.
        if vars(owner).get(name) is replacement:
            setattr(owner, name, method)


def missing(library: str, install: str) -> ImportError:
    """Return the error where a library is not installed."""
    return ImportError(f"{library} is not installed: pip install {install}")
