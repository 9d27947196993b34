"""Name the streams of a tape with blocks of more than one stream."""

from __future__ import annotations

import numpy as np

from memexplore.analysis.curves import cached_by_tape
from memexplore.tape import Action, Tape

_LARGEST_NUMBER = 1 << 16
"""A snapshot of PyTorch has the address of a stream instead of its number."""


@cached_by_tape
def has_streams(tape: Tape) -> bool:
    """Return whether blocks of more than one stream are on a tape.

    >>> from memexplore.tape import Meta, Source
    >>> has_streams(Tape.from_columns({"address": [0, 512], "stream": [0, 7]}, meta=Meta(Source.MEASURED, "cuda:0")))
    True
    """
    of_blocks = tape.stream[np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING))]
    return bool(len(of_blocks)) and bool((of_blocks != of_blocks[0]).any())


def stream_text(stream: int) -> str:
    """Return a stream in words.

    >>> stream_text(0), stream_text(7), stream_text(0x55D0C0DE)
    ('default stream', 'stream 7', 'stream 0x55d0c0de')
    """
    if not stream:
        return "default stream"
    return f"stream {stream if 0 <= stream < _LARGEST_NUMBER else hex(stream)}"
