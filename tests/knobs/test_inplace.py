"""The in-place knob: what it may overwrite, that losses and gradients stay the same, and which bytes it saves."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memexplore as mx
from memexplore.knobs.inplace.activations import Form
from memexplore.knobs.inplace.in_place import in_place
from memexplore.knobs.inplace.legal import legal_sites, observed
from memexplore.knobs.inplace.sites import Sites
from memexplore.knobs.knobs import InPlace, Knobs
from memexplore.steps.step import Step
from memexplore.steps.trial import run
from memexplore.virtual_gpu.device import active

THIS = "test_inplace.py"


class Net(nn.Module):
    """Runs a function of the net and the input; its layers are there to be used."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def step(net: nn.Module, x: torch.Tensor | None = None) -> Callable[[], None]:
    """Forward, loss and backward of a net."""
    value = torch.linspace(-2, 2, 32).reshape(4, 8) if x is None else x
    if active() is not None:
        value = value.cuda()
    return lambda: _sum(net(value)).backward()


def _sum(output: Any) -> torch.Tensor:
    return output.pow(2).sum() if isinstance(output, torch.Tensor) else sum(map(_sum, output))


def found(net: nn.Module) -> Sites:
    """What is legal, on the CPU and on a virtual GPU, where it must be the same."""
    sites = legal_sites(step(net), net)
    with mx.virtual("T4"):
        net.cuda()
        assert legal_sites(step(net), net).sites == sites.sites
    return sites


def reasons(sites: Sites) -> dict[str, str]:
    return {str(site.call): site.reason for site in sites.sites}


def outcome(net: nn.Module, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The loss and all gradients of a step with a fixed seed; running statistics stay."""
    buffers = [buffer.clone() for buffer in net.buffers()]
    net.zero_grad()
    torch.manual_seed(7)
    value = torch.linspace(-2, 2, 32).reshape(4, 8) if x is None else x
    loss = _sum(net(value))
    loss.backward()
    for buffer, before in zip(net.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return [loss.detach(), *(weight.grad.clone() for weight in net.parameters() if weight.grad is not None)]


def assert_same_results(net: nn.Module, sites: Sites, x: torch.Tensor | None = None) -> None:
    """Loss and gradients are the plain run's, to the bit, with the knob on and off, with sites given and found."""
    plain = outcome(net, x)
    for choice in (InPlace.ON, InPlace.OFF):
        for given_sites in (sites, None):
            with in_place(net, choice, given_sites):
                changed = outcome(net, x)
            assert len(changed) == len(plain)
            assert all(torch.equal(one, other) for one, other in zip(plain, changed, strict=True))


def line_of(function: Callable[..., Any], text: str) -> int:
    """The line of this file on which a function's code has a text."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


# --- what is legal --------------------------------------------------------------------------------------------------


def trap(net: Any, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    y = net.act(h)
    return net.second(h + y)


def test_an_input_that_is_read_again_is_left_out_with_its_line():
    net = Net(trap, act=nn.ReLU())
    sites = found(net)
    line = line_of(trap, "h + y")
    assert sites.skipped == (("act", f"its input is read again by aten::add at {THIS}:{line}"),)
    assert_same_results(net, sites)


def test_the_trap_is_one_autograd_does_not_see():
    # Without the trace the flag gives another loss and raises nothing: that is why there is a trace.
    net = Net(trap, act=nn.ReLU())
    plain = outcome(net)
    net.act.inplace = True
    assert not torch.equal(outcome(net)[0], plain[0])


def test_an_alias_that_is_read_again_is_found():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        view = h.view(-1)[3:]
        return functional.relu(h).sum() + view.sum()

    net = Net(forward)
    sites = found(net)
    assert "read again by aten::sum" in sites.skipped[0].reason
    assert_same_results(net, sites)


def test_a_half_that_nobody_reads_may_be_overwritten_though_the_other_half_is_read():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        return net.act(h[:2]) * h[2:]

    net = Net(forward, act=nn.LeakyReLU())
    # The product keeps both halves for backward; they share a storage and no byte of it.
    assert found(net).modules == ("act",)
    assert_same_results(net, found(net))


def test_what_a_view_of_several_outputs_gives_is_left_out_as_torch_refuses_it():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        left, right = net.first(x).chunk(2)
        return net.act(left) * right

    net = Net(forward, act=nn.LeakyReLU())
    assert found(net).skipped[0].reason.startswith("torch refuses: Output 0 of Split")
    assert_same_results(net, found(net))


def test_an_expanded_tensor_is_left_out():
    net = Net(lambda net, x: net.act(net.first(x)[:1].expand(4, 8) * 1 + net.first(x)[:1].expand(4, 8)), act=nn.ReLU())
    assert found(net).modules == ("act",)  # a sum has memory of its own
    net = Net(lambda net, x: net.act(net.first(x)[:1].expand(4, 8)), act=nn.ReLU())
    assert found(net).skipped[0].reason == "its input is expanded: several of its elements share memory"
    assert_same_results(net, found(net))


def test_an_output_kept_for_backward_is_left_out():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.first(x).exp().relu()

    net = Net(forward)
    line = line_of(forward, "exp")
    assert found(net).skipped[0].reason == f"its input is kept for the backward pass of aten::exp at {THIS}:{line}"
    assert_same_results(net, found(net))


def test_an_activation_may_follow_one_that_keeps_its_input_but_not_both_be_in_place():
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
    assert all("existed before the model ran" in left.reason for left in sites.skipped)
    x = torch.randn(4, 8)
    before = x.clone()
    with in_place(net, InPlace.ON):
        net(x)
    assert torch.equal(x, before)


def test_a_weight_is_never_overwritten():
    net = Net(lambda net, x: functional.linear(x, functional.relu(net.first.weight)))
    assert "a weight" in found(net).skipped[0].reason


def test_what_the_model_keeps_after_the_step_is_left_out():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.features = net.first(x)
        return net.second(functional.relu(net.features))

    net = Net(forward)
    assert found(net).skipped[0].reason == "its input is still alive when the step has ended"
    assert not hasattr(net, "features")  # `legal_sites` preserves attributes
    with in_place(net, InPlace.ON), torch.no_grad():
        assert torch.equal(net(torch.ones(4, 8)), net.second(functional.relu(net.features)))
    assert net.features.min() < 0


def test_what_a_hook_put_away_and_the_loss_reads_is_left_out():
    net = Net(lambda net, x: net.second(net.act(net.first(x))), act=nn.ReLU())
    kept: list[torch.Tensor] = []
    net.first.register_forward_hook(lambda module, args, output: kept.append(output))

    def call() -> None:
        (net(torch.ones(4, 8)).sum() + kept.pop().sum()).backward()

    assert "read again by aten::sum" in legal_sites(call, net).skipped[0].reason


def test_a_numpy_array_over_the_input_is_left_out():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        array = h.detach().numpy()
        y = net.act(h)
        return y * float(array.min())

    net = Net(forward, act=nn.ReLU())
    assert not legal_sites(step(net), net).modules


def test_what_the_step_returns_is_left_out():
    net = Net(lambda net, x: (net.act(h := net.first(x)), h), act=nn.ReLU())
    assert "returns" in legal_sites(lambda: net(torch.ones(4, 8)), net).skipped[0].reason
    with in_place(net, InPlace.ON):
        output, before = net(torch.ones(4, 8))
    assert not torch.equal(output, before)


def test_a_module_called_thrice_is_legal_where_all_its_calls_are():
    twice = Net(lambda net, x: net.act(net.third(net.act(net.second(net.act(net.first(x)))))), act=nn.ReLU())
    assert found(twice).modules == ("act",)

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.second(net.act(net.first(x)))
        return net.act(h) + h

    once = Net(forward, act=nn.ReLU())
    assert not found(once).modules
    for net in (twice, once):
        assert_same_results(net, found(net))


def test_calls_of_a_function_are_told_apart_by_line_and_by_count():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        for _ in range(3):
            last, h = h, functional.relu(net.second(h))
        return functional.relu(last * 1) + functional.relu(last)

    net = Net(forward)
    sites = found(net)
    loop, end = line_of(forward, "last, h ="), line_of(forward, "last * 1")
    # `last` is what the second turn gave: it is kept for the product of the third.
    assert reasons(sites) == {
        f"relu at {THIS}:{loop}": "",
        f"relu at {THIS}:{loop} (call 2)": "",
        f"relu at {THIS}:{loop} (call 3)": "",
        f"relu at {THIS}:{end}": "",
        f"relu at {THIS}:{end} (call 2)": f"its input is kept for the backward pass of aten::relu at {THIS}:{loop}",
    }
    assert_same_results(net, sites)


def test_one_line_called_from_several_modules_is_a_place_in_each():
    inner = [Net(lambda net, x: net.second(functional.relu(net.first(x)))) for _ in range(2)]
    net = nn.Sequential(*inner)
    assert [place.module for place in found(net).calls] == ["0", "1"]


@pytest.mark.parametrize("name", ["silu", "hardswish", "mish", "hardtanh", "relu6"])
def test_what_would_be_copied_by_autograd_is_left_out(name):
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


def test_elu_in_place_differs_in_the_last_bits_and_says_so():
    net = Net(lambda net, x: net.second(functional.elu(net.first(x))))
    sites = found(net)
    plain = outcome(net)
    with in_place(net, InPlace.ON, sites) as applied:
        changed = outcome(net)
    assert torch.equal(plain[0], changed[0])
    assert "last bits" in applied.note_texts[0]
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(plain, changed, strict=True))


def test_dropout_with_a_fixed_seed_on_the_cpu():
    net = Net(lambda net, x: net.second(functional.dropout(net.drop(net.first(x)), 0.3)), drop=nn.Dropout(0.5))
    sites = legal_sites(step(net), net)
    assert sites.modules == ("drop",)
    assert len(sites.calls) == 1
    assert_same_results(net, sites)


def test_dropout_on_a_gpu_is_left_out_as_its_mask_would_be_larger():
    # The fused kernel keeps a byte an element; in place dropout multiplies by a mask of the input's type.
    net = Net(lambda net, x: net.second(net.drop(net.first(x))), drop=nn.Dropout(0.5))
    with mx.virtual("T4"):
        net.cuda()
        assert "keeps more for its backward pass" in legal_sites(step(net), net).skipped[0].reason


def test_dropout_that_drops_nothing_is_no_activation():
    net = Net(lambda net, x: net.drop(net.first(x)), drop=nn.Dropout(0.5)).eval()
    assert found(net).sites == ()


# --- whole nets -----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A residual block with its activations behind the convolutions, or before them."""

    def __init__(self, before: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.act1, self.act2 = (before or nn.ReLU)(), (before or nn.ReLU)()
        self.pre = before is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pre:
            h = self.conv1(self.act1(self.norm1(x)))
            return x + self.conv2(self.act2(self.norm2(h)))
        h = self.act1(self.norm1(self.conv1(x)))
        return self.act2(x + self.norm2(self.conv2(h)))


class Skips(nn.Module):
    """A U-Net with one skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(8, 4, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = functional.relu(self.down(x))
        h = functional.interpolate(functional.relu(self.middle(functional.max_pool2d(skip, 2))), scale_factor=2)
        return functional.relu(self.up(torch.cat([h, skip], 1)))


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "residual": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), Residual(), Residual()), 4),
    "pre-activation": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), *(Residual(nn.LeakyReLU) for _ in range(2))), 4),
    "skips": (Skips, 3),
}


@pytest.mark.parametrize("name", NETS)
def test_convolutional_nets_are_in_place_throughout_and_equal(name):
    build, count = NETS[name]
    net, x = build(), torch.randn(2, 4, 8, 8)
    sites = legal_sites(lambda: _sum(net(x)).backward(), net)
    assert len(sites.sites) == count
    assert not sites.skipped
    assert_same_results(net, sites, x)


@pytest.mark.parametrize("activation", ["gelu_new", "silu", "relu"])
def test_a_transformer_whose_activation_is_a_module_that_calls_a_function(activation):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        hidden_act=activation,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(16).reshape(2, 8)
    call = lambda: net(input_ids=tokens, labels=tokens).loss.backward()  # noqa: E731
    sites = legal_sites(call, net)
    # silu needs its input in backward; relu keeps its output; the new GELU has a tanh, whose output it keeps.
    assert len(sites.sites) == 2
    assert len(sites.skipped) == (2 if activation == "silu" else 0)
    assert str(sites.sites[0].call).startswith("model.layers.0.mlp.act_fn")
    call()
    plain = [weight.grad.clone() for weight in net.parameters()]
    with in_place(net, InPlace.ON, sites):
        net.zero_grad()
        call()
    assert all(torch.equal(one, weight.grad) for one, weight in zip(plain, net.parameters(), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_in_place_where_recomputation_reads_nothing_overwritten(reentrant):
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        for block in net.blocks:
            h = checkpoint(block, h, use_reentrant=reentrant)
        return h

    def block() -> nn.Sequential:
        # The first activation reads the block's input, which recomputation reads again.
        return nn.Sequential(nn.LeakyReLU(), nn.Linear(8, 8), nn.LeakyReLU(), nn.Sigmoid())

    net = Net(forward, blocks=nn.ModuleList([block(), block()]))
    sites = found(net)
    why = reasons(sites)
    assert "read again" in why["blocks.0.0"]
    assert "read again" in why["blocks.1.0"]
    assert why["blocks.0.2"] == ""
    assert why["blocks.1.2"] == ""
    # In place the activation before keeps its output, which no version counter guards in a checkpoint.
    assert "blocks.0.2 keeps" in why["blocks.0.3"]
    assert_same_results(net, sites)


def test_a_function_in_a_checkpointed_forward_is_known_again_only_where_it_was_watched_before():
    net = Net(
        lambda net, x: net.inner(net.first(x)), inner=Net(lambda net, x: net.second(functional.relu(net.first(x))))
    )
    inner = net.inner.forward

    def wrap() -> None:
        forward = net.inner.forward
        net.inner.forward = lambda x: checkpoint(forward, x, use_reentrant=False)

    wrap()
    assert "a checkpoint runs it again" in legal_sites(step(net), net).skipped[0].reason
    net.inner.forward = inner
    with observed(net):
        wrap()
        assert len(legal_sites(step(net), net).calls) == 1
        net.inner.forward = inner


def test_autocast_changes_no_legality_and_no_result():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.second(functional.relu(net.first(x)) + net.act(net.third(x).float())).float()

    net = Net(forward, act=nn.LeakyReLU())
    sites = legal_sites(step(net), net)
    assert len(sites.sites) == 2
    assert not sites.skipped
    assert_same_results(net, sites)


def test_a_graph_that_is_run_backward_twice():
    net = Net(lambda net, x: net.second(net.act(net.first(x))), act=nn.LeakyReLU())
    x = torch.randn(4, 8)

    def call() -> None:
        loss = net(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    sites = legal_sites(call, net)
    assert sites.modules == ("act",)
    call()
    plain = [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]
    net.zero_grad()
    with in_place(net, InPlace.ON, sites):
        call()
    changed = [weight.grad for weight in net.parameters() if weight.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(plain, changed, strict=True))


# --- off ------------------------------------------------------------------------------------------------------------


def test_off_turns_flags_and_functions_out_of_place():
    net = Net(lambda net, x: functional.relu(net.second(net.act(net.first(x))), True), act=nn.ReLU(inplace=True))
    sites = found(net)
    with in_place(net, InPlace.OFF, sites) as applied:
        assert applied.texts == ("In-place at 0 of 2 activations",)
        assert not net.act.inplace
    assert net.act.inplace
    assert_same_results(net, sites)


def test_off_leaves_a_statement_whose_value_is_dropped():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        h.relu_()
        return net.second(h)

    net = Net(forward)
    sites = found(net)
    with in_place(net, InPlace.OFF, sites) as applied:
        pass
    assert applied.texts == ("In-place at 1 of 1 activations",)
    line = line_of(forward, "net.second")
    assert (
        applied.skipped == ((f"relu at {THIS}:{line - 1}", f"its input is read again by aten::t at {THIS}:{line}"),)
        or "read again by" in applied.skipped[0].reason
    )
    assert_same_results(net, sites)


def test_on_keeps_what_is_written_in_place_and_does_not_disturb_it():
    # The flag is written; the sigmoid after it must not overwrite what the activation keeps.
    net = Net(lambda net, x: torch.sigmoid(net.act(net.first(x))), act=nn.LeakyReLU(inplace=True))
    sites = found(net)
    assert [site.written for site in sites.sites] == [Form.IN_PLACE, Form.OUT_OF_PLACE]
    assert sites.modules == ("act",)
    assert not sites.calls
    assert_same_results(net, sites)


# --- values, and nothing left behind --------------------------------------------------------------------------------


def test_sites_are_a_value_that_can_be_pickled():
    sites = found(Net(trap, act=nn.ReLU()))
    assert pickle.loads(pickle.dumps(sites)) == sites
    assert hash(sites) == hash(pickle.loads(pickle.dumps(sites)))


@pytest.mark.parametrize("look", ["legal_sites", "rehearsal"])
def test_nothing_is_left_changed(look):
    net = Net(lambda net, x: net.norm(net.drop(net.act(net.first(x)))), act=nn.ReLU(), drop=nn.Dropout())
    step(net)()
    gradient, state = net.first.weight.grad, torch.get_rng_state()
    attributes = [dict(vars(module)) for module in net.modules()]
    values = [tensor.clone() for tensor in (*net.parameters(), *net.buffers(), gradient)]
    numbers = random.getstate()
    if look == "legal_sites":
        legal_sites(step(net), net)
    else:
        with in_place(net, InPlace.ON), torch.no_grad():
            net.eval()(torch.ones(4, 8))
        net.train()
    assert net.first.weight.grad is gradient
    assert random.getstate() == numbers
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(vars(module)) for module in net.modules()] == attributes
    now = (*net.parameters(), *net.buffers(), gradient)
    assert all(torch.equal(one, other) for one, other in zip(values, now, strict=True))


def test_an_error_of_the_step_comes_through_and_undoes_everything():
    net = Net(lambda net, x: net.act(net.first(x)).view(3, 3), act=nn.ReLU())
    with pytest.raises(RuntimeError, match="shape"):
        legal_sites(step(net), net)
    assert "forward" not in vars(net)
    assert not net.act.inplace


def test_the_first_call_in_each_mode_is_looked_at():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        y = functional.relu(h)
        return y if net.training else y + h

    net, x = Net(forward), torch.randn(4, 8)
    plain = net.eval()(x)
    with in_place(net, InPlace.ON) as applied:
        net.train()(x)
        assert torch.equal(net.eval()(x), plain)
        net.train()(x)
    assert applied.completed().texts == ("In-place at 1 of 1 activations",)


def test_a_model_that_needs_values_says_what_to_do():
    net = Net(lambda net, x: net.first(x)[(x > 0).nonzero()[:, 0]])
    with in_place(net, InPlace.ON), pytest.raises(ValueError, match=r"give .* the sites that legal_sites"):
        net(torch.ones(4, 8))


# --- bytes ----------------------------------------------------------------------------------------------------------


def stack(activation: Callable[[], nn.Module], depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), activation()]
    return nn.Sequential(*layers)


def after_forward(activation: Callable[[], nn.Module], choice: InPlace, depth: int = 4) -> tuple[int, int]:
    """Bytes allocated when the forward pass has ended, and the peak until then, on a virtual GPU."""
    with mx.virtual("T4"):
        net, x = stack(activation, depth).cuda(), torch.randn(16, 16, 64, 64, device="cuda")
        sites = legal_sites(lambda: net(x).sum().backward(), net)
        with in_place(net, choice, sites):
            torch.cuda.reset_peak_memory_stats()
            output = net(x)
            numbers = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            output.sum().backward()
        return numbers


MAP = 16 * 16 * 64 * 64 * 4
"""Bytes of one feature map: 4 MiB."""


def test_leaky_relu_in_place_saves_a_map_a_layer():
    # Out of place each keeps its input and its output; in place the output alone: 4 layers, 4 maps.
    held, _ = after_forward(nn.LeakyReLU, InPlace.OFF)
    changed, _ = after_forward(nn.LeakyReLU, InPlace.ON)
    assert held - changed == 4 * MAP


def test_relu_in_place_saves_one_map_at_the_peak_and_nothing_that_is_kept():
    # ReLU keeps its output in either form and batch norm keeps its own input: nobody keeps the map between them. Only
    # while a ReLU runs out of place are its input and its output there at once, and where that is the peak, as in the
    # forward pass of the last layer, one map is saved.
    held, peak = after_forward(nn.ReLU, InPlace.OFF)
    changed, lower = after_forward(nn.ReLU, InPlace.ON)
    assert held == changed
    assert peak - lower == MAP


@pytest.mark.parametrize("depth", [2, 4])
def test_the_peak_of_a_step_falls_by_a_map_for_each_layer_but_the_last(depth):
    # The sum keeps no values, so out of place the output of the last layer is gone when backward begins.
    net = stack(nn.LeakyReLU, depth)
    plan = Step(net, torch.zeros(16, 16, 64, 64), loss=torch.sum, optimizer=torch.optim.SGD)
    peaks = [mx.peak(run(plan, Knobs(inplace=choice)).tape)[0] for choice in (InPlace.OFF, InPlace.ON)]
    assert peaks[0] - peaks[1] == (depth - 1) * MAP


def test_a_rehearsal_on_a_virtual_gpu_asks_for_no_memory():
    with mx.virtual("T4"):
        net, x = stack(nn.LeakyReLU, 2).cuda(), torch.randn(16, 16, 64, 64, device="cuda")
        net(x).sum().backward()
        with mx.record() as recording, in_place(net, InPlace.ON):
            net(x).sum().backward()
        sites = legal_sites(lambda: net(x).sum().backward(), net)
        with mx.record() as again, in_place(net, InPlace.ON, sites):
            net(x).sum().backward()
    one, other = recording.tape, again.tape
    # The same requests in the same order: the rehearsal is not on the tape.
    assert one.action.tolist() == other.action.tolist()
    assert one.size.tolist() == other.size.tolist()


# --- random programs ------------------------------------------------------------------------------------------------

UNARY = {
    "relu": functional.relu,
    "leaky_relu": functional.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.Tensor.tanh,
    "silu": functional.silu,
    "clamp": lambda x: torch.clamp(x, -0.5, 0.5),
    "relu in place": lambda x: functional.relu(x, inplace=True),
    "double": lambda x: x * 2,
    "sin": torch.sin,
    "flip": lambda x: x.t(),
    "view": lambda x: x.view(4, 4) if x.is_contiguous() else x.reshape(4, 4),
    "rows": lambda x: torch.cat([x[:2], x[2:]]),
    "half": lambda x: x[:2].repeat(2, 1),
    "expand": lambda x: x[:1].expand(4, 4),
    "detach": lambda x: x.detach(),
}
BINARY = {"add": torch.add, "mul": torch.mul, "product": torch.matmul}
PROGRAM = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 4)),
        st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 4), st.integers(0, 4)),
    ),
    min_size=1,
    max_size=10,
)


class Program(nn.Module):
    """Straight-line code: each line works on a result of a line before, counted from the last one back."""

    def __init__(self, lines: list[tuple[Any, ...]], recomputed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.lines = lines
        self.body = Body(lines)
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x @ self.weight
        return checkpoint(self.body, start, use_reentrant=False) if self.recomputed else self.body(start)


class Body(nn.Module):
    def __init__(self, lines: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.lines = lines

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for name, *operands in self.lines:
            chosen = [values[-1 - number % len(values)] for number in operands]
            values.append((UNARY.get(name) or BINARY[name])(*chosen))
        return values[-1]


def _run(program: Program, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    program.zero_grad()
    loss = program(x).pow(2).sum()
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), program.weight.grad


@settings(deadline=None, max_examples=150)
@given(PROGRAM, st.booleans())
def test_any_program_gives_the_same_loss_and_gradients_in_place(lines, recomputed):
    program = Program(lines, recomputed)
    x = torch.linspace(-1.5, 2, 16).reshape(4, 4)
    try:
        loss, gradient = _run(program, x)
    except RuntimeError:
        return  # the program itself overwrites what autograd needs
    sites = legal_sites(lambda: _run(program, x) and None, program)
    for choice in (InPlace.ON, InPlace.OFF):
        with in_place(program, choice, sites):
            changed, changed_gradient = _run(program, x)
        assert torch.equal(changed, loss)
        assert (gradient is None) == (changed_gradient is None)
        assert gradient is None or torch.equal(gradient, changed_gradient)
