"""Values that a program puts on the virtual GPU, or that follow from them, are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import memexplore as mx
from memexplore.virtual_gpu.dispatch import value_lane
from memexplore.virtual_gpu.values import known_values, notes


@pytest.fixture
def device() -> Iterator[str]:
    with mx.virtual("T4"):
        yield "cuda"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: torch.tensor([3, 5, 7]).cuda().max().item(), 7),
        (lambda: functional.one_hot(torch.tensor([1, 4, 0]).cuda()).shape, (3, 5)),
        (lambda: torch.arange(10, device="cuda")[torch.arange(10, device="cuda") % 3 == 0].tolist(), [0, 3, 6, 9]),
        (lambda: torch.unique(torch.tensor([2, 2, 5], device="cuda")).tolist(), [2, 5]),
        (lambda: torch.eye(3, device="cuda").nonzero().tolist(), [[0, 0], [1, 1], [2, 2]]),
        (lambda: torch.full((2,), 4, device="cuda").sum().item(), 8),
        (lambda: torch.tensor([1, 0, 3]).cuda().repeat_interleave(torch.tensor([2, 0, 1]).cuda()).tolist(), [1, 1, 3]),
        (lambda: torch.bincount(torch.tensor([0, 4, 4], device="cuda")).tolist(), [1, 0, 0, 0, 2]),
        (lambda: torch.randn(6, 1000, 100, device="cuda")[torch.tensor([1, 0, 1, 1, 0, 0]).cuda() > 0].shape[0], 3),
        (lambda: torch.tensor([True, False]).cuda().any().item(), True),
        (lambda: bool((torch.tensor([2.5]).cuda() > 3).all()), False),
        (lambda: torch.equal(torch.arange(3).cuda(), torch.tensor([0, 1, 2]).cuda()), True),
        (lambda: torch.zeros(3, device="cuda").new_tensor([7, 8]).tolist(), [7.0, 8.0]),
        (lambda: f"{torch.tensor(3.14159).cuda():.2f}", "3.14"),
        (lambda: list(range(int(torch.tensor(2).cuda()))), [0, 1]),
        (lambda: torch.tensor([4, 9]).cuda().cpu().numpy().tolist(), [4, 9]),
    ],
)
def test_a_value_of_the_program_is_exact(device: str, function: Callable[[], object], expected: object) -> None:
    assert function() == expected
    assert not any("assumed" in note for note in notes.notes_of_run())


def test_a_tensor_of_known_values_prints_as_on_a_real_gpu(device: str) -> None:
    assert str(torch.tensor([3, 5]).cuda()) == "tensor([3, 5], device='cuda:0')"
    assert str(torch.tensor([3], dtype=torch.int32).cuda()) == "tensor([3], device='cuda:0', dtype=torch.int32)"


def test_a_write_through_a_view_is_seen_in_its_base(device: str) -> None:
    base = torch.zeros(2, 3, device=device)
    base[1].fill_(5)
    base.view(-1)[0] = 2
    assert base.tolist() == [[2, 0, 0], [5, 5, 5]]


def test_an_unknown_write_makes_all_views_unknown(device: str) -> None:
    base = torch.zeros(4, device=device)
    view = base[2:]
    base[0] = torch.randn(10_000_000, device=device).sum()
    assert not known_values.is_known(view)


def test_a_tensor_that_is_overwritten_as_a_whole_is_known_again(device: str) -> None:
    buffer = torch.empty(3, dtype=torch.int64, device=device)
    assert not known_values.is_known(buffer)
    buffer.copy_(torch.tensor([1, 2, 3]))
    assert buffer.tolist() == [1, 2, 3]


def test_a_later_change_of_the_cpu_tensor_does_not_reach_the_gpu(device: str) -> None:
    source = torch.tensor([1, 2])
    copy = source.cuda()
    source[0] = 9
    assert copy.tolist() == [1, 2]


def test_a_copy_into_a_cpu_tensor_has_its_values(device: str) -> None:
    target = torch.zeros(2, dtype=torch.int64)
    target.copy_(torch.tensor([4, 6]).cuda())
    assert target.tolist() == [4, 6]


def test_tensors_beyond_the_budget_are_unknown(device: str) -> None:
    # 8 bytes an integer, 4 a float.
    integers, floats = value_lane.INTEGER_BYTES // 8, value_lane.FLOAT_BYTES // 4
    assert known_values.is_known(torch.arange(integers, device=device))
    assert not known_values.is_known(torch.arange(integers + 1, device=device))
    assert known_values.is_known(torch.zeros(floats, device=device))
    assert not known_values.is_known(torch.zeros(floats + 1, device=device))


def test_a_copy_ends_with_its_storage(device: str) -> None:
    before = known_values.total()
    tensor = torch.arange(100, device=device)
    assert known_values.total() == before + 800  # 100 * 8
    del tensor
    assert known_values.total() == before


def test_lengths_on_the_gpu_decide_the_shape_of_a_packed_sequence(device: str) -> None:
    lengths = torch.tensor([4, 2], device=device)
    packed = pack_padded_sequence(torch.randn(2, 4, 100_000, device=device), lengths.cpu(), batch_first=True)
    assert packed.data.shape[0] == 6  # 4 + 2
    assert packed.batch_sizes.tolist() == [2, 2, 1, 1]


def test_running_statistics_become_unknown_when_batch_norm_updates_them_with_unknown_values(device: str) -> None:
    layer = nn.BatchNorm2d(4).cuda()
    assert known_values.is_known(layer.running_mean)
    layer(torch.randn(8, 4, 100, 100, device=device))
    assert not known_values.is_known(layer.running_mean)


def test_random_numbers_of_the_gpu_leave_those_of_the_cpu(device: str) -> None:
    torch.manual_seed(0)
    expected = torch.rand(1).item()
    torch.manual_seed(0)
    first = torch.randint(1000, (5,), device=device).tolist()
    assert torch.rand(1).item() == expected
    torch.manual_seed(0)
    assert torch.randint(1000, (5,), device=device).tolist() == first


def test_a_generator_of_the_user_draws_the_same_numbers_again(device: str) -> None:
    draws = [
        torch.randint(1000, (4,), device=device, generator=torch.Generator(device).manual_seed(3)).tolist()
        for _ in range(2)
    ]
    assert draws[0] == draws[1]


def test_an_index_out_of_range_ends_the_program(device: str) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        torch.arange(3, device=device)[torch.tensor([5]).cuda()]


def test_values_none_makes_every_value_unknown() -> None:
    with mx.virtual("T4", values="none"):
        assert not known_values.is_known(torch.arange(3, device="cuda"))


def test_another_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="values='all' is not a setting; write 'none', 'known' or 'real'"):
        mx.virtual("T4", values="all").__enter__()


def test_unknown_values_are_an_array_of_ones_that_prints_as_virtual(device: str) -> None:
    array = torch.randn(1000, 1000, device=device).cpu().numpy()
    assert isinstance(array, np.ndarray)
    assert (np.asarray(array) == 1).all()
    assert str(array) == "virtual(shape=(1000, 1000), dtype=float32)"
    assert (str(array.mean()), float(array.mean())) == ("virtual", 1.0)
    assert any("unknown values count as 1 in a numpy array" in note for note in notes.notes_of_run())


def test_tensors_made_inside_inference_mode_keep_their_values(device: str) -> None:
    with torch.inference_mode():
        assert torch.tensor([3, 4]).cuda().sum().item() == 7


_OPS: list[Callable[[torch.Tensor, torch.Tensor], object]] = [
    lambda x, y: x.add_(y),
    lambda x, y: x.mul_(2),
    lambda x, y: x.view(-1)[::2].fill_(3),
    lambda x, y: x.t().copy_(y.t()),
    lambda x, y: x[0].sub_(y[1]),
    lambda x, y: x.clamp_(-50, 50),
    lambda x, y: x.masked_fill_(y > 0, 7),
    lambda x, y: x.index_add_(0, torch.tensor([0, 2], device=x.device), y[:2]),
    lambda x, y: x[:, 1:].zero_(),
    lambda x, y: x.scatter_(1, (y.abs() % 4), 9),
    lambda x, y: torch.cumsum(y, 1, out=x),
    lambda x, y: x.copy_(torch.where(x > y, x, y)),
    lambda x, y: x.diagonal().add_(1),
    lambda x, y: x.unfold(1, 2, 2)[:, 0].neg_(),
]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(range(len(_OPS))), max_size=12), st.integers(0, 1000))
def test_programs_with_views_and_writes_have_the_values_of_the_cpu(program: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(-9, 9, (4, 4), generator=generator) for _ in range(2))
    with mx.virtual("T4"):
        virtual_x, virtual_y = x.cuda(), y.cuda()
        for number in program:
            _OPS[number](x, y)
            _OPS[number](virtual_x, virtual_y)
        assert virtual_x.tolist() == x.tolist()


def test_what_a_program_writes_to_an_uninitialized_tensor_is_known() -> None:
    with mx.virtual("T4"):
        order = torch.tensor([2, 0, 1], device="cuda")
        inverse = torch.empty_like(order)
        inverse.scatter_(0, order, torch.arange(3, device="cuda"))
        ends = torch.empty(4, dtype=torch.int64, device="cuda")
        ends[:1] = 0
        torch.cumsum(order, 0, out=ends[1:])
    # Element order[i] is i; the sums of 2, 0, 1 are 2, 2, 3.
    assert (inverse.tolist(), ends.tolist()) == ([1, 2, 0], [0, 2, 2, 3])


def test_uninitialized_tensor_that_is_read_is_unknown() -> None:
    with mx.virtual("T4"):
        memory = torch.empty(3, device="cuda")
        total = memory + 1
        scaled = torch.empty(3, device="cuda").mul_(0.9)
        memory[0] = torch.empty((), device="cuda")
    for tensor in (total, scaled, memory):
        assert str(tensor).startswith("virtual")


def test_lengths_of_sequences_that_were_sorted_and_packed_are_known() -> None:
    lengths = [3, 5, 2]
    with mx.virtual("T4"):
        sequences = torch.randn(3, 5, 4, device="cuda")
        packed = pack_padded_sequence(sequences, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
        assert pad_packed_sequence(packed, batch_first=True)[1].tolist() == lengths
