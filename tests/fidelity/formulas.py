"""Estimates on paper: parameters plus a formula. Sizes in bytes; nothing is run.

Weights, gradients and AdamW: 4 + 4 + 8 bytes a parameter in fp32; in mixed precision 6 + 4 + 8, as weights exist in
32 and in 16 bits ("GPU memory usage" in the documentation of Hugging Face transformers, page model_memory_anatomy).
Activations of a transformer: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198), equation 2 and section 4.3. Of other networks: parameters, inputs, and what their layers return.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn


class Shape(NamedTuple):
    """The quantities in the formula for a transformer; `element` is the bytes of an element, 2 in mixed precision."""

    batch: int
    context: int
    width: int
    heads: int
    layers: int
    vocabulary: int
    element: int = 4


def weights(parameters: int, element: int) -> int:
    """fp32 weights, and 16-bit copies if elements have 2 bytes."""
    return parameters * (4 if element == 4 else 4 + element)


def transformer_activations(shape: Shape) -> int:
    """s b h (34 + 5 a s / h) a layer, then final norm and head, 4 s b h (1 + v / h), for elements of 2 bytes.

    34 sbh are 16 elements and two dropout masks of a byte each, 5 as²b two elements and a mask: so written, the
    formula also covers 4-byte elements. Logits have 4 bytes in both.
    """
    batch, context, width, heads, layers, vocabulary, element = shape
    tokens = batch * context
    layer = tokens * width * (16 * element + 2) + heads * context * tokens * (2 * element + 1)
    return layers * layer + 2 * element * tokens * width + 4 * tokens * vocabulary


def transformer_step(parameters: int, shape: Shape) -> int:
    """Weights, gradients, the two states of AdamW, and activations."""
    return weights(parameters, shape.element) + parameters * (4 + 8) + transformer_activations(shape)


def transformer_forward(parameters: int, shape: Shape) -> int:
    """Weights and logits: without gradients no layer saves a tensor."""
    return weights(parameters, shape.element) + shape.batch * shape.context * shape.vocabulary * shape.element


def shape(model: nn.Module, tokens: torch.Tensor, element: int) -> Shape:
    """Return the shape of a language model for tokens (batch, context), from its embedding, layers and heads."""
    table = getattr(model.embedding, "weight", model.embedding)
    heads = next(part.heads for part in model.modules() if hasattr(part, "heads"))
    batch, context = tokens.shape
    vocabulary, width = table.shape
    return Shape(batch, context, width, heads, len(model.layers), vocabulary, element)


class Run(enum.Enum):
    """The kind of run: a forward pass without a graph, one with a graph, or a training step."""

    FORWARD = enum.auto()
    GRAPH = enum.auto()
    STEP = enum.auto()


def language_model(parameters: int, shape: Shape, run: Run) -> int:
    """Return the estimate for a run; weights and activations for a graph without a backward pass."""
    if run is Run.STEP:
        return transformer_step(parameters, shape)
    if run is Run.FORWARD:
        return transformer_forward(parameters, shape)
    return weights(parameters, shape.element) + transformer_activations(shape)


def attention(batch: int, length: int, width: int, metric: str) -> int:
    """One head in fp32: Q, K and V; from the forward on the softmax's result and the output; their gradients.

    Korthikanti's attention core keeps as²b elements of softmax; the other two terms of its 5 as²b are dropout's.
    """
    one = 4 * batch * length * width
    if metric == "memory_allocated after inputs":
        return 3 * one
    forward = 3 * one + 4 * batch * length * length + one
    return forward + 3 * one if metric == "max_memory_allocated fwd+bwd" else forward


def operation(module: nn.Module, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> int:
    """Parameters, inputs and outputs, those with a gradient twice."""
    sizes = [(tensor.nbytes, tensor.requires_grad) for tensor in (*module.parameters(), *inputs, *outputs)]
    return sum(size * (2 if gradient else 1) for size, gradient in sizes)


def network(module: nn.Module, inputs: Iterable[torch.Tensor], outputs: int) -> int:
    """Parameters, inputs, and `outputs`, the bytes that its leaf modules return in one call."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *inputs)) + outputs


STATES = {torch.optim.AdamW: 2, torch.optim.Adam: 2, torch.optim.RMSprop: 1}
"""Tensors of a parameter's size that an optimizer keeps for it; SGD one with momentum, else none."""


def training(module: nn.Module, outputs: int, optimizer: torch.optim.Optimizer | None) -> int:
    """Any model: weights, gradients, optimizer states, and `outputs`, the bytes that its leaf modules return."""
    trained = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    fixed = sum(parameter.nbytes for parameter in module.parameters()) - trained
    states = 0
    if optimizer is not None:
        states = STATES.get(type(optimizer), int(optimizer.defaults.get("momentum", 0) > 0))
    gradients = trained if optimizer is not None else 0
    return fixed + trained + gradients + states * trained + outputs
