"""Copies between the CPU and the device: what has to be put in one piece first takes memory on the device."""

import pytest
import torch

from memexplore import capture
from memexplore.tape import Action

COUNT = 600


def taken(function):
    """Bytes of every request that `function` makes of two tensors of 20 x 30 numbers, one on each side."""
    with capture.virtual("A100"):
        host, device = torch.zeros(20, 30), torch.zeros(20, 30, device="cuda")
        with capture.record() as recording:
            function(host, device)
    tape = recording.tape
    return tape.size[tape.action == Action.ALLOC].tolist()


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        # In one piece, or with equal strides: straight over.
        (lambda host, device: device.copy_(host), []),
        (lambda host, device: device.t().copy_(host.t()), []),
        (lambda host, device: device.copy_(host[:1]), []),
        (lambda host, device: host.t().to("cuda"), [4 * COUNT]),
        (lambda host, device: device.t().cpu(), []),
        (lambda host, device: device[:10].cpu(), []),
        # Into a part of a tensor: by way of a tensor of the part's size.
        (lambda host, device: device[:, :15].copy_(host[:, :15]), [4 * COUNT // 2]),
        (lambda host, device: device.t().copy_(host.reshape(30, 20)), [4 * COUNT]),
        # From a part, or a view that repeats: by way of a copy on the device.
        (lambda host, device: device[:, :15].cpu(), [4 * COUNT // 2]),
        (lambda host, device: device[:1].expand(20, 30).cpu(), [4 * COUNT]),
        # Types are converted on the CPU where the call waits, else on the device.
        (lambda host, device: host.to("cuda", torch.float16), [2 * COUNT]),
        (lambda host, device: host.to("cuda", torch.float16, non_blocking=True), [2 * COUNT, 4 * COUNT]),
        (lambda host, device: device.to("cpu", torch.float16), []),
        (lambda host, device: device.to("cpu", torch.float16, non_blocking=True), [2 * COUNT]),
        (lambda host, device: device[:, :15].to("cpu", torch.float64, non_blocking=True), [4 * COUNT, 4 * COUNT]),
        # On the same side nothing is needed.
        (lambda host, device: device[:, :15].copy_(device[:, 15:]), []),
    ],
)
def test_what_is_not_in_one_piece_goes_by_way_of_a_copy(function, sizes):
    assert taken(function) == sizes
