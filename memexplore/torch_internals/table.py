"""Keep the table of torch's private names, and add a row for each as it is looked up.

Each private name is looked up once, at import. A name that this release of torch lacks is replaced by a stand-in whose
use raises a RuntimeError with one sentence, so that everything else still works.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch


class Internal(NamedTuple):
    """One private name of torch."""

    name: str
    """Dotted path, `torch.Tensor._version` for an attribute of instances."""
    why: str
    """Its use in memexplore."""
    if_missing: str
    """Effect of its absence in a release of torch."""
    probe: Callable[[], bool]
    """Whether the installed torch has the name, with the behaviour that memexplore relies on; it may raise."""


class Attribute(NamedTuple):
    """An attribute of a module or class of torch that is replaced while a virtual GPU is on, or by a knob."""

    owner: Any
    name: str

    @property
    def value(self) -> Any:
        """The present value. Raises AttributeError in a release of torch that lacks it."""
        return getattr(self.owner, self.name)


TABLE: list[Internal] = []

NO_VIRTUAL_GPU = "no virtual GPU and no simulation"
NO_RECORDING = "no recording, on a real or a virtual GPU"
NO_IN_PLACE = "no in-place activations"
CHECKPOINTS = "the checkpoint knob"


def _resolve(name: str) -> Any:
    """The object at a dotted path. A module comes before an attribute of the same name (`torch.optim.optimizer`)."""
    parts = name.split(".")
    value: Any = torch
    for count, part in enumerate(parts[1:], 2):
        path = ".".join(parts[:count])
        if path in sys.modules:
            value = sys.modules[path]
        elif hasattr(value, part):
            value = getattr(value, part)
        else:
            value = importlib.import_module(path)
    return value


def exists(name: str) -> bool:
    """Return whether the installed torch has a name; modules on its path are imported."""
    try:
        _resolve(name)
    except (AttributeError, ImportError):
        return False
    return True


def _missing(name: str, if_missing: str) -> type:
    """A class whose call raises RuntimeError; it can stand for a function, for a class and for a base class."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"torch {torch.__version__} has no {name}: {if_missing}. "
            "Install a release that memexplore was tested with (`memexplore doctor` names them)."
        )

    return type(name.rpartition(".")[2], (), {"__new__": refuse})


def look_up(
    name: str,
    why: str,
    if_missing: str,
    *,
    probe: Callable[[Any], bool] = lambda value: True,
    other_names: Sequence[str] = (),
) -> Any:
    """Add a row and return the object that it names, or that `other_names` name in other releases of torch.

    `probe` gets the object. Where no name exists the result is a stand-in that raises RuntimeError when it is called.
    """
    present = next(filter(exists, (name, *other_names)), None)
    TABLE.append(Internal(name, why, if_missing, lambda: present is not None and probe(_resolve(present))))
    return _resolve(present) if present is not None else _missing(name, if_missing)


def look_up_or_none(name: str, why: str, if_missing: str, *, needed: Callable[[], bool]) -> Any:
    """Add a row for a name that some builds of torch lack; None there. The probe fails where it is `needed`."""
    TABLE.append(Internal(name, why, if_missing, lambda: exists(name) or not needed()))
    return _resolve(name) if exists(name) else None


def attribute_of(
    kind: str, name: str, example: Callable[[], Any], why: str, if_missing: str
) -> operator.attrgetter[Any]:
    """Add a row for an attribute of instances of `kind`, which `example` makes, and return a function that reads it."""
    TABLE.append(Internal(f"{kind}.{name}", why, if_missing, lambda: hasattr(example(), name)))
    return operator.attrgetter(name)


def method_of(kind: str, name: str, example: Callable[[], Any], why: str, if_missing: str) -> Callable[..., Any]:
    """Add a row for a method of instances of `kind`, and return a function that calls it without arguments."""
    attribute_of(kind, name, example, why, if_missing)
    return operator.methodcaller(name)


def attribute_names(kind: str, names: str, example: Callable[[], Any], why: str, if_missing: str) -> tuple[str, ...]:
    """Add a row for each attribute of instances of `kind`, and return the names for `getattr` and `setattr`."""
    attributes = tuple(names.split())
    for name in attributes:
        attribute_of(kind, name, example, why, if_missing)
    return attributes


def replaceable(
    name: str,
    why: str,
    if_missing: str,
    *,
    other_names: Sequence[str] = (),
    needed: Callable[[], bool] = lambda: True,
) -> Attribute:
    """Add a row for a name that is replaced, and return its owner and name. The probe passes if not `needed`."""
    present = next(filter(exists, (name, *other_names)), name)
    TABLE.append(Internal(name, why, if_missing, lambda: exists(present) or not needed()))
    owner, _, attribute = present.rpartition(".")
    return Attribute(_resolve(owner), attribute)
