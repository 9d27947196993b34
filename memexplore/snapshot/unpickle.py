"""Read pickles of plain data as `PlainData`: no class is ever looked up, and every size is bounded.

Python's own unpickler runs code that a file asks for; this one refuses such a file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from memexplore.allocator.gc_pause import gc_paused
from memexplore.snapshot.events import PATTERNS, EventPattern
from memexplore.snapshot.plain import PlainData
from memexplore.text.untrusted import shown

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
        data = self.data
        opcodes = [getattr(self, _OPCODES.get(code, "_unknown")) for code in range(256)]
        position = 0
        while (code := data[position]) != _STOP:
            position = opcodes[code](position + 1)
            if position > len(data):
                raise IndexError
        if len(self.stack) != 1 or self.marks:
            raise ValueError("the pickle is damaged: it ends with a stack that is not empty")
        self.plain.root = self.stack[0]
        return self.plain

    # Each opcode is a method: it gets the position behind the opcode and returns that of the next one.

    def _get_long(self, position: int) -> int:
        self.stack.append(self.memo[_unsigned(self.data, position)[0]])
        return position + 4

    def _get(self, position: int) -> int:
        self.stack.append(self.memo[self.data[position]])
        return position + 1

    def _memoize(self, position: int) -> int:
        memo = self.memo
        if type(memo) is dict:
            memo[len(memo)] = self.stack[-1]
        else:
            memo.append(self.stack[-1])  # type: ignore[union-attr]
        return position

    def _put(self, position: int) -> int:
        self._numbered_memo()[self.data[position]] = self.stack[-1]
        return position + 1

    def _put_long(self, position: int) -> int:
        self._numbered_memo()[_unsigned(self.data, position)[0]] = self.stack[-1]
        return position + 4

    def _dictionary(self, position: int) -> int:
        """Begin a dictionary, or read events as long as the pattern of an earlier one matches."""
        if self.pattern is not None and type(self.memo) is list:
            after = self.pattern.read_events(position - 1, self.stack, self.memo)
            if after != position - 1:
                return after
        self._count()
        self.stack.append({})
        return position

    def _empty_list(self, position: int) -> int:
        self._count()
        self.stack.append([])
        return position

    def _mark(self, position: int) -> int:
        self.marks.append(len(self.stack))
        if len(self.marks) > _DEEPEST:
            raise ValueError("it is nested deeper than a snapshot")
        return position

    def _byte(self, position: int) -> int:
        self.stack.append(self.data[position])
        return position + 1

    def _two_bytes(self, position: int) -> int:
        self.stack.append(self.data[position] | self.data[position + 1] << 8)
        return position + 2

    def _four_bytes(self, position: int) -> int:
        self.stack.append(_signed(self.data, position)[0])
        return position + 4

    def _long(self, position: int) -> int:
        length = self.data[position]
        if length > 16:
            raise ValueError("the pickle holds a number of more than 128 bits")
        end = position + 1 + length
        self.stack.append(int.from_bytes(self.data[end - length : end], "little", signed=True))
        return end

    def _float(self, position: int) -> int:
        self.stack.append(struct.unpack_from(">d", self.data, position)[0])
        return position + 8

    def _short_text(self, position: int) -> int:
        end = position + 1 + self.data[position]
        self.stack.append(_text(self.data[position + 1 : end]))
        return end

    def _counted(self, position: int) -> int:
        """Read a text or bytes behind their length."""
        form, convert = _COUNTED[self.data[position - 1]]
        (length,) = struct.unpack_from(form, self.data, position)
        start = position + struct.calcsize(form)
        if length > len(self.data) - start:
            raise IndexError
        self.stack.append(convert(self.data[start : start + length]))
        return start + int(length)

    def _constant(self, position: int) -> int:
        self.stack.append(_CONSTANTS[self.data[position - 1]])
        return position

    def _set_items(self, position: int) -> int:
        items = self._since_mark()
        self._set(self.stack[-1], items)
        return position

    def _set_item(self, position: int) -> int:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._set(self.stack[-1], items)
        return position

    def _append_items(self, position: int) -> int:
        items = self._since_mark()
        _list(self.stack[-1]).extend(items)
        return position

    def _append_item(self, position: int) -> int:
        item = self.stack.pop()
        _list(self.stack[-1]).append(item)
        return position

    def _full_list(self, position: int) -> int:
        items = self._since_mark()
        self._count()
        self.stack.append(items)
        return position

    def _full_dictionary(self, position: int) -> int:
        items = self._since_mark()
        self._count()
        self.stack.append({})
        self._set(self.stack[-1], items)
        return position

    def _short_tuple(self, position: int) -> int:
        return self._tuple(len(self.stack) - (self.data[position - 1] - 0x84), position)

    def _marked_tuple(self, position: int) -> int:
        return self._tuple(self.marks.pop(), position)

    def _line(self, position: int) -> int:
        """Read a line of text, in which protocol 0 writes numbers and places in the memo."""
        code, end = self.data[position - 1], self.data.find(b"\n", position)
        if end < 0:
            raise IndexError
        _LINES[code](self.stack, self._numbered_memo() if code == _PUT_LINE else self.memo, self.data[position:end])
        return end + 1

    def _frame(self, position: int) -> int:
        return position + 8

    def _protocol(self, position: int) -> int:
        if self.data[position] > 5:
            raise ValueError(f"pickle protocol {self.data[position]} is unknown; 0 to 5 can be read")
        return position + 1

    def _refused(self, position: int) -> int:
        reason = _REFUSED[self.data[position - 1]]
        raise ValueError(f"it {reason}; a snapshot is plain data, so the file is refused and nothing of it ran")

    def _unknown(self, position: int) -> int:
        code = self.data[position - 1 : position]
        raise ValueError(f"the pickle is damaged: {code!r} at byte {position - 1} means nothing here")

    def _since_mark(self) -> list[Any]:
        """Take what was put on the stack since the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def _numbered_memo(self) -> dict[int, Any]:
        """Return the memo as a dictionary, which it stays: older protocols number its entries themselves."""
        if type(self.memo) is list:
            self.memo = dict(enumerate(self.memo))
        return self.memo  # type: ignore[return-value]

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


_signed, _unsigned = struct.Struct("<i").unpack_from, struct.Struct("<I").unpack_from
_STOP, _PUT_LINE = b".p"
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
    _PUT_LINE: _line_put,  # p, PUT
    0x67: _line_get,  # g, GET
}
_OPCODES: dict[int, str] = {
    0x6A: "_get_long",  # j, LONG_BINGET
    0x68: "_get",  # h, BINGET
    0x94: "_memoize",  # MEMOIZE
    0x71: "_put",  # q, BINPUT
    0x72: "_put_long",  # r, LONG_BINPUT
    0x7D: "_dictionary",  # }, EMPTY_DICT
    0x5D: "_empty_list",  # ], EMPTY_LIST
    0x28: "_mark",  # (, MARK
    0x4B: "_byte",  # K, BININT1
    0x4D: "_two_bytes",  # M, BININT2
    0x4A: "_four_bytes",  # J, BININT
    0x8A: "_long",  # LONG1
    0x47: "_float",  # G, BINFLOAT
    0x8C: "_short_text",  # SHORT_BINUNICODE
    0x75: "_set_items",  # u, SETITEMS
    0x73: "_set_item",  # s, SETITEM
    0x65: "_append_items",  # e, APPENDS
    0x61: "_append_item",  # a, APPEND
    0x6C: "_full_list",  # l, LIST
    0x64: "_full_dictionary",  # d, DICT
    **dict.fromkeys((0x85, 0x86, 0x87), "_short_tuple"),  # TUPLE1 to TUPLE3
    0x74: "_marked_tuple",  # t, TUPLE
    0x95: "_frame",  # FRAME
    0x80: "_protocol",  # PROTO
    **dict.fromkeys(_CONSTANTS, "_constant"),
    **dict.fromkeys(_COUNTED, "_counted"),
    **dict.fromkeys(_LINES, "_line"),
    **dict.fromkeys(_REFUSED, "_refused"),
}
"""Opcode -> method of `_Reader`."""
