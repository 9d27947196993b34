"""Read the events of a pickled snapshot as columns, with a regular expression.

Nearly all of a snapshot is events: dictionaries with the same keys in the same order. After `unpickle` has read one of
them, an `EventPattern` made from it reads the others, faster than Python's own unpickler and in a tenth of the memory
of a million dictionaries.
"""

from __future__ import annotations

import array
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from memexplore.snapshot.plain import EVENT_COLUMNS, PlainData

_REFERENCE = rb"h.|j.{4}"
_INTEGER = rb"K.|M..|J.{4}|" + b"|".join(rb"\x8a" + re.escape(bytes([n])) + b".{%d}" % n for n in range(1, 9))
_FRAMES = rb"(?:%s)|\]\x94(?:\((?:(?:j....)++|(?:h.)++)++e|(?:%s)a)?" % (_REFERENCE, _REFERENCE)
_OTHER = rb"(?:%s|%s|[N\x88\x89]|(?:%%s)\x94)" % (_REFERENCE, _INTEGER)
_PAIR = rb"(?:%s){2}\x86" % _INTEGER
_MEMOIZED_PAIR = re.compile(_PAIR + rb"\x94", re.DOTALL).fullmatch
PATTERNS = {"action": _REFERENCE, "frames": _FRAMES} | dict.fromkeys(("addr", "size", "stream", "time_us"), _INTEGER)


class EventPattern:
    """A matcher for events with given keys, which the pickle writes as references to earlier texts.

    The values from the first text or list of frames on, the tail, are equal in many events and are decoded once.
    """

    def __init__(
        self,
        data: bytes,
        plain: PlainData,
        memo: list[Any],
        keys: tuple[str, ...],
        text_lengths: tuple[int, ...],
        references: dict[str, list[int]],
    ) -> None:
        self.data = data
        self.plain = plain
        self.memo = memo
        in_tail = (at for at, key in enumerate(keys) if key not in PATTERNS or key == "frames")
        head = next(in_tail, len(keys))
        self.head = {name: at for at, name in enumerate(keys[:head]) if name in EVENT_COLUMNS}
        self.tail = {name: at for at, name in enumerate(keys[head:]) if name in EVENT_COLUMNS}
        self.match, self.match_tail = _compile(keys, head, text_lengths, references)
        self.integers = _Cache(_integer)
        self.actions = _Cache(lambda text: self.plain.action_number(_dereference(text, self.memo)))
        self.stacks = _Cache(self._stack)
        self.memo_entries = _Cache(self._memo_entries)

    def read_events(self, position: int, stack: list[Any], memo: list[Any]) -> int:
        """Read events from a position on, push their rows on the stack and return the position behind them."""
        if self.match is None:
            return position
        match, data, memo_entries = self.match, self.data, self.memo_entries
        matches: list[tuple[bytes, ...]] = []
        add_row, extend_memo = matches.append, memo.extend
        while (event := match(data, position)) is not None:
            values = event.groups()
            add_row(values)
            extend_memo(memo_entries[values[-1]])
            position = event.end()
        if matches:
            begin = len(self.plain.columns["action"])
            self._decode(list(zip(*matches, strict=True)), len(matches))
            stack.extend(range(begin, begin + len(matches)))
        return position

    def _decode(self, values: list[tuple[bytes, ...]], count: int) -> None:
        """Append columns of pickled values to the columns of events."""
        columns, head, tails = self.plain.columns, self.head, values[-1]
        columns["action"].extend(map(self.actions.__getitem__, values[head["action"]]))
        columns["frames"].extend(map(self.stacks.__getitem__, tails))
        for name, missing in (("addr", -1), ("size", 0), ("stream", 0), ("time_us", -1)):
            if name in self.tail:
                texts: tuple[bytes, ...] = tuple(self._tail_values(tail)[self.tail[name]] for tail in tails)
            elif name in head:
                texts = values[head[name]]
            else:
                columns[name].extend([missing] * count)
                continue
            numbers = _long1_column(texts) if name in ("addr", "time_us") else None
            columns[name].extend(map(self.integers.__getitem__, texts) if numbers is None else numbers)

    def _tail_values(self, tail: bytes) -> tuple[bytes, ...]:
        """Return the pickled values of a tail."""
        assert self.match_tail is not None
        matched = self.match_tail(tail)
        assert matched is not None
        return matched.groups()

    def _memo_entries(self, tail: bytes) -> tuple[Any, ...]:
        """Return what an event adds to the memo: None for itself and for tuples, texts, bytes for a list of frames."""
        entries: list[Any] = [None]
        for text in self._tail_values(tail):
            if text[0] == 0x5D:
                entries.append(text)
            elif text[0] == 0x8C:
                entries.append(text[2:-1].decode())
            elif _MEMOIZED_PAIR(text) is not None:
                entries.append(None)
        return tuple(entries)

    def _stack(self, tail: bytes) -> int:
        at = self.tail.get("frames")
        if at is None:
            return -1
        text = self._tail_values(tail)[at]
        if text[0] != 0x5D:
            return self.plain.stack_number(_dereference(text, self.memo))
        number = self.plain.stack_of_text.get(text)
        if number is None:
            references = re.findall(rb"h.|j.{4}", text[2:], re.DOTALL)
            frames = [_dereference(reference, self.memo) for reference in references]
            number = self.plain.stack_of_text[text] = self.plain.stack_number(frames)
        return number


class _Cache(dict[Any, Any]):
    """Results of a function, by its argument."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def __missing__(self, text: Any) -> Any:
        self[text] = value = self.function(text)
        return value


_Match = Callable[..., re.Match[bytes] | None]


def _compile(
    keys: tuple[str, ...], head: int, text_lengths: tuple[int, ...], positions: dict[str, list[int]]
) -> tuple[_Match | None, _Match | None]:
    """Return the matchers of an event with these keys and texts of these lengths, and of its tail; None without keys.

    The keys must be in the memo, at the given positions.
    """
    texts = [re.escape(bytes((0x8C, length))) + rb"[\x00-\x7f]{%d}" % length for length in text_lengths]
    other = _OTHER % b"|".join([*texts, _PAIR])
    named = []
    for key in keys:
        references = [_reference(index) for index in positions.get(key, ())]
        if not references or "action" not in keys[:head]:
            return None, None
        named.append(b"(?:" + b"|".join(map(re.escape, references)) + b")")
    first = b"".join(name + b"(" + PATTERNS[key] + b")" for name, key in zip(named[:head], keys[:head], strict=True))
    values = [PATTERNS.get(key, other) for key in keys[head:]]
    rest = list(zip(named[head:], values, strict=True))
    event = rb"\}\x94\(" + first + b"(" + b"".join(name + b"(?:" + value + b")" for name, value in rest) + b")u"
    tail = b"".join(name + b"(" + value + b")" for name, value in rest)
    return re.compile(event, re.DOTALL).match, re.compile(tail, re.DOTALL).fullmatch


def _reference(index: int) -> bytes:
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


def _dereference(reference: bytes, memo: list[Any]) -> Any:
    return memo[reference[1] if reference[0] == 0x68 else int.from_bytes(reference[1:], "little")]


def _long1_column(texts: tuple[bytes, ...]) -> array.array[int] | None:
    """Return the numbers of texts that are all LONG1 of one length, as addresses and times are; otherwise None."""
    length = len(texts[0])
    joined = np.frombuffer(b"".join(texts), dtype=np.uint8)
    if not 3 <= length <= 9 or len(joined) != length * len(texts):
        return None
    digits = joined.reshape(-1, length)
    if not ((digits[:, 0] == 0x8A).all() and (digits[:, 1] == length - 2).all() and (digits[:, -1] < 0x80).all()):
        return None
    wide = np.zeros((len(texts), 8), dtype=np.uint8)
    wide[:, : length - 2] = digits[:, 2:]
    return array.array("q", wide.view("<i8").astype(np.int64).tobytes())


def _integer(text: bytes) -> int:
    kind = text[0]
    if kind == 0x4A or kind == 0x8A:  # J, LONG1
        return int.from_bytes(text[1:] if kind == 0x4A else text[2:], "little", signed=True)
    return int.from_bytes(text[1:], "little")
