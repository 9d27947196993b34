"""Ops on a real device: which outputs are new storages, and which are views of tensors older than the recording."""

from __future__ import annotations

import torch

import memexplore as mx
from memexplore.recorder import real_device
from memexplore.tape import Action
from memexplore.torch_internals.tensors import storage_key, storage_use_count


def test_many_views_of_an_older_tensor_are_one_older_block():
    older = torch.zeros(8, 25)
    with mx.record() as recording:
        parts = torch.unbind(older)
    tape = recording.tape
    assert len(parts) == 8
    # 8 × 25 float32.
    assert tape.size[tape.action == Action.PREEXISTING].tolist() == [800]
    assert not (tape.action == Action.ALLOC).any()


def test_many_new_outputs_of_one_op_are_one_block_each():
    older = [torch.zeros(number + 1) for number in range(8)]
    with mx.record() as recording:
        sums = torch._foreach_add(older, 1.0)
    tape = recording.tape
    assert len(sums) == 8
    # 1 to 8 float32; arguments are read only.
    assert tape.size[tape.action == Action.ALLOC].tolist() == [4, 8, 12, 16, 20, 24, 28, 32]
    assert not (tape.action == Action.PREEXISTING).any()


def test_many_views_in_one_list_of_older_tensors_are_one_block_each():
    older = [torch.zeros(2, number + 1) for number in range(6)]
    with mx.record() as recording:
        views = [view for tensor in older for view in tensor.split(1)]
    tape = recording.tape
    assert len(views) == 12
    # 2 × (1 to 6) float32.
    assert tape.size[tape.action == Action.PREEXISTING].tolist() == [8, 16, 24, 32, 40, 48]


def test_an_older_tensor_that_is_written_is_an_older_block():
    older, listed = torch.zeros(25), [torch.zeros(5), torch.zeros(6)]
    with mx.record() as recording:
        older.add_(1)
        torch._foreach_add_(listed, 1.0)
        listed[0].mul_(2)
    tape = recording.tape
    # 25 and 5 float32: the op of a list returns nothing.
    assert tape.size[tape.action == Action.PREEXISTING].tolist() == [100, 20]
    assert not (tape.action == Action.ALLOC).any()


def test_an_older_tensor_that_an_op_returns_without_saying_so_is_an_older_block():
    older = torch.zeros(5, 5)
    with mx.record() as recording:
        # A view that its schema does not name.
        view = torch.ops.aten._unsafe_view(older, [25])
    tape = recording.tape
    assert view.shape == (25,)
    assert tape.size[tape.action == Action.PREEXISTING].tolist() == [100]
    assert not (tape.action == Action.ALLOC).any()


def test_the_storage_of_one_tensor_is_known_to_be_new():
    # Otherwise every new output would be looked for among the arguments.
    tensor = torch.zeros(3)
    storage = tensor.untyped_storage()
    assert storage_use_count(storage_key(storage)) == real_device._ALONE
    view = tensor.view(3)
    assert storage_use_count(storage_key(storage)) > real_device._ALONE
    assert view is not tensor


def test_a_tensor_older_than_the_recording_is_seen_where_it_is_written_without_gradients():
    older = torch.ones(1000)
    with torch.no_grad(), mx.record("cpu") as recording:
        older.mul_(2)
        older.add_(1)
    tape = recording.tape
    assert tape.action.tolist() == [Action.PREEXISTING]
    assert tape.size.tolist() == [4000]


def test_a_tensor_that_is_resized_without_gradients_has_a_row_of_its_new_size():
    with torch.no_grad(), mx.record("cpu") as recording:
        x = torch.ones(1000)
        x.resize_(2000)
    allocs = recording.tape.size[recording.tape.action == Action.ALLOC]
    assert allocs.tolist() == [4000, 8000]


def test_sparse_tensors_are_written_in_place_while_a_step_is_recorded():
    x = torch.eye(3).to_sparse()
    with torch.no_grad(), mx.record("cpu"):
        x.mul_(2)
    assert x.to_dense().sum() == 6.0
