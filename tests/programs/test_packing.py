"""Steps that are packed for another process."""

from __future__ import annotations

import pickle

import torch
from torch import nn

from memexplore.run.programs.step import Step
from tests.search.sweep_steps import step


def test_weights_and_large_batches_are_sent_as_shapes():
    model = nn.Linear(4096, 4096)
    adam = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 4096)).sum().backward()
    adam.step()
    packed = Step(model, torch.zeros(1024, 4096), loss=torch.mean, optimizer=adam).packed()
    # 64 MiB of weights, twice as much state and 16 MiB of batch are a few KiB of shapes.
    assert len(packed) < 16 * 1024


def test_unpacked_weights_have_the_shapes_strides_and_flags_of_the_packed():
    model = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
    model.bias.requires_grad_(False)
    model.weight.group = "slow"
    sent = Step(model, torch.zeros(2, 64, 8, 8), loss=torch.mean)
    unpacked = pickle.loads(sent.packed()).model
    for mine, its in zip(model.parameters(), unpacked.parameters(), strict=True):
        assert (its.shape, its.stride(), its.dtype, its.requires_grad) == (
            mine.shape, mine.stride(), mine.dtype, mine.requires_grad,
        )  # fmt: skip
    assert unpacked.weight.group == "slow"


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    model[1].weight = model[0].weight
    unpacked = pickle.loads(Step(model, torch.zeros(2, 512), loss=torch.mean).packed()).model
    assert unpacked[1].weight is unpacked[0].weight


def test_small_batches_keep_their_values():
    lengths = torch.tensor([3, 1, 2])
    sent = Step(nn.Linear(4, 4), (torch.zeros(3, 4), lengths), loss=lambda output, lengths: output.mean())
    assert torch.equal(pickle.loads(sent.packed()).batch[1], lengths)


def test_packing_does_not_change_the_step():
    sent = step()
    before = [weight.clone() for weight in sent.model.parameters()]
    sent.packed()
    assert all(torch.equal(one, other) for one, other in zip(before, sent.model.parameters(), strict=True))
