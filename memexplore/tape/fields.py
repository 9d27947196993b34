"""What a file of a tape says besides numbers: its metadata and tables as JSON, which may come from anybody.

Every field has its type checked, and every text becomes one printable line of bounded length.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from memexplore.tape.allocator_settings import Settings
from memexplore.tape.tape import Action, Category, Meta, Phase
from memexplore.tape.words import Communicator, Ending, Os, Source
from memexplore.text.tensor_text import is_tensor_text
from memexplore.text.untrusted import clean_text, shown

LARGEST = 1 << 62
"""No address, size, step or time of a tape is above."""
MOST_SIZES = 100
"""A workspace has no more sizes that it may have."""
_PROCESSES = 1 << 31
_CODES: dict[str, type[enum.IntEnum]] = {"action": Action, "category": Category, "phase": Phase}
_LOWEST = {"address": -1, "size": 0, "step": 0, "time": 0}
_RELEASE = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}(?![0-9])")


def check_columns(columns: Mapping[str, NDArray[Any]]) -> None:
    """Raise ValueError if a column of rows has a code or a number that no tape has."""
    if not len(columns["action"]):
        return
    for name, codes in _CODES.items():
        if columns[name].max() >= len(codes):
            raise ValueError(f"column {name!r} has the unknown code {columns[name].max()}")
    for name, lowest in _LOWEST.items():
        if not lowest <= columns[name].min() <= columns[name].max() <= LARGEST:
            raise ValueError(f"column {name!r} has a value that no tape has")


def json_of(data: bytes) -> Any:
    """Return the value in a JSON text; ValueError with one sentence for anything else."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("its metadata is nested too deeply") from None
    except ValueError:  # numbers of more than 4300 digits among them
        raise ValueError("its metadata is not JSON") from None


def object_of(value: Any, name: str) -> dict[str, Any]:
    """Return a value that must be a JSON object; `name` is the subject of the error."""
    if type(value) is not dict:
        raise ValueError(f"{name} are not a JSON object but {shown(value)}")
    return value


def whole_number_of(value: Any, name: str, lowest: int = 0) -> int:
    """Return a value that must be a whole number from `lowest` on; `name` is the subject of the error."""
    if type(value) is not int or not lowest <= value <= LARGEST:
        raise ValueError(f"{name} is {shown(value)}, not a whole number")
    return value


def text_of(value: Any) -> str:
    """Return a value that must be a text, as one printable line."""
    if type(value) is not str:
        raise ValueError(f"expected a text, not {shown(value)}")
    return clean_text(value)


def texts_of(value: Any, read: Callable[[Any], str] = text_of) -> tuple[str, ...]:
    """Return a value that must be a list of texts."""
    if type(value) is not list:
        raise ValueError(f"expected a list of texts, not {shown(value)}")
    return tuple(read(text) for text in value)


def tensor_text_of(value: Any) -> str:
    """Return a value that must be the shape and dtype of a tensor as text."""
    text = text_of(value)
    if not is_tensor_text(text):
        raise ValueError(f"{shown(text)} is not the shape and dtype of a tensor")
    return text


def workspaces_of(value: Any) -> tuple[tuple[int, ...], ...]:
    """Return a value that must be a list of workspaces, each with the sizes that it may have."""
    if type(value) is not list:
        raise ValueError(f"expected a list of workspaces, not {shown(value)}")
    return tuple(_sizes_of(sizes) for sizes in value)


def _sizes_of(value: Any) -> tuple[int, ...]:
    if type(value) is not list or not 0 < len(value) <= MOST_SIZES:
        raise ValueError(f"expected from 1 to {MOST_SIZES} sizes of a workspace, not {shown(value)}")
    return tuple(whole_number_of(size, "the size of a workspace") for size in value)


def meta_as_json(meta: Meta) -> dict[str, Any]:
    """Return the JSON object of metadata."""
    return meta._asdict() | {"versions": dict(meta.versions)}


def meta_of(value: Any) -> Meta:
    """Return metadata from its JSON object; files of earlier releases lack some fields."""
    values = object_of(value, "its metadata")
    if "source" not in values or "device" not in values:
        raise ValueError("its metadata lacks the source or the device")
    checked = {}
    for name, text in values.items():
        if name in FIELDS:  # a later release may write others
            try:
                checked[name] = FIELDS[name](text)
            except ValueError as error:
                raise ValueError(f"its metadata has an invalid {name}: {error}") from None
    return Meta(**checked)


def _lines(value: Any) -> str:
    """Return a text of several lines, as messages of errors are."""
    if type(value) is not str:
        raise ValueError(f"expected a text, not {shown(value)}")
    return "\n".join(clean_text(line) for line in value.split("\n"))


def _text_or_none(value: Any) -> str | None:
    return None if value is None else text_of(value)


def _bytes_or_none(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < LARGEST):
        raise ValueError(f"expected a number of bytes, not {shown(value)}")
    return value


def _settings(value: Any) -> str:
    Settings.parse(text_of(value))
    return text_of(value)


def _versions(value: Any) -> dict[str, str]:
    versions = {text_of(name): text_of(version) for name, version in object_of(value, "versions").items()}
    if "torch" in versions and not _RELEASE.match(versions["torch"]):
        raise ValueError(f"{shown(versions['torch'])} is not a torch release")
    return versions


def _member(kind: type[enum.StrEnum]) -> Callable[[Any], enum.StrEnum]:
    def read(value: Any) -> enum.StrEnum:
        if type(value) is not str or value not in {member.value for member in kind}:
            raise ValueError(f"expected one of {', '.join(kind)}, not {shown(value)}")
        return kind(value)

    return read


def _number_or_none(value: Any, lowest: int) -> int | None:
    if value is not None and (type(value) is not int or not lowest <= value < _PROCESSES):
        raise ValueError(f"expected a number of processes, not {shown(value)}")
    return value


def _communicators(value: Any) -> tuple[Communicator, ...]:
    if type(value) is not list:
        raise ValueError(f"expected a list of groups, not {shown(value)}")
    for group in value:
        if type(group) is not list or [type(part) for part in group] != [int, bool] or not 0 < group[0] < _PROCESSES:
            raise ValueError(f"expected a group, not {shown(group)}")
    return tuple(Communicator(*group) for group in value)


FIELDS: dict[str, Callable[[Any], Any]] = {
    "source": _member(Source),
    "device": text_of,
    "gpu": _text_or_none,
    "capacity": _bytes_or_none,
    "total": _bytes_or_none,
    "settings": _settings,
    "versions": _versions,
    "notes": lambda value: texts_of(value, _lines),
    "ending": _member(Ending),
    "error": _lines,
    "trained_on_cpu": lambda value: texts_of(value, _lines),
    "advice": _lines,
    "unmeasured": _lines,
    "os": _member(Os),
    "rank": lambda value: _number_or_none(value, 0),
    "world": lambda value: _number_or_none(value, 1),
    "communicators": _communicators,
    "late_reserved": _bytes_or_none,
    "early_allocated": _bytes_or_none,
    "early_reserved": _bytes_or_none,
    "limit": _bytes_or_none,
    "capacity_without_limit": _bytes_or_none,
}
"""How each field of the metadata is read."""
