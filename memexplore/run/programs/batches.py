"""Find and exchange the tensors of a batch, and pass a batch to a model and a criterion.

A batch is a tensor, or tensors in tuples, lists, mappings, NamedTuples and dataclasses. A `Call` is how a training
script would pass it to a model and a criterion.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from memexplore.torch_internals.dispatch import pytree

_TARGET_NAMES = ("labels", "label", "targets", "target", "y")


class Call(NamedTuple):
    """The arguments of a model, and the arguments of the criterion after the model's output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]


def mapped(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a batch with each tensor replaced; a mapping becomes a dict, everything else keeps its type.

    >>> mapped(lambda tensor: tensor + 1, ({"x": torch.ones(1)}, [torch.zeros(1), "name"]))
    ({'x': tensor([2.])}, [tensor([1.]), 'name'])
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        # Its batch sizes stay on the CPU, wherever the data is.
        order = [None if part is None else function(part) for part in (value.sorted_indices, value.unsorted_indices)]
        return value._replace(data=function(value.data), sorted_indices=order[0], unsorted_indices=order[1])
    if isinstance(value, Mapping):
        return {name: mapped(function, part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts_of = [mapped(function, part) for part in value]
        return type(value)(*parts_of) if hasattr(value, "_fields") else type(value)(parts_of)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(changed, field.name, mapped(function, getattr(value, field.name)))
        return changed
    return pytree.tree_map_only(torch.Tensor, function, value)


def with_samples(value: Any, samples: int, choose: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    """Return a batch in which `choose` has chosen the parts of each list that has one part for each sample.

    Such are the lists of targets or images of detectors: below the top, as long as the batch, and of tensors or, as a
    tuple too, of mappings.

    >>> with_samples((torch.zeros(2, 3), [{"boxes": 1}, {"boxes": 2}]), 2, lambda parts: parts[:1])[1]
    [{'boxes': 1}]
    """
    if isinstance(value, Mapping):
        return {name: _with_samples(part, samples, choose) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_with_samples(part, samples, choose) for part in value)
    return value


def _with_samples(value: Any, samples: int, choose: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    is_list = type(value) is list and all(isinstance(part, torch.Tensor | Mapping) for part in value)
    # A tuple of tensors may be the state of a recurrent network.
    is_list = is_list or (type(value) is tuple and all(isinstance(part, Mapping) for part in value))
    if is_list and len(value) == samples:
        return type(value)(choose(value))
    return with_samples(value, samples, choose)


def has_list_of_samples(value: Any, samples: int) -> bool:
    """Return whether a batch has a list with one part for each sample.

    >>> has_list_of_samples((torch.zeros(2, 3), [{}, {}]), 2), has_list_of_samples(torch.zeros(2, 3), 2)
    (True, False)
    """
    lists: list[Any] = []

    def note(parts: Sequence[Any]) -> Sequence[Any]:
        lists.append(parts)
        return parts

    with_samples(value, samples, note)
    return bool(lists)


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch, in order.

    >>> [tensor.item() for tensor in tensors({"x": torch.tensor(1), "more": (torch.tensor(2), 3)})]
    [1, 2]
    """
    result: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        result.append(tensor)
        return tensor

    mapped(note, value)
    return result


def call_of(model: Any, loss: Callable[..., Any] | None, batch: Any) -> Call:
    """Return how a script would pass a batch to a model and a criterion, by the signatures of both.

    - a tensor: ``model(x)``; a dict: ``model(**batch)``
    - a tuple: ``(x, y)``, ``(x, mask, y)`` and ``((x, mask), y)``, where the model takes `x` and `mask`, and the
      criterion `y`; ``(dict, y)``
    - a dict, NamedTuple or dataclass with names that the model does not take: those parts go to the criterion

    >>> attention = torch.nn.MultiheadAttention(4, 1)
    >>> call = call_of(attention, torch.nn.MSELoss(), ("query", "key", "value", "target"))
    >>> call.args, call.targets
    (('query', 'key', 'value'), ('target',))

    Raises TypeError for names that the model does not take, and for parts that model and criterion cannot share.
    """
    forward = signature(_inner(model))
    if isinstance(batch, Mapping):
        return _by_name(forward, loss, dict(batch), batch)
    fields = fields_of(batch)
    if fields is not None and forward is not None and fields.keys() & _names(forward):
        return _by_name(forward, loss, fields, batch)
    if fields is not None and not isinstance(batch, tuple):
        return Call((batch,), {}, (batch,))
    if isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence) and len(batch):
        return _by_position(forward, loss, tuple(batch))
    return Call((batch,), {}, ())


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the parts of a mapping, NamedTuple or dataclass by name; None for any other value.

    >>> fields_of({"x": 1}), fields_of((1, 2))
    ({'x': 1}, None)
    """
    if isinstance(value, PackedSequence):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in value._fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _by_position(forward: inspect.Signature | None, loss: Callable[..., Any] | None, batch: tuple[Any, ...]) -> Call:
    first, *targets = batch
    low, high = _positions(forward)
    if isinstance(first, Mapping) and forward is not None and (first.keys() <= _names(forward) or _takes_any(forward)):
        return Call((), dict(first), tuple(targets))
    if isinstance(first, tuple) and fields_of(first) is None and not isinstance(first, PackedSequence):
        # A model with one argument takes the tuple itself.
        takes = low <= len(first) <= high and high > 1
        return Call(tuple(first) if takes else (first,), {}, tuple(targets))
    count = _input_count(low, high, loss, len(batch))
    if count is None:
        taken = signature(loss)
        raise TypeError(
            f"the batch is {kind(batch)}, the model's forward takes {_texts(forward)}, and the loss takes "
            f"{_texts(taken)}: give a batch of these parts, such as (input, target) or ((input, mask), target), or "
            "Step(..., compute_loss=function of model and batch)"
        )
    return Call(batch[:count], {}, batch[count:])


def _input_count(low: int, high: float, loss: Callable[..., Any] | None, parts: int) -> int | None:
    """Return how many of the first parts of a batch are the model's, which takes `low` to `high`; None if none fit."""
    if loss is None:
        # A model that returns its loss takes the targets too.
        return parts if max(low, 2) <= parts <= high < math.inf else max(1, min(low, parts))
    if high == math.inf and low == 0:
        return 1  # forward(*args) says nothing
    least, most = _positions(signature(loss))
    possible = [
        count for count in range(max(low, 1), int(min(high, parts)) + 1) if least - 1 <= parts - count <= most - 1
    ]
    exact = parts - (least - 1)
    if least > 1 and exact in possible:
        return exact
    if possible:
        return possible[0]
    return 1 if low <= 1 else None  # the loss then says what it was given


def _by_name(
    forward: inspect.Signature | None, loss: Callable[..., Any] | None, fields: dict[str, Any], batch: Any
) -> Call:
    if forward is None or _takes_any(forward):
        arguments, others = fields, {}
    else:
        names = _names(forward)
        arguments = {name: value for name, value in fields.items() if name in names}
        others = {name: value for name, value in fields.items() if name not in names}
        missing = [name for name in _required(forward) if name not in arguments]
        if missing or (others and loss is None):
            raise TypeError(
                f"the batch has the names {', '.join(fields)}, and the model's forward takes "
                f"{_texts(forward)}: rename the parts of the batch, or write "
                "Step(..., compute_loss=function of model and batch)"
            )
    return Call((), arguments, _targets(loss, fields, others, batch))


def _targets(
    loss: Callable[..., Any] | None, fields: dict[str, Any], others: dict[str, Any], batch: Any
) -> tuple[Any, ...]:
    """Return what a criterion gets of a batch with names: the parts that it names, else the batch.

    A criterion of torch gets the parts that the model does not take, or the labels.
    """
    if loss is None:
        return ()
    if is_criterion(loss):
        labels = [fields[name] for name in _TARGET_NAMES if name in fields][:1]
        return tuple(others.values()) or tuple(labels) or (batch,)
    taken = signature(loss)
    names = _required(taken)[1:] if taken is not None else []
    if names and all(name in fields for name in names):
        return tuple(fields[name] for name in names)
    if others and len(names) == len(others) and names != ["batch"]:
        return tuple(others.values())
    return (batch,)


def is_criterion(loss: Any) -> bool:
    """Return whether a loss is a function or a module of torch.

    >>> is_criterion(torch.nn.functional.cross_entropy), is_criterion(torch.nn.MSELoss()), is_criterion(len)
    (True, True, False)
    """
    function = getattr(loss, "func", loss)  # of functools.partial
    owner = type(function) if isinstance(function, torch.nn.Module) else function
    return (getattr(owner, "__module__", None) or "").startswith("torch.nn.")


def criterion_input(output: Any) -> Any:
    """Return what a criterion of torch takes of a model's output: the logits of an object or dict that has them.

    `out` is the name in the segmentation models of torchvision.
    """
    if isinstance(output, torch.Tensor):
        return output
    for name in ("logits", "out"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return value
    return output


def own_loss(output: Any) -> torch.Tensor | None:
    """Return the loss in a model's output: a number, `loss`, a sum of named losses, or the only number of a tuple."""
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if value is None:
        value = output
    if isinstance(value, Mapping):
        parts = list(value.values())
        return sum(parts) if parts and all(map(_is_number, parts)) else None  # type: ignore[return-value]
    if isinstance(value, tuple | list):
        numbers = [part for part in value if _is_number(part)]
        value = numbers[0] if len(numbers) == 1 else None
    return value if isinstance(value, torch.Tensor) and not value.dim() else None


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()


def kind(value: Any) -> str:
    """Return the form of a value as text, as an error names it.

    >>> kind((torch.zeros(2, 3), {"mask": torch.zeros(2)}))
    '(Tensor(2, 3), {mask: Tensor(2)})'
    """
    if isinstance(value, torch.Tensor):
        return f"Tensor({', '.join(map(str, value.shape))})"
    if isinstance(value, Mapping):
        name = "" if isinstance(value, dict) else type(value).__name__
        return f"{name}{{{', '.join(f'{key}: {kind(part)}' for key, part in value.items())}}}"
    fields = fields_of(value)
    if fields is not None:
        return f"{type(value).__name__}({', '.join(f'{name}={kind(part)}' for name, part in fields.items())})"
    if isinstance(value, tuple):
        return f"({', '.join(map(kind, value))})"
    return f"[{', '.join(map(kind, value))}]" if isinstance(value, list) else type(value).__name__


# --- signatures -----------------------------------------------------------------------------------------------------


def signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a function, or of a module's forward; None for a builtin without one."""
    try:
        if not isinstance(function, torch.nn.Module):
            return inspect.signature(function)
        # That of the class: a knob or a library may have replaced the forward of the module by one that takes anything.
        taken = inspect.signature(type(function).forward)
        return taken.replace(parameters=list(taken.parameters.values())[1:])
    except (TypeError, ValueError):
        return None


def rejects(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError) -> bool:
    """Return whether a call failed because of its arguments, rather than by an error inside of the function."""
    taken = signature(function)
    if taken is None:
        traceback = error.__traceback__
        return traceback is not None and traceback.tb_next is None  # the frame of the call itself, and none below it
    try:
        taken.bind(*args, **kwargs)
    except TypeError:
        return True
    return False


def _inner(model: Any) -> Any:
    """Return the model in wrappers whose forward takes anything, such as DataParallel and compiled models."""
    for _ in range(8):
        taken = signature(model)
        if not isinstance(model, torch.nn.Module) or (taken is not None and _names(taken)):
            return model
        inner: Iterator[Any] = (getattr(model, name, None) for name in ("_orig_mod", "module", "base_model", "model"))
        wrapped_module = next((candidate for candidate in inner if isinstance(candidate, torch.nn.Module)), None)
        if wrapped_module is None:
            return model
        model = wrapped_module
    return model


def _texts(taken: inspect.Signature | None) -> str:
    """Return arguments as text; ``mask=`` has a default."""
    arguments = [] if taken is None else list(taken.parameters.values())
    texts = [
        f"{argument.name}=" if argument.default is not argument.empty else str(argument).split(":")[0]
        for argument in arguments
    ]
    return ", ".join(texts) or ("anything" if taken is None else "nothing")


def _names(taken: inspect.Signature) -> set[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in taken.parameters.values() if parameter.kind in kinds}


def _takes_any(taken: inspect.Signature) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.parameters.values())


def _required(taken: inspect.Signature) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in taken.parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in kinds
    ]


def _positions(taken: inspect.Signature | None) -> tuple[int, float]:
    """Return the least and the greatest number of positional arguments; 0 and infinity if unknown."""
    if taken is None:
        return 0, math.inf
    positional = [
        parameter
        for parameter in taken.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    least = sum(parameter.default is parameter.empty for parameter in positional)
    anything = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in taken.parameters.values())
    return least, math.inf if anything else len(positional)
