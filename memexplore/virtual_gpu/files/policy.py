"""Decide which changes of files go to the overlay.

In `memexplore run`, changes of all files that existed before the run do; a new file is written in place, where other
processes and native code find it. In a notebook, changes of files that hold tensors or arrays do. Everywhere, files of
a library that saves a model or its checkpoints do.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from memexplore.text.result_files import TAPE
from memexplore.virtual_gpu.files.overlay import Overlay

_SUFFIXES = frozenset(
    ".bin .ckpt .dat .h5 .hdf5 .joblib .mmap .npy .npz .onnx .pkl .pickle .pt .pt2 .pth .raw .safetensors".split()
)
_MAGIC = (
    (b"PK\x03\x04", "zip archives: torch, npz"),
    (b"\x93NUMPY", "npy"),
    (b"\x89HDF\r\n\x1a\n", "HDF5"),
    (b"GGUF", "llama.cpp"),
    (b"PAR1", "Parquet"),
    *((start, "tapes") for start in TAPE.starts),
    (b"ARROW1", "Arrow"),
    *((bytes([0x80, protocol]), "pickle") for protocol in range(2, 6)),
)
_TRAINERS = frozenset(
    "accelerate detectron2 fairseq fastai ignite lightning lightning_fabric mmengine pytorch_lightning timm "
    "ultralytics".split()
)
"""Libraries all of whose files belong to a training run."""
_LIBRARIES = _TRAINERS | frozenset("diffusers peft sentence_transformers transformers trl".split())
_SAVING = ("save", "checkpoint", "ckpt")
_BELOW = ("fsspec", "memexplore.virtual_gpu", "numpy", "pandas", "safetensors", "torch")
"""Libraries that write what others give them, besides the standard library."""
_CACHES = ("HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_SYSTEM = ("/dev", "/proc", "/sys", "/run")
_DRIVES = "/run/media"
"""Folder of the drives that a desktop mounts."""


def holds_values(path: str) -> bool:
    """Whether a file of the user's holds tensors, arrays or pickled objects, by its first bytes or its name.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "notes.txt")
    ...     _ = path.write_bytes(b"hello")
    ...     first = holds_values(str(path))
    ...     _ = path.write_bytes(bytes([0x80, 4]) + b"pickled")
    ...     first, holds_values(str(path))
    (False, True)
    """
    try:
        if not os.path.isfile(path) or os.path.getsize(path) == 0:
            return False
        with open(path, "rb") as file:
            start = file.read(16)
    except OSError:
        return False
    if os.path.splitext(path)[1].lower() in _SUFFIXES or start.startswith(tuple(magic for magic, _ in _MAGIC)):
        return True
    # safetensors: the length of the header, then the header in JSON.
    return start[8:9] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= 100_000_000


def tree_holds_values(folder: str) -> bool:
    """Whether a folder of the user's has a file that holds values, at any depth."""
    return any(holds_values(os.path.join(where, name)) for where, _, names in os.walk(folder) for name in names)


def is_saving() -> bool:
    """Whether a library is saving a model or files of a training run, by the running functions of this thread."""
    frame: Any = sys._getframe(1)
    is_writer = True
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        library = module.partition(".")[0]
        if library in _LIBRARIES or module.startswith("torch.distributed.checkpoint"):
            name = frame.f_code.co_name.lower()
            if (any(word in name for word in _SAVING) and _saves_tensors(frame)) or (
                is_writer and library in _TRAINERS
            ):
                return True
        if library not in sys.stdlib_module_names and not module.startswith(_BELOW):
            is_writer = False
        frame = frame.f_back
    return False


def _saves_tensors(frame: Any) -> bool:
    """Whether a saving function is not that of a tokenizer or a configuration, whose files have no tensors."""
    saver, name = frame.f_locals.get("self"), frame.f_code.co_name
    return saver is None or not ("pretrained" in name or "vocabulary" in name) or hasattr(saver, "state_dict")


def is_result() -> bool:
    """Whether memexplore writes a tape, a page or a snapshot that the user asked it for."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("memexplore.") and not module.startswith("memexplore.virtual_gpu."):
            return True
        if not module.startswith("memexplore.virtual_gpu.files.") and module not in ("contextlib", "pathlib"):
            return False
        frame = frame.f_back
    return False


def tensors_only(overlay: Overlay, logical: str) -> bool:
    """The policy in a notebook, `virtual` and `simulate`."""
    if is_in_overlay(overlay, logical):
        return True
    if _is_system(logical) or is_result():
        return False
    return is_saving() or (not overlay.hidden(logical) and holds_values(logical))


def every_file(overlay: Overlay, logical: str) -> bool:
    """The policy of `memexplore run`: all files that existed before the run, but those of caches and temporary ones."""
    if is_in_overlay(overlay, logical):
        return True
    if _is_system(logical) or is_result() or _is_cached(logical):
        return False
    if _is_temporary(overlay, logical) and not holds_values(logical):
        return False
    return not overlay.is_own(logical) if os.path.lexists(logical) else is_saving()


def is_output(logical: str) -> bool:
    """Whether a new file is one of the program: no device or pipe, and no result of memexplore."""
    return not (_is_system(logical) or is_result())


def is_from_another_rank(overlay: Overlay, logical: str) -> bool:
    """Whether a file that is missing may be one that another rank has written.

    Libraries look for files that may be missing in their caches.
    """
    if _is_cached(logical) or logical.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep)):
        return False
    if logical.startswith(os.getcwd() + os.sep):
        return True
    folder = os.path.realpath(os.fsdecode(tempfile.tempdir or overlay.temporary))
    is_temporary = logical.startswith(folder + os.sep) and not _is_temporary(overlay, logical)
    return is_temporary or os.path.splitext(logical)[1].lower() in _SUFFIXES


def is_in_overlay(overlay: Overlay, logical: str) -> bool:
    """Whether the overlay has the file, or a folder above it that the user's files lack."""
    if not overlay.is_on_disk(logical):
        return True
    parent = os.path.dirname(logical)
    return overlay.in_overlay(parent) and not os.path.isdir(parent)


def _is_system(logical: str) -> bool:
    """Whether a path is a device, a pipe or a socket, or below a folder of the system."""
    if logical.startswith(tuple(folder + os.sep for folder in _SYSTEM)) and not logical.startswith(_DRIVES + os.sep):
        return True
    return os.path.exists(logical) and not os.path.isfile(logical) and not os.path.isdir(logical)


def _is_cached(logical: str) -> bool:
    """Whether a path is below a cache folder, whose downloads are kept for the next run."""
    folders = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    folders.append(os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
    return any(logical.startswith(os.path.realpath(folder) + os.sep) for folder in folders)


def _is_temporary(overlay: Overlay, logical: str) -> bool:
    """Whether a path is one that `tempfile` and similar modules name, in the temporary folder."""
    # gettempdir() would wait for ever below os.open of a gettempdir() that tries folders: its lock is not reentrant.
    named = os.fsdecode(tempfile.tempdir or overlay.temporary)
    if not named:
        return False
    folder = os.path.realpath(named) + os.sep
    return logical.startswith(folder) and logical[len(folder) :].startswith(("tmp", "torch", "pymp-", "memexplore-"))
