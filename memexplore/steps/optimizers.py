"""The optimizer of a step: as written, of another kind, or going over the parameters in another way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memexplore.knobs.knobs import Knobs, Optimizer, Update

KINDS: dict[Optimizer, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    Optimizer.SGD: (torch.optim.SGD, {"lr": 1e-3}),
    Optimizer.MOMENTUM: (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    Optimizer.ADAM: (torch.optim.Adam, {"lr": 1e-3}),
    Optimizer.ADAMW: (torch.optim.AdamW, {"lr": 1e-3}),
    Optimizer.ADAFACTOR: (torch.optim.Adafactor, {"lr": 1e-3}),
}
"""What each choice is made from, and with which settings."""

WAYS = {
    Update.FOREACH: {"foreach": True, "fused": False},
    Update.FUSED: {"fused": True, "foreach": False},
    Update.PER_TENSOR: {"foreach": False, "fused": False},
}
"""Settings of torch's optimizers for each way to go over the parameters."""

Written = Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | None


def make(written: Written, knobs: Knobs, weights: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of some weights, by the knobs, else as written: `Step.optimizer`, AdamW where that is None.

    An optimizer that exists already lends its class, and to its own weights the settings of their groups; the others
    get the settings that all of its groups share. It is not changed.

    >>> weights = [torch.nn.Parameter(torch.zeros(2))]
    >>> made = make(torch.optim.SGD(weights, lr=0.5), Knobs(update="foreach"), weights)
    >>> type(made).__name__, made.param_groups[0]["lr"], made.param_groups[0]["foreach"]
    ('SGD', 0.5, True)

    Raises ValueError where the optimizer cannot go over its parameters in the way that is asked for.
    """
    weights = list(weights)
    if knobs.optimizer is not Optimizer.AS_WRITTEN:
        kind, settings = KINDS[knobs.optimizer]
        made = kind(weights, **settings)
    elif isinstance(written, torch.optim.Optimizer):
        made = written
    else:
        made = (written or torch.optim.AdamW)(weights)
    if made is not written and knobs.update not in WAYS:
        return made
    return _again(made, weights, way(type(made), knobs.update))


def accepted(kind: type[torch.optim.Optimizer]) -> set[str]:
    """Names of the settings that an optimizer's class takes.

    >>> "fused" in accepted(torch.optim.AdamW), "fused" in accepted(torch.optim.Adafactor)
    (True, False)
    """
    return set(list(inspect.signature(kind).parameters)[1:])


def way(kind: type[torch.optim.Optimizer], update: Update) -> dict[str, Any]:
    """Settings with which an optimizer of some class goes over its parameters in a given way.

    >>> way(torch.optim.Adafactor, Update.PER_TENSOR)
    {'foreach': False}

    Raises ValueError, with the ways that there are, where the class does not have it.
    """
    if update not in WAYS:
        return {}
    takes = accepted(kind)
    asked = {Update.FOREACH: "foreach", Update.FUSED: "fused"}.get(update)
    if asked and asked not in takes:
        others = [way.value for way in (Update.FOREACH, Update.FUSED) if way.value in takes]
        words = ", ".join(repr(word) for word in (*others, Update.PER_TENSOR.value, Update.IN_BACKWARD.value))
        raise ValueError(f"{kind.__name__} has no {asked} update; write update= one of {words}")
    return {name: value for name, value in WAYS[update].items() if name in takes}


def _again(
    optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], changes: dict[str, Any]
) -> torch.optim.Optimizer:
    """Another optimizer of the same class for some weights, each with the settings it had, but for `changes`."""
    takes = accepted(type(optimizer))
    settings = {name: value for name, value in optimizer.defaults.items() if name in takes}
    wanted = {id(weight): weight for weight in weights}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = [wanted.pop(id(weight)) for weight in group["params"] if id(weight) in wanted]
        if own:
            groups.append({**_settings(group), "params": own, **changes})
    if wanted:
        groups.append({**_shared(optimizer.param_groups), "params": list(wanted.values()), **changes})
    return type(optimizer)(groups, **{**settings, **changes})


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _shared(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings that are the same in all groups."""
    first, *others = map(_settings, groups)
    return {
        name: value for name, value in first.items() if all(name in other and other[name] == value for other in others)
    }
