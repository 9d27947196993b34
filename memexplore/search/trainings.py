"""Sentences on how a setting trains differently from the step as written. In: knobs. Out: text."""

from __future__ import annotations

from collections.abc import Iterator

from memexplore.knobs.knobs import Knobs


def training_text(knobs: Knobs, altered: frozenset[str]) -> str:
    """Return how a setting trains differently, one sentence for each of its `altered` fields (`candidates.altered`).

    >>> training_text(Knobs(batch=20), frozenset({"batch"}))
    'A step of 20 samples has a noisier gradient, and often needs another learning rate.'
    >>> training_text(Knobs(checkpoint="sqrt"), frozenset())
    ''
    """
    return " ".join(_sentences(knobs, altered))


def _sentences(knobs: Knobs, altered: frozenset[str]) -> Iterator[str]:
    if "batch" in altered:
        yield f"A step of {knobs.batch} samples has a noisier gradient, and often needs another learning rate."
    if "variables" in altered:
        values = ", ".join(f"{name} = {value}" for name, value in knobs.variables)
        yield f"With {values} the gradient of a step is noisier, which often needs another learning rate."
    if "accumulation" in altered:
        yield "Batch norm takes its statistics from each micro-batch."
    if "input_size" in altered:
        yield f"Inputs are cut or scaled to a size of {knobs.input_size}."
    if "optimizer" in altered:
        yield f"{knobs.optimizer.value} replaces the optimizer, and needs a learning rate of its own."
    if "precision" in altered:
        yield "Weights are rounded to bf16 after each update, which loses updates below 1/256 of a weight."
    if "frozen" in altered:
        yield f"{_layers(knobs.frozen)} not train."
    if "lora" in altered:
        one = len(knobs.lora) == 1
        where = f"In {knobs.lora[0]}" if one else f"In {len(knobs.lora)} layers"
        yield f"{where} only adapters of rank {knobs.lora_rank} train, not the weights themselves."
    if "mode" in altered:
        yield "Nothing trains."


def _layers(names: tuple[str, ...]) -> str:
    return f"{names[0]} does" if len(names) == 1 else f"{len(names)} layers do"
