"""A stand-in for the browser: what it would send, and what it would receive."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from memexplore.jupyter.view import View


def unpack(buffers: list[bytes]) -> dict[str, Any]:
    """Return the content of pairs of buffers, as the browser reads them."""
    content: dict[str, Any] = {}
    for text, numbers in zip(buffers[::2], buffers[1::2], strict=True):
        content |= json.loads(gzip.decompress(text) if text[:1] == b"\x1f" else text, object_hook=_numbers_of(numbers))
    return content


def _numbers_of(numbers: bytes) -> Any:
    values = memoryview(numbers).cast("d")

    def filled(part: dict[str, Any]) -> Any:
        if part.keys() == {"offset", "length"}:
            return list(values[part["offset"] : part["offset"] + part["length"]])
        return part

    return filled


class Browser:
    """A stand-in for the browser: sends requests and keeps the messages of the view."""

    def __init__(self, shown: View, monkeypatch: pytest.MonkeyPatch) -> None:
        self.view = shown
        self.messages: list[dict[str, Any]] = []
        monkeypatch.setattr(shown, "send", self._receive)

    def _receive(self, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        unpacked = {} if content["type"] in ("plotly", "error") else unpack(buffers or [])
        self.messages.append({**content, **unpacked, "buffers": buffers})

    def request(self, **request: Any) -> list[dict[str, Any]]:
        self.messages.clear()
        self.view._handle_custom_msg(request, [])
        return self.messages
