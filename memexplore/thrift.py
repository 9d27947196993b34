"""Structs in Thrift's compact protocol, as Parquet files hold them: bytes go in, fields by number come out."""

from __future__ import annotations

from typing import Any

_DEEPEST = 10

Struct = dict[int, Any]
"""Values by the number of their field: numbers, texts as bytes, lists, structs."""


def read_struct(data: bytes) -> tuple[Struct, int]:
    """Return the struct at the start of some bytes, and its length.

    >>> read_struct(bytes([0x15, 0x08, 0x18, 0x02, 0x68, 0x69, 0x00]))
    ({1: 4, 2: b'hi'}, 7)

    Raises ValueError if the bytes end early, or hold something else.
    """
    reader = _Reader(data)
    try:
        return reader.struct(_DEEPEST), reader.position
    except IndexError:
        raise ValueError("a description of columns or pages ends early") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def struct(self, depth: int) -> Struct:
        fields: Struct = {}
        number = 0
        while code := self.byte():
            step, kind = code >> 4, code & 15
            number = number + step if step else self.signed()
            fields[number] = kind == 1 if kind in (1, 2) else self.value(kind, depth)
        return fields

    def value(self, kind: int, depth: int) -> Any:
        """Read a value of a kind: 1 to 6 numbers, 7 double, 8 bytes, 9 list, 10 set, 12 struct."""
        if not depth:
            raise ValueError("a description of columns or pages is nested too deeply")
        if kind in (1, 2, 3):
            return self.byte()
        if kind in (4, 5, 6):
            return self.signed()
        if kind == 7:
            return self.bytes(8)
        if kind == 8:
            return self.bytes(self.unsigned())
        if kind in (9, 10):
            code = self.byte()
            count = code >> 4 if code >> 4 != 15 else self.unsigned()
            if count > len(self.data) - self.position:  # each item takes a byte
                raise IndexError
            return [self.value(code & 15, depth - 1) for _ in range(count)]
        if kind == 12:
            return self.struct(depth - 1)
        raise ValueError(f"a description of columns or pages has a value of kind {kind}")

    def byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.position:
            raise IndexError
        self.position += count
        return self.data[self.position - count : self.position]

    def unsigned(self) -> int:
        """Read a number of up to 64 bits, 7 bits a byte."""
        result = 0
        for shift in range(0, 70, 7):
            byte = self.byte()
            result |= (byte & 127) << shift
            if byte < 128:
                return result
        raise ValueError("a description of columns or pages has a number of more than 64 bits")

    def signed(self) -> int:
        """Read a number whose lowest bit is its sign."""
        number = self.unsigned()
        return number >> 1 ^ -(number & 1)
