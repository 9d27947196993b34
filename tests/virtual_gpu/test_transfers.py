"""Copies between CPU and GPU: temporaries on the GPU for tensors that are not contiguous."""

import pytest
import torch

from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Action

COUNT = 600


def sizes_of(function):
    """Return the bytes of each request of `function` on two tensors of 20 x 30 numbers, one on each device."""
    with virtual("A100"):
        host, device = torch.zeros(20, 30), torch.zeros(20, 30, device="cuda")
        with record() as recording:
            function(host, device)
    tape = recording.tape
    return tape.size[tape.action == Action.ALLOC].tolist()


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        # Contiguous, or with equal strides: a direct copy.
        (lambda host, device: device.copy_(host), []),
        (lambda host, device: device.t().copy_(host.t()), []),
        (lambda host, device: device.copy_(host[:1]), []),
        (lambda host, device: host.t().to("cuda"), [4 * COUNT]),
        (lambda host, device: device.t().cpu(), []),
        (lambda host, device: device[:10].cpu(), []),
        # Into a slice: through a temporary of the slice's size.
        (lambda host, device: device[:, :15].copy_(host[:, :15]), [4 * COUNT // 2]),
        (lambda host, device: device.t().copy_(host.reshape(30, 20)), [4 * COUNT]),
        # From a slice or an expanded view: through a copy on the GPU.
        (lambda host, device: device[:, :15].cpu(), [4 * COUNT // 2]),
        (lambda host, device: device[:1].expand(20, 30).cpu(), [4 * COUNT]),
        # A blocking copy converts the dtype on the CPU, a non-blocking one on the GPU.
        (lambda host, device: host.to("cuda", torch.float16), [2 * COUNT]),
        (lambda host, device: host.to("cuda", torch.float16, non_blocking=True), [2 * COUNT, 4 * COUNT]),
        (lambda host, device: device.to("cpu", torch.float16), []),
        (lambda host, device: device.to("cpu", torch.float16, non_blocking=True), [2 * COUNT]),
        (lambda host, device: device[:, :15].to("cpu", torch.float64, non_blocking=True), [4 * COUNT, 4 * COUNT]),
        # On one device nothing is needed.
        (lambda host, device: device[:, :15].copy_(device[:, 15:]), []),
    ],
)
def test_a_non_contiguous_copy_goes_through_a_temporary(function, sizes):
    assert sizes_of(function) == sizes


def test_a_number_is_copied_into_a_tensor():
    with virtual("T4"), record() as recording:
        counter = torch.zeros((), dtype=torch.int32, device="cuda")
        assert counter.copy_(5).item() == 5
    assert recording.tape.size[recording.tape.action == Action.ALLOC].tolist() == [4]
