"""Cures that belong to a library: what its own object, which keeps the memory, offers against that.

A row is chosen by the class of the object that keeps the tensors, or a class that it is derived from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memexplore.out_of_memory.objects import bases_of, module_of, name_of


class Cure(NamedTuple):
    """What to change about an object of a class."""

    text: str
    """A sentence; ``{holder}`` is the name of what keeps the tensors."""
    code: str
    """``{kind}`` is the name of the object's class."""
    source: str
    """Where the library says so."""


GRADIENT = "torch.Tensor.grad"
CURES = {
    GRADIENT: Cure(
        "`backward(create_graph=True)` has made gradients with a graph: the graph refers to its leaf, and the leaf to "
        "the gradient. Take such gradients with torch.autograd.grad, or set `.grad` to None after its last use.",
        "leaf.grad = None  # after its last use; or: (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)",
        "torch, Tensor.backward and the warning of the autograd engine (engine.cpp)",
    ),
    "torch.autograd.function.FunctionCtx": Cure(
        "`{holder}` keeps its output as an attribute of `ctx`, and the output leads back to it: save what the backward "
        "pass needs with `ctx.save_for_backward`.",
        "ctx.save_for_backward(output)  # in backward: (output,) = ctx.saved_tensors",
        'torch, Extending PyTorch: "save_for_backward() must be used to save any tensors to be used in the backward '
        'pass", which prevents reference cycles and memory leaks',
    ),
    "torchmetrics.classification.precision_recall_curve.BinaryPrecisionRecallCurve": Cure(
        "`{holder}` are the predictions and targets of every batch, which this metric keeps until `compute`: give it "
        "thresholds, so that it keeps counts, or reset it when a round ends.",
        "{kind}(thresholds=100)  # or: metric.reset() after each round",
        'torchmetrics, BinaryPrecisionRecallCurve: "Setting the thresholds argument to an integer, list or 1d tensor '
        'will use a binned version that uses memory of size O(n_thresholds)"',
    ),
    "torchmetrics.metric.Metric": Cure(
        "`{holder}` is the state of a metric, which keeps it until `compute`: let it keep its lists on the CPU, or "
        "reset it when a round ends.",
        "{kind}(compute_on_cpu=True)  # or: metric.reset() after each round",
        "torchmetrics, Metric, additional keyword arguments: compute_on_cpu",
    ),
    "transformers.trainer_pt_utils.EvalLoopContainer": Cure(
        "`{holder}` are the predictions of all batches, which the Trainer gathers on the GPU: let it move them to the "
        "CPU every few batches.",
        "TrainingArguments(eval_accumulation_steps=8)",
        "transformers, TrainingArguments: eval_accumulation_steps",
    ),
    "transformers.modeling_outputs.CausalLMOutputWithPast": Cure(
        "`{holder}` has the logits of all positions: have the model compute those that are used, the last one to "
        "choose the next token.",
        "model(input_ids, logits_to_keep=1)",
        "transformers, forward of the models with a language modeling head: logits_to_keep",
    ),
    "transformers.cache_utils.Cache": Cure(
        "`{holder}` is a cache of keys and values for generation: switch it off where nothing is generated.",
        "model(input_ids, use_cache=False)",
        "transformers, PretrainedConfig: use_cache",
    ),
}
"""Class -> its cure; of several classes of an object the first in its method resolution order counts."""


def cure_of(classes: Sequence[str]) -> Cure | None:
    """Return the cure for an object by the names of its classes, the most derived first; None without one.

    >>> cure_of(["torchmetrics.text.bleu.BLEUScore", "torchmetrics.metric.Metric"]).code.partition("  ")[0]
    'BLEUScore(compute_on_cpu=True)'
    """
    found = next((CURES[name] for name in classes if name in CURES), None)
    return found and found._replace(code=found.code.format(kind=classes[0].rpartition(".")[2]))


def names_of_classes(kind: type | None) -> tuple[str, ...]:
    """Return the names of a class and of those that it is derived from, in the order of their attributes.

    >>> names_of_classes(dict)
    ('builtins.dict', 'builtins.object')
    """
    return () if kind is None else tuple(f"{module_of(each)}.{name_of(each)}" for each in bases_of(kind))
