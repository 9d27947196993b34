"""Write and read the files of virtual tensors of the safetensors library, and load them onto the device.

Tensors whose values are known are written as usual. If one has no values, `torch.save` writes the file, which keeps
shapes and dtypes. Other readers refuse such a file: it is read by `safe_open` while a virtual GPU is on only.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
from collections.abc import Callable
from typing import Any

import torch

from memexplore.virtual_gpu.files import tensor_files
from memexplore.virtual_gpu.files.overlay import Overlay
from memexplore.virtual_gpu.files.replacements import imported, making
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.tensor import is_virtual

_ZIP = b"PK\x03\x04"
"""First bytes of a file of `torch.save`; as the length of a safetensors header they are over its limit."""
_NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL", torch.bfloat16: "BF16"}


def rows(overlay: Overlay) -> list[Replace]:
    """Return the replacements in safetensors, none if it is not installed. Call it while nothing is replaced."""
    if importlib.util.find_spec("safetensors") is None:
        return []
    # Also before the program imports it: a later import of one of its names must find the replacement.
    library: Any = importlib.import_module("safetensors.torch")
    # Releases before 0.8 flatten tensors to bytes, later ones to pointers.
    names = vars(library)
    flatten = next(name for name in ("_flatten_as_ptr", "_flatten") if name in names)
    return [
        *imported("safe_open", library.safe_open, _safe_open(overlay, library.safe_open)),
        Replace(library, flatten, _flatten(names[flatten], names.get("_evaluate_tensors_for_save", _accept))),
        *imported("serialize_file", library.serialize_file, _serialize_file(overlay, library.serialize_file)),
        Replace(library, "serialize", _serialize(library.serialize)),
        Replace(library, "deserialize", _deserialize(library.deserialize)),
        Replace(library, "_view2torch", _view(names["_view2torch"])),
    ]


def _accept(tensors: Any) -> None:
    """Check nothing: releases before 0.8 have no function for it."""


# --- writing -------------------------------------------------------------------------------------------------------


class _Tensors(dict[str, Any]):
    """Tensors of which some have no values, in place of the bytes that safetensors makes of them."""


class _Known(dict[str, Any]):
    """The bytes that safetensors makes of the known values of virtual tensors."""


def _flatten(original: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    def flatten(tensors: Any, *args: Any) -> Any:
        if not isinstance(tensors, dict) or not any(is_virtual(value) for value in tensors.values()):
            return original(tensors, *args)
        check(tensors)
        for name, value in tensors.items():
            if not value.is_contiguous():
                raise ValueError(f"safetensors saves no tensor that is not contiguous: call .contiguous() on {name!r}")
        values = {
            name: tensor_files.values_of(value) if is_virtual(value) else value for name, value in tensors.items()
        }
        if any(value is None for value in values.values()):
            return _Tensors(tensors)
        return _Known(original(values, *args))

    return flatten


def _save(tensors: _Tensors, file: Any, metadata: Any) -> None:
    detached = {name: value.detach() for name, value in tensors.items()}
    torch.save({"metadata": metadata, "tensors": detached}, file)


def _serialize_file(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    def serialize_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if isinstance(tensors, _Tensors):
            _save(tensors, filename, metadata)
        else:
            content = tensor_files.Content.KNOWN if isinstance(tensors, _Known) else tensor_files.Content.REAL
            with making(overlay, filename):
                original(dict(tensors), tensor_files.tensor_path(overlay, filename, content), metadata=metadata)

    return serialize_file


def _serialize(original: Callable[..., Any]) -> Callable[..., Any]:
    def serialize(tensors: Any, metadata: Any = None) -> bytes:
        if not isinstance(tensors, _Tensors):
            return original(dict(tensors), metadata=metadata)
        buffer = io.BytesIO()
        _save(tensors, buffer, metadata)
        return buffer.getvalue()

    return serialize


# --- reading -------------------------------------------------------------------------------------------------------


class _File:
    """An open safetensors file, as `safe_open` returns it, whose tensors go to `device`."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def get_tensor(self, name: str) -> Any:
        """Return a tensor on the device."""
        raise NotImplementedError

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors by their place in the file."""
        raise NotImplementedError

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return self.offset_keys()

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors on the device."""
        return {name: self.get_tensor(name) for name in self.offset_keys()}


class _SavedFile(_File):
    """A file of virtual tensors."""

    def __init__(self, content: Any, framework: str, device: Any) -> None:
        super().__init__(device)
        self._framework = framework
        self._content = content

    def get_tensor(self, name: str) -> Any:
        return self.get_slice(name)[...]

    def get_slice(self, name: str) -> _SavedSlice:
        """Return a tensor of which a part can be taken."""
        if name not in self._content["tensors"]:
            raise KeyError(f"the file holds no tensor {name!r}")
        return _SavedSlice(self._content["tensors"][name], self._framework, self._device)

    def offset_keys(self) -> list[str]:
        return list(self._content["tensors"])

    def metadata(self) -> dict[str, str] | None:
        """Return the texts that were saved with the tensors."""
        return self._content["metadata"]


class _SavedSlice:
    """A saved tensor, parts of which are read by indexing."""

    def __init__(self, tensor: torch.Tensor, framework: str, device: Any) -> None:
        self._tensor = tensor
        self._framework = framework
        self._device = device

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return the dtype as safetensors names it."""
        return dtype_name(self._tensor.dtype)

    def __getitem__(self, index: Any) -> Any:
        part = self._tensor[index]
        return part.to(self._device) if self._framework in ("pt", "torch", "pytorch") else part.numpy()


class _RealFile(_File):
    """A file with values, whose tensors are read onto the CPU and then moved."""

    def __init__(self, file: Any, device: Any) -> None:
        super().__init__(device)
        self._file = file

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> Any:
        return self._file.get_tensor(name).to(self._device)

    def get_slice(self, name: str) -> _RealSlice:
        """Return a tensor of which a part can be read."""
        return _RealSlice(self._file.get_slice(name), self._device)

    def offset_keys(self) -> list[str]:
        names = getattr(self._file, "offset_keys", self._file.keys)
        return list(names())

    def keys(self) -> list[str]:
        return list(self._file.keys())


class _RealSlice:
    """A tensor of a file with values; the part that is read is moved."""

    def __init__(self, part: Any, device: Any) -> None:
        self._slice = part
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)

    def __getitem__(self, index: Any) -> Any:
        return self._slice[index].to(self._device)


def _safe_open(overlay: Overlay, original: Callable[..., Any]) -> Callable[..., Any]:
    def safe_open(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        if overlay.closed:
            return original(filename, framework, device, **kwargs)
        path = overlay.for_reading(os.fspath(filename)) if overlay.changed else filename
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if _is_saved_by_torch(path):
            # An open file, because torch takes the name for that of a file with values.
            with open(path, "rb") as file:
                return _SavedFile(torch.load(file, map_location="cpu", weights_only=True), framework, target)
        if target.type != "cuda" or framework not in ("pt", "torch", "pytorch"):
            return original(path, framework, device, **kwargs)
        return _RealFile(original(path, framework, "cpu", **kwargs), target)

    return safe_open


def _is_saved_by_torch(path: Any) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_ZIP)) == _ZIP
    except OSError:
        return False


def _deserialize(original: Callable[..., Any]) -> Callable[..., Any]:
    def deserialize(data: Any) -> Any:
        if bytes(data[: len(_ZIP)]) != _ZIP:
            return original(data)
        return _Tensors(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)["tensors"])

    return deserialize


def _view(original: Callable[..., Any]) -> Callable[..., Any]:
    def view(flat: Any) -> dict[str, Any]:
        return dict(flat) if isinstance(flat, _Tensors) else original(flat)

    return view


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that safetensors gives a dtype.

    >>> dtype_name(torch.float32), dtype_name(torch.int64), dtype_name(torch.uint8), dtype_name(torch.bfloat16)
    ('F32', 'I64', 'U8', 'BF16')
    """
    if dtype in _NAMES:
        return _NAMES[dtype]
    letter = "C" if dtype.is_complex else "F" if dtype.is_floating_point else "I" if dtype.is_signed else "U"
    return f"{letter}{dtype.itemsize * 8}"
