"""Say how a recorded program ended: its `Ending`, and the error in one line of text."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from memexplore.analysis.tables import user_line
from memexplore.tape import Ending, Frame
from memexplore.text.untrusted import clean_text, encodable

_LONGEST = 300
"""Letters of a message; longer ones are cut, as the traceback has all of it."""


class End(NamedTuple):
    """How a program ended, and the error that ended it as text."""

    ending: Ending
    error: str = ""


COMPLETED = End(Ending.COMPLETED)


def end_of(error: BaseException | None) -> End:
    """Return the end of a program that raised an exception, or that came to its end (None).

    `sys.exit()` ends the program without an error, `sys.exit(1)` with one. An error raised `from` an out-of-memory
    error is an out-of-memory error, and so is `sys.exit(1)` in its `except` block.

    >>> end_of(None).ending.value, end_of(SystemExit(0)).ending.value
    ('completed', 'completed')
    >>> end_of(ValueError("too small"))
    End(ending=<Ending.ERROR: 'error'>, error='ValueError: too small')
    """
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return COMPLETED
    if isinstance(error, KeyboardInterrupt):
        return End(Ending.INTERRUPTED, _text(error))
    return End(Ending.OUT_OF_MEMORY if out_of_memory_error(error) is not None else Ending.ERROR, _text(error))


def out_of_memory_error(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """Return the out-of-memory error that an exception is, or that it reports; None for another exception.

    >>> out_of_memory_error(ValueError("too small")) is None
    True
    """
    links = links_to_out_of_memory(error)
    return links[-1] if links else None  # type: ignore[return-value]


def links_to_out_of_memory(error: BaseException | None) -> list[BaseException]:
    """Return an exception and those that it reports, the last an out-of-memory error; nothing for another exception."""
    links: list[BaseException] = []
    while error is not None and all(error is not link for link in links):
        links.append(error)
        reported = _reported(error)
        if isinstance(error, torch.OutOfMemoryError) and not isinstance(reported, torch.OutOfMemoryError):
            return links
        error = reported
    return []


_REQUEST = "Tried to allocate"
"""Words of an error of the allocator, which a program may repeat in an error of its own."""


def _reported(error: BaseException) -> BaseException | None:
    """Return the error that an exception was raised from.

    `sys.exit(1)`, and an out-of-memory error that the program makes itself, report the error that is being handled.
    """
    handled = error.__context__
    is_made = False
    if isinstance(error, torch.OutOfMemoryError) and isinstance(handled, torch.OutOfMemoryError):
        text = _message(error)
        is_made = _REQUEST not in text or _message(handled) in text
    return error.__cause__ or (handled if is_made or isinstance(error, SystemExit) else None)


def class_name(error: BaseException) -> str:
    """Return the name of an error's class, with its module where code needs it.

    >>> class_name(ValueError()), class_name(torch.OutOfMemoryError())
    ('ValueError', 'torch.OutOfMemoryError')
    """
    name, module = type(error).__qualname__, type(error).__module__
    return name if module in ("builtins", "__main__") else f"{module}.{name}"


def _text(error: BaseException) -> str:
    """Return type and message of an error in one line, with the user's line that raised it."""
    name = class_name(error)
    message = clean_text(next((line for line in map(str.strip, _message(error).splitlines()) if line), ""), _LONGEST)
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        name, message = f"exit status {error.code}", ""
    text = f"{name}: {message}" if message else name
    line = user_line(_frames(error))
    return f"{text} ({line})" if line and line not in text else text


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        # As in a traceback: the error that ended the program counts, not one of its own `__str__`.
        return "<exception str() failed>"


def _frames(error: BaseException) -> tuple[Frame, ...]:
    """Return the frames of an error's traceback, innermost first."""
    walked = traceback.walk_tb(error.__traceback__)
    frames = [Frame(encodable(frame.f_code.co_filename), line, frame.f_code.co_qualname) for frame, line in walked][
        ::-1
    ]
    # Code that a library generates, as dataclasses do, has this name, and so has `python -c`.
    return tuple(frame for frame in frames if frame.filename != "<string>") or tuple(frames)


def watch_threads(report: Callable[[End], None]) -> Callable[[], None]:
    """Report the end of each thread that an exception ends, besides `threading.excepthook`; return the undoing."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            end = end_of(args.exc_value)
            name = f"the thread {args.thread.name}" if args.thread is not None else "a thread"
            report(end._replace(error=f"{end.error} in {name}"))
        before(args)

    threading.excepthook = hook
    return partial(_restore, hook, before)


def _restore(hook: Callable[..., object], before: Callable[..., object]) -> None:
    # A hook that the program installed meanwhile calls this one or replaces it: it stays.
    if threading.excepthook is hook:
        threading.excepthook = before
