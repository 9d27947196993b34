"""Memory of in-place activations: the bytes that they save after the forward pass and at the peak of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.run.knobs.inplace import InPlace
from memexplore.run.knobs.inplace_sites.activations import Form
from memexplore.run.knobs.inplace_sites.in_place import in_place
from memexplore.run.knobs.inplace_sites.legal import legal_sites
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.step import Step
from memexplore.run.run import run


def stack(activation: Callable[[], nn.Module], depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), activation()]
    return nn.Sequential(*layers)


def after_forward(activation: Callable[[], nn.Module], form: Form, depth: int = 4) -> tuple[int, int]:
    """Return the bytes allocated after the forward pass, and its peak, on a virtual GPU."""
    with mx.virtual("T4"):
        net, x = stack(activation, depth).cuda(), torch.randn(16, 16, 64, 64, device="cuda")
        sites = legal_sites(lambda: net(x).sum().backward(), net)
        with in_place(net, form, sites):
            torch.cuda.reset_peak_memory_stats()
            output = net(x)
            numbers = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            output.sum().backward()
        return numbers


MAP = 16 * 16 * 64 * 64 * 4
"""Bytes of one feature map: 4 MiB."""


def test_leaky_relu_in_place_saves_one_map_per_layer():
    # Out of place each layer keeps its input and its output, in place only the output: 4 layers, 4 maps.
    held, _ = after_forward(nn.LeakyReLU, Form.OUT_OF_PLACE)
    changed, _ = after_forward(nn.LeakyReLU, Form.IN_PLACE)
    assert held - changed == 4 * MAP


def test_relu_in_place_saves_one_map_at_the_peak_and_none_after_forward():
    # ReLU keeps its output in either form and batch norm its input: the map between them is not saved. Only while
    # a ReLU runs out of place are its input and its output both alive; if that is the peak, as in the forward pass of
    # the last layer, in place is lower by one map.
    held, peak = after_forward(nn.ReLU, Form.OUT_OF_PLACE)
    changed, lower = after_forward(nn.ReLU, Form.IN_PLACE)
    assert held == changed
    assert peak - lower == MAP


@pytest.mark.parametrize("depth", [2, 4])
def test_the_peak_of_a_step_falls_by_a_map_for_each_layer_but_the_last(depth):
    # The sum saves no tensor, so out of place the output of the last layer is freed before backward begins.
    net = stack(nn.LeakyReLU, depth)
    plan = Step(net, torch.zeros(16, 16, 64, 64), loss=torch.sum, optimizer=torch.optim.SGD)
    peaks = [mx.peak(run(plan, Knobs(inplace=choice)).tape)[0] for choice in (InPlace.OFF, InPlace.ON)]
    assert peaks[0] - peaks[1] == (depth - 1) * MAP


def test_a_fake_run_on_a_virtual_gpu_requests_no_memory():
    with mx.virtual("T4"):
        net, x = stack(nn.LeakyReLU, 2).cuda(), torch.randn(16, 16, 64, 64, device="cuda")
        net(x).sum().backward()
        with mx.record() as recording, in_place(net, Form.IN_PLACE):
            net(x).sum().backward()
        sites = legal_sites(lambda: net(x).sum().backward(), net)
        with mx.record() as again, in_place(net, Form.IN_PLACE, sites):
            net(x).sum().backward()
    one, other = recording.tape, again.tape
    # The same requests in the same order: the fake run is not on the tape.
    assert one.action.tolist() == other.action.tolist()
    assert one.size.tolist() == other.size.tolist()
