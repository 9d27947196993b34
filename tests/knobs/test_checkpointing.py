"""Activation checkpointing: losses, gradients, buffers and random states equal those of the plain run."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from memexplore.run.knobs.checkpoints.checkpointing import checkpointed
from memexplore.run.knobs.checkpoints.setting import Checkpoint
from tests.models import UNet


@pytest.fixture(autouse=True)
def _one_thread():
    # The models are so small that several threads only wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


KINDS = ("none", "every 1", "every 2", "sqrt", "keep matmuls", "norms")
on = Checkpoint.parse


# --- models ---------------------------------------------------------------------------------------------------------


def gpt2():
    import transformers

    config = transformers.GPT2Config(
        n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )  # dropout 0.1 on embeddings, attention and residuals
    return transformers.GPT2LMHeadModel(config)


def _llama():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=64,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _t5():
    import transformers

    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, vocab_size=64, decoder_start_token_id=0,
        use_cache=False,  # tensors from the cache have other strides, and the last bits of sums differ
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _resnet():
    import transformers

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 3], num_labels=3)
    return transformers.ResNetForImageClassification(config)


def _language(model, batch):
    return model(input_ids=batch, labels=batch, attention_mask=torch.ones_like(batch)).loss


def _flat(width=8, depth=6):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Dropout(0.3), nn.GELU())]
    return nn.Sequential(*layers)


def vgg():
    act = nn.ReLU(inplace=True)  # one module for all, overwriting the results of the convolutions
    convolutions = [layer for inputs in (3, 4, 4, 4) for layer in (nn.Conv2d(inputs, 4, 3, padding=1), act)]
    return nn.Sequential(*convolutions)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.linear(x)).tanh()


class Other(Own):
    """The same under another class: it repeats no `Own` block."""


def mixed():
    """Return a model of flat layers and blocks in turn; a segment has both."""
    layers = lambda: (nn.Linear(8, 8), nn.GELU())  # noqa: E731
    return nn.Sequential(*layers(), Own(), *layers(), Other(), *layers(), nn.Linear(8, 8))


TRAINED = {
    "unet": (lambda: UNet(3, 1, 4), lambda: torch.randn(2, 3, 16, 16), lambda m, x: m(x).square().mean()),
    "resnet": (_resnet, lambda: torch.randn(4, 3, 32, 32), lambda m, x: m(x).logits.square().mean()),
    "gpt2": (gpt2, lambda: torch.randint(64, (2, 16)), _language),
    "llama": (_llama, lambda: torch.randint(64, (2, 16)), _language),
    "t5": (_t5, lambda: torch.randint(64, (2, 8)), _language),
    "flat": (_flat, lambda: torch.randn(4, 8), lambda m, x: m(x).square().mean()),
    "mixed": (mixed, lambda: torch.randn(4, 8), lambda m, x: m(x).square().mean()),
    "vgg": (vgg, lambda: torch.randn(2, 3, 8, 8), lambda m, x: m(x).square().mean()),
}


def state(model, loss):
    """Return loss, gradients and buffers."""
    gradients = [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
    return [loss.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


def train(model, x, loss_of, steps=2):
    torch.manual_seed(7)
    model.train()
    model.zero_grad()
    states = []
    for _ in range(steps):
        loss = loss_of(model, x)
        loss.backward()
        states += state(model, loss)
    # The last number shows that the random state afterwards is that of the plain run.
    return [*states, torch.rand(1)]


@functools.cache
def plain(name):
    torch.manual_seed(0)
    build, batch, loss_of = TRAINED[name]
    model, x = build(), batch()
    start = copy.deepcopy(model.state_dict())
    return model, x, loss_of, start, train(model, x, loss_of)


def same(one, other):
    return len(one) == len(other) and all(
        mine is its or (mine is not None and its is not None and torch.equal(mine, its))
        for mine, its in zip(one, other, strict=True)
    )


# --- real training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_the_plain_run(name, kind):
    model, x, loss_of, start, expected = plain(name)
    model.load_state_dict(start)
    with checkpointed(model, on(kind)):
        assert same(train(model, x, loss_of), expected)


def test_training_with_named_layers_equals_the_plain_run():
    model, x, loss_of, start, expected = plain("gpt2")
    model.load_state_dict(start)
    with checkpointed(model, on("layers transformer.h.1 transformer.h.3.mlp")) as applied:
        assert same(train(model, x, loss_of), expected)
    assert applied.completed().texts == ("Checkpointing 2 of 2 named layers",)


def test_statistics_of_batch_norm_move_once_and_a_note_says_so():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(2)))
    x = torch.randn(8, 4)
    checkpoint(model[0], x, use_reentrant=False).sum().backward()
    assert model[0][1].num_batches_tracked == 2
    with checkpointed(model, on("every 1")) as applied:
        model(x).sum().backward()
    assert model[0][1].num_batches_tracked == 3
    assert any("statistics move once" in note for note in applied.notes)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_runs_in_the_autocast_of_forward(kind):
    torch.manual_seed(0)
    model, x = _flat(), torch.randn(4, 8)

    def step():
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
        return state(model, loss)

    expected = step()
    with checkpointed(model, on(kind)):
        assert same(step(), expected)


class Looping(nn.Module):
    """Calls its layers in a loop, on a pair, with a mask by name, and draws random numbers of its own between."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)

        def forward(self, pair, scale=1.0, *, mask):
            x, seen = pair
            return {"pair": (x + scale * self.drop(self.down(torch.tanh(self.up(x)))) * mask, seen + 1), "extra": None}

    def __init__(self, depth=9):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(depth))

    def forward(self, x):
        mask, pair = torch.rand(8), (x, 0)
        for layer in self.layers:
            if torch.rand(()) < 0.8:
                pair = layer(pair, 0.5, mask=mask)["pair"]
        return pair[0].sum()


@pytest.mark.parametrize("kind", ["every 1", "sqrt", "keep matmuls"])
def test_nested_arguments_and_random_numbers_between_layers_are_repeated(kind):
    torch.manual_seed(0)
    model, x = Looping(), torch.randn(4, 8)
    expected = train(model, x, lambda model, x: model(x))
    with checkpointed(model, on(kind)):
        assert same(train(model, x, lambda model, x: model(x)), expected)


class Residual(nn.Module):
    """Layers whose results the parent overwrites before the next layer gets them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        return x.sum()


def test_a_result_overwritten_between_layers_is_kept_as_the_next_layer_got_it():
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(4, 8)
    expected = train(model, x, lambda model, x: model(x))
    with checkpointed(model, on("sqrt")) as applied:
        assert same(train(model, x, lambda model, x: model(x)), expected)
    # Two segments: the second layer of each gets another tensor than the first returned.
    assert any("layers.1, layers.3" in note for note in applied.completed().notes)


def test_a_block_whose_first_module_overwrites_its_input_gets_a_copy():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))  # noqa: E731
    model, x = nn.Sequential(nn.Linear(8, 8), *(block() for _ in range(4))), torch.randn(4, 8)
    expected = train(model, x, lambda model, x: model(x).sum())
    for kind in ("every 1", "sqrt", "norms"):
        with checkpointed(model, on(kind)):
            assert same(train(model, x, lambda model, x: model(x).sum()), expected)


class Overwriting(nn.Module):
    """The result of a matrix product, overwritten by an op that saves nothing, then by one that saves its result."""

    def __init__(self, last):
        super().__init__()
        self.up, self.last, self.down = nn.Linear(8, 8), last, nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.last(self.up(x).add_(1)))


OVERWRITES = {
    "dropout": lambda: nn.Dropout(0.3, inplace=True),
    "leaky": lambda: nn.LeakyReLU(0.1, inplace=True),
}


@pytest.mark.parametrize("last", OVERWRITES)
def test_a_kept_product_that_is_overwritten_is_kept_as_a_copy(last):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Overwriting(OVERWRITES[last]()) for _ in range(3))), torch.randn(4, 8)
    expected = train(model, x, lambda model, x: model(x).sum())
    with checkpointed(model, on("keep matmuls")):
        assert same(train(model, x, lambda model, x: model(x).sum()), expected)


def test_a_block_whose_code_overwrites_its_input_raises():
    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x):
            return self.inner(x.mul_(2))

    model = nn.Sequential(nn.Linear(4, 4), Doubling(), Doubling())
    with checkpointed(model, on("every 1")), pytest.raises(RuntimeError, match=r"1 overwrites its input in place"):
        model(torch.ones(2, 4))


LAYERS = (
    *(lambda: nn.Linear(6, 6), lambda: nn.BatchNorm1d(6), lambda: nn.LayerNorm(6), lambda: nn.Dropout(0.4)),
    *(lambda: nn.ReLU(inplace=True), nn.ReLU, nn.GELU, lambda: nn.SiLU(inplace=True), nn.Tanh, nn.Identity),
)


@given(
    st.lists(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4), min_size=1, max_size=6),
    st.sampled_from(["every 1", "every 2", "sqrt", "norms"]),
    st.booleans(),
)
@settings(max_examples=80)
def test_training_of_any_chain_of_layers_equals_the_plain_run(parts, kind, nested):
    torch.manual_seed(0)
    made = [[nn.Linear(6, 6), *(make() for make in part)] for part in parts]
    model = nn.Sequential(*(map(_nest, made) if nested else itertools.chain(*made)))
    start, x = copy.deepcopy(model.state_dict()), torch.randn(5, 6)
    try:
        expected = train(model, x, lambda model, x: model(x).sum())
    except RuntimeError:  # autograd refuses a value that is overwritten and needed
        assume(False)
    model.load_state_dict(start)
    with checkpointed(model, on(kind)):
        assert same(train(model, x, lambda model, x: model(x).sum()), expected)


def _nest(layers):
    return nn.Sequential(*layers)


def test_second_derivatives_equal_the_plain_run():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()) for _ in range(4)))
    x = torch.randn(2, 4, requires_grad=True)

    def penalty():
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), list(model.parameters()), allow_unused=True)

    expected = penalty()
    for kind in ("every 1", "sqrt", "norms"):
        with checkpointed(model, on(kind)):
            assert same(penalty(), expected), kind


def test_backward_twice_through_a_retained_graph_doubles_gradients():
    model, x = _flat(), torch.randn(4, 8)
    for kind in ("every 1", "sqrt", "norms"):
        with checkpointed(model, on(kind)):
            model.zero_grad()
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            once = [weight.grad.clone() for weight in model.parameters()]
            loss.backward()
        assert same([weight.grad for weight in model.parameters()], [2 * gradient for gradient in once])


def test_recomputed_norms_keep_autograds_error_for_overwritten_tensors():
    x = torch.randn(3, requires_grad=True)
    with checkpointed(nn.Sequential(nn.LayerNorm(3)), on("norms")):
        y = x.exp()
        z = y.sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (z + y.sum()).backward()
