"""Indexing under releases that made a view of its own for every `:`, beside the installed one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Action
from memexplore.virtual_gpu.patches import indexing


def backward(release, index):
    """Bytes of each request of the backward pass of `x[index].sum()` for 3 x 4 x 5 numbers."""
    with virtual("A100", release=release):
        x = torch.ones(3, 4, 5, device="cuda", requires_grad=True)
        loss = x[index].sum()
        with record() as recording:
            loss.backward()
    tape = recording.tape
    return tape.size[tape.action == Action.ALLOC].tolist()


@pytest.mark.parametrize("release", ["2.8", "2.9"])
def test_before_2_9_every_colon_has_a_backward_of_its_own(release):
    # The loss's gradient, then zeros of each view's size, last view first: 3 x 5, 3 x 4 x 5 for the row, and for `:`.
    expected = {"2.8": [4, 60, 240, 240], "2.9": [4, 240]}
    assert backward(release, (slice(None), -1, slice(None))) == expected[release]


@pytest.mark.parametrize(
    "index",
    [-1, slice(None), slice(1, 3), ..., None, (slice(0, 3), 1), (..., slice(1, 3)), (slice(None, 3), slice(0, 4, 2))],
)
def test_other_indices_have_the_same_backward_in_all_releases(index):
    assert backward("2.8", index) == backward("2.9", index)


entries = st.one_of(
    st.none(),
    st.integers(-3, 2),
    st.sampled_from([slice(None), slice(0, 99), slice(1, None), slice(None, None, 2), slice(None, 3)]),
    st.just(torch.tensor([0, 2, 1])),
    st.just([1, 2, 0]),
)


@given(st.lists(entries, max_size=4), st.lists(entries, max_size=1), st.booleans())
def test_values_equal_those_of_the_installed_release(before, after, dots):
    index = (*before, ..., *after) if dots else (*before, *after)
    x = torch.arange(3 * 3 * 3 * 3 * 3 * 3).reshape(3, 3, 3, 3, 3, 3)
    assert torch.equal(indexing.getitem(x, index), x[index])


def test_masks_select_the_elements_of_the_installed_release():
    x = torch.arange(12).reshape(3, 4)
    mask = torch.tensor([True, False, True])
    assert torch.equal(indexing.getitem(x, (mask, slice(None))), x[mask])
    assert torch.equal(indexing.getitem(x, (x > 3, None)), x[x > 3, None])
    assert torch.equal(indexing.getitem(x, (True, slice(None))), x[True, :])
