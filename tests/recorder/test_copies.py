"""Copies of weights, as averaged models, reference models and checkpoints hold them, are parameters."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.recorder.copies import Copies
from memexplore.tape import Category, Tape
from memexplore.torch_internals.tensors import storage_key

SIZE = 256
WEIGHTS = (
    SIZE * SIZE * 4 + SIZE * 4
)  # of one linear layer: 256 x 256 weights and 256 biases of 4 bytes; both fill blocks


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(SIZE, SIZE).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, after_step: Any = lambda: None) -> None:
    for _ in range(2):
        model(torch.ones(4, SIZE, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def swa() -> Any:
    model, optimizer = made()
    average = torch.optim.swa_utils.AveragedModel(model)
    train(model, optimizer, lambda: average.update_parameters(model))
    return model, average


def ema_of_a_copied_model() -> Any:
    model, optimizer = made()
    average = copy.deepcopy(model).requires_grad_(False)

    def update() -> None:
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)

    train(model, optimizer, update)
    return model, average


def ema_in_a_dict() -> Any:
    model, optimizer = made()
    shadow = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def update() -> None:
        for name, weight in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * weight.detach()

    train(model, optimizer, update)
    return model, shadow


def loaded_checkpoint() -> Any:
    model, optimizer = made()
    file = io.BytesIO()
    torch.save(nn.Linear(SIZE, SIZE).state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location="cuda")
    model.load_state_dict(state)
    train(model, optimizer)
    return model, state


def best_state() -> Any:
    model, optimizer = made()
    train(model, optimizer)
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer)
    return model, best


def reference_model() -> Any:
    model, optimizer = made()
    reference = copy.deepcopy(model).eval().requires_grad_(False)

    def compare() -> None:
        with torch.no_grad():
            reference(torch.ones(4, SIZE, device="cuda"))

    train(model, optimizer, compare)
    return model, reference


def target_network() -> Any:
    model, optimizer = made()
    target = nn.Linear(SIZE, SIZE).cuda()
    target.load_state_dict(model.state_dict())

    def update() -> None:
        for old, new in zip(target.parameters(), model.parameters(), strict=True):
            old.data.copy_(0.9 * old.data + 0.1 * new.data)

    train(model, optimizer, update)
    return model, target


def old_weights() -> Any:
    model, optimizer = made()
    old = [weight.clone().detach() for weight in model.parameters()]
    train(model, optimizer)
    return model, old


def one_vector() -> Any:
    model, optimizer = made()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    train(model, optimizer)
    return model, vector


def held_at_the_end(program: Any) -> tuple[Tape, dict[str, int]]:
    kept = []
    tape = mx.simulate(lambda: kept.append(program()), gpu="T4")
    held = tape.by_category().iloc[-1]
    return tape, {name: int(size) for name, size in held.items() if size and name != "workspace"}


@pytest.mark.parametrize(
    "program",
    [
        swa,
        ema_of_a_copied_model,
        ema_in_a_dict,
        loaded_checkpoint,
        best_state,
        reference_model,
        target_network,
        old_weights,
        one_vector,
    ],
)
def test_copy_of_the_weights_is_parameters(program: Any) -> None:
    _, held = held_at_the_end(program)
    counter = 512 if program is swa else 0  # the number of averaged models, a buffer of 8 bytes
    assert held == {"parameter": 2 * WEIGHTS} | ({"buffer": counter} if counter and "buffer" in held else {})


def test_copy_belongs_to_the_layer_of_its_source() -> None:
    tape, _ = held_at_the_end(ema_in_a_dict)
    assert tape.layers()["parameter"].to_dict()["Linear"] >= 2 * WEIGHTS


def test_batch_computed_from_a_parameter_and_data_stays_an_input() -> None:
    def program() -> Any:
        model, optimizer = made()
        batch = torch.ones(SIZE, SIZE, device="cuda") * model.weight.detach()
        model(batch).sum().backward()
        optimizer.step()
        return model, batch

    _, held = held_at_the_end(program)
    assert held["input"] == SIZE * SIZE * 4


def test_short_lived_copy_is_temporary() -> None:
    def program() -> Any:
        model, optimizer = made()
        train(model, optimizer, lambda: model.weight.detach().clone().norm())
        return model

    tape, held = held_at_the_end(program)
    assert held["parameter"] == WEIGHTS
    clones = [number for number, name in enumerate(tape.ops) if name == "aten::clone"]
    assert set(tape.category[tape.op == clones[0]].tolist()) == {Category.TEMPORARY}


class Blocks:
    """Tensors, each in a block of its own row."""

    def __init__(self, rows: list[int]) -> None:
        self.tensors = {row: torch.zeros(4) for row in rows}
        refs = {storage_key(one.untyped_storage()): SimpleNamespace(address=row) for row, one in self.tensors.items()}
        self.copies = Copies(refs, {row: row for row in rows})

    def computed(self, row: int, *sources: int) -> None:
        self.copies.computed(row, tuple(self.tensors.get(source, torch.zeros(4)) for source in sources), size=16)


def test_copies_of_copies_inherit_and_strangers_do_not() -> None:
    blocks = Blocks([1, 3, 4, 5, 8])
    blocks.computed(3, 1)
    blocks.computed(4, 3, 1)
    blocks.computed(5, 3, -1)  # one source is not on the device
    blocks.copies.copied(blocks.tensors[1], blocks.tensors[8])
    found = blocks.copies.inherited({1: Category.PARAMETER})
    assert {row: kind for row, (kind, _) in found.items()} == dict.fromkeys((3, 4, 8), Category.PARAMETER)


def test_renumbered_rows_keep_their_sources() -> None:
    blocks = Blocks([0, 1])
    blocks.computed(1, 0)
    blocks.copies.renumber({0: 1, 1: 0, -1: -1}.__getitem__)
    assert blocks.copies.inherited({1: Category.BUFFER}) == {0: (Category.BUFFER, 1)}


def test_reduction_is_no_copy() -> None:
    blocks = Blocks([0])
    blocks.copies.computed(1, (blocks.tensors[0],), size=2)  # 4 floats of 16 bytes do not fit, even as int8
    assert blocks.copies.inherited({0: Category.PARAMETER}) == {}
