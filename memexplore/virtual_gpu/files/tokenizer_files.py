"""Put the overlay below the tokenizers library: its Rust code opens files itself, here Python does.

There is nothing to replace if the library is not installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from typing import Any

from memexplore.virtual_gpu.files.overlay import Overlay
from memexplore.virtual_gpu.patches.install import Replace


def rows(overlay: Overlay) -> list[Replace]:
    """Return the replacements of methods that name a file. Call it while nothing is replaced."""
    if importlib.util.find_spec("tokenizers") is None:
        return []
    # Also before the program imports it: it keeps no other reference to its methods.
    library: Any = importlib.import_module("tokenizers")
    kind, model = library.Tokenizer, library.models.Model
    return [
        Replace(kind, "save", _save(overlay, kind.save)),
        Replace(kind, "from_file", staticmethod(_from_file(overlay, kind.from_file))),
        Replace(model, "save", _save_model(overlay, model.save)),
    ]


def _save(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(self: Any, path: Any, pretty: bool = True) -> None:
        if overlay.inside:
            return original(self, path, pretty)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(self.to_str(pretty))
        return None

    return save


def _save_model(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    """`Model.save`, which chooses the names of its files: they are written elsewhere and then copied."""

    @functools.wraps(original)
    def save(self: Any, folder: Any, *args: Any, **kwargs: Any) -> list[str]:
        if overlay.inside:
            return original(self, folder, *args, **kwargs)
        contents: dict[str, bytes] = {}
        with overlay.real(), tempfile.TemporaryDirectory(prefix="memexplore-") as temporary:
            for path in original(self, temporary, *args, **kwargs):
                with open(path, "rb") as written:
                    contents[os.path.join(os.fspath(folder), os.path.basename(path))] = written.read()
        for path, content in contents.items():
            with open(path, "wb") as file:
                file.write(content)
        return list(contents)

    return save


def _from_file(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_file(path: Any) -> Any:
        return original(path if overlay.inside or not overlay.changed else overlay.for_reading(os.fspath(path)))

    return from_file
