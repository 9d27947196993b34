"""The in-place knob: ON and OFF, sites found at the first call, and restored models."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from memexplore.run.knobs.inplace_sites.activations import Form
from memexplore.run.knobs.inplace_sites.in_place import in_place
from memexplore.run.knobs.inplace_sites.legal import legal_sites
from tests.knobs.inplace_steps import Net, assert_same_results, found, line_of, step

THIS = "test_inplace.py"


def test_off_turns_flags_and_functions_out_of_place():
    net = Net(lambda net, x: functional.relu(net.second(net.act(net.first(x))), True), act=nn.ReLU(inplace=True))
    sites = found(net)
    with in_place(net, Form.OUT_OF_PLACE, sites) as applied:
        assert applied.texts == ("In-place at 0 of 2 activations",)
        assert not net.act.inplace
    assert net.act.inplace
    assert_same_results(net, sites)


def test_off_skips_an_in_place_call_whose_input_is_read_again():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        h.relu_()
        return net.second(h)

    net = Net(forward)
    sites = found(net)
    with in_place(net, Form.OUT_OF_PLACE, sites) as applied:
        pass
    assert applied.texts == ("In-place at 1 of 1 activations",)
    line = line_of(forward, "net.second")
    assert (
        applied.skipped == ((f"relu at {THIS}:{line - 1}", f"its input is read again by aten::t at {THIS}:{line}"),)
        or "read again by" in applied.skipped[0].reason
    )
    assert_same_results(net, sites)


def test_on_keeps_calls_written_in_place_and_their_saved_outputs():
    # The flag is written; the sigmoid after it must not overwrite what the activation keeps.
    net = Net(lambda net, x: torch.sigmoid(net.act(net.first(x))), act=nn.LeakyReLU(inplace=True))
    sites = found(net)
    assert [site.written for site in sites.sites] == [Form.IN_PLACE, Form.OUT_OF_PLACE]
    assert sites.modules == ("act",)
    assert not sites.calls
    assert_same_results(net, sites)


# --- sites as values, restored models --------------------------------------------------------------------------------


def test_sites_can_be_pickled_and_hashed():
    sites = found(Net(lambda net, x: net.second(net.act(h := net.first(x))) + h, act=nn.ReLU()))
    assert sites.skipped
    assert pickle.loads(pickle.dumps(sites)) == sites
    assert hash(sites) == hash(pickle.loads(pickle.dumps(sites)))


@pytest.mark.parametrize("search", ["legal_sites", "fake run"])
def test_model_and_random_states_are_restored(search):
    net = Net(lambda net, x: net.norm(net.drop(net.act(net.first(x)))), act=nn.ReLU(), drop=nn.Dropout())
    step(net)()
    gradient, state = net.first.weight.grad, torch.get_rng_state()
    attributes = [dict(vars(module)) for module in net.modules()]
    values = [tensor.clone() for tensor in (*net.parameters(), *net.buffers(), gradient)]
    numbers = random.getstate()
    if search == "legal_sites":
        legal_sites(step(net), net)
    else:
        with in_place(net, Form.IN_PLACE), torch.no_grad():
            net.eval()(torch.ones(4, 8))
        net.train()
    assert net.first.weight.grad is gradient
    assert random.getstate() == numbers
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(vars(module)) for module in net.modules()] == attributes
    now = (*net.parameters(), *net.buffers(), gradient)
    assert all(torch.equal(one, other) for one, other in zip(values, now, strict=True))


def test_legal_sites_raises_the_error_of_the_step_and_restores_the_model():
    net = Net(lambda net, x: net.act(net.first(x)).view(3, 3), act=nn.ReLU())
    with pytest.raises(RuntimeError, match="shape"):
        legal_sites(step(net), net)
    assert "forward" not in vars(net)
    assert not net.act.inplace


def test_sites_are_found_at_the_first_call_in_each_training_mode():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        y = functional.relu(h)
        return y if net.training else y + h

    net, x = Net(forward), torch.randn(4, 8)
    plain = net.eval()(x)
    with in_place(net, Form.IN_PLACE) as applied:
        net.train()(x)
        assert torch.equal(net.eval()(x), plain)
        net.train()(x)
    assert applied.completed().texts == ("In-place at 1 of 1 activations",)


def test_a_model_that_needs_values_raises_and_names_legal_sites():
    net = Net(lambda net, x: net.first(x)[(x > 0).nonzero()[:, 0]])
    with in_place(net, Form.IN_PLACE), pytest.raises(ValueError, match=r"give .* the sites that legal_sites"):
        net(torch.ones(4, 8))
