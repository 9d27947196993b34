"""Make the optimizer of a step: as written, of another class, or with another implementation of its update."""

from __future__ import annotations

import collections
import copy
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.optimizer import KINDS, Optimizer
from memexplore.run.knobs.update import UPDATE_SETTINGS, parameter_names, update_settings
from memexplore.torch_internals.state import OPTIMIZER_HOOKS

Written = Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | None


def written(optimizer: Any) -> Written:
    """Return `Step.optimizer` as a function of the parameters or an optimizer; a name becomes a class of torch.

    >>> written("adamw") is torch.optim.AdamW, written("SGD with momentum").keywords["momentum"]
    (True, 0.9)

    Raises ValueError for a name that torch does not have, TypeError for any other value.
    """
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        return _named(optimizer)
    if not callable(optimizer):
        raise TypeError(
            f"optimizer={optimizer!r} is not an optimizer; write a name such as 'adamw', a class such as "
            "torch.optim.AdamW, or a function of the parameters"
        )
    first = next(iter(parameters), None) if (parameters := _parameters(optimizer)) is not None else None
    if first in ("model", "module", "net"):
        raise TypeError(
            f"optimizer= is called with the list of parameters, and the first argument of this function is called "
            f"{first}. Write lambda parameters: torch.optim.AdamW(parameters)"
        )
    function: Callable[..., torch.optim.Optimizer] = optimizer
    return function


def _named(name: str) -> Callable[..., torch.optim.Optimizer]:
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    kind = classes.get(name.strip().lower().removeprefix("torch.optim."))
    if kind is not None:
        return kind
    if name.strip().lower() in ("sgd with momentum", "momentum"):
        kind, settings = KINDS[Optimizer.MOMENTUM]
        return functools.partial(kind, **settings)
    names = {key: value.__name__ for key, value in classes.items()}
    close = difflib.get_close_matches(name.strip().lower(), names, n=2, cutoff=0.6)
    meant = f"did you mean {' or '.join(names[key] for key in close)}?" if close else "torch.optim has"
    others = "" if close else f" {', '.join(sorted(names.values()))};"
    raise ValueError(
        f"optimizer={name!r} is not an optimizer of torch; {meant}{others} give one of another library as a function "
        "of the parameters"
    )


def _parameters(function: Any) -> list[str] | None:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def make(
    written: Written | str,
    knobs: Knobs,
    weights: Iterable[torch.nn.Parameter],
    replaced: Mapping[int, torch.nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer of some weights, by the knobs, else as written: `Step.optimizer`, AdamW if that is None.

    From an optimizer object the new one has its class. Weights of the object keep the settings of their groups; other
    weights get the settings that all of its groups share. The object is not changed. `replaced` has the weight that
    trains instead of one of the object, by the id of that.

    >>> weights = [torch.nn.Parameter(torch.zeros(2))]
    >>> made = make(torch.optim.SGD(weights, lr=0.5), Knobs(update="foreach"), weights)
    >>> type(made).__name__, made.param_groups[0]["lr"], made.param_groups[0]["foreach"]
    ('SGD', 0.5, True)

    Raises ValueError where the class does not have the update that the knobs ask for, TypeError where the optimizer
    can be neither made again nor copied.
    """
    weights = list(weights)
    if knobs.optimizer is not Optimizer.AS_WRITTEN:
        kind, settings = KINDS[knobs.optimizer]
        made = kind(weights, **settings)
    elif isinstance(written, torch.optim.Optimizer):
        made = written
    elif isinstance(written, str):
        made = _named(written)(weights)
    else:
        made = (written or torch.optim.AdamW)(weights)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                f"the function given as optimizer= returned {type(made).__name__}; let it return an optimizer, such as "
                "lambda parameters: torch.optim.AdamW(parameters)"
            )
    if replaced and made is not written:
        _check_weights(made, weights)
    if made is not written and knobs.update not in UPDATE_SETTINGS:
        return made
    return _rebuilt(made, weights, update_settings(type(made), knobs.update), replaced or {})


def _check_weights(made: torch.optim.Optimizer, weights: list[torch.nn.Parameter]) -> None:
    known = {id(weight) for weight in weights}
    if any(id(weight) not in known for group in made.param_groups for weight in group["params"]):
        raise ValueError(
            "the function given as optimizer= does not use the parameters that it gets, which are others on several "
            "GPUs: write lambda parameters: torch.optim.AdamW(parameters)"
        )


def settings_of(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the parameter groups of an optimizer and the settings with which its class makes another one.

    >>> groups, settings = settings_of(torch.optim.SGD([torch.zeros(1)], lr=0.5))
    >>> len(groups), settings["lr"]
    (1, 0.5)
    """
    takes = parameter_names(type(optimizer))
    groups = [{**_settings(group), "params": group["params"]} for group in optimizer.param_groups]
    return groups, {name: value for name, value in optimizer.defaults.items() if name in takes}


def _rebuilt(
    optimizer: torch.optim.Optimizer,
    weights: list[torch.nn.Parameter],
    changes: dict[str, Any],
    replaced: Mapping[int, torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class for some weights, each with its settings, except for `changes`."""
    takes = parameter_names(type(optimizer))
    # What the class keeps as attributes too: the arguments that are no settings of groups, such as flags.
    values = {**vars(optimizer), **optimizer.defaults}
    settings = {name: value for name, value in values.items() if name in takes}
    wanted = {id(weight): weight for weight in weights}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        now = [replaced.get(id(weight), weight) for weight in group["params"]]
        own = [wanted.pop(id(weight)) for weight in now if id(weight) in wanted]
        if own:
            groups.append({**_settings(group), "params": own, **changes})
    if wanted:
        groups.append({**_shared(optimizer.param_groups), "params": list(wanted.values()), **changes})
    kind = type(optimizer)
    try:
        return kind(groups, **{**settings, **changes})
    except Exception as error:
        if kind.__module__.startswith("torch.optim."):
            raise
        failure = error
    # Settings are not always what the constructor takes: an argument `weight_decay` may be an object.
    try:
        return _copied(optimizer, groups, changes, replaced)
    except Exception:
        name = kind.__name__
        raise TypeError(
            f"the optimizer cannot be made again from its settings ({type(failure).__name__} in the constructor of "
            f"{name}: {failure}): give optimizer= as a function, such as lambda parameters: {name}(parameters, ...)"
        ) from failure


def _copied(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    changes: dict[str, Any],
    replaced: Mapping[int, torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """Return an optimizer with the attributes of another one, for the weights of groups, without its state."""
    memo: dict[int, Any] = {id(weight): weight for group in groups for weight in group["params"]}
    for nested in (optimizer, *vars(optimizer).values()):
        if isinstance(nested, torch.optim.Optimizer):
            memo[id(nested.state)] = collections.defaultdict(dict)
            for weight in (weight for group in nested.param_groups for weight in group["params"]):
                memo[id(weight)] = replaced.get(id(weight), weight)
    copied = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = copied
    # As a constructor would: without hooks, and without the `step` of a scheduler.
    kept = {name: value for name, value in vars(optimizer).items() if not name.startswith("_optimizer_")}
    copied.__setstate__({name: copy.deepcopy(value, memo) for name, value in kept.items() if name != "step"})
    # In place: a wrapper has the groups of the optimizer inside it.
    copied.param_groups[:] = groups
    copied.defaults.update(changes)
    return copied


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _shared(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings that are the same in all groups."""
    first, *others = map(_settings, groups)
    return {
        name: value for name, value in first.items() if all(name in other and other[name] == value for other in others)
    }


def depends_on_parameters_only(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the requests of an update depend on nothing but the parameters, their gradients and the state.

    >>> depends_on_parameters_only(torch.optim.SGD([torch.zeros(1)]))
    True
    """
    # LBFGS calls the model again; a class or a hook of the user's may do anything.
    is_known = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)
    return is_known and not any(getattr(optimizer, hooks) for hooks in OPTIMIZER_HOOKS)
