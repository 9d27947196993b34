"""Apply a setting to the live model after an out-of-memory error, until it is undone.

What only the person's code can have is shown as lines to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore.live.locks import why_locked
from memexplore.live.setting import inner, no_model
from memexplore.run.code.lines import lines
from memexplore.run.knobs.applying.apply import apply_until_restored
from memexplore.run.knobs.applying.loop import RunningLoop
from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.run.knobs.knobs import Knobs
from memexplore.torch_internals.modules import is_compiled

if TYPE_CHECKING:
    import torch

GONE = "No model of the failed step is known that still exists, so only the code can have a setting"
MADE_BY_CELL = "The failed cell makes the model itself, so only its code can have a setting"
_WRITE = "write the lines for it"


class Parts(NamedTuple):
    """A setting in two parts."""

    of_model: Knobs
    """What a model can get at any time."""
    of_code: Knobs
    """What only the code of the training loop can have."""
    reason: str
    """Why no model is changed, as a sentence; empty where one can be."""


def parts_of(knobs: Knobs, models: Sequence[torch.nn.Module]) -> Parts:
    """Return what live models can get of a setting, and what is left to the code.

    >>> import torch
    >>> parts = parts_of(Knobs(checkpoint="sqrt", batch=4), [torch.nn.Linear(1, 1)])
    >>> print(parts.of_model, "|", parts.of_code)
    checkpoint sqrt | batch 4
    """
    reason = next(filter(None, (no_model([model], is_compiled(model)) for model in models)), "")
    # A new memory format does not suit state that the optimizer has. Autocast is applied to the forward of the model.
    facts = RunningLoop(reason, frozenset({"precision"}), "The optimizer")
    of_model: dict[str, Any] = {}
    of_code: dict[str, Any] = {}
    for field, value in knobs.changed().items():
        (of_code if why_locked(Knobs(**{field: value}), facts) else of_model)[field] = value
    return Parts(Knobs(**of_model), Knobs(**of_code), reason)


def why_not(knobs: Knobs, models: Sequence[torch.nn.Module], cannot: str) -> str:
    """Return why nothing of a setting can be applied to some models, as sentences; empty if a part of it can.

    `cannot` says why the models cannot be used, without a full stop; empty if they can.
    """
    if knobs == Knobs():
        return ""
    if not models or cannot:
        return f"{cannot or GONE}: {_WRITE}."
    parts = parts_of(knobs, models)
    if parts.of_model != Knobs():
        return ""
    return f"{parts.reason or f'Only the code can have {knobs}.'} {_WRITE.capitalize()}."


class AppliedSetting:
    """At most one setting in effect on models, which it keeps alive until it is undone.

    >>> import torch
    >>> model, applied = torch.nn.Sequential(torch.nn.Linear(1, 1)), AppliedSetting()
    >>> applied.apply(Knobs(precision="bf16", batch=4), [model])
    >>> applied.text
    'Applied to the model: bf16 autocast. Only the code can have batch 4: write the lines for it.'
    >>> applied.undo()
    """

    def __init__(self) -> None:
        self._log = UndoLog()
        self.text = ""
        """What was changed and what was not, as sentences."""
        self.code = ""
        """The lines of what was not applied."""

    def apply(self, knobs: Knobs, models: Sequence[torch.nn.Module], cannot: str = "") -> None:
        """Apply knobs; for `cannot` see `why_not`.

        Raises ValueError where nothing of the setting can be applied, and what applying it raises; `undo` restores the
        models afterwards.
        """
        if reason := why_not(knobs, models, cannot):
            raise ValueError(reason)
        parts = parts_of(knobs, models)
        reports = [apply_until_restored(self._log, parts.of_model, inner(model), _in_place_failed) for model in models]
        changes = [text for report in reports for text in report.texts or (str(parts.of_model),)]
        where = "the model" if len(models) == 1 else f"{len(models)} models"
        notes = dict.fromkeys(note for report in reports for note in report.notes)
        sentences = [f"Applied to {where}: {', '.join(dict.fromkeys(changes))}.", *notes]
        if parts.of_code != Knobs():
            sentences.append(f"Only the code can have {parts.of_code}: {_WRITE}.")
        self.text, self.code = " ".join(sentences), lines(None, parts.of_code)

    def undo(self) -> None:
        """Restore the models; it may be called twice."""
        self._log.restore()


def _in_place_failed(error: Exception) -> None:
    print(f"The model cannot run on fake tensors ({error}), so its activations are as written.")
