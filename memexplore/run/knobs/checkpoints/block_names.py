"""Write modules of a model as one expression to loop over: ``model.transformer.h`` instead of twelve names."""

from __future__ import annotations

from torch import nn

_LEAST = 3
"""Fewer names are listed."""


def blocks_expression(model: nn.Module | None, names: tuple[str, ...]) -> str:
    """Return an expression for repeated blocks that lists or `nn.Sequential`s hold, in order; empty for others.

    >>> model = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(2, 2) for _ in range(6))})
    >>> blocks_expression(model, tuple(f"h.{number}" for number in range(6)))
    'model.h'
    >>> blocks_expression(model, ("h.1", "h.3", "h.5"))
    'model.h[1::2]'
    """
    if model is None or len(names) < _LEAST or len({type(model.get_submodule(name)) for name in names}) > 1:
        return ""
    places: dict[str, list[int]] = {}
    for name in names:
        holder, _, own = name.rpartition(".")
        children = list(model.get_submodule(holder).named_children())
        places.setdefault(holder, []).append([child for child, _ in children].index(own))
    parts = [_part(model, holder, indices) for holder, indices in places.items()]
    if not all(parts) or names != tuple(f"{holder}.{at}".lstrip(".") for holder in places for at in places[holder]):
        return ""
    return parts[0] if len(parts) == 1 else f"[{', '.join(f'*{part}' for part in parts)}]"


def _part(model: nn.Module, holder: str, places: list[int]) -> str:
    """Return the expression for some children of one module, empty if it has none."""
    module, path = model.get_submodule(holder), _path(model, holder)
    if not path or not isinstance(module, nn.ModuleList | nn.Sequential):
        return ""
    every = places[1] - places[0] if len(places) > 1 else 1
    if every < 1 or places != list(range(places[0], places[-1] + 1, every)):
        return ""
    first = str(places[0]) if places[0] else ""
    # Beyond the last block there may be others, such as a head.
    end = "" if places[-1] + every >= len(module) else str(places[-1] + 1)
    step = f":{every}" if every > 1 else ""
    return path if not first and not end and not step else f"{path}[{first}:{end}{step}]"


def _path(model: nn.Module, name: str) -> str:
    """Return the expression for a module, empty if there is none without a call."""
    text, module = "model", model
    for part in name.split(".") if name else ():
        if part.isidentifier():
            text += f".{part}"
        elif isinstance(module, nn.ModuleList | nn.Sequential):
            text += f"[{part}]"
        else:
            return ""
        module = module.get_submodule(part)
    return text
