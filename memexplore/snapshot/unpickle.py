"""A reader for pickles of plain data that never looks up a class and bounds every size: bytes in, `PlainData` out.

Python's own unpickler runs code that a file asks for; this one refuses such a file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from memexplore.allocator.gc_pause import gc_paused
from memexplore.snapshot.events import PATTERNS, EventPattern
from memexplore.snapshot.plain import PlainData
from memexplore.texts import shown

_REFUSED = {
    **dict.fromkeys(b"ciob\x81\x92\x93R", "asks for a class or a function"),
    **dict.fromkeys(b"\x82\x83\x84PQ", "asks for an object that is not in the file"),
    **dict.fromkeys(b"\x8f\x90\x91\x96\x97\x98", "holds sets or buffers"),
}

_DEEPEST = 1000
"""Lists, tuples and dictionaries inside each other; a snapshot has 6."""
_MOST_FIELDS = 24
"""Fields of an event that a pattern reads; PyTorch writes up to 10."""
_MOST_PATTERNS = 40
_REFERENCES = 8
_LARGEST_KEY = 1 << 60


def unpickle(data: bytes) -> PlainData:
    """Read a pickle of protocol 0 to 5 that holds dictionaries, lists, tuples, texts and numbers only.

    >>> import pickle
    >>> unpickle(pickle.dumps({"segments": [1, (2.5, None)]})).root
    {'segments': [1, (2.5, None)]}

    Raises ValueError with the reason for a pickle that contains anything else, ends early or is damaged.
    """
    reader = _Reader(data)
    try:
        with gc_paused():
            return reader.read()
    except (IndexError, struct.error, KeyError):
        raise ValueError("the pickle ends early or is damaged") from None
    except (TypeError, AttributeError, OverflowError, UnicodeError) as error:
        raise ValueError(f"the pickle is damaged: {error}") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.plain = PlainData()
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] | dict[int, Any] = []
        self.pattern: EventPattern | None = None
        self.patterns: dict[tuple[tuple[str, ...], tuple[int, ...]], EventPattern] = {}
        self.text_lengths = {0}
        self.references: dict[str, list[int]] = {}
        """The last positions of each text among the first `indexed` entries of the memo."""
        self.indexed = 0
        # In a real pickle a container takes some bytes; without this bound each byte could request 70.
        self.containers_left = len(data) // 6 + 10_000

    def read(self) -> PlainData:
        data, stack, marks = self.data, self.stack, self.marks
        unpack_int, unpack_unsigned = struct.Struct("<i").unpack_from, struct.Struct("<I").unpack_from
        position = 0
        memo: Any = self.memo
        while True:
            code = data[position]
            position += 1
            if code == 0x6A:  # j, LONG_BINGET
                stack.append(memo[unpack_unsigned(data, position)[0]])
                position += 4
            elif code == 0x68:  # h, BINGET
                stack.append(memo[data[position]])
                position += 1
            elif code == 0x94:  # MEMOIZE
                if type(memo) is dict:
                    memo[len(memo)] = stack[-1]
                else:
                    memo.append(stack[-1])
            elif code == 0x7D:  # }, EMPTY_DICT
                if self.pattern is not None and type(memo) is list:
                    after = self.pattern.read_events(position - 1, stack, memo)
                    if after != position - 1:
                        position = after
                        continue
                self._count()
                stack.append({})
            elif code == 0x28:  # (, MARK
                marks.append(len(stack))
                if len(marks) > _DEEPEST:
                    raise ValueError("it is nested deeper than a snapshot")
            elif code == 0x4B:  # K, BININT1
                stack.append(data[position])
                position += 1
            elif code == 0x4D:  # M, BININT2
                stack.append(data[position] | data[position + 1] << 8)
                position += 2
            elif code == 0x4A:  # J, BININT
                stack.append(unpack_int(data, position)[0])
                position += 4
            elif code == 0x8A:  # LONG1
                length = data[position]
                if length > 16:
                    raise ValueError("the pickle holds a number of more than 128 bits")
                position += 1 + length
                stack.append(int.from_bytes(data[position - length : position], "little", signed=True))
            elif code == 0x75:  # u, SETITEMS
                start = marks.pop()
                items = stack[start:]
                del stack[start:]
                self._set(stack[-1], items)
            elif code == 0x8C:  # SHORT_BINUNICODE
                length = data[position]
                position += 1 + length
                stack.append(data[position - length : position].decode("utf-8", "surrogatepass"))
            elif code == 0x5D:  # ], EMPTY_LIST
                self._count()
                stack.append([])
            elif code == 0x65:  # e, APPENDS
                start = marks.pop()
                items = stack[start:]
                del stack[start:]
                _list(stack[-1]).extend(items)
            elif code == 0x61:  # a, APPEND
                item = stack.pop()
                _list(stack[-1]).append(item)
            elif code == 0x73:  # s, SETITEM
                items = stack[-2:]
                del stack[-2:]
                self._set(stack[-1], items)
            elif code == 0x95:  # FRAME
                position += 8
            elif code == 0x2E:  # ., STOP
                if len(stack) != 1 or marks:
                    raise ValueError("the pickle is damaged: it ends with a stack that is not empty")
                self.plain.root = stack[0]
                return self.plain
            else:
                if code in (0x71, 0x72, 0x70) and type(memo) is list:
                    memo = dict(enumerate(memo))
                position = self._rare_opcode(code, position, memo)
            if position > len(data):
                raise IndexError

    def _rare_opcode(self, code: int, position: int, memo: Any) -> int:
        data, stack = self.data, self.stack
        if code == 0x80:  # PROTO
            if data[position] > 5:
                raise ValueError(f"pickle protocol {data[position]} is unknown; 0 to 5 can be read")
            return position + 1
        if code == 0x71:  # q, BINPUT
            memo[data[position]] = stack[-1]
            return position + 1
        if code == 0x72:  # r, LONG_BINPUT
            memo[struct.unpack_from("<I", data, position)[0]] = stack[-1]
            return position + 4
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
            return position
        if 0x85 <= code <= 0x87:  # TUPLE1 to TUPLE3
            return self._tuple(len(stack) - (code - 0x84), position)
        if code == 0x74:  # t, TUPLE
            return self._tuple(self.marks.pop(), position)
        if code in (0x6C, 0x64):  # l, LIST and d, DICT
            start = self.marks.pop()
            items = stack[start:]
            del stack[start:]
            self._count()
            stack.append([] if code == 0x6C else {})
            if code == 0x6C:
                stack[-1].extend(items)
            else:
                self._set(stack[-1], items)
            return position
        if code == 0x47:  # G, BINFLOAT
            stack.append(struct.unpack_from(">d", data, position)[0])
            return position + 8
        if code in _COUNTED:
            form, convert = _COUNTED[code]
            (length,) = struct.unpack_from(form, data, position)
            start = position + struct.calcsize(form)
            if length > len(data) - start:
                raise IndexError
            stack.append(convert(data[start : start + length]))
            return start + length
        if code in _LINES:
            end = data.find(b"\n", position)
            if end < 0:
                raise IndexError
            _LINES[code](stack, memo, data[position:end])
            return end + 1
        if code in _REFUSED:
            raise ValueError(
                f"it {_REFUSED[code]}; a snapshot is plain data, so the file is refused and nothing of it ran"
            )
        raise ValueError(f"the pickle is damaged: {bytes([code])!r} at byte {position - 1} means nothing here")

    def _count(self) -> None:
        self.containers_left -= 1
        if self.containers_left < 0:
            raise ValueError("it requests far more memory than a snapshot of its length needs")

    def _tuple(self, start: int, position: int) -> int:
        if start < 0:
            raise IndexError
        self._count()
        self.stack[start:] = [tuple(self.stack[start:])]
        return position

    def _set(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict or len(items) % 2:
            raise ValueError("the pickle is damaged: an entry outside a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Python hashes a nested tuple recursively, without a bound on its depth. Whole numbers beyond 60 bits can
            # be chosen such that all have one hash, so that a dictionary takes quadratic time.
            if type(key) is not str and (type(key) is not int or not -_LARGEST_KEY < key < _LARGEST_KEY):
                raise ValueError(f"a snapshot has no dictionary with the key {shown(key)}")
            target[key] = value
        if "action" in target and "size" in target and len(target) <= _MOST_FIELDS and type(self.memo) is list:
            self._prepare_pattern(target)

    def _prepare_pattern(self, event: dict[Any, Any]) -> None:
        """Create the pattern that reads further events like this one."""
        keys = tuple(event)
        memo = self.memo
        if type(memo) is not list or "device_free" in keys:
            return  # an oom is rare, and its device_free must be kept
        for key, value in event.items():
            if key not in PATTERNS and type(value) is str and len(value) < 64 and value.isascii():
                self.text_lengths.add(len(value))
        wanted = keys, tuple(sorted(self.text_lengths))
        if wanted not in self.patterns and len(self.patterns) < _MOST_PATTERNS:
            self._index(memo)
            self.patterns[wanted] = EventPattern(self.data, self.plain, memo, *wanted, self.references)
        self.pattern = self.patterns.get(wanted, self.pattern)

    def _index(self, memo: list[Any]) -> None:
        """Note the positions of texts in what the memo has grown by."""
        for position in range(self.indexed, len(memo)):
            if type(memo[position]) is str:
                positions = self.references.setdefault(memo[position], [])
                positions.append(position)
                del positions[:-_REFERENCES]
        self.indexed = len(memo)


def _list(target: Any) -> list[Any]:
    if type(target) is not list:
        raise ValueError("the pickle is damaged: an item outside a list")
    return target


def _line_int(stack: list[Any], memo: Any, line: bytes) -> None:
    if len(line) > 40:
        raise ValueError("the pickle holds a number of more than 128 bits")
    stack.append(line == b"01" if line in (b"00", b"01") else int(line.rstrip(b"L")))


def _line_put(stack: list[Any], memo: Any, line: bytes) -> None:
    memo[_line_index(line)] = stack[-1]


def _line_get(stack: list[Any], memo: Any, line: bytes) -> None:
    stack.append(memo[_line_index(line)])


def _line_index(line: bytes) -> int:
    if not line.isdigit() or len(line) > 10:
        raise ValueError("the pickle is damaged: a memo entry without a number")
    return int(line)


def _line_float(stack: list[Any], memo: Any, line: bytes) -> None:
    if len(line) > 100:
        raise ValueError("the pickle holds a number of more than 100 digits")
    stack.append(float(line))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


_CONSTANTS: dict[int, Any] = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
_COUNTED: dict[int, tuple[str, Callable[[bytes], Any]]] = {
    0x58: ("<I", _text),  # X, BINUNICODE
    0x8D: ("<Q", _text),  # BINUNICODE8
    0x43: ("<B", bytes),  # C, SHORT_BINBYTES
    0x42: ("<I", bytes),  # B, BINBYTES
    0x8E: ("<Q", bytes),  # BINBYTES8
}
_LINES: dict[int, Callable[[list[Any], Any, bytes], None]] = {
    0x49: _line_int,  # I, INT
    0x4C: _line_int,  # L, LONG
    0x46: _line_float,  # F, FLOAT
    0x56: lambda stack, memo, line: stack.append(line.decode("raw-unicode-escape")),  # V, UNICODE
    0x70: _line_put,  # p, PUT
    0x67: _line_get,  # g, GET
}
