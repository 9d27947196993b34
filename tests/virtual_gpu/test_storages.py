"""Storages whose size changes: `untyped_storage().resize_`, `Tensor.resize_`, `set_`, `.data =` and `swap_tensors`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memexplore.recorder.recording import record
from memexplore.tape import Action, Category, Tape
from tests.small import allocated, on_a_t4


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    yield from on_a_t4()


def ones(count: int = 1000) -> torch.Tensor:
    return torch.ones(count, device="cuda")


def test_resizing_to_0_frees() -> None:
    x = ones()
    before = allocated()
    x.untyped_storage().resize_(0)
    assert before - allocated() == 4_096  # 1000 * 4, rounded up to 512
    assert (x.untyped_storage().size(), x.data_ptr(), x.shape) == (0, 0, (1000,))


def test_growing_allocates() -> None:
    x = ones()
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(10_000)
    assert allocated() == 10_240  # 10000 rounded up to 512
    assert (x + 1).shape == (1000,)


def test_the_same_size_allocates_before_it_frees() -> None:
    x = ones()
    torch.cuda.reset_peak_memory_stats()
    x.untyped_storage().resize_(4000)
    assert (allocated(), torch.cuda.max_memory_allocated()) == (4_096, 2 * 4_096)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_typed_storage_counts_elements() -> None:
    x = ones()
    x.storage().resize_(2000)
    assert allocated() == 8_192  # 2000 * 4, rounded up to 512


def test_views_share_the_emptied_storage() -> None:
    x = ones()
    early = x[:10]
    x.untyped_storage().resize_(0)
    late, detached = x.view(10, 100), x.detach()
    assert [tensor.untyped_storage().size() for tensor in (x, early, late, detached)] == [0] * 4
    late.untyped_storage().resize_(4000)
    assert early.data_ptr() == x.data_ptr() != 0
    assert allocated() == 4_096


def test_an_emptied_storage_that_dies_frees_nothing_more() -> None:
    kept, x = ones(), ones()
    x.untyped_storage().resize_(0)
    del x
    assert allocated() == kept.untyped_storage().size() + 96  # 4000 rounded up to 512


def test_a_tensor_made_empty_grows() -> None:
    x = torch.empty(0, device="cuda")
    x.untyped_storage().resize_(1 << 20)
    assert allocated() == 1 << 20
    del x
    assert allocated() == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.add_(1),
        lambda x: x + 1,
        lambda x: x.view(10, 100).copy_(torch.zeros(10, 100)),
        lambda x: x.cpu(),
        lambda x: torch.stack([x, x]),
    ],
)
def test_using_an_emptied_storage_is_an_illegal_access(use: Any) -> None:
    x = ones()
    x.untyped_storage().resize_(0)
    with pytest.raises(torch.AcceleratorError, match=r"illegal memory access.*resized to 0 bytes"):
        use(x)


def test_metadata_of_an_emptied_tensor_can_be_used() -> None:
    x = ones()
    x.untyped_storage().resize_(0)
    assert torch.empty_like(x).shape == x.new_zeros(1000).shape == x.t().shape


def test_a_request_that_does_not_fit_leaves_the_storage_as_it_was() -> None:
    x = ones()
    with pytest.raises(torch.OutOfMemoryError):
        x.untyped_storage().resize_(1 << 40)
    assert (x.untyped_storage().size(), allocated()) == (4000, 4_096)


def test_storages_on_the_cpu_take_no_memory_of_the_gpu() -> None:
    x = torch.ones(1000)
    x.untyped_storage().resize_(8000)
    assert (x.untyped_storage().device.type, allocated()) == ("cpu", 0)


def test_a_storage_names_its_device_and_address() -> None:
    x = ones()
    storage = x[10:].untyped_storage()
    assert (str(storage.device), storage.is_cuda, storage.data_ptr()) == ("cuda:0", True, x.data_ptr())


def test_a_parameter_that_was_freed_and_allocated_again_is_a_parameter() -> None:
    def train() -> None:
        model = nn.Linear(1000, 1000, bias=False).cuda()
        model(torch.ones(8, 1000, device="cuda")).sum().backward()
        model.weight.untyped_storage().resize_(0)
        model.weight.untyped_storage().resize_(4_000_000)

    with torch.no_grad(), record() as recording, torch.enable_grad():
        train()
    assert rows(recording.tape, 4_000_000) == [
        (Action.ALLOC, Category.PARAMETER),
        (Action.ALLOC, Category.GRADIENT),
        (Action.FREE_REQUESTED, Category.PARAMETER),
        (Action.ALLOC, Category.PARAMETER),
        (Action.FREE_REQUESTED, Category.GRADIENT),
        (Action.FREE_REQUESTED, Category.PARAMETER),
    ]


def rows(tape: Tape, size: int) -> list[tuple[Action, Category]]:
    shown = ((tape.action == Action.ALLOC) | (tape.action == Action.FREE_REQUESTED)) & (tape.size == size)
    return [(Action(tape.action[row]), Category(tape.category[row])) for row in shown.nonzero()[0]]


def test_resize_grows_and_never_shrinks_the_storage() -> None:
    x = ones()
    assert x.resize_(10).untyped_storage().size() == 4000
    assert x.resize_(2000).untyped_storage().size() == 8000
    assert allocated() == 8_192  # 8000 rounded up to 512


def test_set_drops_the_old_storage_and_shares_the_new() -> None:
    x, y = ones(), ones(2000)
    x.set_(y.untyped_storage(), 0, (10,), (1,))
    assert (allocated(), x.data_ptr()) == (8_192, y.data_ptr())  # 2000 * 4, rounded up to 512
    del y
    assert allocated() == 8_192
    x.set_()
    assert allocated() == 0


def test_assigned_data_replaces_the_storage() -> None:
    parameter = nn.Parameter(ones())
    parameter.data = ones(2000)
    assert allocated() == 8_192  # 2000 * 4, rounded up to 512
    parameter.data = torch.ones(10)
    assert (allocated(), parameter.is_cuda) == (0, False)


def test_swapped_tensors_swap_their_storages() -> None:
    x, y = ones(1000), ones(100)
    torch.utils.swap_tensors(x, y)
    del y
    assert (allocated(), x.shape) == (512, (100,))  # 400 rounded up to 512


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["new", "view", "resize", "drop"]), st.integers(0, 7), st.integers(0, 3000))))
def test_any_sequence_of_resizes_holds_what_the_storages_say(steps: list[tuple[str, int, int]]) -> None:
    tensors: list[torch.Tensor] = []
    before = allocated()
    for action, index, size in steps:
        chosen = index % len(tensors) if tensors else -1
        if action == "new" or chosen < 0:
            tensors.append(ones(size))
        elif action == "view":
            tensors.append(tensors[chosen].detach())
        elif action == "resize":
            tensors[chosen].untyped_storage().resize_(size)
        else:
            del tensors[chosen]
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().size() for tensor in tensors}
    assert allocated() - before == sum(-(-size // 512) * 512 for size in sizes.values())
