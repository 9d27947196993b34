"""Explain the error of a compiled extension to which a program gives tensors of a virtual GPU.

Such an extension reads memory, which virtual tensors do not have. Torch then raises an error that speaks to the authors
of ops (torch_internals/memory_access.py), and the extension's own checks say that a tensor is not on the GPU.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
from types import TracebackType
from typing import Any

import torch

from memexplore.text.package import FOLDER

_MEMORY = re.compile(r"its data is not allocated yet|Cannot access data pointer of (Tensor|(?P<storage>Storage))")
"""What torch says where C++ asks a tensor without memory for its address (c10/core/TensorImpl.h, StorageImpl.cpp)."""
_PLACE = re.compile(r"must be (a |on )?(the )?(cuda|gpu)|(not|isn't) (a |on )?(the )?(cuda|gpu)", re.IGNORECASE)
"""What extensions say where a tensor is not on the GPU, as C++ sees a virtual one."""

_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
_NOT_EXTENSIONS = {"torch", *sys.stdlib_module_names}
_PACKAGE = f"{FOLDER}{os.sep}"


def explain(error: BaseException) -> None:
    """Replace the text of such an error by one sentence with the names of the extension and its function.

    Any other error is left as it is.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    memory, entry = _MEMORY.search(text), error.__traceback__
    if entry is None or not (memory or _PLACE.search(text)):
        return
    while entry.tb_next is not None:
        entry = entry.tb_next
    if entry.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return
    # Storages refuse their address only on a virtual GPU; the other texts may be errors on a real one too.
    called = _called_extension(entry) or ("compiled code" if memory and memory["storage"] else "")
    if called:
        reads = "reads the memory of a tensor" if memory else "asks for a tensor in the memory of a GPU"
        error.args = (
            f"{called} {reads}, which a virtual GPU does not have: use the package's version in plain PyTorch if there "
            "is one, or profile on a real GPU",
        )


def _called_extension(entry: TracebackType) -> str:
    """Return the compiled function that an entry of a traceback called, with its module; "" where it is not known."""
    operator = entry.tb_frame.f_locals.get("self")
    if type(operator) in _OPERATORS:
        return f"the operator {operator}"
    function = _called(entry)
    # A method or static method holds the function.
    function = getattr(function, "__func__", function)
    module = getattr(function, "__module__", None)
    if not inspect.isbuiltin(function) or not isinstance(module, str) or module.partition(".")[0] in _NOT_EXTENSIONS:
        return ""
    return f"{function.__name__} of the compiled extension {module}"


def _called(entry: TracebackType) -> Any:
    """Return what the dotted name before a bracket means where an entry of a traceback points, without running code."""
    frame, code = entry.tb_frame, entry.tb_frame.f_code
    number, _, begin, _ = list(code.co_positions())[entry.tb_lasti // 2]
    line = linecache.getline(code.co_filename, number or 0).encode()[begin or 0 :].decode(errors="replace")
    name = re.match(r"(\w+)((?:\.\w+)*)\(", line)
    if name is None:
        return None
    value = frame.f_locals.get(name[1], frame.f_globals.get(name[1]))
    for attribute in name[2].split(".")[1:]:
        value = inspect.getattr_static(value, attribute, None)
    return value
