"""`Knobs`: one frozen value with the changes to a training step, and the registry of all knobs, `KNOBS`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memexplore.run.knobs.control import Control, Explored
from memexplore.run.knobs.knob import Group, Knob, Limits
from memexplore.run.knobs.values import AS_WRITTEN


def _discovered() -> Iterator[Knob]:
    """Yield a knob of each class in the files of this folder; its packages hold what large knobs need."""
    for file in pkgutil.iter_modules([str(Path(__file__).parent)], f"{__package__}."):
        if not file.ispkg and file.name not in (__name__, Knob.__module__):
            for kind in vars(importlib.import_module(file.name)).values():
                if isinstance(kind, type) and issubclass(kind, Knob) and kind.__module__ == file.name:
                    yield kind()


KNOBS: dict[str, Knob] = {knob.name: knob for knob in sorted(_discovered(), key=lambda knob: (knob.place, knob.name))}
"""All knobs by name, in the order in which a setting names them."""
_BY_STAGE = sorted(KNOBS.values(), key=lambda knob: knob.stage)


class Knobs:
    """Changes to a training step; a knob that is "as written", None or empty changes nothing.

    Choices can be given as text: ``Knobs(precision="bf16", checkpoint="every 2", batch=16)``.

    >>> Knobs(precision="bf16").precision
    <Precision.BF16: 'bf16'>
    >>> print(Knobs(checkpoint="every 2", batch=16))
    checkpoint every 2, batch 16
    >>> print(Knobs())
    as written
    >>> Knobs(checkpoint="every 2", batch=16)
    Knobs(checkpoint='every 2', batch=16)

    Raises ValueError for a value that is not a setting.
    """

    # Values that change nothing are attributes of the class.
    _given: dict[str, Any]
    _hash: int

    def __init__(self, **values: Any) -> None:
        given = {}
        for name, value in values.items():
            if name not in KNOBS:
                close = difflib.get_close_matches(name, KNOBS, n=1)
                raise TypeError(f"there is no knob {name!r}{f'; did you mean {close[0]}?' if close else ''}")
            given[name] = KNOBS[name].values.parsed(name, value)
        given = {name: given[name] for name in KNOBS if name in given and given[name] != KNOBS[name].values.default}
        self.__dict__.update(given, _given=given)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a setting cannot be changed: write knobs.replace({name}={value!r})")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a setting cannot be changed: write knobs.replace({name}=...)")

    def __eq__(self, other: object) -> bool:
        return self._given == other._given if isinstance(other, Knobs) else NotImplemented

    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            self.__dict__["_hash"] = hash(tuple(self._given.items()))
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._given,)

    def changed(self) -> dict[str, Any]:
        """Return the knobs that change something, by name.

        >>> Knobs(batch=4).changed()
        {'batch': 4}
        """
        return {
            name: value
            for name, value in self._given.items()
            if not KNOBS[name].part_of or KNOBS[name].part_of in self._given
        }

    def replace(self, **changes: Any) -> Knobs:
        """Return the same knobs with some of them changed."""
        return Knobs(**{**self._given, **changes})

    def without(self, group: Group) -> Knobs:
        """Return the same knobs, but the knobs of a group as written."""
        return Knobs(**{name: value for name, value in self._given.items() if KNOBS[name].group is not group})

    def __replace__(self, **changes: Any) -> Knobs:
        return self.replace(**changes)

    def __str__(self) -> str:
        return ", ".join(KNOBS[name].text(value) for name, value in self.changed().items()) or AS_WRITTEN

    def __repr__(self) -> str:
        return f"Knobs({', '.join(f'{name}={KNOBS[name].values.code(value)}' for name, value in self._given.items())})"

    def _repr_html_(self) -> str:
        from memexplore.figures.values import changes_html

        changed = self.changed()
        rows = [
            (name, KNOBS[name].values.text(value), KNOBS[name].values.text(KNOBS[name].values.default))
            for name, value in changed.items()
        ]
        return changes_html(repr(self), rows, [name for name in KNOBS if name not in changed])


def _restored(values: dict[str, Any]) -> Knobs:
    return Knobs(**values)


for _name, _knob in KNOBS.items():
    setattr(Knobs, _name, _knob.values.default)
Knobs.__doc__ = f"{Knobs.__doc__}\n" + "".join(f"\n    {name}: {knob.summary}" for name, knob in KNOBS.items())
Knobs.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=knob.values.default)
        for name, knob in KNOBS.items()
    ]
)


def in_stages(knobs: Knobs) -> list[tuple[Knob, Any]]:
    """Return the knobs that change something with their values, in the order in which they act.

    >>> [knob.name for knob, value in in_stages(Knobs(batch=8, gpu="T4", frozen="0"))]
    ['gpu', 'frozen', 'batch']
    """
    changed = knobs.changed()
    return [(knob, changed[knob.name]) for knob in _BY_STAGE if knob.name in changed]


def conflicts(knobs: Knobs, explored: Explored | None = None) -> list[str]:
    """Return a sentence for each contradiction in a setting, and with a program; an empty list if it can run.

    >>> conflicts(Knobs(update="in backward", accumulation=2))
    ['update in backward frees each gradient at once: accumulation=2 needs them until the last micro-batch']
    >>> conflicts(Knobs(update="in backward", accumulation=1))
    []
    """
    return [
        sentence
        for name, value in knobs.changed().items()
        for sentence in KNOBS[name].conflicts(value, knobs, explored or Explored())
    ]


def refuse_conflicts(knobs: Knobs) -> None:
    """Raise ValueError with a sentence for each contradiction in a setting."""
    wrong = conflicts(knobs)
    if wrong:
        raise ValueError("; ".join(wrong))


def layers_of(knobs: Knobs) -> tuple[str, ...]:
    """Return the names of layers in a setting."""
    return tuple(name for knob, value in in_stages(knobs) for name in knob.layers(value))


def knobs_of(texts: Iterable[str]) -> Knobs:
    """Return the knobs that texts name, as on a command line.

    >>> knobs_of(["batch=16", "checkpoint=every 2"])
    Knobs(checkpoint='every 2', batch=16)

    Raises ValueError for a text without a name, for an unknown name, and for a value that is not a setting.
    """
    names = [name for name in KNOBS if name != "variables"]
    texts_by_name: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or name not in names:
            raise ValueError(f"{text!r} is not a knob with a value; write one such as batch=16, of {', '.join(names)}")
        texts_by_name[name] = value
    return Knobs(**texts_by_name)


def controls_of(explored: Explored) -> list[Control]:
    """Return the controls of an explorer, in the order of their groups."""
    titles = [group.value for group in Group]
    controls = [control for knob in KNOBS.values() for control in knob.controls(explored)]
    return sorted(controls, key=lambda control: titles.index(control.group))


def unavailable_in(limits: Limits) -> dict[str, str]:
    """Return the knobs that a program cannot have, each with the reason.

    >>> unavailable_in(Limits("this cell", no_optimizer="this cell makes no optimizer"))["lora_rank"]
    'this cell makes no optimizer'
    """
    reasons = {name: (KNOBS.get(knob.part_of) or knob).unavailable(limits) for name, knob in KNOBS.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def hidden_in(explored: Explored) -> dict[str, str]:
    """Return the knobs that would change nothing in a program, each with the reason."""
    reasons = {name: (KNOBS.get(knob.part_of) or knob).hidden(explored) for name, knob in KNOBS.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def not_now(knobs: Knobs) -> dict[str, str]:
    """Return the knobs that wait for another one in a setting, each with the sentence that says for which.

    >>> not_now(Knobs())["lora_rank"]
    'No layer has LoRA'
    """
    reasons = {name: knob.not_now(knobs) for name, knob in KNOBS.items()}
    return {name: reason for name, reason in reasons.items() if reason}
