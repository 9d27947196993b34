"""Read objects of the user without running their code.

A class of the user may compute what its objects say of themselves: attributes, items, even the class. So what an object
is, and what it holds, is read from where Python and torch store it. An object that stores nothing there, such as a
module whose constructor has failed, holds nothing.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard, TypeVar

import torch

from memexplore.torch_internals.modules import MODULE_TABLES
from memexplore.torch_internals.tensors import stored_in_tensor

Kind = TypeVar("Kind")
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
"""Descriptors of C."""
_module: Callable[[type], Any] = vars(type)["__module__"].__get__
bases_of: Callable[[type], tuple[type, ...]] = vars(type)["__mro__"].__get__
"""Returns a class and those that it is derived from, in the order in which attributes are looked up."""
class_attributes: Callable[[type], types.MappingProxyType[str, Any]] = vars(type)["__dict__"].__get__
"""Returns the attributes of a class, without a copy of them."""


def is_a(value: object, kind: type[Kind]) -> TypeGuard[Kind]:
    """Return whether a value is of a class; `isinstance` also asks the value itself.

    >>> class Proxy:
    ...     @property
    ...     def __class__(self):
    ...         raise RuntimeError("there is no request")
    >>> is_a(Proxy(), dict), is_a({}, dict)
    (False, True)
    """
    return issubclass(type(value), kind)


def stored(value: Any, kind: type, name: str) -> Any:
    """Return an attribute that a class of Python itself stores, whatever a class derived from it overrides.

    >>> stored(ValueError(), BaseException, "__context__") is None
    True
    """
    return vars(kind)[name].__get__(value)


def classes_of(value: object) -> tuple[type, ...]:
    """Return the class of a value and those that it is derived from, in the order in which attributes are looked up."""
    return bases_of(type(value))


def module_of(kind: type) -> str:
    """Return the name of the module of a class."""
    name = _module(kind)
    return name if is_a(name, str) else ""


def name_of(kind: type) -> str:
    """Return the qualified name of a class."""
    return stored(kind, type, "__qualname__")  # type: ignore[no-any-return]


def attributes_of(value: Any) -> dict[str, Any]:
    """Return a copy of the attributes of an object or a class, without those that it computes.

    >>> class Lazy:
    ...     def __getattr__(self, name):
    ...         raise RuntimeError("not loaded")
    >>> lazy = Lazy()
    >>> lazy.size = 3
    >>> attributes_of(lazy)
    {'size': 3}
    """
    for kind in classes_of(value):
        descriptor = class_attributes(kind).get("__dict__")
        if descriptor is not None:
            own = descriptor.__get__(value) if type(descriptor) in _DESCRIPTORS else None
            return dict(own.items() if type(own) is types.MappingProxyType else items_of(own))
    return {}


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a dictionary; none of other objects."""
    return list(dict.items(value)) if is_a(value, dict) else []


def of_kind(objects: Iterable[Any], kind: type[Kind]) -> list[Kind]:
    """Return the objects of a class."""
    return [value for value in objects if is_a(value, kind)]


# -- modules and optimizers


def own_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a module without those of its children."""
    return _tensors(module, MODULE_TABLES[0])


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module without those of its children."""
    return _tensors(module, MODULE_TABLES[1])


def _tensors(module: torch.nn.Module, table: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in items_of(attributes_of(module).get(table)) if is_a(value, torch.Tensor)}


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that are attributes of a module."""
    items = items_of(attributes_of(module).get(MODULE_TABLES[2]))
    return {name: child for name, child in items if is_a(child, torch.nn.Module)}


def parts_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a model and all modules in it, each once, with their qualified names.

    >>> [name for name, _ in parts_of(torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU())))]
    ['', '0', '0.0']
    """
    waiting, known = [("", model)], set()
    while waiting:
        name, module = waiting.pop()
        if id(module) not in known:
            known.add(id(module))
            yield name, module
            inner = [(f"{name}.{child}" if name else child, part) for child, part in children_of(module).items()]
            waiting += reversed(inner)


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters of a model and of all modules in it."""
    weights = (weight for _, module in parts_of(model) for weight in own_weights(module).values())
    return list({id(weight): weight for weight in weights}.values())


def requires_gradient(weight: torch.Tensor) -> bool:
    """Return whether a tensor requires a gradient."""
    return stored_in_tensor(weight, "requires_grad")  # type: ignore[no-any-return]


def stored_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor, None of one that autograd computed and whose gradient it does not keep."""
    keeps = stored_in_tensor(tensor, "is_leaf") or stored_in_tensor(tensor, "retains_grad")
    return stored_in_tensor(tensor, "grad") if keeps else None


def is_training(module: torch.nn.Module) -> bool:
    """Return whether a module is in training mode."""
    return bool(attributes_of(module).get("training", True))


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups of weights of an optimizer."""
    groups = attributes_of(optimizer).get("param_groups")
    return of_kind(list.copy(groups), dict) if is_a(groups, list) else []


def updated_by(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, torch.Tensor]:
    """Return the weights that optimizers update, by identity."""
    groups = (group.get("params") for optimizer in optimizers for group in groups_of(optimizer))
    weights = (weight for group in groups if is_a(group, list) for weight in of_kind(group, torch.Tensor))
    return {id(weight): weight for weight in weights}


def state_in(optimizer: torch.optim.Optimizer) -> dict[int, list[torch.Tensor]]:
    """Return the tensors that an optimizer keeps for its weights, by the identity of the weight."""
    states = items_of(attributes_of(optimizer).get("state"))
    return {id(weight): of_kind((value for _, value in items_of(state)), torch.Tensor) for weight, state in states}
