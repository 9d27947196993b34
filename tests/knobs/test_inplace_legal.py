"""Legal sites: the activations that may overwrite their input, and the reason why others may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memexplore as mx
from memexplore.run.knobs.inplace_sites.activations import Form
from memexplore.run.knobs.inplace_sites.in_place import in_place
from memexplore.run.knobs.inplace_sites.legal import legal_sites
from tests.knobs.inplace_steps import Net, assert_same_results, found, line_of, outcome, reasons, step

THIS = "test_inplace_legal.py"


def read_again(net: Any, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    y = net.act(h)
    return net.second(h + y)


def test_reason_names_the_op_and_line_that_read_the_input_again():
    net = Net(read_again, act=nn.ReLU())
    sites = found(net)
    line = line_of(read_again, "h + y")
    assert sites.skipped == (("act", f"its input is read again by aten::add at {THIS}:{line}"),)
    assert_same_results(net, sites)


def test_autograd_raises_no_error_for_an_input_read_again():
    # The flag gives another loss without an error: only a trace of the memory accesses finds this.
    net = Net(read_again, act=nn.ReLU())
    plain = outcome(net)
    net.act.inplace = True
    assert not torch.equal(outcome(net)[0], plain[0])


def test_an_input_read_again_through_an_alias_is_skipped():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        view = h.view(-1)[3:]
        return functional.relu(h).sum() + view.sum()

    net = Net(forward)
    sites = found(net)
    assert "read again by aten::sum" in sites.skipped[0].reason
    assert_same_results(net, sites)


def test_half_of_a_tensor_is_legal_if_only_the_other_half_is_read():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        return net.act(h[:2]) * h[2:]

    net = Net(forward, act=nn.LeakyReLU())
    # The product keeps both halves for backward; they share a storage and no byte of it.
    assert found(net).modules == ("act",)
    assert_same_results(net, found(net))


def test_a_result_of_chunk_is_skipped_because_torch_raises():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        left, right = net.first(x).chunk(2)
        return net.act(left) * right

    net = Net(forward, act=nn.LeakyReLU())
    assert found(net).skipped[0].reason.startswith("torch refuses: Output 0 of Split")
    assert_same_results(net, found(net))


def test_an_expanded_tensor_is_skipped():
    net = Net(lambda net, x: net.act(net.first(x)[:1].expand(4, 8) * 1 + net.first(x)[:1].expand(4, 8)), act=nn.ReLU())
    assert found(net).modules == ("act",)  # the sum has its own memory
    net = Net(lambda net, x: net.act(net.first(x)[:1].expand(4, 8)), act=nn.ReLU())
    assert found(net).skipped[0].reason == "its input is expanded: several of its elements share memory"
    assert_same_results(net, found(net))


def test_an_output_saved_for_backward_is_skipped():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.first(x).exp().relu()

    net = Net(forward)
    line = line_of(forward, "exp")
    assert found(net).skipped[0].reason == f"its input is kept for the backward pass of aten::exp at {THIS}:{line}"
    assert_same_results(net, found(net))


def test_only_the_first_of_two_activations_in_a_row_is_legal_if_it_saves_its_output():
    # leaky_relu keeps its input out of place and its output in place: the hardtanh after it would overwrite that.
    net = Net(lambda net, x: net.second(torch.sigmoid(net.act(net.first(x)))), act=nn.LeakyReLU())
    sites = found(net)
    assert sites.modules == ("act",)
    assert "what act keeps for the backward pass" in sites.skipped[0].reason
    assert_same_results(net, sites)


def test_the_batch_and_a_view_of_it_are_never_overwritten():
    net = Net(
        lambda net, x: net.first(net.act(x)) + net.second(net.other(x.view(8, 4)).view(4, 8)),
        act=nn.ReLU(),
        other=nn.ReLU(),
    )
    sites = found(net)
    assert not sites.modules
    assert all("existed before the model ran" in site.reason for site in sites.skipped)
    x = torch.randn(4, 8)
    before = x.clone()
    with in_place(net, Form.IN_PLACE):
        net(x)
    assert torch.equal(x, before)


def test_a_weight_is_never_overwritten():
    net = Net(lambda net, x: functional.linear(x, functional.relu(net.first.weight)))
    assert "a weight" in found(net).skipped[0].reason


def test_a_tensor_stored_by_the_model_is_skipped():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.features = net.first(x)
        return net.second(functional.relu(net.features))

    net = Net(forward)
    assert found(net).skipped[0].reason == "its input is still alive when the step has ended"
    assert not hasattr(net, "features")  # `legal_sites` preserves attributes
    with in_place(net, Form.IN_PLACE), torch.no_grad():
        assert torch.equal(net(torch.ones(4, 8)), net.second(functional.relu(net.features)))
    assert net.features.min() < 0


def test_a_tensor_stored_by_a_hook_and_read_by_the_loss_is_skipped():
    net = Net(lambda net, x: net.second(net.act(net.first(x))), act=nn.ReLU())
    kept: list[torch.Tensor] = []
    net.first.register_forward_hook(lambda module, args, output: kept.append(output))

    def call() -> None:
        (net(torch.ones(4, 8)).sum() + kept.pop().sum()).backward()

    assert "read again by aten::sum" in legal_sites(call, net).skipped[0].reason


def test_an_input_shared_with_a_numpy_array_is_skipped():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        array = h.detach().numpy()
        y = net.act(h)
        return y * float(array.min())

    net = Net(forward, act=nn.ReLU())
    assert not legal_sites(step(net), net).modules


def test_a_tensor_returned_by_the_step_is_skipped():
    net = Net(lambda net, x: (net.act(h := net.first(x)), h), act=nn.ReLU())
    assert "returns" in legal_sites(lambda: net(torch.ones(4, 8)), net).skipped[0].reason
    with in_place(net, Form.IN_PLACE):
        output, before = net(torch.ones(4, 8))
    assert not torch.equal(output, before)


def test_a_module_called_several_times_is_legal_if_all_its_calls_are():
    twice = Net(lambda net, x: net.act(net.third(net.act(net.second(net.act(net.first(x)))))), act=nn.ReLU())
    assert found(twice).modules == ("act",)

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.second(net.act(net.first(x)))
        return net.act(h) + h

    once = Net(forward, act=nn.ReLU())
    assert not found(once).modules
    for net in (twice, once):
        assert_same_results(net, found(net))


def test_calls_of_a_function_are_identified_by_line_and_number():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        for _ in range(3):
            last, h = h, functional.relu(net.second(h))
        return functional.relu(last * 1) + functional.relu(last)

    net = Net(forward)
    sites = found(net)
    loop, end = line_of(forward, "last, h ="), line_of(forward, "last * 1")
    # `last` is the result of the second iteration: the product of the third saves it.
    assert reasons(sites) == {
        f"relu at {THIS}:{loop}": "",
        f"relu at {THIS}:{loop} (call 2)": "",
        f"relu at {THIS}:{loop} (call 3)": "",
        f"relu at {THIS}:{end}": "",
        f"relu at {THIS}:{end} (call 2)": f"its input is kept for the backward pass of aten::relu at {THIS}:{loop}",
    }
    assert_same_results(net, sites)


def test_a_line_that_several_modules_run_is_a_site_of_each():
    inner = [Net(lambda net, x: net.second(functional.relu(net.first(x)))) for _ in range(2)]
    net = nn.Sequential(*inner)
    assert [site.module for site in found(net).calls] == ["0", "1"]


@pytest.mark.parametrize("name", ["silu", "hardswish", "mish", "hardtanh", "relu6"])
def test_an_activation_whose_input_autograd_would_copy_is_skipped(name):
    net = Net(lambda net, x: net.second(getattr(functional, name)(net.first(x))))
    sites = found(net)
    assert "autograd would copy it, nothing is saved" in sites.skipped[0].reason
    assert_same_results(net, sites)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "sigmoid", "tanh"])
def test_functions_and_methods_run_in_place(name):
    function = getattr(functional, name)
    torch_function = getattr(torch, name, function)
    net = Net(lambda net, x: torch_function(net.second(function(net.first(x)))))
    sites = found(net)
    assert len(sites.calls) == 2
    assert not sites.skipped
    assert_same_results(net, sites)


def test_a_note_says_that_elu_in_place_differs_in_the_last_bits():
    net = Net(lambda net, x: net.second(functional.elu(net.first(x))))
    sites = found(net)
    plain = outcome(net)
    with in_place(net, Form.IN_PLACE, sites) as applied:
        changed = outcome(net)
    assert torch.equal(plain[0], changed[0])
    assert "last bits" in applied.notes[0]
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(plain, changed, strict=True))


def test_dropout_on_the_cpu_is_legal():
    net = Net(lambda net, x: net.second(functional.dropout(net.drop(net.first(x)), 0.3)), drop=nn.Dropout(0.5))
    sites = legal_sites(step(net), net)
    assert sites.modules == ("drop",)
    assert len(sites.calls) == 1
    assert_same_results(net, sites)


def test_dropout_on_a_gpu_is_skipped_because_its_mask_would_be_larger():
    # The fused kernel saves one byte per element; in place dropout multiplies by a mask of the input's type.
    net = Net(lambda net, x: net.second(net.drop(net.first(x))), drop=nn.Dropout(0.5))
    with mx.virtual("T4"):
        net.cuda()
        assert "keeps more for its backward pass" in legal_sites(step(net), net).skipped[0].reason


def test_dropout_in_evaluation_mode_is_no_activation():
    net = Net(lambda net, x: net.drop(net.first(x)), drop=nn.Dropout(0.5)).eval()
    assert found(net).sites == ()
