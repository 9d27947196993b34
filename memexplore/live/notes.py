"""Write the notes of `Live`: sentences about a watched run, such as what is not measured."""

from __future__ import annotations

from memexplore.live.control import Control
from memexplore.live.counters import Counters, VirtualCounters
from memexplore.live.store import Store
from memexplore.run.knobs.applying.forward import device_of
from memexplore.text.units import size_text
from memexplore.torch_internals.state import compiler_is_used

_MANY = 20
"""Steps or calls after which a note says why the run has no step of its own."""


def of_now(store: Store, control: Control, counters: Counters, calls: int) -> list[str]:
    """Return the notes of a run that hold now. `calls` are the calls of models in the step that runs."""
    return [
        *store.notes,
        *_is_limited(counters),
        *_steps_are_missing(store, control, calls),
        *_is_on_the_cpu(store, control, counters),
    ]


def _is_limited(counters: Counters) -> list[str]:
    if counters.limit is None:
        return []
    return [
        f"This process may use {size_text(counters.limit)} on {counters.device}: "
        "torch.cuda.set_per_process_memory_fraction sets this limit."
    ]


def _steps_are_missing(store: Store, control: Control, calls: int) -> list[str]:
    steps, kind = control.steps_of_others()
    if steps >= _MANY:
        return [
            f"An optimizer that is not watched ({kind}) has stepped {steps:,} times since the last watched step: watch "
            "it and the model that it updates."
        ]
    if not steps and calls >= _MANY and (store.history.newest is None or compiler_is_used()):
        reason = "; an optimizer's step that is compiled is not seen" if compiler_is_used() else ""
        return [
            f"The model was called {calls:,} times with gradients and no optimizer has stepped: a step ends when an "
            f"optimizer of torch.optim has stepped{reason}."
        ]
    return []


def _is_on_the_cpu(store: Store, control: Control, counters: Counters) -> list[str]:
    if counters.capacity is None or store.history.newest is None or store.worst is not None:
        return []
    on_cpu = [model for model in control.models() if device_of(model).type == "cpu"]
    if not on_cpu:
        return []
    watch_cpu = "--gpu cpu" if isinstance(counters, VirtualCounters) else 'device="cpu"'
    return [
        f"Nothing is allocated on the {counters.device}, because {type(on_cpu[0]).__name__} trains on the CPU: put it "
        f'and its batches on "cuda", or watch the CPU ({watch_cpu}).'
    ]
