"""Knobs that cannot be switched while a loop runs, each with one sentence that says why."""

from __future__ import annotations

from memexplore.run.knobs.applying.loop import RunningLoop
from memexplore.run.knobs.knobs import KNOBS, Knobs, conflicts


def why_locked(knobs: Knobs, loop: RunningLoop) -> str:
    """Return why a setting cannot be switched on while a loop runs, as one sentence, "" if it can.

    >>> why_locked(Knobs(batch=8), RunningLoop())
    "The batch comes from the loop's data loader: change it there and start again."
    >>> why_locked(Knobs(checkpoint="sqrt"), RunningLoop())
    ''
    """
    reasons = (KNOBS[name].locked_in(value, loop) for name, value in knobs.changed().items())
    return next(filter(None, reasons), "; ".join(conflicts(knobs)))


def locked(loop: RunningLoop) -> dict[str, str]:
    """Return the sentence for each locked knob, and for each of its values where only some are locked for one reason.

    >>> sorted(name for name in locked(RunningLoop()) if name.startswith(("accum", "check", "prec")))
    ['accumulation', 'precision all bf16', 'precision bf16', 'precision fp16']
    """
    sentences: dict[str, str] = {}
    for name, knob in KNOBS.items():
        reasons = {} if knob.part_of else {value: knob.locked_in(value, loop) for value in knob.values.examples}
        if len({*reasons.values()}) == 1:
            sentences[name] = next(iter(reasons.values()))
        else:
            sentences |= {knob.text(value): reason for value, reason in reasons.items()}
    return {name: sentence for name, sentence in sentences.items() if sentence}


def switchable() -> list[str]:
    """Return the knobs that a loop can switch while it runs, where it has a model and asks memexplore for all it can.

    >>> "checkpoint" in switchable(), "optimizer" in switchable()
    (True, False)
    """
    examples = [(knob, value) for knob in KNOBS.values() for value in knob.values.examples if not knob.part_of]
    loop = RunningLoop(follows=frozenset(word for knob, value in examples for word in knob.asks_loop_for(value)))
    return list(dict.fromkeys(knob.name for knob, value in examples if not knob.locked_in(value, loop)))
