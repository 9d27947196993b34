"""Say whether optimizers keep state, and how many bytes of it a failed update has still to allocate."""

from __future__ import annotations

import torch

from memexplore.out_of_memory.evidence_types import State
from memexplore.out_of_memory.objects import groups_of, is_a, state_in, stored_gradient, updated_by
from memexplore.torch_internals.tensors import raw_device_of, stored_in_tensor

_AVERAGES = dict.fromkeys((torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam), 2)
"""State tensors with the shape of a weight, of optimizers that make them for one weight after the other."""


def state_of(optimizers: list[torch.optim.Optimizer]) -> State:
    """Return whether optimizers keep tensors from step to step, or will after their first step.

    >>> weight = torch.nn.Parameter(torch.zeros(4))
    >>> [state_of(each).value for each in ([], [torch.optim.SGD([weight])], [torch.optim.Adam([weight])])]
    ['none', 'none', 'kept']
    """
    return State.KEPT if any(_keeps_state(optimizer) for optimizer in optimizers) else State.NONE


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    momentum = any(group.get("momentum") for group in groups_of(optimizer))
    return momentum or not is_a(optimizer, torch.optim.SGD)


def bytes_of_weights(optimizers: list[torch.optim.Optimizer]) -> int:
    """Return the bytes of the weights that optimizers update.

    >>> bytes_of_weights([torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))])])  # 4 numbers of 4 bytes
    16
    """
    return sum(stored_in_tensor(weight, "nbytes") for weight in updated_by(optimizers).values())


def state_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of state that weights with gradients still lack.

    Their number is known of Adam and its kin, else from the weights that have theirs: only state with the shape of its
    weight counts, and only that of weights with as many dimensions as one that has its state, as some optimizers keep
    less for a matrix than for a vector. So the bytes are those at least.

    >>> first, second = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(8))
    >>> first.grad, optimizer = torch.zeros(4), torch.optim.Adam([first, second])
    >>> optimizer.step()
    >>> second.grad = torch.zeros(8)
    >>> state_to_come(optimizer)  # two averages of 8 numbers of 4 bytes
    64
    """
    weights = [weight for weight in updated_by([optimizer]).values() if stored_gradient(weight) is not None]
    state = state_in(optimizer)
    shaped = [_shaped(weight, state.get(id(weight), [])) for weight in weights]
    least = _AVERAGES.get(type(optimizer), 0)
    # The largest second average so far is kept too.
    least += bool(least) and all(group.get("amsgrad") for group in groups_of(optimizer))
    complete: dict[int, int] = {}
    for weight, count in zip(weights, shaped, strict=True):
        dimensions = len(_shape(weight))
        complete[dimensions] = max(count, complete.get(dimensions, least))
    return sum(
        (complete[len(_shape(weight))] - count) * stored_in_tensor(weight, "nbytes")
        for weight, count in zip(weights, shaped, strict=True)
    )


def _shaped(weight: torch.Tensor, state: list[torch.Tensor]) -> int:
    """Return the number of tensors with the shape of a weight, on its device."""
    return sum(_shape(value) == _shape(weight) and raw_device_of(value) == raw_device_of(weight) for value in state)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return stored_in_tensor(tensor, "shape")  # type: ignore[no-any-return]
