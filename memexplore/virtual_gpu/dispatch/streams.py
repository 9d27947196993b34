"""Know the current CUDA stream of each thread, by number: each has its own pool of free blocks in the allocator.

A node of the backward pass runs on the stream that was current when its forward made it
(torch/csrc/autograd/engine.cpp), unless code inside of it chooses another one.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from memexplore.torch_internals.tensors import current_autograd_node, next_sequence_number, sequence_number_of

DEFAULT = 0
"""Number of the default stream."""
_OF_A_POOL = 32
"""kStreamsPerPool in c10/cuda/CUDAStream.cpp: a program with more streams of a priority gets the first ones again."""
_PRIORITIES = 4
"""max_stream_priorities there: 0 and three higher ones, below 0."""
_MAX_SPANS = 10_000
"""Nodes of older spans count as those of the default stream."""


class _Span(NamedTuple):
    """Autograd nodes that were made on a stream other than the default one, as a range of sequence numbers."""

    first: int
    end: int
    stream: int


class _Thread(threading.local):
    """What a thread has chosen."""

    stream: int | None = DEFAULT
    """None while the autograd engine chooses the stream of each node."""
    since = 0
    """Sequence number of the next autograd node when the stream was chosen."""
    generation = 0

    def __init__(self) -> None:
        self.spans: list[_Span] = []


_thread = _Thread()
_made = [itertools.count() for _ in range(_PRIORITIES)]
_generation = 0
"""Number of the virtual GPU: what a thread chose on an earlier one does not hold."""


def start() -> None:
    """Begin with the default stream in every thread, and with no other stream made."""
    global _generation, _made
    _generation += 1
    _made = [itertools.count() for _ in range(_PRIORITIES)]


def new(priority: int = 0) -> int:
    """Return the number of a new stream of a priority, 0 or below; the numbers of a priority repeat after 32."""
    kind = min(max(-priority, 0), _PRIORITIES - 1)
    return 1 + kind * _OF_A_POOL + next(_made[kind]) % _OF_A_POOL


def current() -> int:
    """Return the number of the stream on which the calling thread requests memory."""
    if _thread.generation != _generation:
        _renew()
    stream = _thread.stream
    return _of_running_node() if stream is None else stream


def make_current(stream: int | None) -> int | None:
    """Make a stream current in the calling thread, None for the one of each autograd node; return the one before."""
    if _thread.generation != _generation:
        _renew()
    before, since = _thread.stream, _thread.since
    _thread.stream, _thread.since = stream, next_sequence_number()
    if before and since != _thread.since:
        del _thread.spans[:-_MAX_SPANS]
        _thread.spans.append(_Span(since, _thread.since, before))
    return before


def by_engine(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, the entry of the autograd engine, in which each node has the stream of its forward."""

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        before = make_current(None)
        try:
            return run(*args, **kwargs)
        finally:
            make_current(before)

    return run_backward


def _renew() -> None:
    _thread.generation, _thread.stream, _thread.since = _generation, DEFAULT, 0
    _thread.spans.clear()


def _of_running_node() -> int:
    spans = _thread.spans
    node = current_autograd_node() if spans else None
    if node is None:
        return DEFAULT
    number = sequence_number_of(node)
    index = bisect.bisect_right(spans, number, key=lambda span: span.first) - 1
    return spans[index].stream if index >= 0 and number < spans[index].end else DEFAULT
